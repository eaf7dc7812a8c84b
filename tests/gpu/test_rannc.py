"""`RaNNCModule` on CUDA: the same guarantees; several ranks share the one GPU as processes.

pytest -m gpu tests/gpu/test_rannc.py
"""

import gc
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from pyrannc import RaNNCModule
from tests.gpu.tasks import Wide
from tests.pool import Pool
from tests.pyrannc.jobs import make, own_rows, train, train_plainly
from tests.pyrannc.low_precision import compare_low, train_low, train_low_plainly
from tests.pyrannc.models import WIDTH
from varuna.errors import VarunaError

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
CLOSE = {"rtol": 1e-5, "atol": 1e-8}


def train_there(name: str, counts: list[list[int]], options: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the outputs on the host; check that they were on the device."""
    found = train(name, counts=counts, options=options, device=device)
    leaves = [leaf for leaf in pytree.tree_leaves(found["outputs"]) if isinstance(leaf, Tensor)]
    assert leaves and all(leaf.device == torch.device(device) for leaf in leaves)
    on_host: dict[str, Any] = pytree.tree_map(
        lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, found
    )
    return on_host


@pytest.mark.parametrize(("world", "stages"), [(1, 1), (2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("name", ["WithLoss", "Branching", "Shared", "Bert"])
def test_training_on_cuda_equals_one_process(
    pool: Pool, name: str, world: int, stages: int, device: str = DEVICE
) -> None:
    """R1, R2, R4: inputs on the host, uneven and empty batches, against the plain model on the CPU."""
    counts = [[3] * world, [4] + [1] * (world - 1), [0] * (world - 1) + [5]]
    options = {"partition_num": stages, "pipeline_num": 2, "checkpointing": stages == 2}
    expected = train_plainly(name, counts=counts)
    for found in pool.run(train_there, world, name, counts, options, device):
        for part in ("state", "gradients"):
            for key, value in expected[part].items():
                torch.testing.assert_close(found[part][key], value, **CLOSE)


def as_a_part(stages: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of inputs on the device and on the host, and those by a plain model."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = RaNNCModule(make("Simple"), device=device, partition_num=stages, pipeline_num=2)
    x = torch.randn(2 * world, WIDTH, generator=torch.Generator().manual_seed(1))
    first, stop = own_rows([2] * world)
    found = []
    for place in (device, "cpu"):
        own = x[first:stop].to(place).requires_grad_()
        model(own).square().sum(1).mean().backward()
        assert own.grad is not None and own.grad.device == torch.device(place), rank
        found.append(own.grad.cpu())
    model.undeploy()
    plain = x.clone().requires_grad_()
    make("Simple")(plain)[first:stop].square().sum(1).mean().backward()
    assert plain.grad is not None
    return found[0], found[1], plain.grad[first:stop]


@pytest.mark.parametrize(("world", "stages"), [(1, 1), (2, 2)])
def test_gradients_of_inputs_are_on_the_device_of_the_inputs(
    pool: Pool, world: int, stages: int, device: str = DEVICE
) -> None:
    """R2: the module as a part of a larger one."""
    for there, here, expected in pool.run(as_a_part, world, stages, device):
        torch.testing.assert_close(there, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(here, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("world", "stages", "precision"), [(1, 1, "fp16"), (2, 1, "fp16"), (2, 2, "fp16"), (2, 2, "bf16")]
)
def test_low_precision_on_cuda(
    pool: Pool, world: int, stages: int, precision: str, device: str = DEVICE
) -> None:
    """R16: `use_amp_master_params` is fp16 here, with torch's gradient scaler; an overflow on one rank."""
    expected = train_low_plainly(precision, device)
    for found in pool.run(train_low, world, precision, stages, device, shard_optimizer=stages == 1):
        compare_low(found, expected)


def test_the_default_device_is_that_of_the_worker() -> None:
    """R17: alone, without a device argument."""
    model = RaNNCModule(make("Simple"))
    assert model(torch.randn(2, WIDTH)).device == torch.device(DEVICE) == model.device


def run_out_of_memory(**options: Any) -> str:
    """Return the error of a call with 1.4 GiB of memory that holds four micro-batches of 0.5 GiB."""
    x = torch.randn(32, 4)
    model = RaNNCModule(Wide(), device=DEVICE, partition_num=1, pipeline_num=4, measure=False, **options)
    gc.collect()  # earlier tests of this process may have left tensors in reference cycles
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(1.4 * 2**30 / total)
    try:
        model(x).backward()
    except VarunaError as caught:
        return f"{type(caught).__name__}: {caught}"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return ""


def test_out_of_memory_names_consumers_and_a_setting_that_fits(pool: Pool) -> None:
    """R17: and it fits."""
    (error,) = pool.run(run_out_of_memory, 1, checkpointing=False)
    assert error.startswith("OutOfDeviceMemory: the device's memory of 1.4 GiB is full: ")
    assert re.search("activations of [23] micro-batches", error) and "try checkpointing=True" in error
    assert pool.run(run_out_of_memory, 1, checkpointing=True) == [""]
