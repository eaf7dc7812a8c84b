"""The stopwatch: two sides in turn in the same processes, wall time and CPU seconds of each.

This is what runs on every rank; ranks start each sample together. The number of steps in a sample follows
from how long a step takes, so that a sample is long enough to be measured and short enough to be repeated.
"""

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import quantiles
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from benchmarks.sides import SIDES, Side

MOST_STEPS = 200
T = TypeVar("T")


class Settings(msgspec.Struct, frozen=True):
    """Durations and repeats of a measurement."""

    repeats: int = 9
    sample_seconds: float = 0.5
    warmup_steps: int = 4


FULL = Settings()
QUICK = Settings(repeats=2, sample_seconds=0.0, warmup_steps=1)


class Sample(msgspec.Struct, frozen=True):
    """One turn of one side on one rank: seconds for each step."""

    wall: float
    cpu: float


class Contender(msgspec.Struct, frozen=True):
    """A side by name, and what it is made with."""

    side: str
    arguments: dict[str, Any]


class Spread(msgspec.Struct, frozen=True):
    """The median, and the quartiles around it."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def measured_within(seconds: float, repeats: int, measure: Callable[[], T]) -> list[T]:
    """Measure that often, but begin no more after `seconds`: a benchmark must end on a slow machine too."""
    began = time.perf_counter()
    found = [measure()]
    while len(found) < repeats and time.perf_counter() - began < seconds:
        found.append(measure())
    return found


def cpu_seconds() -> float:
    """Return the CPU seconds of this process: all threads, user and kernel."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def take_turns(
    contenders: Sequence[Contender],
    settings: Settings,
    same_batch: bool = True,
    sides: Mapping[str, type[Side]] = SIDES,
) -> list[list[Sample]]:
    """For each contender its samples on this rank; the k-th ones of all were taken side by side."""
    made = [sides[contender.side](**contender.arguments) for contender in contenders]
    if same_batch:
        _check_same_training(contenders, made)
    counts = [_warm_up(side, settings) for side in made]
    samples: list[list[Sample]] = [[] for _ in made]
    for turn in range(settings.repeats):
        order = range(len(made)) if turn % 2 == 0 else reversed(range(len(made)))
        for index in order:
            samples[index].append(_sample(made[index], counts[index]))
    for side in made:
        dist.barrier()
        side.close()
    return samples


def _check_same_training(contenders: Sequence[Contender], sides: Sequence[Side]) -> None:
    """A comparison means something only where both sides compute the same: the first two losses agree."""
    known = [[side.step(), side.step()] for side in sides]
    for contender, losses in zip(contenders[1:], known[1:], strict=True):
        for found, expected in zip(losses, known[0], strict=True):
            if found is not None and expected is not None and abs(found - expected) > 1e-4 * abs(expected):
                raise RuntimeError(
                    f"{contenders[0].side} and {contender.side} do not train the same: losses {known[0]} "
                    f"and {losses}"
                )


def _warm_up(side: Side, settings: Settings) -> int:
    """Return the number of steps per sample, the same on all ranks."""
    for _ in range(settings.warmup_steps):
        side.step()
    dist.barrier()
    started = time.perf_counter()
    side.step()
    side.step()
    seconds = (time.perf_counter() - started) / 2
    count = torch.tensor([settings.sample_seconds / seconds])
    dist.broadcast(count, 0)
    return max(1, min(MOST_STEPS, round(count.item())))


def _sample(side: Side, steps: int) -> Sample:
    dist.barrier()
    cpu, started = cpu_seconds(), time.perf_counter()
    for _ in range(steps):
        side.step()
    wall, used = time.perf_counter() - started, cpu_seconds() - cpu
    return Sample(wall / steps, used / steps)
