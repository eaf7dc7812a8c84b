"""A wrapped model trains as one plain process would, at every layout, with whatever batches come."""

import itertools
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from pyrannc import RaNNCModule
from tests.pool import Pool
from tests.pyrannc.jobs import make, train, train_plainly
from tests.pyrannc.models import WIDTH
from tests.pyrannc.usage import use
from tests.tasks import logged
from varuna.errors import VarunaError

CLOSE = {"rtol": 1e-5, "atol": 1e-8}
LAYOUTS = {1: [(1, 2)], 2: [(2, 2), (1, 1)], 3: [(1, 2), (3, 4)], 4: [(2, 8), (4, 2)]}


def batches(world: int) -> list[list[int]]:
    """Of five steps: even, uneven, all on one rank, one each, fewer than ranks."""
    return [
        [4] * world,
        [5] + [2] * (world - 1),
        [0] * (world - 1) + [7],
        [1] * world,
        [3] + [0] * (world - 1),
    ]


@cache
def plain(name: str, world: int) -> dict[str, Any]:
    return train_plainly(name, counts=batches(world))


def several(names: list[str], layouts: list[tuple[int, int]], counts: list[list[int]]) -> dict[Any, Any]:
    return {
        (name, *layout): train(
            name, counts=counts, options={"partition_num": layout[0], "pipeline_num": layout[1]}
        )
        for name in names
        for layout in layouts
    }


def check(found: dict[str, Any], expected: dict[str, Any], counts: list[list[int]], rank: int) -> None:
    for part in ("state", "gradients"):
        for key, value in expected[part].items():
            torch.testing.assert_close(
                found[part][key], value, **CLOSE, msg=lambda m, k=key, p=part: f"{p} of {k}: {m}"
            )
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["optimizer"].get("state", {}).items():
        torch.testing.assert_close(found["optimizer"]["state"][index]["exp_avg"], state["exp_avg"], **CLOSE)
    for step, sizes in enumerate(counts):
        own, whole = (tree_leaves(outputs["outputs"][step]) for outputs in (found, expected))
        for out, of_all in zip(own, whole, strict=True):
            if isinstance(out, torch.Tensor):
                first = sum(sizes[:rank])
                rows = of_all[first : first + sizes[rank]] if of_all.dim() else of_all
                torch.testing.assert_close(out, rows.detach(), **CLOSE)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_training_equals_one_process(pool: Pool, world: int) -> None:
    """R1, R2, R3, R4, R5, R8: losses in and out of the model, nesting, kwargs, constants, masks, ties,
    branches; five steps of Adam with uneven and empty batches; the state of model and optimizer."""
    names = ["Simple", "Shared", "Branching", "WithLoss", *(["Bert"] if world in (2, 4) else [])]
    counts = batches(world)
    for name in names:
        for rank, found in enumerate(pool.run(several, world, [name], LAYOUTS[world], counts)):
            for its in found.values():
                check(its, plain(name, world), counts, rank)


def test_models_without_parameters_or_with_one_operation(pool: Pool) -> None:
    """R5: no parameters, one operation, none at all."""
    counts = [[2, 3]]
    for found in pool.run(several, 2, ["Identity", "OneOperation"], [(1, 2)], counts):
        for (name, *_), its in found.items():
            assert its["state"] == {} and its["gradients"] == {}
            assert its["outputs"][0].shape[0] in (2, 3), name


@pytest.mark.parametrize("recompute", [False, True])
def test_batch_norm_and_dropout_match_one_process_with_the_same_microbatches(
    pool: Pool, recompute: bool
) -> None:
    """R9: over 2 stages of 2 replicas, recomputed or not."""
    counts = [[2, 2, 2, 2], [2, 2, 2, 2]]
    options = {"partition_num": 2, "pipeline_num": 2, "checkpointing": recompute}
    expected = train_plainly("Norm", counts=counts, microbatches=[[2] * 4] * 2)
    for rank, found in enumerate(pool.run(train, 4, "Norm", counts=counts, options=options)):
        check(found, expected, counts, rank)


