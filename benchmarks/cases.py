"""Each benchmark: what it compares, at which sizes, and what is to be reached."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks import checkpoints as ck
from benchmarks import rannc as rn
from benchmarks.accuracy import GLIMPSE, TRIALS, Compared, compare_in, cores_awake
from benchmarks.adapters import checkpoint_bytes, lora_turns
from benchmarks.jitter import Jitter
from benchmarks.loading import loading_peaks
from benchmarks.makespan import steps_and_makespans
from benchmarks.measure import Contender, Sample, Settings, Spread, spread, take_turns
from benchmarks.memory import Held, held
from benchmarks.models import MEDIUM, TINY, Size, chain
from benchmarks.morphing import manager, morphing
from benchmarks.moving import moving
from benchmarks.observing import observing
from benchmarks.partition import partition_rows
from benchmarks.planning_rows import planning, planning_memory
from benchmarks.replicas import torchft
from benchmarks.report import Row
from benchmarks.strangers import strangers
from benchmarks.trainers import (
    BATCH,
    Kind,
    UpdateTimes,
    computed_seconds,
    times_of_updates,
    tokens_per_second,
)
from tests.pool import Pool
from varuna.types import ScheduleName

JITTER = {TINY.name: Jitter(0.003), MEDIUM.name: Jitter(0.01)}
"""Link delay, about as long as a stage computes for one micro-batch."""
FORWARD_SECONDS, BACKWARD_SECONDS = 0.008, 0.016
MORPHS = {False: 10, True: 2}
"""Runs of each benchmark of morphs, in full and with --quick: a median of fewer says little."""
HOUR = 3600.0
NAIVE = "one stage at a time (device_map)"


@dataclass(frozen=True)
class Lab:
    """The processes that measure, and how long they do."""

    pool: Pool
    settings: Settings
    quick: bool

    def run(self, task: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        return self.pool.run(task, world, *args, timeout=HOUR)

    def layouts(self) -> Iterator[tuple[Size, int, int]]:
        """(model, P, M) of the comparisons with torch's pipeline."""
        if self.quick:
            yield TINY, 2, 4
            return
        for size in (TINY, MEDIUM):
            for depth in (2, 4):
                for microbatches in (8, 32):
                    yield size, depth, microbatches


class Turns:
    """The samples of several contenders, put together over the ranks."""

    def __init__(self, by_rank: Sequence[Sequence[Sequence[Sample]]]) -> None:
        # A step has ended when its last rank has; CPU seconds add up.
        self.wall = [
            [max(sample.wall for sample in ranks) for ranks in zip(*side, strict=True)]
            for side in zip(*by_rank, strict=True)
        ]
        self.cpu = [
            [sum(sample.cpu for sample in ranks) for ranks in zip(*side, strict=True)]
            for side in zip(*by_rank, strict=True)
        ]

    def row(
        self, benchmark: str, case: str, against: str, index: int = 0, other: int = 1, **targets: Any
    ) -> Row:
        return Row(
            benchmark=benchmark,
            case=case,
            against=against,
            unit="ms",
            ours=in_ms(self.wall[index]),
            other=in_ms(self.wall[other]),
            ratio=paired(self.wall[index], self.wall[other]),
            cpu_ours=in_ms(self.cpu[index]),
            cpu_other=in_ms(self.cpu[other]),
            cpu_ratio=paired(self.cpu[index], self.cpu[other]),
            **targets,
        )


def in_ms(seconds: Sequence[float]) -> Spread:
    return spread([1000 * value for value in seconds])


def paired(ours: Sequence[float], others: Sequence[float]) -> Spread:
    """Return the ratio of samples taken side by side, so that a slow moment of the machine slows both."""
    return spread([a / b for a, b in zip(ours, others, strict=True)])


def compare(lab: Lab, world: int, *contenders: Contender, same_batch: bool = True) -> Turns:
    return Turns(lab.run(take_turns, world, list(contenders), lab.settings, same_batch))


def one_process(lab: Lab) -> list[Row]:
    rows = []
    for size in (TINY,) if lab.quick else (TINY, MEDIUM):
        same = {"size": size, "microbatches": 8}
        turns = compare(lab, 1, Contender("varuna", {**same, "depth": 1}), Contender("bare loop", same))
        rows.append(
            turns.row("one-process", f"{size.name}, P=1, D=1, M=8", "the bare PyTorch loop", target=1.02)
        )
    return rows


