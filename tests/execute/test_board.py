"""The status board: every rank can name the rank that failed or hangs."""

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from varuna.errors import PeerHangs, PeerLost, WorkerError
from varuna.execute.comm.board import StatusBoard
from varuna.execute.comm.job_store import JobStore
from varuna.secure.credential import make_credential
from varuna.secure.store_server import store_in_thread

PATIENCE = 60.0  # far above what anything here takes: reached only by a failure


def describe(rank: int) -> str:
    return f"rank {rank} (stage {rank}, replica 0)"


@contextlib.contextmanager
def boards(world: int, store: Store | None = None) -> Iterator[list[StatusBoard]]:
    """Yield the boards of all ranks, in this process."""
    store = PrefixStore("board", store or HashStore())
    made = [StatusBoard(store, rank, world, describe, timeout_seconds=7) for rank in range(world)]
    del store
    yield made
    for board in made:
        board.close()


def broken_model() -> None:
    raise ArithmeticError("the loss is no number")


def post_failure(board: StatusBoard, where: str) -> None:
    try:
        broken_model()
    except ArithmeticError as error:
        board.post_error(error, where)


def test_an_error_reaches_the_others_with_its_place_and_traceback() -> None:
    """V33, B7"""
    with boards(2) as (mine, theirs):
        post_failure(theirs, "micro-batch 3, forward")
        error = mine.read_error()
        assert type(error) is WorkerError
        assert str(error).startswith(
            "rank 1 (stage 1, replica 0) failed at micro-batch 3, forward: "
            "ArithmeticError: the loss is no number"
        )
        assert "in broken_model" in str(error)
        assert theirs.read_error() is None  # its own error


def test_the_first_error_wins() -> None:
    with boards(3) as (first, second, third):
        first.post_error(ValueError("the cause"), "backward")
        second.post_error(ConnectionError("a consequence"), "forward")
        assert "the cause" in str(third.read_error()) and "the cause" in str(second.read_error())


def test_no_error_is_none() -> None:
    with boards(2) as (mine, _):
        assert mine.read_error() is None


def test_a_lost_peer_is_named_also_if_another_rank_reports_it() -> None:
    """B7: the rank that noticed it is not to blame."""
    with boards(3) as (first, _, third):
        first.post_error(PeerLost("rank 1 is lost"), "forward")
        error = third.read_error()
        assert type(error) is PeerLost and str(error).startswith("rank 1 is lost")


def test_the_watcher_reports_an_error_once_and_the_sender_waits_until_it_is_seen() -> None:
    """V33"""
    reported: list[WorkerError] = []
    seen = threading.Event()

    def see(error: WorkerError) -> None:
        reported.append(error)
        seen.set()

    with boards(2) as (mine, theirs):
        mine.watch(see)
        theirs.watch(see)  # does not get its own error
        post_failure(theirs, "backward")
        theirs.wait_until_seen(PATIENCE)
        assert seen.wait(PATIENCE)
    assert len(reported) == 1 and "backward" in str(reported[0])


def test_the_hanging_rank_is_the_one_that_neither_waits_nor_has_finished() -> None:
    """V33, B7"""
    with boards(4) as (first, second, third, fourth):
        second.set_waiting("rank 2's activation 3")
        third.set_waiting("something that came")
        third.set_waiting(None)
        fourth.set_finished()
        hang = first.find_hanging_rank()
    assert isinstance(hang, PeerHangs) and str(hang).startswith("rank 2 (stage 2, replica 0) hangs")
    assert "rank 1 (stage 1, replica 0) waits for rank 2's activation 3" in str(hang)
    assert "rank 3 (stage 3, replica 0) has finished" in str(hang)


def test_ranks_that_all_wait_are_reported() -> None:
    with boards(2) as (first, second):
        second.set_waiting("rank 0's gradient 1")
        assert str(first.find_hanging_rank()).startswith("no rank progresses")


def test_a_board_in_the_jobs_store_says_that_the_store_has_ended(capfd: pytest.CaptureFixture[str]) -> None:
    """REL-2, SEC-2: the board needs no connection beside the authenticated one."""
    credential, before = make_credential("test"), threading.active_count()
    with store_in_thread(credential) as port:
        store = JobStore("127.0.0.1", port, credential)
        stack = contextlib.ExitStack()
        mine, theirs = stack.enter_context(boards(2, store))
        mine.watch(lambda error: None)
        post_failure(theirs, "step")
        assert isinstance(mine.read_error(wait_seconds=PATIENCE), WorkerError)
    with stack:
        assert mine.read_error() is None
        error = str(mine.find_hanging_rank())
        assert error.startswith(f"the job's store hangs or is gone: the job's store at 127.0.0.1:{port} ")
    assert threading.active_count() == before
    assert capfd.readouterr().err == ""


def test_closing_leaves_no_thread_behind_and_a_dead_store_prints_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = threading.active_count()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with boards(2, TCPStore("127.0.0.1", store.port, is_master=False)) as (mine, theirs):
        mine.watch(lambda error: None)
        theirs.set_waiting(None)
        assert mine.read_error() is None
        del store
        gc.collect()
        assert mine.read_error() is None
        assert "rank 0 (stage 0, replica 0), which hosts the store" in str(theirs.find_hanging_rank())
        mine.post_error(ValueError("nobody hears it"), "forward")
        mine.wait_until_seen()
    assert threading.active_count() == before
    assert capfd.readouterr().err == ""


# ---------------------------------------------------------------- with a real second process


def live_as_host(orders: Connection) -> None:
    """Run rank 0 with its own store (port 0), or rank 1 with the store at this port."""
    port = orders.recv()
    rank = 0 if port == 0 else 1
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    board = StatusBoard(store, rank, 2, describe, timeout_seconds=5)
    board.watch(lambda error: None)
    board.set_waiting("rank 0's gradient 2")
    orders.send(store.port)
    orders.recv()


@pytest.fixture
def peer() -> Iterator[tuple[BaseProcess, Connection]]:
    context = multiprocessing.get_context("spawn")
    orders, theirs = context.Pipe()
    process = context.Process(target=live_as_host, args=(theirs,), daemon=True)
    process.start()
    yield process, orders
    process.kill()
    process.join()


def test_a_stopped_process_is_named_although_its_status_is_waiting(
    peer: tuple[BaseProcess, Connection],
) -> None:
    """V33, B7: SIGSTOP leaves connections open and an old status on the board."""
    process, orders = peer
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    orders.send(store.port)
    orders.recv()
    board = StatusBoard(store, 0, 2, describe, timeout_seconds=5)
    while store.add("beat/1", 0) == 0:
        pass
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    assert str(board.find_hanging_rank()).startswith(
        "rank 1 (stage 1, replica 0) hangs: its process is stopped"
    )
    board.close()


def test_a_stopped_host_of_the_store_is_named(peer: tuple[BaseProcess, Connection]) -> None:
    """V33, B7: the board does not answer either."""
    process, orders = peer
    orders.send(0)
    store = TCPStore("127.0.0.1", orders.recv(), is_master=False)
    board = StatusBoard(store, 1, 2, describe, timeout_seconds=5)
    assert board.read_error() is None
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    board.set_waiting("rank 0's activation 1")  # returns, though nobody answers
    assert str(board.find_hanging_rank()).startswith(
        "rank 0 (stage 0, replica 0), which hosts the store, hangs"
    )
    process.kill()
    board.close()
