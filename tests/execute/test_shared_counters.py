"""Barriers of all ranks, in shared memory and with messages."""

import errno
import gc
import multiprocessing as mp
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool
from tests.train.hot_jobs import wait_for_files
from varuna.errors import PeerHangs, PeerLost
from varuna.execute import shared_counters
from varuna.execute.comm.collective import Collective
from varuna.execute.comm.session import Session, open_session
from varuna.execute.comm.wait import Waiter
from varuna.execute.shared_counters import CounterPlace, SharedCounters, open_counters

ROUNDS = 6


def session_of_all() -> Session:
    stage_map = tuple((rank,) for rank in range(dist.get_world_size()))
    return open_session(stage_map, rank=dist.get_rank(), device=torch.device("cpu"), timeout_seconds=60)


def is_complete(session: Session) -> bool:
    if session.counters is not None:
        return session.counters.all_here()
    assert session._barrier is not None
    return session._barrier.is_completed()


def num_mapped() -> int:
    return sum("varuna-counters" in line for line in Path("/proc/self/maps").read_text().splitlines())


def pass_barriers(folder: str, messages: bool) -> None:
    """Begin each barrier at another moment than the other ranks."""
    gc.collect()
    others = num_mapped()  # of earlier tests in this process
    session, files = session_of_all(), Path(folder)
    assert session.counters is not None
    assert num_mapped() == others + 1
    if messages:
        session.counters = None
    for number in range(ROUNDS):
        last = number % session.num_ranks
        if session.rank == last:
            wait_for_files(*(files / f"{number}_{other}" for other in session.ranks if other != last))
            session.start_barrier()
        else:
            session.start_barrier()
            assert not is_complete(session), "a rank is missing"
            (files / f"{number}_{session.rank}").touch()
        with pytest.raises(AssertionError, match="before the last barrier had ended"):
            session.gather_numbers([0.0])
        with pytest.raises(AssertionError, match="before the last barrier had ended"):
            session.start_barrier()
        with pytest.raises(AssertionError, match="before the last barrier had ended"), session.call("step"):
            pass
        session.finish_barrier()
        assert session.gather_numbers([number]) == [[number]] * session.num_ranks
    session.close()
    assert num_mapped() <= others


@pytest.mark.parametrize("messages", [False, True], ids=["counters", "messages"])
def test_ranks_that_begin_at_different_moments_pass_a_barrier_together(
    pool: Pool, tmp_path: Path, messages: bool
) -> None:
    pool.run(pass_barriers, 3, str(tmp_path), messages)


@pytest.fixture
def pair() -> Iterator[tuple[SharedCounters, SharedCounters]]:
    """Make the counters of two ranks, in this process."""
    fd, place = shared_counters._make(2)
    other = shared_counters._open(place)
    assert fd is not None and other is not None
    both = SharedCounters(fd, 0, 2), SharedCounters(other, 1, 2)
    os.close(fd)
    os.close(other)
    yield both
    for one in both:
        one.close()


def waiter_of(lose: Callable[[float], None] = lambda seconds: None, *, timeout_seconds: float = 60) -> Waiter:
    board: Any = SimpleNamespace(
        interrupt_with=lambda has_order: None,
        find_hanging_rank=lambda: PeerHangs("rank 1 hangs"),
        set_waiting=lambda what: None,
        read_error=lambda **_: None,
        find_ended_ranks=lambda: [1],
        describe=lambda rank: f"rank {rank}",
    )
    network: Any = SimpleNamespace(wait=lose, wake=lambda: None, has_ended_peer=False)
    return Waiter(network, board, timeout_seconds=timeout_seconds)


def alone(counters: SharedCounters, waiter: Waiter) -> Collective:
    found = Collective(0, (0, 1), waiter=waiter)
    found.counters = counters
    return found