def pipeline(lab: Lab) -> list[Row]:
    rows = []
    for size, depth, microbatches in lab.layouts():
        same = {"size": size, "depth": depth, "microbatches": microbatches}
        turns = compare(lab, depth, Contender("varuna", same), Contender("torch 1F1B", same))
        case = f"{size.name}, P={depth}, M={microbatches}"
        rows.append(turns.row("pipeline", case, "torch's Schedule1F1B", target=0.95, cpu_target=1.0))
    return rows


def pipeline_jitter(lab: Lab) -> list[Row]:
    rows = []
    for size, depth, microbatches in lab.layouts():
        jitter = JITTER[size.name]
        same = {"size": size, "depth": depth, "microbatches": microbatches, "jitter": jitter}
        turns = compare(lab, depth, Contender("varuna", same), Contender("torch 1F1B", same))
        case = f"{size.name}, P={depth}, M={microbatches}, links late by {1000 * jitter.mean_seconds:.0f} ms"
        rows.append(turns.row("pipeline-jitter", case, "torch's Schedule1F1B", target=0.80))
    return rows


def data_parallel(lab: Lab) -> list[Row]:
    rows = []
    for size in (TINY,) if lab.quick else (TINY, MEDIUM):
        for microbatches in (2,) if lab.quick else (1, 8):
            same = {"size": size, "microbatches": microbatches}
            turns = compare(
                lab,
                2,
                Contender("varuna", {**same, "depth": 1, "width": 2}),
                Contender("DistributedDataParallel", same),
            )
            case = f"{size.name}, P=1, D=2, M={microbatches}"
            rows.append(turns.row("data-parallel", case, "DistributedDataParallel", target=1.00))
    return rows


def makespan(lab: Lab) -> list[Row]:
    rows = []
    for depth, microbatches in [(2, 4)] if lab.quick else [(2, 32), (4, 8), (4, 32)]:
        seconds = {"F": FORWARD_SECONDS, "B": BACKWARD_SECONDS}
        found = lab.run(steps_and_makespans, depth, depth, microbatches, seconds, lab.settings)
        steps = [max(step for step, _ in ranks) for ranks in zip(*found, strict=True)]
        allowed = [ranks[0][1] for ranks in zip(*found, strict=True)]
        row = Row(
            benchmark="makespan",
            case=f"computing by sleeping, P={depth}, M={microbatches}",
            against="what its own compute times allow",
            unit="ms",
            ours=in_ms(steps),
            other=in_ms(allowed),
            ratio=paired(steps, allowed),
            target=1.10,
        )
        rows.append(row)
    return rows


MEMORY_SCHEDULES: list[tuple[ScheduleName, bool]] = [
    ("varuna", False),
    ("varuna", True),
    ("1f1b", False),
    ("gpipe", False),
    ("zero-bubble", False),
]


def memory(lab: Lab) -> list[Row]:
    rows = []
    size, depth, microbatches = (TINY, 2, 4) if lab.quick else (MEDIUM, 4, 16)
    for schedule, recompute in MEMORY_SCHEDULES:
        stages: list[Held] = lab.run(held, depth, size, depth, microbatches, schedule, recompute)
        for found in stages:
            name = f"{schedule} recomputing" if recompute else schedule
            place = f"{size.name}, P={depth}, M={microbatches}, {name}, stage {found.stage}"
            counted = found.microbatches, found.most_microbatches
            rows.append(of_memory(place, "micro-batches", *counted))
            rows.append(of_memory(place, "KiB", found.num_bytes / 1024, found.most_bytes / 1024))
    return rows


def of_memory(place: str, unit: str, ours: float, bound: float) -> Row:
    return Row(
        benchmark="memory",
        case=place,
        against="the schedule's bound",
        unit=unit,
        ours=spread([ours]),
        other=spread([bound]),
        ratio=spread([ours / bound]),
        target=1.0,
    )


