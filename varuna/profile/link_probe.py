"""Measurement of links and reductions, between the ranks of a job or with processes started for it.

A job of one process starts helper processes on its own machine: `python -m varuna.profile.link_probe`. They
meet in a store, run the same code as the first process, and end. They do not import the user's script.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from varuna.capture import Source
from varuna.execute.comm.address import Exchange
from varuna.execute.comm.link import PeerLink
from varuna.execute.comm.network import PeerNetwork, connect
from varuna.execute.update.shard import share_values
from varuna.measure.links import LINK_EFFORT, measure_link
from varuna.measure.reductions import group_sizes, measure_reductions
from varuna.measure.stopwatch import Effort, stopwatch_for
from varuna.processes import die_with_parent
from varuna.types import LinkCost, ReduceCost

START_LIMIT = timedelta(seconds=120)
"""Longest wait for a helper process: it must import torch first."""


class ProcessCosts(msgspec.Struct, frozen=True):
    """Costs measured by processes of one machine."""

    link: LinkCost
    reductions: tuple[ReduceCost, ...]
    fixed_bytes: int  # memory of a process without a model


class NetworkEnd:
    """This process's end of a link, for `measure_link`."""

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
        self._network.wait(START_LIMIT.total_seconds())
        if self._link.over and not self._link.ready:
            raise self._link.error()


def measure_link_between(
    ranks: tuple[int, int],
    rank: int,
    exchange: Exchange,
    *,
    device: torch.device,
    sizes: Sequence[int],
    host: str = "127.0.0.1",
    key: bytes | None = None,
    effort: Effort = LINK_EFFORT,
) -> LinkCost | None:
    """Measure the link between two ranks; all ranks call it, and the first of the two gets the costs."""
    others = {other: f"rank {other}" for other in ranks if rank in ranks and other != rank}
    with connect(rank, others, exchange, host=host, key=key, device=device) as network:
        for link in network.links.values():
            end, leads = NetworkEnd(network, link), rank == ranks[0]
            return measure_link(end, leads=leads, device=device, sizes=sizes, effort=effort)
    return None


def measure_with_processes(count: int, device: torch.device, sizes: Sequence[int]) -> ProcessCosts:
    """Start `count` processes on the same device, and measure messages and reductions of these bytes."""
    free = _free_bytes(device)
    with ExitStack() as stack:
        path = Path(stack.enter_context(TemporaryDirectory(prefix="varuna-links-"))) / "store"
        store = _open_store(path)
        processes = [
            stack.enter_context(_helper(path, rank, count + 1, device)) for rank in range(1, count + 1)
        ]
        _wait_for_bytes(store, processes)
        resident = int(store.get("bytes"))
        fixed = resident if free is None else max(0, free - (_free_bytes(device) or 0)) // count
        store.set("sizes", ",".join(map(str, sizes)))
        link, reductions = _measure_all(store, 0, count + 1, device)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):  # all measurements are done; else it is killed
                process.wait(START_LIMIT.total_seconds())
    assert link is not None
    return ProcessCosts(link, tuple(reductions), fixed)


def main() -> None:
    parent, path, rank, count, device = sys.argv[1:]
    die_with_parent(int(parent))
    store = _open_store(Path(path))
    matrix = torch.ones(64, 64, device=device, requires_grad=True)
    torch.autograd.backward((matrix @ matrix).sum())  # loads what any first computation loads
    if rank == "1":
        if device == "cpu":  # here host memory counts, so load what capturing a model loads
            model = _TinyModel()
            Source(model).capture({"x": torch.ones(2, 1)}, training=True)
        resident_pages = Path("/proc/self/statm").read_text().split()[1]
        store.set("bytes", str(int(resident_pages) * os.sysconf("SC_PAGE_SIZE")))
    _measure_all(store, int(rank), int(count), torch.device(device))


def _open_store(path: Path) -> Store:
    """Open the store of these processes: a file that only this user can read, so that nothing listens."""
    store: Store = FileStore(str(path), -1)
    store.set_timeout(START_LIMIT)
    return store


class _TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self.line(x).sum()
        return summed


def _measure_all(
    store: Store, rank: int, count: int, device: torch.device
) -> tuple[LinkCost | None, list[ReduceCost]]:
    """Measure one link and all group sizes; every process runs this."""
    sizes = [int(size) for size in store.get("sizes").decode().split(",")]

    def exchange(own: str) -> list[str]:
        store.set(f"contact/{rank}", own)
        return [store.get(f"contact/{other}").decode() for other in range(2)]

    link = measure_link_between((0, 1), rank, exchange, device=device, sizes=sizes) if rank < 2 else None
    reductions = []
    if device.type == "cpu":
        for size in group_sizes(count):
            if rank < size:
                # A group without torch.distributed, which the user's process may use differently.
                group_store = PrefixStore(f"group/{size}", store)
                group: Any = ProcessGroup(group_store, rank, size)
                backend: Any = ProcessGroupGloo(group_store, rank, size, _loopback_options())
                group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
                reductions += measure_reductions(
                    lambda tensor: group.allreduce([tensor]).wait(),  # noqa: B023 - called here
                    lambda owned: share_values(owned, group),  # noqa: B023
                    group_size=size,
                    between_machines=False,
                    device=device,
                    stopwatch=stopwatch_for(device),
                    sizes=sizes,
                )
    # The store is removed by the first process, which must not end before the others are done with it.
    store.set(f"done/{rank}", "")
    if rank == 0:
        store.wait([f"done/{other}" for other in range(count)])
    return link, reductions


def _loopback_options() -> Any:
    """Return options of a gloo group that listens on the loopback interface only."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = START_LIMIT
    return options


@contextmanager
def _helper(path: Path, rank: int, count: int, device: torch.device) -> Iterator[subprocess.Popen[bytes]]:
    modules = os.pathsep.join(path or os.getcwd() for path in sys.path)  # same modules as here
    arguments = [str(os.getpid()), str(path), str(rank), str(count), str(device)]
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


def _wait_for_bytes(store: Store, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until the store has "bytes"; raise RuntimeError as soon as a process has ended."""
    deadline = time.monotonic() + START_LIMIT.total_seconds()
    while time.monotonic() < deadline:
        if store.check(["bytes"]):
            return
        ended = [process.returncode for process in processes if process.poll() is not None]
        if ended:
            raise RuntimeError(
                f"a process started to measure links ended with status {ended[0]} (see its stderr above)"
            )
        time.sleep(0.05)
    raise RuntimeError(
        f"a process started to measure links did not answer within {START_LIMIT.total_seconds():g} s"
    )


def _free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a CUDA device; None for other devices."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


if __name__ == "__main__":
    main()
