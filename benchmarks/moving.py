"""State that moves in place: the pause of a planned join and leave against a plain copy of the same bytes.

Two processes of one machine. A worker alone holds both stages; another one joins and takes the second stage
over; then the first one leaves and hands its stage over. The rival sends the same number of bytes through a
Unix socket into new memory, between the same two processes, without hashes. The last rows train two stages
with and without copies of the state on the other rank, and two replicas with and without the commit of each
step, in turn.
"""

import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.measure import spread
from benchmarks.report import Row
from tests.train.hot_jobs import BATCH, CHUNK, Generation, managed, order_of
from varuna import CutPoint, Varuna
from varuna.execute.comm.frames import memory_of
from varuna.morph.run.order_page import OrderWriter
from varuna.morph.run.progress_page import ProgressReader

GENERATIONS = [Generation("0;", (0,)), Generation("0;1;", (0, 1)), Generation("0;", (1,))]
LAYERS = 4
"""Layers of each stage."""
STATE = 12
"""Bytes of a parameter with Adam's state."""
PORTS = len(GENERATIONS) + 1


class Stages(nn.Module):
    """Two stages of equal layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
        self.cut = CutPoint()
        self.second = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.cut(self.first(x))).square().mean()  # type: ignore[no-any-return]


def moving(run: Callable[..., list[Any]], repeats: int, *, quick: bool) -> list[Row]:
    rows = []
    for size in [2_000_000] if quick else [10_000_000, 100_000_000, 1_000_000_000]:
        width = max(8, int((size / STATE / LAYERS) ** 0.5))
        found = [_with_ports(run, move, width) for _ in range(repeats)]
        name = f"{size / 1e6:.0f} MB of state per rank"
        copies = [one["copy"] for one in found]
        rows += [
            _row(f"planned {kind}, {name}", [one[kind] for one in found], copies, size)
            for kind in ("join", "leave")
        ]
    width, steps = (8, 8) if quick else (1000, 60)
    found = [_with_ports(run, train_with_copies, width, steps) for _ in range(repeats)]
    rows.append(
        _row("step with copies on the other rank", *([one[key] for one in found] for key in ("on", "off")), 0)
    )
    for name, width, steps in [("tiny", 8, 8)] if quick else [("tiny", 8, 2000), ("32 MB", 1000, 100)]:
        found = [_with_ports(run, train_with_commits, width, steps) for _ in range(3 * repeats)]
        sides = [[one[key] for one in found] for key in ("on", "off")]
        rows.append(_row(f"step with a commit, {name} model", *sides, 0, "without commits"))
    return rows


def _row(
    case: str, ours: Sequence[float], others: Sequence[float], size: int, without: str = "without copies"
) -> Row:
    """With little state, the rebuild of the groups decides: the target is for 1 GB, and for the copies."""
    ratios = [own / other for own, other in zip(ours, others, strict=True)]
    return Row(
        benchmark="moving",
        case=case,
        against="a plain copy of the same bytes" if size else without,
        unit="s",
        ours=spread(ours),
        other=spread(others),
        ratio=spread(ratios),
        target=None if 0 < size < 10**9 else 1.3 if size else 1.01,
    )


def _with_ports(run: Callable[..., list[Any]], task: Callable[..., Any], *arguments: Any) -> dict[str, float]:
    make = partial(dist.TCPStore, "127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    stores = [make() for _ in range(PORTS)]
    with tempfile.TemporaryDirectory() as folder:
        found = run(task, 2, folder, [store.port for store in stores], *arguments)
    return {key: max(one[key] for one in found if key in one) for one in found for key in one}


def _wrap(width: int, mapping: str) -> tuple[Varuna, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Varuna(
        *(Stages(width), mapping, {"x": torch.randn(2, width)}, BATCH, CHUNK),
        device="cpu",
        seed=1,
        from_cache=False,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.set_optimizer(optimizer)
    return model, optimizer


def _train(model: Varuna, optimizer: torch.optim.Optimizer, fetch: Any) -> None:
    model.step(fetch)
    optimizer.step()
    model.zero_grad()


def move(folder: str, ports: Sequence[int], width: int) -> dict[str, float]:
    """Join and leave; return the pauses of this process, and the time of a plain copy."""
    process, pauses = dist.get_rank(), dict[str, float]()
    with managed(folder, GENERATIONS[0], process, ports, 2) as joins:
        page = Path(os.environ["VARUNA_PROGRESS_FILE"])
        progress, orders = ProgressReader(page, process), OrderWriter(page)
        prepared = Path(folder) / "prepared"
        model, optimizer = _wrap(width, GENERATIONS[0].mapping)

        def fetch(samples: Sequence[int]) -> dict[str, object]:
            return {"x": torch.ones(len(samples), width)}

        try:
            if joins:
                prepared.touch()
                orders.give(order_of(GENERATIONS, 1, process, ports[1]))
            else:
                _train(model, optimizer, fetch)
                while not prepared.exists():
                    time.sleep(0.01)
                orders.give(order_of(GENERATIONS, 1, process, ports[1]))
                _train(model, optimizer, fetch)
            _train(model, optimizer, fetch)
            pauses["join"] = progress.read().morph_seconds if not joins else 0.0
            orders.give(order_of(GENERATIONS, 2, process, ports[2]))
            _train(model, optimizer, fetch)
            _train(model, optimizer, fetch)
            pauses["leave"] = progress.read().morph_seconds
        except SystemExit:
            pass
        model.close()
        orders.close()
        progress.close()
    pauses["copy"] = copy_plainly(folder, LAYERS * (width * width + width) * STATE)
    return pauses


def copy_plainly(folder: str, num_bytes: int) -> float:
    """Send bytes from the first process to the second one, in parts as large as a tensor."""
    process, path = dist.get_rank(), f"{folder}/link"
    parts = [num_bytes // (3 * LAYERS)] * (3 * LAYERS)
    if process == 0:
        data = [torch.ones(size, dtype=torch.uint8) for size in parts]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            dist.barrier()
            link, _ = listener.accept()
    else:
        dist.barrier()
        link = socket.socket(socket.AF_UNIX)
        link.connect(path)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
    dist.barrier()
    started = time.perf_counter()
    with link:
        if process == 0:
            for part in data:
                link.sendall(memory_of(part))
            link.recv(1)
        else:
            kept = []
            for size in parts:
                memory = torch.empty(size, dtype=torch.uint8)
                view, place = memory_of(memory), 0
                while place < size:
                    place += link.recv_into(view[place:])
                kept.append(memory)
            link.send(b"x")
    return time.perf_counter() - started


def train_with_copies(folder: str, ports: Sequence[int], width: int, steps: int) -> dict[str, float]:
    """Return seconds of a step with copies and without, in turn."""
    process, seconds = dist.get_rank(), {"on": list[float](), "off": list[float]()}
    with managed(folder, Generation("0;1;", (0, 1)), process, ports, 2):
        page = Path(os.environ["VARUNA_PROGRESS_FILE"])
        progress, orders = ProgressReader(page, process), OrderWriter(page)
        model, optimizer = _wrap(width, "0;1;")

        def fetch(samples: Sequence[int]) -> dict[str, object]:
            return {"x": torch.ones(len(samples), width)}

        turn, started = "", time.perf_counter()
        for step, inputs in model.batches(fetch, steps=8 * steps):
            if step % steps == 0:
                now = time.perf_counter()
                if step >= 2 * steps:  # the first turns measure the interval
                    seconds[turn].append((now - started) / steps)
                turn = "off" if step // steps % 2 else "on"
                model._state_copies.is_off = turn == "off"
                started = time.perf_counter()
            model.step(inputs)
            optimizer.step()
            model.zero_grad()
        model.close()
        orders.close()
        progress.close()
    return {key: median(values) for key, values in seconds.items()}


def train_with_commits(folder: str, ports: Sequence[int], width: int, steps: int) -> dict[str, float]:
    """Return seconds of a step with a commit and without: two replicas, in the order on, off, off, on."""
    process, seconds = dist.get_rank(), {True: list[float](), False: list[float]()}
    with managed(folder, Generation("0,1;", (0, 1)), process, ports, 2):
        page = Path(os.environ["VARUNA_PROGRESS_FILE"])
        progress, orders = ProgressReader(page, process), OrderWriter(page)
        model, optimizer = _wrap(width, "0,1;")

        def fetch(samples: Sequence[int]) -> dict[str, object]:
            return {"x": torch.tensor(samples)[:, None].expand(-1, width) * 1e-5}

        for step in range(4 * steps):
            commits = step % 4 in (0, 3)
            model._hot.waits_for_orders = commits
            started = time.perf_counter()
            _train(model, optimizer, fetch)
            if step >= steps:  # the first ones warm up
                seconds[commits].append(time.perf_counter() - started)
        model.close()
        orders.close()
        progress.close()
    return {"on": median(seconds[True]), "off": median(seconds[False])}
