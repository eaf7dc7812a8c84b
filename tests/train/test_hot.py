"""Hot morphs: the layout of a job changes while its processes, their state and the script's objects stay."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, TaskFailed
from tests.train.hot_jobs import CHUNK, Generation, run, train_plainly
from varuna.execute.comm.collective import Collective
from varuna.execute.rebuild import handover
from varuna.execute.rebuild.handover import Unit

F64 = {"rtol": 1e-9, "atol": 1e-11}

STAY = [Generation("0;1;", (0, 1)), Generation("0,1;", (0, 1)), Generation("0;1;", (1, 0))]
JOIN_AND_LEAVE = [
    Generation("0;1;", (0, 1)),
    Generation("0,2;1,3;", (0, 1, 2, 3)),  # two join
    Generation("0;1;2;", (0, 2, 3)),  # one leaves: deeper
    Generation("0,1;2;", (2, 3, 0)),  # unequal replicas, other ranks
]
ALONE = [
    Generation("0;", (0,)),
    Generation("0;1,2;", (1, 0, 2)),  # a joiner is the first rank
    Generation("0;", (1,)),  # the first process leaves
]


def check(results: list[Any], generations: list[Generation], name: str, **options: Any) -> None:
    """Compare every step with one plain process; processes and objects of the script stay."""
    steps = sum(one.steps for one in generations)
    losses, state = train_plainly(name, steps, **options)
    found: dict[int, float] = {}
    for process, result in enumerate(results):
        found |= result["losses"]
        for step, loss in result["losses"].items():
            torch.testing.assert_close(loss, losses[step], **F64, msg=lambda m, s=step: f"step {s}: {m}")
        assert all(result["kept"]) and result["groups"]
        if result.get("killed"):
            continue
        for key, value in result.get("state", {}).items():
            torch.testing.assert_close(value, state[key], **F64, msg=lambda m, k=key: f"{k}: {m}")
        taken = [one for one in generations if process in one.members]
        layouts = [
            (one.layout.depth, one.layout.widths[one.layout.place(rank)[0]], rank)
            for one in taken
            for rank in [one.members.index(process)] * one.steps
        ]
        assert result["layouts"] == layouts
        assert ("exit" in result) == (process not in generations[-1].members)
        assert result.get("exit", 0) == 0
    assert sorted(found) == list(range(steps)), "every step once"


@pytest.mark.parametrize(
    ("name", "generations", "options"),
    [
        ("Plain", JOIN_AND_LEAVE, {"accumulate": 3}),
        ("GPT", JOIN_AND_LEAVE, {"model_options": {"dropout": 0.2}, "clip": 0.05, "clips_itself": True}),
        ("GPT", ALONE, {"model_options": {"dropout": 0.2}, "clip": 0.05}),
        ("Conv", JOIN_AND_LEAVE[:3], {"optimizer": "sgd"}),
        ("Reused", ALONE, {}),
    ],
)
def test_losses_are_those_of_one_process(
    pool: Pool, tmp_path: Path, name: str, generations: list[Generation], options: dict[str, Any]
) -> None:
    """HOT-1, HOT-2: depth and width change, processes join and leave; ties, dropout, BatchNorm, clipping."""
    results = run(pool, tmp_path, name, generations, **options)
    plain = {key: value for key, value in options.items() if key != "clips_itself"}
    check(results, generations, name, **plain, **({"chunk": CHUNK} if name == "Conv" else {}))


def test_only_what_changes_its_owner_moves(pool: Pool, tmp_path: Path) -> None:
    """HOT-6: a rank that keeps its stage receives nothing; one that is new gets its stage and no more."""
    generations = [Generation("0;1;", (0, 1)), Generation("0,2;1,3;", (0, 1, 2, 3))]
    results = run(pool, tmp_path, "Plain", generations)
    check(results, generations, "Plain")
    sizes = [[7 * 7 + 7] * 3, [7 * 7 + 7] * 2]  # parameters of the layers of each stage
    state = [sum(8 * 3 * size for size in layers) + 4 * 2 * len(layers) for layers in sizes]
    assert [result["bytes"] for result in results] == [0, 0, *state]  # value, two moments, counters


LOSS = [
    Generation("0,2;1,3;", (0, 1, 2, 3)),
    Generation("0;1;", (0, 1), lost=(3,)),  # each stage has a holder left; another process leaves
    Generation("0,1;", (1, 0)),
]


@pytest.mark.parametrize(
    ("name", "dies_in", "options"),
    [
        ("GPT", "backward", {"model_options": {"dropout": 0.2}, "clip": 0.05}),
        ("Plain", "fetch", {"accumulate": 3}),
        ("Plain", "commit", {}),
    ],
)
def test_no_step_is_lost_with_a_rank(
    pool: Pool, tmp_path: Path, name: str, dies_in: str, options: dict[str, Any]
) -> None:
    """HOT-3, HOT-4: survivors run the interrupted step again with their new shares, or all finish it."""
    results = run(pool, tmp_path, name, LOSS, dies_in=dies_in, **options)
    assert [result.get("killed", False) for result in results] == [False, False, False, True]
    check(results, LOSS, name, **options)


def test_a_scheduler_that_is_not_registered_is_refused_after_a_join(pool: Pool, tmp_path: Path) -> None:
    """HOT-5: it would start anew on the joiner, and the replicas would drift apart."""
    generations = [Generation("0;", (0,), 3), Generation("0,1;", (0, 1), 4)]
    with pytest.raises(TaskFailed, match=r"register the learning rate scheduler"):
        run(pool, tmp_path, "Plain", generations, registers=False)


def test_damaged_bytes_are_sent_again_and_then_refused(pool: Pool, tmp_path: Path) -> None:
    """HOT-6: a flipped bit on the way does not reach the model."""
    assert pool.run(receive_damaged, 2, 1) == [["x"], ["x"]]
    with pytest.raises(TaskFailed, match="arrived 2 times with other bytes"):
        pool.run(receive_damaged, 2, 2)


class Store:
    """A participant that gives and takes tensors by name."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def give(self, name: str) -> Unit:
        return Unit(None, {"value": self.tensors[name]})

    def memory(self, name: str, key: str) -> None:
        return None

    def take(self, name: str, unit: Unit) -> None:
        assert torch.equal(unit.tensors["value"], torch.arange(9.0))
        self.tensors[name] = unit.tensors["value"]


def receive_damaged(times: int) -> list[str]:
    """Hand one tensor over; its first arrivals are damaged."""
    rank = dist.get_rank()
    store = Store({"x": torch.arange(9.0)} if rank == 0 else {})
    receive = handover._Transfer._get

    def damage(self: Any, sender: int, memory: torch.Tensor) -> torch.Tensor:
        nonlocal times
        found = receive(self, sender, memory)
        if len(found) == 36 and times:
            times -= 1
            found[5] ^= 16
        return found

    handover._Transfer._get = damage  # type: ignore[method-assign]
    try:
        key = dist.PrefixStore("damage", dist.distributed_c10d._get_default_store())
        group: Any = dist.ProcessGroupGloo(key, rank, 2, timedelta(seconds=20))
        holds, lacks = ({"x": 36}, []) if rank == 0 else ({}, ["x"])
        handover.hand_over(Collective(rank, range(2), group), "here", holds, lacks, store)
    finally:
        handover._Transfer._get = receive  # type: ignore[method-assign]
    return list(store.tensors)
