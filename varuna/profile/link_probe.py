"""Measures what goes between processes: with the ranks of a job, or with processes started for it.

A job of one process has nobody to send to. It starts some neighbours on its own machine, as
`python -m varuna.profile.link_probe`; they meet in a store, run the very code that the first one
runs, and end. The user's script is not imported by them.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from varuna.capture import Source
from varuna.execute.comm.link import PeerLink
from varuna.execute.comm.pump import PeerNetwork, connect
from varuna.execute.update.shard import share_values
from varuna.measure.links import LINK_EFFORT, measure_link
from varuna.measure.reductions import group_sizes, measure_reductions
from varuna.measure.stopwatch import Effort, stopwatch_for
from varuna.processes import die_with_parent
from varuna.types import LinkCost, ReduceCost

PATIENCE = timedelta(seconds=120)
"""For a neighbour to appear: it imports torch first."""


class Findings(msgspec.Struct, frozen=True):
    """What a process and its neighbours have found together."""

    link: LinkCost
    reductions: tuple[ReduceCost, ...]
    fixed_bytes: int  # of a process on this device in which there is no model yet


class LinkEnd:
    """One of a network's links, for `measure_link`."""

    def __init__(self, network: PeerNetwork, link: PeerLink) -> None:
        self._network = network
        self._link = link
        self.poll = network.poll
        self.send = link.send
        self.take = link.take

    @property
    def ready(self) -> int:
        return self._link.ready

    def wait(self) -> None:
        self._network.wait(PATIENCE.total_seconds())
        if self._link.over and not self._link.ready:
            raise self._link.error()


def measure_link_between(
    ranks: tuple[int, int],
    rank: int,
    exchange: Callable[[object], list[object]],
    *,
    device: torch.device,
    sizes: Sequence[int],
    host: str = "127.0.0.1",
    effort: Effort = LINK_EFFORT,
) -> LinkCost | None:
    """Called by every rank of the exchange; the first of the two gets the answer."""
    others = {other: f"rank {other}" for other in ranks if rank in ranks and other != rank}
    with connect(rank, others, exchange, host=host, device=device) as network:
        for link in network.links.values():
            leads = rank == ranks[0]
            end = LinkEnd(network, link)
            return measure_link(end, leads=leads, device=device, sizes=sizes, effort=effort)
    return None


def measure_with_neighbours(count: int, device: torch.device, sizes: Sequence[int]) -> Findings:
    """Starts `count` processes beside this one, on the same device, and measures together with them.

    `sizes`: the bytes of messages and reductions.
    """
    free = _free_bytes(device)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    with ExitStack() as stack:
        processes = [
            stack.enter_context(_neighbour(store.port, rank, count + 1, device))
            for rank in range(1, count + 1)
        ]
        _await(store, ["bytes"], processes)
        resident = int(store.get("bytes"))
        fixed = resident if free is None else max(0, free - (_free_bytes(device) or 0)) // count
        store.set("sizes", ",".join(map(str, sizes)))
        link, reductions = _take_part(store, 0, count + 1, device)
        for process in processes:
            process.wait()
    assert link is not None
    return Findings(link, tuple(reductions), fixed)


def main() -> None:
    parent, port, rank, count, device = sys.argv[1:]
    die_with_parent(int(parent))
    store = TCPStore("127.0.0.1", int(port), is_master=False, timeout=PATIENCE)
    matrix = torch.ones(64, 64, device=device, requires_grad=True)
    torch.autograd.backward((matrix @ matrix).sum())  # all that the first computation brings along is there
    if rank == "1":
        if device == "cpu":  # and what capturing a model does, where both are in one memory
            least = _Least()
            Source(least).capture({"x": torch.ones(2, 1)}, training=True)
        store.set("bytes", str(_resident_bytes()))
    _take_part(store, int(rank), int(count), torch.device(device))


class _Least(nn.Module):
    """As little of a model as there can be."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self.line(x).sum()
        return summed


def _take_part(
    store: Store, rank: int, count: int, device: torch.device
) -> tuple[LinkCost | None, list[ReduceCost]]:
    """The same on all of them."""
    sizes = [int(size) for size in store.get("sizes").decode().split(",")]

    def exchange(own: object) -> list[object]:
        store.set(f"contact/{rank}", str(own))
        return [store.get(f"contact/{other}").decode() for other in range(2)]

    link = None
    if rank < 2:
        link = measure_link_between((0, 1), rank, exchange, device=device, sizes=sizes)
    reductions = []
    if device.type == "cpu":
        for size in group_sizes(count):
            if rank < size:
                group = _gloo(PrefixStore(f"group/{size}", store), rank, size)
                reductions += measure_reductions(
                    lambda tensor: group.allreduce([tensor]).wait(),  # noqa: B023 - called here
                    lambda owned: share_values(owned, group),  # noqa: B023
                    group_size=size,
                    between_machines=False,
                    device=device,
                    stopwatch=stopwatch_for(device),
                    sizes=sizes,
                )
    # The store lives with the first: it may go when all others have done with it.
    store.set(f"done/{rank}", "")
    if rank == 0:
        store.wait([f"done/{other}" for other in range(count)])
    return link, reductions


def _gloo(store: Store, rank: int, size: int) -> Any:
    """A group of its own: torch.distributed of the user's process stays as it is."""
    group: Any = ProcessGroup(store, rank, size)
    backend: Any = ProcessGroupGloo(store, rank, size, PATIENCE)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    return group


@contextmanager
def _neighbour(port: int, rank: int, count: int, device: torch.device) -> Iterator[subprocess.Popen[bytes]]:
    modules = os.pathsep.join(path or os.getcwd() for path in sys.path)  # what is found here is found there
    arguments = [str(os.getpid()), str(port), str(rank), str(count), str(device)]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "varuna.profile.link_probe", *arguments],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": modules, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _await(store: Store, keys: Sequence[str], processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """A neighbour that cannot start says why on stderr; nobody waits two minutes for it."""
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while time.monotonic() < deadline:
        if store.check(list(keys)):
            return
        ended = [process.returncode for process in processes if process.poll() is not None]
        if ended:
            raise RuntimeError(
                f"a process that was started to measure links ended with status {ended[0]} "
                "(see what it wrote to stderr)"
            )
        time.sleep(0.05)
    raise RuntimeError("a process that was started to measure links does not answer")


def _free_bytes(device: torch.device) -> int | None:
    """Of a device that tells."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