def loading(lab: Lab) -> list[Row]:
    return [
        Row(
            benchmark="loading",
            case=f"peak memory of a rank that reads a Hugging Face folder, Llama, {found.stage / 1e6:.0f} MB",
            against="its stage",
            unit="MB",
            ours=spread([found.grown / 1e6]),
            other=spread([found.stage / 1e6]),
            ratio=spread([found.grown / found.stage]),
            target=1.2,
        )
        for found in loading_peaks(lab.run, quick=lab.quick)
    ]


def trainer(lab: Lab) -> list[Row]:
    """VarunaTrainer in one process, and over several workers with one core each; all sides in turn."""
    layers, width, updates, rounds = (2, 64, 2, 1) if lab.quick else (8, 256, 2, 3)
    workers = 2 if lab.quick else 4
    times: dict[str, list[list[UpdateTimes]]] = {}

    def measure(name: str, kind: Kind, world: int, stages: int = 1, accumulated: int = 1) -> None:
        found = lab.run(times_of_updates, world, kind, updates, layers, width, stages, False, accumulated)
        times.setdefault(name, []).extend([*ranks] for ranks in zip(*found, strict=True))

    for _ in range(rounds):
        measure("alone", "transformers", 1)
        measure("one", "varuna", 1)
        measure("two", "varuna", 2, 2)
        measure("stages", "varuna", workers, workers)
        measure("replicas", "varuna", workers)
        measure("ddp", "ddp", workers)
        measure("fsdp2", "fsdp2", workers)
    measure("alone, accumulated", "transformers", 1, 1, 4)
    measure("stages, accumulated", "varuna", workers, workers, 4)

    walls = {name: [1000 * max(t.wall for t in ranks) for ranks in all_] for name, all_ in times.items()}
    model = f"Llama, {layers} layers, {width} wide"
    rows = [
        _of_updates(f"one process, {model}", "transformers.Trainer", walls["one"], walls["alone"], 1.02),
        _of_updates(f"2 stages, {model}", NAIVE, walls["two"], walls["alone"], None),
    ]
    for name in ("", ", accumulated"):
        samples = BATCH * (4 if name else 1)
        case = f"{workers} stages, {samples} samples, {model}"
        ours, other = walls[f"stages{name}"], walls[f"alone{name}"]
        if len(os.sched_getaffinity(0)) < workers:
            case += " (computed from CPU times)"
            ours = [1000 * computed_seconds(ranks) for ranks in times[f"stages{name}"]]
            other = [1000 * ranks[0].cpu for ranks in times[f"alone{name}"]]
        rows.append(_of_updates(case, NAIVE, ours, other, 0.4, samples))
    for name, case, against in (
        ("replicas", f"{workers} replicas, {model}", "ddp"),
        ("stages", f"{workers} stages, {model}", "fsdp2"),
    ):
        rival = {"ddp": "Trainer with DDP", "fsdp2": "torch's FSDP2"}[against]
        rows.append(_of_updates(case, rival, walls[name], walls[against], None))
    return rows


def _of_updates(
    case: str,
    against: str,
    ours: list[float],
    other: list[float],
    target: float | None,
    samples: int = BATCH,
) -> Row:
    speeds = [f"{tokens_per_second(spread(times).median, samples):,.0f}" for times in (ours, other)]
    return Row(
        benchmark="trainer",
        case=f"{case}; {speeds[0]} and {speeds[1]} tokens/s",
        against=against,
        unit="ms",
        ours=spread(ours),
        other=spread(other),
        ratio=spread([spread(ours).median / spread(other).median]),
        target=target,
    )


def lightning(lab: Lab) -> list[Row]:
    """Lightning's Trainer and Fabric in one process, with the strategy "varuna" and without, in turn."""
    from benchmarks.lightning import seconds_with_fabric, seconds_with_trainer

    layers, width, updates, rounds = (2, 64, 2, 1) if lab.quick else (8, 256, 5, 3)
    rows = []
    for name, measure in (("Trainer", seconds_with_trainer), ("Fabric", seconds_with_fabric)):
        times: dict[str, list[float]] = {"auto": [], "varuna": []}
        for _ in range(rounds):
            for strategy, found in times.items():
                found += lab.run(measure, 1, strategy, updates, layers, width)[0]
        case = f"CPU time of Lightning's {name}, Llama, {layers} layers, {width} wide"
        rows.append(of_time("lightning", case, f"{name} alone", times["varuna"], times["auto"], 1.05))
    return rows


