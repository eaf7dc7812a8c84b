"""State that moves in place: the pause of a planned join and leave against a plain copy of the same bytes.

Two processes of one machine. A worker alone holds both stages; another one joins and takes the second stage
over; then the first one leaves and hands its stage over. The rival sends the same number of bytes through a
Unix socket into new memory, between the same two processes, without hashes. The last rows train two stages
with and without copies of the state on the other rank, and two replicas with and without the commit of each
step, in turn; and a rank of two stages is lost just before its next copy, the worst moment.

A copy touches few steps. So a turn with copies goes from one copy to the next one, or to a later one, and its
time is the mean over all its steps. The turn without copies after it has as many steps.
"""

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.measure import measured_within, spread
from benchmarks.report import Row
from tests.train.hot_jobs import (
    BATCH,
    CHUNK,
    Generation,
    Killed,
    die,
    give_when_waiting,
    managed,
    order_of,
    own_sockets,
)
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
LOSS = [Generation("0;1;", (0, 1)), Generation("0;", (0,), lost=(1,))]
MOVE_SECONDS = 30.0
"""No run of moving state of one size begins later than this after the first one."""
STEP_SECONDS = 25.0
"""The same for the rows of steps and of losses."""
FEWEST_STEPS = 20
"""In a turn with copies."""
COPIES_BEFORE_A_LOSS = 2
"""The first ones measure the interval."""
SIDES = ("on", "off")
T = TypeVar("T")


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
        found = measured_within(MOVE_SECONDS, repeats, lambda w=width: _slowest(run, move, w))  # type: ignore[misc]
        name = f"{size / 1e6:.0f} MB of state per rank"
        copies = [one["copy"] for one in found]
        rows += [
            _row(f"planned {kind}, {name}", [one[kind] for one in found], copies, size)
            for kind in ("join", "leave")
        ]
    turns = _with_ports(run, train_with_copies, 8 if quick else 300, repeats, STEP_SECONDS)
    on, off = ([max(both) for both in zip(*(one[side] for one in turns), strict=True)] for side in SIDES)
    interval = round(median(turns[0]["intervals"]))
    rows.append(_row(f"step with copies on the other rank, one every {interval} steps", on, off, 0))
    losses = measured_within(STEP_SECONDS, repeats, lambda: _with_ports(run, lose_before_a_copy)[0])
    rows.append(_row_of_losses([one["redone"] for one in losses], [one["interval"] for one in losses]))
    for name, width, steps in [("tiny", 8, 8)] if quick else [("tiny", 8, 200), ("32 MB", 1000, 8)]:
        found = measured_within(
            STEP_SECONDS,
            repeats,
            lambda w=width, s=steps: _slowest(run, train_with_commits, w, s),  # type: ignore[misc]
        )
        sides = [[one[side] for one in found] for side in SIDES]
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
        runs=len(ours),
    )


def _row_of_losses(redone: Sequence[float], intervals: Sequence[float]) -> Row:
    """All steps since a copy are run again, and the loss comes just before the next one."""
    return Row(
        benchmark="moving",
        case="steps redone after a loss just before the next copy, D=1",
        against="the interval of the copies",
        unit="steps",
        ours=spread(redone),
        other=spread(intervals),
        ratio=spread([own / other for own, other in zip(redone, intervals, strict=True)]),
        target=1.0,
        runs=len(redone),
    )


def _with_ports(run: Callable[..., list[Any]], task: Callable[..., T], *arguments: Any) -> list[T]:
    make = partial(dist.TCPStore, "127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    stores = [make() for _ in range(PORTS)]
    with tempfile.TemporaryDirectory() as folder:
        return run(task, 2, folder, [store.port for store in stores], *arguments)


def _slowest(run: Callable[..., list[Any]], task: Callable[..., Any], *arguments: Any) -> dict[str, float]:
    found = _with_ports(run, task, *arguments)
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


def train_with_copies(
    folder: str, ports: Sequence[int], width: int, turns: int, seconds: float
) -> dict[str, list[float]]:
    """Return mean seconds of a step with copies and without, in turn; no turn begins after `seconds`."""
    process, means = dist.get_rank(), {"on": list[float](), "off": list[float](), "intervals": list[float]()}
    with managed(folder, LOSS[0], process, ports, 2):
        page = Path(os.environ["VARUNA_PROGRESS_FILE"])
        progress, orders = ProgressReader(page, process), OrderWriter(page)
        model, optimizer = _wrap(width, LOSS[0].mapping)
        batches = model.batches(_ones(width))

        def train() -> None:
            _step(model, optimizer, next(batches)[1])

        def train_until_copy() -> int:
            """Train to the end of a step in which the ranks copy; return the number of this step."""
            copies = model._state_copies
            before = copies._since[0]
            while copies._since[0] == before or not copies.interval:
                train()
                if copies.is_off:
                    raise RuntimeError("the ranks cannot copy their state, or no longer")
            return copies._since[0]

        train_until_copy()
        began, goes_on = time.perf_counter(), True
        while goes_on and len(means["on"]) < turns:
            first, started = train_until_copy(), time.perf_counter()
            while (steps := train_until_copy() - first) < FEWEST_STEPS:
                pass
            means["on"].append((time.perf_counter() - started) / steps)
            means["intervals"].append(model._state_copies.interval)
            model._state_copies.is_off, started = True, time.perf_counter()
            for _ in range(steps):
                train()
            means["off"].append((time.perf_counter() - started) / steps)
            model._state_copies.is_off = False
            late = model._session.gather_numbers([time.perf_counter() - began > seconds])
            goes_on = not any(one for (one,) in late)
        model.close()
        orders.close()
        progress.close()
    return means


def _ones(width: int) -> Callable[[Sequence[int]], dict[str, object]]:
    return lambda samples: {"x": torch.ones(len(samples), width)}


def _step(model: Varuna, optimizer: torch.optim.Optimizer, inputs: Any) -> float:
    loss, _ = model.step(inputs)
    optimizer.step()
    model.zero_grad()
    return loss


def lose_before_a_copy(folder: str, ports: Sequence[int]) -> dict[str, float]:
    """Lose the other rank before the last step of an interval; return the steps that are run again."""
    process, kept, found = dist.get_rank(), own_sockets(), dict[str, float]()
    with managed(folder, LOSS[0], process, ports, 2):
        page = Path(os.environ["VARUNA_PROGRESS_FILE"])
        progress, orders = ProgressReader(page, process), OrderWriter(page)
        model, optimizer = _wrap(8, LOSS[0].mapping)
        fetch, copied, last = _ones(8), set[int](), -1
        if process == 0:
            order = order_of(LOSS, 1, process, ports[1])
            threading.Thread(target=give_when_waiting, args=(progress, orders, order), daemon=True).start()

        def fetch_or_die(samples: Sequence[int]) -> dict[str, object]:
            copies = model._state_copies
            copied.add(copies._since[0])
            is_last = samples[0] // BATCH == copies._since[0] + copies.interval - 1
            if process == 1 and copies.interval and is_last and len(copied) > COPIES_BEFORE_A_LOSS:
                die(kept)
            return fetch(samples)

        try:
            for step, inputs in model.batches(fetch_or_die):
                if step <= last:
                    found["redone"] = last - step  # the last one was not finished
                    break
                last, found["interval"] = step, model._state_copies.interval
                _step(model, optimizer, inputs)
        except Killed:
            pass
        model.close()
        orders.close()
        progress.close()
    return found


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
