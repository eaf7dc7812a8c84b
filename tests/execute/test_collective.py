"""Collectives of Python values, and errors that all ranks agree on."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from tests.pool import Pool
from varuna.errors import CheckpointError
from varuna.execute.comm.collective import Collective, RankFailure
from varuna.execute.update.loss_sum import LossSum, LossTotals


class BlockingWaiter:
    def for_work(self, work: dist.Work, what: Callable[[], str]) -> None:
        work.wait()


def collective_of_all() -> Collective:
    return Collective(dist.get_rank(), range(dist.get_world_size()), dist.group.WORLD)


def gather_and_broadcast() -> tuple[Any, ...]:
    ranks = collective_of_all()
    own = "x" * (1000 * ranks.rank)  # of different sizes
    return ranks.gather(len(own), int), ranks.gather_numbers([ranks.rank, 7]), ranks.broadcast(own, 1, str)


def test_values_are_gathered_in_the_order_of_ranks_and_broadcast_from_any(pool: Pool) -> None:
    for lengths, numbers, value in pool.run(gather_and_broadcast, 3):
        assert lengths == [0, 1000, 2000]
        assert numbers == [[0, 7], [1, 7], [2, 7]]
        assert value == "x" * 1000


def test_a_single_rank_needs_no_group() -> None:
    alone = Collective(0, (0,))
    assert alone.gather("a", str) == ["a"] and alone.broadcast("b", 0, str) == "b"
    assert alone.gather_numbers((1, 2)) == [[1, 2]]
    with alone.patient(15):
        assert alone.agree(lambda: "c", lambda failures, own: AssertionError(), str) == ["c"]


def agree_with_failures(failing: Sequence[int]) -> tuple[str, str]:
    ranks = collective_of_all()

    def act() -> int:
        if ranks.rank in failing:
            raise ValueError(f"disk {ranks.rank} is full")
        return ranks.rank

    def error(failures: Sequence[RankFailure], own: Exception | None) -> Exception:
        return CheckpointError(", ".join(f"rank {f.rank}: {f.kind}: {f.message}" for f in failures))

    try:
        return str(ranks.agree(act, error, int)), ""
    except CheckpointError as raised:
        return str(raised), str(raised.__cause__)


def test_a_failure_of_some_ranks_is_the_same_error_on_all(pool: Pool) -> None:
    """V33: with the reasons of all of them; the rank's own exception is its cause."""
    assert pool.run(agree_with_failures, 3, []) == [("[0, 1, 2]", "")] * 3
    found = pool.run(agree_with_failures, 3, [1, 2])
    text = "rank 1: ValueError: disk 1 is full, rank 2: ValueError: disk 2 is full"
    assert found == [(text, "None"), (text, "disk 1 is full"), (text, "disk 2 is full")]


def sum_losses(requests: Sequence[bool]) -> list[LossTotals]:
    rank, waiter = dist.get_rank(), BlockingWaiter()
    sums = []
    for request in (requests[rank], False):
        total = LossSum(0.5 * rank, 1.0 + rank, request=request, group=dist.group.WORLD, waiter=waiter)  # type: ignore[arg-type]
        sums.append(total.finish())
    return sums


def test_a_request_of_any_rank_reaches_all_and_leaves_the_sums_exact(pool: Pool) -> None:
    """V40"""
    plain, requested = LossTotals(1.5, 6.0, requested=False), LossTotals(1.5, 6.0, requested=True)
    assert pool.run(sum_losses, 3, [False, False, False]) == [[plain, plain]] * 3
    assert pool.run(sum_losses, 3, [False, True, False]) == [[requested, plain]] * 3
    assert pool.run(sum_losses, 3, [True, True, True]) == [[requested, plain]] * 3
    assert LossSum(2.0, 4.0, request=True, group=None, waiter=None).finish() == (2.0, 4.0, True)
