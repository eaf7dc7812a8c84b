"""Groups of the next generation: interrupted starts, broken connections, ranks that gloo does not free."""

import errno
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo

from varuna.errors import CheckpointError, PeerHangs, PeerLost, WorkerError
from varuna.execute.rebuild.abort_nccl import KEEP_PROCESS, abort_nccl
from varuna.execute.rebuild.generation import is_interruption, start_world
from varuna.secure.listeners import shut_gloo_connections


def test_a_rank_whose_last_start_was_interrupted_gives_its_group_the_same_name_as_others() -> None:
    """HOT-3: torch counts groups. With another count, all ranks would wait for each other's keys."""
    distributed_c10d._world.group_count = 3
    start_world(store=HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None and dist.group.WORLD.group_name == "0"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PeerLost("rank 2 ended"), True),
        (dist.DistBackendError("NCCL error: remote process exited"), True),
        (dist.DistNetworkError("the client socket has timed out"), True),
        (dist.DistStoreError("wait timeout after 200ms"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1"), True),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), True),
        (TimeoutError("timed out"), True),
        (OSError(errno.EHOSTUNREACH, "No route to host"), True),
        (OSError(errno.EBADF, "Bad file descriptor"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory for gloo"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (FileNotFoundError(errno.ENOENT, "No such file"), False),
        (WorkerError("ranks [1] have wrapped another model"), False),
        (PeerHangs("rank 1 hangs"), False),
        (CheckpointError("the connection closed: no checkpoint"), False),
        (ValueError("Connection closed by peer"), False),
    ],
    ids=str,
)
def test_only_errors_of_connections_show_that_a_rank_is_gone(error: Exception, expected: bool) -> None:
    """HOT-4: a morph that fails by itself must not wait for an order that never comes."""
    assert is_interruption(error) == expected


def test_an_error_of_gloo_is_one_of_a_connection() -> None:
    """HOT-4: the words of a real one, of this version of torch."""
    store, groups = HashStore(), dict[int, ProcessGroupGloo]()

    def join(rank: int) -> None:
        groups[rank] = ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(join, range(2)))
    shut_gloo_connections()
    with pytest.raises(RuntimeError) as caught:
        groups[0].recv([torch.ones(1)], 1, 0).wait()
    assert is_interruption(caught.value)


STUCK = """
import sys, threading
import torch
from varuna.execute.comm.collective import Collective
from varuna.execute.comm.groups import waiting_in_gloo
from varuna.execute.rebuild import generation, handover

class Never:
    seconds = None

    def wait(self):
        threading.Event().wait(self.seconds)

class Group:
    def recv(self, tensors, sender, tag):
        return Never()

def form():
    with waiting_in_gloo():
        Never().wait()

group = Collective(0, range(2), Group())
waits = {
    "forms a group": form,
    "gathers": lambda: group._wait(Never()),
    "receives": lambda: handover._Transfer(group, None, lambda: None)._expect(1),
    "sends": lambda: handover._Transfer(group, None, lambda: None)._wait_for(Never()),
}
generation.STUCK_SECONDS = 0.05
with generation.ended_by(lambda: True):
    pass  # interrupted in time
Never.seconds = 0.5
with generation.ended_by(lambda: False):
    form()  # it takes long, and no rank is lost
Never.seconds = None
with generation.ended_by(lambda: True):
    waits[sys.argv[1]]()
"""


@pytest.mark.parametrize("what", ["forms a group", "gathers", "receives", "sends"])
def test_a_rank_in_which_gloo_waits_for_a_lost_rank_ends_so_that_the_others_go_on(what: str) -> None:
    """HOT-3: gloo forgets a message whose connection ends in the middle, and its receiver waits on."""
    command = [sys.executable, "-c", STUCK, what]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "gloo waits for a rank that was lost" in done.stderr


class AbortedNccl:
    """Plays NCCL's backend, which this torch may lack: an abort ends when all groups are being aborted."""

    def __init__(self, begun: threading.Barrier) -> None:
        self.begun = begun
        self.aborted = False

    def abort(self) -> None:
        with suppress(threading.BrokenBarrierError):
            self.begun.wait()
            self.aborted = True


class GroupOfBackends:
    """Plays a process group with a backend for each kind of device."""

    def __init__(self, backends: dict[str, object]) -> None:
        self.backends = backends

    def _get_backend(self, device: torch.device) -> object:
        if device.type not in self.backends:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self.backends[device.type]


@pytest.mark.parametrize("expected", [2, 3])
def test_after_a_loss_all_nccl_groups_and_lanes_are_aborted_together(
    monkeypatch: pytest.MonkeyPatch, expected: int
) -> None:
    """HOT-3: one after the other, the first would wait for a kernel of the second. Gloo's are shut."""
    gloo = ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=5))
    begun = threading.Barrier(expected)
    replicas, lane = AbortedNccl(begun), AbortedNccl(begun)
    groups = [
        GroupOfBackends({"cpu": gloo}),
        GroupOfBackends({"cpu": gloo, "cuda": replicas}),
        lane,
        gloo,
    ]
    synchronized = threading.Event()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", AbortedNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.set)
    ends = expected == 2  # else NCCL is stuck
    assert abort_nccl(groups, seconds=60 if ends else 0.1) is ends
    assert synchronized.is_set() and replicas.aborted is lane.aborted is ends
    begun.abort()


def test_a_worker_that_can_go_on_in_place_is_not_ended_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """HOT-1: by default, the watchdog of NCCL's groups ends a process whose peer is lost."""
    for name in KEEP_PROCESS:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for hot, expected in (("", dict.fromkeys(KEEP_PROCESS)), ("1", KEEP_PROCESS)):
        monkeypatch.setenv("VARUNA_HOT", hot)
        start_world(store=HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        assert {name: os.environ.get(name) for name in KEEP_PROCESS} == expected