def adapters(lab: Lab) -> list[Row]:
    """LoRA: the time of a step, and the bytes of a checkpoint."""
    width = 64 if lab.quick else 256
    turns = Turns(lab.run(lora_turns, 1, lab.settings, width))
    rows = [turns.row("adapters", f"a step with LoRA, Llama, width {width}", "peft alone", target=1.02)]
    lora, full = (lab.run(checkpoint_bytes, 1, width, lora)[0] for lora in (True, False))
    cases = [
        ("LoRA", "the adapters with Adam's state", lora.saved, lora.trained, 1.2),
        ("LoRA", "a checkpoint of full training", lora.saved, full.saved, None),
    ]
    for case, against, ours, other, target in cases:
        rows.append(
            Row(
                benchmark="adapters",
                case=f"bytes of a checkpoint, {case}, Llama, width {width}",
                against=against,
                unit="MB",
                ours=spread([ours / 1e6]),
                other=spread([other / 1e6]),
                ratio=spread([ours / other]),
                target=target,
            )
        )
    return rows


def overhead(lab: Lab) -> list[Row]:
    """CPU time for each micro-batch and stage; growth is the ratio to the layout before."""
    rows = []
    found: dict[tuple[int, int], list[float]] = {}
    depths, counts = ((1, 2), (2, 4)) if lab.quick else ((1, 2, 4), (8, 32, 128))
    for depth in depths:
        contenders = [
            Contender("varuna", {"size": chain(depth), "depth": depth, "microbatches": count})
            for count in counts
        ]
        turns = compare(lab, depth, *contenders, same_batch=False)
        for count, cpu in zip(counts, turns.cpu, strict=True):
            found[depth, count] = [seconds / count / depth for seconds in cpu]
    for depth in depths:
        for fewer, more in pairwise(counts):
            rows.append(_growth(found, (depth, more), (depth, fewer), target=1.05))
    # A stage between two others has twice the messages of one at the end: 1 sent by each of P=2, 1.5 of P=4.
    for narrow, deep in pairwise(depths[1:]):
        rows.append(_growth(found, (deep, counts[1]), (narrow, counts[1]), target=1.5))
    return rows


def _growth(
    found: dict[tuple[int, int], list[float]], ours: tuple[int, int], other: tuple[int, int], *, target: float
) -> Row:
    return Row(
        benchmark="overhead",
        case=f"CPU per micro-batch and stage, P={ours[0]}, M={ours[1]}",
        against=f"P={other[0]}, M={other[1]}",
        unit="ms",
        ours=in_ms(found[ours]),
        other=in_ms(found[other]),
        ratio=paired(found[ours], found[other]),
        target=target,
    )


def schedules(lab: Lab) -> list[Row]:
    rows = []
    cases = [(TINY, 2, 4)] if lab.quick else [(TINY, 4, 32), (MEDIUM, 2, 8), (MEDIUM, 4, 8)]
    variants: dict[str, dict[str, Any]] = {
        "varuna": {},
        "1f1b": {"schedule": "1f1b"},
        "gpipe": {"schedule": "gpipe"},
        "zero-bubble": {"schedule": "zero-bubble"},
        "varuna recomputing": {"recompute": True},
    }
    for size, depth, microbatches in cases:
        same = {"size": size, "depth": depth, "microbatches": microbatches}
        turns = compare(lab, depth, *(Contender("varuna", {**same, **more}) for more in variants.values()))
        for index, name in enumerate(variants):
            if index:
                case = f"{size.name}, P={depth}, M={microbatches}, {name}"
                rows.append(turns.row("schedules", case, "the schedule varuna", index, 0))
    return rows


