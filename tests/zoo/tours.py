"""Walks through the zoo: each model in turn, and one line on what became of it."""

import time
from typing import Any

from tests.pool import Pool, TaskFailed
from tests.zoo import hand_made, trial
from tests.zoo.here import run_here
from tests.zoo.trial import Case, Layout

LAYOUTS = [Layout(1), Layout(2), Layout(3), Layout(4), Layout(2, 2), Layout(1, 2, 3)]


def case_of(name: str) -> Case:
    found = hand_made.CASES.get(name)
    return found or cases([])[name]


def cases(wanted: list[str]) -> dict[str, Case]:
    from tests.zoo import hugging_face  # which takes its time: who asks for another case need not wait

    everything = {**hugging_face.CASES, **hand_made.CASES}
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
    """On one rank: what became of each layout."""
    found = []
    for layout in layouts:
        try:
            trial.run(case_of(name), layout, key=name)
            found.append("ok")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
            break
    return found


def tour(wanted: list[str]) -> None:
    pool = Pool()
    for name in cases(wanted):
        began = time.monotonic()
        words: list[str] = []
        for world in (4, 3, 2, 1):
            layouts = [layout for layout in LAYOUTS if layout.stages * layout.replicas == world]
            answers: Any
            try:
                answers = pool.run(try_one, world, name, layouts, timeout=240)
            except TaskFailed as error:
                answers = [[f"failed: {str(error)[-600:]}"]]
            bad = [each for answer in answers for each in answer if each != "ok"]
            if bad:
                said = next((each for each in bad if "on rank" not in each and "peer" not in each), bad[0])
                words.append(f"W={world}: {said.strip()[:1500]}")
                pool.close()
                break
        print(f"{name}: {'ok' if not words else words[0]}   [{time.monotonic() - began:.0f} s]", flush=True)
    pool.close()