@pytest.mark.parametrize(
    ("name", "replicas"), [("Simple", (2,)), ("Simple", (1, 1)), ("Simple", (2, 2)), ("Shared", (1, 2))]
)
def test_every_feature_matches_the_plain_model(pool: Pool, name: str, replicas: tuple[int, ...]) -> None:
    """R2, R3, R4, R7, R8, R9: accumulation, clipping, several forwards and backwards, evaluation, state into
    a plain model and another layout, a part of a larger model, samples on rank 0 alone."""
    pool.run(use, sum(replicas), name, replicas, timeout=150)


def run_out_of_memory(stages: int, pipeline_num: int) -> str:
    """What is said where a device of 16 GiB is asked for 2 more, as torch says it of CUDA."""

    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")

    gib = 1 << 30
    found: dict[str, Any] = {
        "mem_get_info": lambda _: (0, 16 * gib),
        "memory_allocated": lambda _: 14 * gib,
        "memory_reserved": lambda _: 15 * gib,
        "get_per_process_memory_fraction": lambda _: 1.0,
    }
    model = RaNNCModule(make("Simple"), device="cpu", partition_num=stages, pipeline_num=pipeline_num)
    model(torch.randn(4, WIDTH))
    pipeline: Any = model._require_partitioned("").pipeline
    pipeline.trainer.engine.stage.forward = refuse
    with patch.multiple(torch.cuda, **found), pytest.raises(VarunaError) as caught:
        model(torch.randn(4, WIDTH))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("stages", "pipeline_num", "way_out"),
    [
        (1, 2, "micro-batches of 1: pipeline_num=4, and checkpointing=True"),
        (1, 4, "partition_num=2 on as many devices or more"),
    ],
)
def test_out_of_memory_names_the_option_to_change(
    pool: Pool, stages: int, pipeline_num: int, way_out: str
) -> None:
    """R17: who has the device's memory, and what to set instead."""
    (said,) = pool.run(run_out_of_memory, 1, stages, pipeline_num)
    assert said.startswith(
        "OutOfDeviceMemory: the device's memory of 16 GiB is full: could not allocate 2 GiB more beside "
        "activations of 1 micro-batch 14 GiB, fragments 1 GiB, other processes 1 GiB"
    )
    assert said.endswith(f"(try {way_out})")


def test_impossible_arguments_are_refused_at_once() -> None:
    """R6: another model's optimizer, a model that is wrapped already, a first call without samples."""
    model = RaNNCModule(make("Simple"), device="cpu")
    with pytest.raises(ValueError, match="none of the model's parameters"):
        RaNNCModule(make("Simple"), torch.optim.SGD(make("Simple").parameters()), device="cpu")
    with pytest.raises(TypeError, match="already wrapped"):
        RaNNCModule(model, device="cpu")
    with pytest.raises(ValueError, match="no rank gave a sample"):
        model(torch.randn(0, WIDTH))


class Counting(nn.Module):
    """Multiplies by the number of its calls, which no capture sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), itertools.count(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * next(self.calls)  # type: ignore[no-any-return]


@pytest.mark.parametrize("counts", [(3, 2), (0, 1)])
def test_a_capture_that_differs_from_the_model_is_refused(pool: Pool, counts: tuple[int, int]) -> None:
    """EXA-7: on all ranks, by the first one that has samples."""
    for said in pool.run(call_counting, 2, counts):
        assert "output 0 differently when it is called again with the same inputs" in said


def call_counting(counts: tuple[int, int]) -> str:
    model = RaNNCModule(Counting(), device="cpu", timeout_seconds=20)
    with pytest.raises(VarunaError) as caught:
        model(torch.randn(counts[dist.get_rank()], WIDTH))
    model.undeploy()
    return str(caught.value)


def test_equal_batches_on_two_ranks_are_warned_of(pool: Pool) -> None:
    """Once, in training; an empty share is nobody's."""
    assert pool.run(warnings_of_given_alike, 2, [1, 1]) == [1, 0]
    assert pool.run(warnings_of_given_alike, 2, [1, 2]) == [0, 0]
    assert pool.run(warnings_of_given_alike, 3, [1, None, None]) == [0, 0, 0]


def warnings_of_given_alike(seeds: list[int | None]) -> int:
    seed = seeds[dist.get_rank()]
    model = RaNNCModule(nn.Linear(4, 2), device="cpu", measure=False)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed or 0))
    with logged("pyrannc") as told:
        for _ in range(2):
            model(x[:0] if seed is None else x).sum().backward()
    return sum("called the model with the same samples" in line for line in told)