def checkpoints(lab: Lab) -> list[Row]:
    """Each in a folder of its own on the disk that holds temporary files."""
    layers, width, samples, steps = (4, 16, 8, 2) if lab.quick else (8, 2048, 64, 8)
    repeats = lab.settings.repeats
    state = f"{layers * width * (width + 1) * 12 / 1e6:.0f} MB of state"
    rows = []
    with tempfile.TemporaryDirectory(prefix="varuna-benchmark-") as folder:
        for depth in (1,) if lab.quick else (1, 2):
            place = f"{state}, P={depth}"
            saved = lab.run(ck.saving, depth, f"{folder}/save{depth}", repeats, depth, layers, width)
            ours, torchs, plain = (slowest([rank[i] for rank in saved]) for i in range(3))
            dcp = "torch.distributed.checkpoint"
            rows.append(of_time("checkpoints", f"save, {place}", f"{dcp}, fsync", ours, torchs, 1.0))
            rows.append(of_time("checkpoints", f"save, {place}", "a plain write, fsync", ours, plain, 1.25))
            loaded = lab.run(ck.loading, depth, f"{folder}/load{depth}", repeats, depth, layers, width)
            ours, torchs = (slowest([rank[i] for rank in loaded]) for i in range(2))
            rows.append(of_time("checkpoints", f"load, {place}", dcp, ours, torchs, 1.0))
        [(times, share)] = lab.run(ck.one_stage_of_four, 1, f"{folder}/four", repeats, layers, width)
        rows.append(of_time("checkpoints", f"load, {state}, one stage of four", "all of it", *times, 0.35))
        rows.append(
            Row(
                benchmark="checkpoints",
                case=f"bytes read, {state}, one stage of four",
                against="all of it",
                unit="of all",
                ours=spread([share]),
                other=spread([1.0]),
                ratio=spread([share]),
                target=0.35,
            )
        )
        [times] = lab.run(ck.stall, 1, f"{folder}/stall", repeats, layers, width)
        what = f"the call that starts a background save, {state}"
        rows.append(of_time("checkpoints", what, "one copy of it in memory", *times, 1.3))
        for depth in (1,) if lab.quick else (1, 2):
            arguments = (f"{folder}/over{depth}", repeats, depth, layers, width, samples, steps)
            found = lab.run(ck.overlapped, depth, *arguments)
            ours, without = (slowest([rank[0][i] for rank in found]) for i in range(2))
            what = f"a step during a background save, {state}, P={depth}"
            rows.append(of_time("checkpoints", what, "a step without", ours, without, 1.03))
    return rows


def rannc(lab: Lab) -> list[Row]:
    subjects = rn.SMALL[:1] if lab.quick else rn.SUBJECTS
    rows = [row for world in (1, 2) for subject in subjects for row in rannc_whole(lab, subject, world)]
    rows += [row for subject in subjects for row in rannc_stages(lab, subject)]
    return rows + [row for subject in subjects[:2] for row in rannc_first_calls(lab, subject)]


def rannc_turns(lab: Lab, world: int, *contenders: Contender) -> Turns:
    """Single steps in turn, many of them: half a second is long on a machine that is not always as fast."""
    settings = msgspec.structs.replace(lab.settings, repeats=5 * lab.settings.repeats, sample_seconds=0.0)
    return Turns(lab.run(rn.turns, world, list(contenders), settings))


def rannc_whole(lab: Lab, subject: rn.Subject, world: int) -> Iterator[Row]:
    """A model that fits one device."""
    same, other = {"subject": subject}, "plain loop" if world == 1 else "DistributedDataParallel"
    turns = rannc_turns(lab, world, Contender("RaNNCModule", same), Contender(other, same))
    yield turns.row("rannc", f"{subject.name}, W={world}", other, target=1.02)


def rannc_stages(lab: Lab, subject: rn.Subject) -> Iterator[Row]:
    """Calls that come before all losses are known must run all forwards first, as gpipe does."""
    cut = {"subject": subject, "microbatches": 4}
    ours = Contender("RaNNCModule", {**cut, "stages": 2})
    gpipe = Contender("Varuna", {**cut, "schedule": "gpipe"})
    turns = rannc_turns(lab, 2, ours, gpipe, Contender("Varuna", cut))
    case = f"{subject.name}, 2 stages, M=4"
    yield turns.row("rannc", case, "Varuna, gpipe", target=1.05)
    yield turns.row("rannc", case, "Varuna, its own schedule", other=2)


