"""Tests each model in turn and prints one line per model."""

import multiprocessing as mp
import os
import time
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tests.ports import free_port
from tests.zoo import hand_made, projects, trial
from tests.zoo.here import run_here
from tests.zoo.trial import Case, Layout

PATIENCE_SECONDS = 240.0
FEW = [
    Layout((1, 1)),
    Layout((2,), 3),
    Layout((1, 1, 1)),
    Layout((2, 1)),
    Layout((2, 2)),
    Layout((1, 3)),
    Layout((2, 1, 1), 3),
]
MANY = [
    Layout((3, 2)),
    Layout((1, 2, 2), 3),
    Layout((3, 2, 1)),
    Layout((2, 2, 2)),
    Layout((3, 4)),
    Layout((1, 2, 1, 3), 3),
    Layout((3, 1, 4)),
    Layout((2, 2, 2, 2)),
    Layout((8,), 1),
    Layout((5,), 1),
]
"""Layouts of 5 to 8 ranks, one for each model in turn; some ranks get no samples."""


def case_of(name: str) -> Case:
    found = hand_made.CASES.get(name) or projects.CASES.get(name)
    return found or cases([])[name]


def cases(wanted: list[str]) -> dict[str, Case]:
    # Imported late: these modules are slow to import.
    from tests.zoo import further_hugging_face, hugging_face, more_hugging_face, multimodal

    everything = {
        **hugging_face.CASES,
        **more_hugging_face.CASES,
        **further_hugging_face.CASES,
        **multimodal.CASES,
        **hand_made.CASES,
        **projects.CASES,
    }
    return {
        name: case
        for name, case in everything.items()
        if not wanted or any(part in name.lower() for part in wanted)
    }


def tour_here(wanted: list[str]) -> None:
    for name, case in cases(wanted).items():
        began = time.monotonic()
        try:
            said = f"ok, {run_here(case)} segments"
        except Exception as error:
            said = f"{type(error).__name__}: {str(error)[:1500]}"
        print(f"{name}: {said}   [{time.monotonic() - began:.0f} s]", flush=True)


def try_one(name: str, layouts: list[Layout]) -> list[str]:
    """Return the result of each layout on this rank."""
    found = []
    for layout in layouts:
        try:
            trial.run(case_of(name), layout, key=name)
            found.append("ok")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
            break
    return found


# ------------------------------------------------------------------ in processes that know the captures


def tour(wanted: list[str]) -> None:
    """Capture each model in a separate process, whose children are the ranks of every layout."""
    torch.set_num_threads(1)
    for number, name in enumerate(cases(wanted)):
        began = time.monotonic()
        said = _answers(1, _visit, name, MANY[number % len(MANY)])[0]
        print(f"{name}: {said}   [{time.monotonic() - began:.0f} s]", flush=True)


def _visit(_rank: int, name: str, many: Layout) -> str:
    """Return the result of one model: the first layout that differs from one process, if any."""
    case = case_of(name)
    os.environ["MASTER_PORT"] = str(free_port())
    for layout in (Layout((1,)), Layout((1,), max(trial.BATCHES))):  # also with one sample each
        said = _as_rank(0, name, layout, free_port())
        if said != "ok":
            return f"1 rank: {said}"
    passed = []
    for layout in (*FEW, many):
        if trial.fits(case, layout):
            answers = _answers(layout.world, _as_rank, name, layout, free_port())
            bad = [answer for answer in answers if answer != "ok"]
            if any("can be cut into" in answer for answer in bad):
                continue
            if bad:
                said = next((each for each in bad if "on rank" not in each and "peer" not in each), bad[0])
                return f"{layout}: {said}"
            passed.append(str(layout))
    return f"ok at {', '.join(passed)}"


def _as_rank(rank: int, name: str, layout: Layout, port: int) -> str:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(layout.world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=layout.world)
    (said,) = try_one(name, [layout])
    if said == "ok":
        dist.barrier()
    dist.destroy_process_group()
    return said


def _answers(ranks: int, task: Any, *args: Any) -> list[str]:
    """Return the results of forked processes, which share this one's memory."""
    fork = mp.get_context("fork")
    found = ["no answer"] * ranks
    workers, pending = [], {}
    for rank in range(ranks):
        ours, theirs = fork.Pipe(duplex=False)
        worker = fork.Process(target=_say, args=(theirs, task, rank, *args))
        worker.start()
        theirs.close()
        workers.append(worker)
        pending[ours] = rank
    patience = PATIENCE_SECONDS * (10 if task is _visit else 1)
    while pending:
        ready = wait(list(pending), patience)
        if not ready:
            break
        for connection in ready:
            rank = pending.pop(connection)  # type: ignore[arg-type]
            try:
                found[rank] = connection.recv()  # type: ignore[union-attr]
            except EOFError:
                found[rank] = "the process died"
    for worker in workers:
        worker.kill()
        worker.join()
    return found


def _say(connection: Connection, task: Any, *args: Any) -> None:
    try:
        connection.send(task(*args))
    except BaseException:
        connection.send(traceback.format_exc()[-1500:])
