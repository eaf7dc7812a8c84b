"""Errors about full and missing devices, and the proposed layouts."""

import dataclasses
import functools
import gc
import re
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pyrannc import RaNNCModule
from varuna import Varuna
from varuna.environment import variable_name
from varuna.errors import OutOfDeviceMemory
from varuna.execute.comm.groups import nccl_name, reduce_backend
from varuna.execute.device.facts import choose_gpu, find_device
from varuna.execute.device.out_of_memory import USABLE, MemoryUse, StageLayout, explain, propose
from varuna.train.varuna import REMEDIES

GIB = 1 << 30


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.linear(x)).sin().mean()


def use(*, activations: int, begun: int = 1, state: int = 4) -> MemoryUse:
    steady = {"parameters": 2 * GIB, "gradients": 2 * GIB, "optimizer state": state * GIB}
    return MemoryUse(steady, activations * GIB, begun, spare=GIB // 8, elsewhere=0, capacity=24 * GIB)


def test_the_three_largest_consumers_are_named() -> None:
    said = explain(
        use(activations=15),
        StageLayout(2, 8, held=lambda _: 1, recompute=False),
        requested=2 * GIB,
        remedies=REMEDIES,
    )
    assert said.startswith("the device's memory of 24 GiB is full: could not allocate 2 GiB more beside ")
    assert "activations of 1 micro-batch 15 GiB, optimizer state 4 GiB, parameters 2 GiB" in said


@pytest.mark.parametrize(
    ("found", "layout", "proposal"),
    [
        (
            use(activations=15, begun=3),
            StageLayout(2, 8, held=lambda _: 4, recompute=False),
            "recompute=True",
        ),
        (use(activations=15), StageLayout(2, 8, held=lambda _: 1, recompute=False), "chunk_size=4"),
        (use(activations=15, begun=3), StageLayout(2, 8, held=lambda _: 8, recompute=True), "chunk_size=4"),
        (use(activations=2, state=18), StageLayout(2, 8, held=lambda _: 1, recompute=False), "3 stages"),
        (use(activations=15), StageLayout(1, 1, held=lambda _: 1, recompute=False), "2 stages"),
    ],
)
def test_the_nearest_layout_that_fits_is_proposed(
    found: MemoryUse, layout: StageLayout, proposal: str
) -> None:
    assert proposal in propose(found, layout, requested=GIB, remedies=REMEDIES)


@given(
    activations=st.integers(1, 200),
    begun=st.integers(1, 8),
    microbatch=st.integers(1, 64),
    held=st.integers(1, 8),
    recompute=st.booleans(),
)
def test_a_proposed_micro_batch_fits_what_was_seen(
    activations: int, begun: int, microbatch: int, held: int, recompute: bool
) -> None:
    found = use(activations=activations, begun=begun)
    said = propose(
        found, StageLayout(2, microbatch, lambda _: held, recompute), requested=0, remedies=REMEDIES
    )
    proposed = re.search(r"chunk_size=(\d+)", said)
    if proposed is not None:
        size, recompute = int(proposed[1]), recompute or "recompute=True" in said
        each = found.activations / begun * size / microbatch
        assert 1 <= size < microbatch
        assert sum(found.steady.values()) + each * (1 if recompute else held) < USABLE * found.capacity


def test_gradients_of_the_first_backward_are_counted() -> None:
    layout = StageLayout(2, 8, held=lambda _: 1, recompute=False)
    first = dataclasses.replace(use(activations=23), steady={"parameters": 6 * GIB})
    assert "chunk_size=4" in propose(first, layout, requested=GIB, remedies=REMEDIES)
    first = dataclasses.replace(first, coming=6 * GIB)
    assert "chunk_size=2" in propose(first, layout, requested=GIB, remedies=REMEDIES)


def test_smaller_micro_batches_do_not_help_if_all_are_held() -> None:
    all_of_32 = StageLayout(1, 8, lambda size: 32 // size, recompute=False)
    said = propose(use(activations=30), all_of_32, requested=GIB, remedies=REMEDIES)
    assert said == "try micro-batches of 2: chunk_size=2, and recompute=True"


def test_a_missing_gpu_is_an_error_before_anything_starts() -> None:
    assert choose_gpu(-1, 3, 11, count=4) == torch.device("cuda", 3)
    assert choose_gpu(1, 3, 11, count=4) == torch.device("cuda", 1)
    assert choose_gpu(-1, -1, 5, count=4) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="rank 2 cannot use GPU 4: this machine has 4, numbered 0 to 3"):
        choose_gpu(4, 0, 2, count=4)
    with pytest.raises(ValueError, match=r"worker 1 of its machine, which has 1 GPU: .*start 1 on it"):
        choose_gpu(-1, 1, 1, count=1)


def test_a_gpu_on_a_machine_without_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device(-1, -1, 0) == torch.device("cpu")
    with pytest.raises(ValueError, match=r"device='cuda:0' names a GPU, but torch .* finds none"):
        find_device("cuda:0", -1, 0)


def test_nccl_reduces_gradients_if_each_rank_has_its_own_gpu() -> None:
    assert reduce_backend(["a", "b"]) == "cpu:gloo,cuda:nccl"
    assert reduce_backend(["a", "b", "a"]) == "gloo"
    assert reduce_backend([None, None]) == "gloo"


def test_a_switch_for_tests_allows_nccl_on_a_shared_gpu_to_ranks_with_own_host_names() -> None:
    """EXA-7: without own names NCCL would refuse them."""
    switch = {variable_name("nccl_on_shared_gpus"): "1"}
    own = [nccl_name("a", {**switch, "NCCL_HOSTID": f"host{rank}"}) for rank in range(2)]
    assert reduce_backend(own) == "cpu:gloo,cuda:nccl"
    assert reduce_backend([nccl_name("a", switch)] * 2) == "gloo"
    assert reduce_backend([nccl_name("a", {"NCCL_HOSTID": f"host{rank}"}) for rank in range(2)]) == "gloo"


class ThirdIsTooMuch(TorchDispatchMode):
    """Tracks the results of `sin`, and runs out of memory at the mean of the third micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []
        self.means = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.sin.default:
            self.made.append(StorageWeakRef(found.untyped_storage()))
        self.means += func is torch.ops.aten.mean.default
        if self.means == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return found


@pytest.mark.parametrize("door", ["Varuna", "RaNNCModule"])
def test_the_memory_of_a_failed_step_is_free_while_its_error_and_model_live(
    monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    """The error lives no longer than its handler: a script may try the next layout."""
    of_cuda: dict[str, Any] = {
        "mem_get_info": (0, 16 * GIB),
        "memory_allocated": 14 * GIB,
        "memory_reserved": 15 * GIB,
        "get_per_process_memory_fraction": 1.0,
    }
    for name, value in of_cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    x = torch.randn(8, 4)
    model: Any
    if door == "Varuna":
        model = Varuna(Mean(), "0", {"x": x}, 8, 2, schedule="gpipe", device="cpu", from_cache=False)
        model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        step = functools.partial(model.step, {"x": x})
    else:
        model = RaNNCModule(Mean(), device="cpu", pipeline_num=4, checkpointing=False, measure=False)
        step = functools.partial(model, x)
    step()  # at which a model is captured
    device = ThirdIsTooMuch()
    gc.collect()
    gc.disable()
    try:
        with (
            device,
            pytest.raises(OutOfDeviceMemory, match="activations of 3 micro-batches 14 GiB") as caught,
        ):
            step()
        assert len(device.made) >= 3 and all(each.expired() for each in device.made[-3:])
        error = weakref.ref(caught.value)
        del caught
        assert error() is None
    finally:
        gc.enable()