def test_a_rank_that_never_comes_is_an_error(pair: tuple[SharedCounters, SharedCounters]) -> None:
    """It is stopped, or it waits for something else: its connections stay open."""
    ranks = alone(pair[0], waiter_of(timeout_seconds=0.01))
    ranks.start_barrier()
    with pytest.raises(PeerHangs, match="rank 1 hangs"):
        ranks.finish_barrier()


def test_an_order_ends_the_wait_for_a_rank_that_never_comes(
    pair: tuple[SharedCounters, SharedCounters],
) -> None:
    waiter, looks = waiter_of(), iter(range(5))
    waiter.survives = True
    waiter.listen(lambda: next(looks, None) is None)
    ranks = alone(pair[0], waiter)
    ranks.start_barrier()
    with pytest.raises(PeerLost, match="the manager has ordered"):
        ranks.finish_barrier()
    assert next(looks, None) is None


def test_a_lost_link_ends_the_wait_unless_the_lost_rank_has_come(
    pair: tuple[SharedCounters, SharedCounters],
) -> None:
    def lose(seconds: float) -> None:
        raise PeerLost("rank 1 is lost")

    waiter = waiter_of(lose)
    waiter.survives = True
    ranks = alone(pair[0], waiter)
    ranks.start_barrier()
    with pytest.raises(PeerLost, match="rank 1 is lost"):
        ranks.finish_barrier()
    pair[1].advance()
    ranks.finish_barrier()


def test_a_rank_that_is_two_barriers_ahead_is_an_error(pair: tuple[SharedCounters, SharedCounters]) -> None:
    """It would let this rank pass barriers for which it has not come."""
    pair[1].advance()
    assert pair[0].all_here()  # this rank has not come yet
    pair[1].advance()
    with pytest.raises(AssertionError, match="has passed a barrier without this one"):
        pair[0].all_here()


def count_and_stop(place: CounterPlace) -> None:
    fd = shared_counters._open(place)
    assert fd is not None
    counters = SharedCounters(fd, 1, 2)
    counters.advance()
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_has_come_counts_when_it_is_stopped_or_killed(end: signal.Signals) -> None:
    fd, place = shared_counters._make(2)
    assert fd is not None
    process = mp.get_context("spawn").Process(target=count_and_stop, args=(place,))
    process.start()
    try:
        _, status = os.waitpid(process.pid or 0, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        if end == signal.SIGKILL:
            process.kill()
            process.join()
        ranks = alone(SharedCounters(fd, 0, 2), waiter_of())
        ranks.start_barrier()
        ranks.finish_barrier()
    finally:
        process.kill()
        process.join()
        os.close(fd)


def test_other_files_and_processes_that_are_gone_are_not_opened(tmp_path: Path) -> None:
    fd, place = shared_counters._make(2)
    assert fd is not None
    other = tmp_path / "other"
    other.write_bytes(bytes(1000))
    os.mkfifo(tmp_path / "fifo")  # opening it would wait
    for path in (str(other), str(tmp_path / "fifo"), f"/proc/{os.getpid()}/fd/999999", ""):
        assert shared_counters._open(place._replace(path=path)) is None
    os.close(fd)


def test_if_one_rank_cannot_open_the_counters_none_has_them() -> None:
    fd, place = shared_counters._make(2)
    assert fd is not None
    before = os.listdir("/proc/self/fd")

    def gather(own: bool) -> list[bool]:
        assert own
        return [own, False]

    for index in (0, 1):
        assert open_counters(index, 2, gather_places=lambda own: [place, own], gather_flags=gather) is None
    assert os.listdir("/proc/self/fd") == before
    os.close(fd)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSYS])
def test_ranks_send_messages_where_the_system_allows_no_memory_of_this_kind(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """EACCES: `vm.memfd_noexec` is 2."""

    def refuse(name: str, flags: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "memfd_create", refuse)
    for index in (0, 1):
        found = open_counters(index, 2, gather_places=lambda own: [own], gather_flags=lambda own: [own, own])
        assert found is None