def rannc_first_calls(lab: Lab, subject: rn.Subject) -> Iterator[Row]:
    cut = {"subject": subject, "microbatches": 4}
    both = [Contender("RaNNCModule", {**cut, "stages": 2}), Contender("Varuna", cut)]
    by_rank = lab.run(rn.first_calls, 2, both, min(lab.settings.repeats, 3))
    ours, other = (slowest([rank[index] for rank in by_rank]) for index in range(2))
    case = f"from the plain model to the end of the first step, {subject.name}, 2 stages"
    yield of_time("rannc", case, "Varuna", ours, other)


def accuracy(lab: Lab) -> list[Row]:
    found = []
    with tempfile.TemporaryDirectory(prefix="varuna-benchmark-") as folder:
        for trial in (GLIMPSE,) if lab.quick else TRIALS:
            with cores_awake() if trial.waits else nullcontext():
                found.append(compare_in(trial, lab.run, Path(folder)))
    return accuracy_rows(found)


def accuracy_rows(found: Sequence[Compared]) -> list[Row]:
    rows = []
    for trial in found:
        for one in trial.measured:
            steps = [one.seconds] if one.waits else one.steps
            row = Row(
                benchmark="accuracy",
                case=f"{trial.name} {one.layout}",
                against="predicted against measured",
                unit="ms",
                ours=in_ms([one.predicted]),
                other=in_ms(steps),
                ratio=spread([one.predicted / seconds for seconds in steps]),
            )
            rows.append(row)
    for sort in dict.fromkeys(trial.sort for trial in found):
        alike = [trial for trial in found if trial.sort == sort]
        errors = [100 * one.error for trial in alike for one in trial.measured]
        what = f"of {len(errors)} layouts, {sort}"
        rows.append(_of_error(f"median error {what}", median(errors), 3.0))
        rows.append(_of_error(f"worst error {what}", max(errors), 8.0))
        for trial in alike:
            case = f"{trial.name} as the planner lays it out, {trial.chosen.layout}"
            against = f"the best of {len(trial.measured)}, {trial.best.layout}"
            chosen, best = trial.chosen.seconds, trial.best.seconds
            rows.append(of_time("accuracy", case, against, [chosen], [best], 1.03))
    return rows


def _of_error(case: str, error: float, most: float) -> Row:
    return Row(
        benchmark="accuracy",
        case=case,
        against=f"{most:g} %",
        unit="%",
        ours=spread([error]),
        other=spread([most]),
        ratio=spread([error / most]),
        target=1.0,
    )


def slowest(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    return [max(ranks) for ranks in zip(*of_ranks, strict=True)]


def of_time(
    benchmark: str,
    case: str,
    against: str,
    ours: Sequence[float],
    other: Sequence[float],
    target: float | None = None,
) -> Row:
    return Row(
        benchmark=benchmark,
        case=case,
        against=against,
        unit="ms",
        ours=in_ms(ours),
        other=in_ms(other),
        ratio=paired(ours, other),
        target=target,
    )


BENCHMARKS: dict[str, Callable[[Lab], list[Row]]] = {
    "one-process": one_process,
    "pipeline": pipeline,
    "pipeline-jitter": pipeline_jitter,
    "data-parallel": data_parallel,
    "makespan": makespan,
    "memory": memory,
    "loading": loading,
    "trainer": trainer,
    "lightning": lightning,
    "adapters": adapters,
    "overhead": overhead,
    "schedules": schedules,
    "checkpoints": checkpoints,
    "planning": lambda lab: planning(lab.run, lab.settings.repeats, quick=lab.quick),
    "planning-memory": lambda lab: planning_memory(quick=lab.quick),
    "partition": lambda lab: partition_rows(quick=lab.quick),
    "accuracy": accuracy,
    "rannc": rannc,
    "moving": lambda lab: moving(lab.run, MORPHS[lab.quick], quick=lab.quick),
    "morphing": lambda lab: morphing(MORPHS[lab.quick], quick=lab.quick),
    "torchft": lambda lab: torchft(MORPHS[lab.quick], quick=lab.quick),
    "manager": lambda lab: manager(lab.settings.repeats, quick=lab.quick),
    "strangers": lambda lab: strangers(quick=lab.quick),
    "observing": lambda lab: observing(min(lab.settings.repeats, 5), quick=lab.quick),
}
