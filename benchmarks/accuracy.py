"""Predictions against measurements: how far the planner is off, and whether its choice is the best.

A model is profiled once. Every layout is forecast before any of them runs; then all of them train in other
processes, in turn. Two sorts of models:

    computing   real work, by no more workers than there are cores
    waiting     segments whose time is a timed wait, so that more workers than cores are no lie
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import SEED, Size, make_batch, make_model
from varuna import CutPoint, Profiler, Varuna, cut_after
from varuna.capture import Source
from varuna.capture.cuts.segment_kinds import find_kinds
from varuna.capture.model.batch import Batch
from varuna.measure.segments import LinkedSegment, run_once
from varuna.measure.stopwatch import Effort, Stopwatch
from varuna.plan.cost.forecast import forecast_plan
from varuna.plan.search.search import search
from varuna.profile.runnable import SegmentFactory
from varuna.types import Cluster, Machine, Plan, Profile, ScheduleName, StagePlan, format_stage_map

LARGE = Size("large", blocks=8, width=256, tokens=128, vocab=512)
MEMORY_BYTES = 1 << 40
MESSAGE_BYTES = tuple(1 << power for power in range(12, 23, 2))
QUICK = 0.2
"""Quantile of the runs of a computing segment that counts: undisturbed, but no outlier."""
ROUNDS = 4
"""Quantile of the runs of a yardstick that counts."""
STEADIEST = 0.5
"""Number of turns that count: those in which the machine changed its speed least."""


# ---------------------------------------------------------------- the layouts


@dataclass(frozen=True)
class Layout:
    spans: tuple[tuple[int, int], ...]
    microbatch: int
    width: int = 1
    schedule: ScheduleName = "varuna"
    recompute: bool = False
    shard: bool = False

    @property
    def depth(self) -> int:
        return len(self.spans)

    @property
    def world(self) -> int:
        return self.depth * self.width

    def ranks(self) -> list[list[int]]:
        return [
            [stage + self.depth * replica for replica in range(self.width)] for stage in range(self.depth)
        ]

    def plan(self, batch_size: int) -> Plan:
        return Plan(
            tuple(
                StagePlan(first, stop, tuple(ranks), self.recompute)
                for (first, stop), ranks in zip(self.spans, self.ranks(), strict=True)
            ),
            batch_size,
            self.microbatch,
            self.schedule,
        )

    def __str__(self) -> str:
        extras: list[str] = [self.schedule]
        extras += ["recomputing"] * self.recompute + ["sharded optimizer"] * self.shard
        cuts = ",".join(str(stop) for _, stop in self.spans[:-1])
        where = f" cut at {cuts}" if cuts else ""
        return f"P={self.depth} D={self.width} m={self.microbatch} {' '.join(extras)}{where}"


def evenly(segments: int, depth: int) -> tuple[tuple[int, int], ...]:
    return tuple((segments * s // depth, segments * (s + 1) // depth) for s in range(depth))


def cut_at(segments: int, *cuts: int) -> tuple[tuple[int, int], ...]:
    bounds = [0, *cuts, segments]
    return tuple(pairwise(bounds))


# ---------------------------------------------------------------- the models


class Subject(Protocol):
    """A model with its batches."""

    def make(self) -> nn.Module: ...
    def batch(self, samples: int) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Small(Subject):
    """One of the models of the other benchmarks."""

    size: Size

    def make(self) -> nn.Module:
        return make_model(self.size)

    def batch(self, samples: int) -> dict[str, Tensor]:
        tokens, labels = make_batch(self.size, samples)
        return {"tokens": tokens, "labels": labels}


@dataclass(frozen=True)
class Llama(Subject):
    """A model of Hugging Face as it comes, cut after each layer."""

    layers: int = 4
    width: int = 256
    vocab: int = 512
    tokens: int = 128

    def make(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(SEED)
        config = LlamaConfig(
            num_hidden_layers=self.layers,
            hidden_size=self.width,
            intermediate_size=2 * self.width,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=self.vocab,
        )
        model: nn.Module = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        cut_after(model, "model.layers.*")
        return model

    def batch(self, samples: int) -> dict[str, Tensor]:
        drawn = torch.randint(
            self.vocab, (samples, self.tokens), generator=torch.Generator().manual_seed(SEED)
        )
        return {"input_ids": drawn, "labels": drawn}


class Convolutions(nn.Module):
    """Layers of unequal cost: pictures shrink as channels grow."""

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        pairs = zip((3, *channels), channels, strict=False)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, stride=1 + (a < b)) for a, b in pairs)
        self.head = nn.Linear(channels[-1], 10)
        self.cuts = nn.ModuleList(CutPoint() for _ in channels[1:])

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = F.relu(layer(x if index == 0 else self.cuts[index - 1](x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), label)


@dataclass(frozen=True)
class Pictures(Subject):
    channels: tuple[int, ...] = (64, 64, 128, 128, 256, 256)
    side: int = 64

    def make(self) -> nn.Module:
        return Convolutions(self.channels)

    def batch(self, samples: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(SEED)
        return {
            "x": torch.randn(samples, 3, self.side, self.side, generator=generator),
            "label": torch.randint(10, (samples,), generator=generator),
        }


# ---------------------------------------------------------------- waiting in place of computing


class Pace:
    """Share of each wait that is kept: 1, or 0 while a model is only traced."""

    factor = 1.0

    def wait(self, seconds: float) -> None:
        time.sleep(self.factor * seconds)

    @contextmanager
    def hurried(self) -> Iterator[None]:
        self.factor = 0.0
        yield
        self.factor = 1.0


pace = Pace()


@torch.library.custom_op("varuna_benchmarks::nap", mutates_args=())
def nap(x: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
    """Waits for so long for each sample, forward and backward."""
    pace.wait(forward_seconds * len(x))
    return x.clone()


@torch.library.custom_op("varuna_benchmarks::doze", mutates_args=())
def doze(weight: Tensor, x: Tensor, seconds: float) -> Tensor:
    """Waits only when the weight's gradient is made."""
    return weight.clone()


def _keep_nap(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
    ctx.seconds = inputs[2] * inputs[0].shape[0]


def _keep_doze(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    ctx.seconds = inputs[2] * inputs[1].shape[0]


def _nap_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    pace.wait(ctx.seconds)
    return gradient, None, None


nap.register_fake(lambda x, forward_seconds, backward_seconds: torch.empty_like(x))
doze.register_fake(lambda weight, x, seconds: torch.empty_like(weight))
nap.register_autograd(_nap_backward, setup_context=_keep_nap)
doze.register_autograd(_nap_backward, setup_context=_keep_doze)


class Sleeper(nn.Module):
    """A small layer for each segment, which takes a given time."""

    def __init__(self, seconds: Sequence[float], width: int) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.seconds = seconds
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in seconds)
        self.cuts = nn.ModuleList(CutPoint() for _ in seconds[1:])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for index, (layer, seconds) in enumerate(zip(self.layers, self.seconds, strict=True)):
            assert isinstance(layer, nn.Linear)
            x = x if index == 0 else self.cuts[index - 1](x)
            x = nap(F.linear(x, doze(layer.weight, x.detach(), seconds), layer.bias), seconds, seconds)
        return F.mse_loss(x, y)


@dataclass(frozen=True)
class Waits(Subject):
    seconds: tuple[float, ...]
    """Seconds per sample of each segment: forward, backward for inputs, backward for weights."""
    width: int = 128

    def make(self) -> nn.Module:
        return Sleeper(self.seconds, self.width)

    def batch(self, samples: int) -> dict[str, Tensor]:
        drawn = torch.randn(2, samples, self.width, generator=torch.Generator().manual_seed(SEED))
        return {"x": drawn[0], "y": drawn[1]}


# ---------------------------------------------------------------- the machine


@contextmanager
def cores_awake() -> Iterator[None]:
    """Keeps every core busy with something that gives way to all else.

    The core of a virtual machine that has nothing to do is lent to others, and comes back milliseconds after
    it was asked for: a wait of 5 ms was seen to take 8, and a message to arrive as late.
    """
    spinners = [
        subprocess.Popen([sys.executable, "-S", "-c", SPINNER, str(core), str(os.getpid())])
        for core in os.sched_getaffinity(0)
    ]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


SPINNER = """
import os, sys
core, parent = map(int, sys.argv[1:])
os.sched_setaffinity(0, {core})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


# ---------------------------------------------------------------- what is tried


@dataclass(frozen=True)
class Trial:
    """A model, the job that it is to be laid out for, and the layouts to try."""

    name: str
    subject: Subject
    batch_size: int
    sizes: tuple[int, ...]
    devices: int
    layouts: tuple[Layout, ...]
    waits: bool = False

    @property
    def sort(self) -> str:
        return "waiting" if self.waits else "computing"

    @property
    def turns(self) -> int:
        return 2 if self.waits else 10

    @property
    def effort(self) -> Effort:
        # A timed wait takes what it takes; what computes is disturbed by others.
        return (
            Effort(seconds=1.0, fewest=5, most=20)
            if self.waits
            else Effort(seconds=2.0, most=400, quantile=QUICK)
        )

    @property
    def cluster(self) -> Cluster:
        return Cluster((Machine("here", self.devices, MEMORY_BYTES),))


WORKERS = 2 if len(os.sched_getaffinity(0)) < 8 else 4
"""That compute, each on a core of its own; where cores abound, others are left to the system."""


def _computing(segments: int, small: int, large: int) -> tuple[Layout, ...]:
    whole, deep, halves = evenly(segments, 1), evenly(segments, WORKERS), evenly(segments, 2)
    mixed = (
        Layout(halves, small, width=2),
        Layout(halves, large, width=2, schedule="zero-bubble-2x"),
        Layout(halves, large, width=2, recompute=True, shard=True),
    )
    return (
        Layout(whole, small),
        Layout(whole, large, recompute=True),
        Layout(deep, small),
        Layout(deep, large, schedule="1f1b"),
        Layout(deep, small, schedule="gpipe"),
        Layout(deep, small, schedule="zero-bubble"),
        Layout(deep, large, schedule="zero-bubble-2x"),
        Layout(deep, large, recompute=True),
        Layout(whole, small, width=WORKERS),
        Layout(whole, large, width=WORKERS, shard=True),
        *(mixed if WORKERS > 2 else ()),
    )


def _eight_workers(segments: int) -> tuple[Layout, ...]:
    by = {depth: evenly(segments, depth) for depth in (2, 4, 8)}
    return (
        Layout(by[8], 1),
        Layout(by[8], 1, schedule="1f1b"),
        Layout(by[8], 2, schedule="gpipe"),
        Layout(by[8], 1, schedule="zero-bubble"),
        Layout(by[8], 2, recompute=True),
        Layout(by[4], 1, width=2, schedule="1f1b"),
        Layout(by[4], 2, width=2, schedule="zero-bubble-2x"),
        Layout(by[2], 1, width=4),
    )


def _four_workers(segments: int) -> tuple[Layout, ...]:
    even, balanced, halves = evenly(segments, 4), cut_at(segments, 2, 4, 5), evenly(segments, 2)
    return (
        Layout(even, 1),
        Layout(even, 2, schedule="1f1b"),
        Layout(even, 2, schedule="gpipe"),
        Layout(even, 1, schedule="zero-bubble"),
        Layout(even, 2, recompute=True),
        Layout(balanced, 1),
        Layout(balanced, 1, schedule="1f1b"),
        Layout(balanced, 2, schedule="zero-bubble"),
        Layout(balanced, 2, schedule="zero-bubble-2x"),
        Layout(cut_at(segments, 1, 3, 5), 1),
        Layout(halves, 1, width=2),
        Layout(halves, 2, width=2, schedule="gpipe"),
        Layout(halves, 1, width=2, schedule="zero-bubble", shard=True),
        Layout(cut_at(segments, 3), 2, width=2, schedule="1f1b"),
        Layout(cut_at(segments, 5), 2, width=2, recompute=True),
        Layout(evenly(segments, 1), 2, width=4),
    )


GLIMPSE = Trial("waits", Waits((0.001,) * 2, width=8), 4, (2,), 2, (Layout(evenly(2, 2), 2),), waits=True)
"""To see that it runs."""

UNEQUAL = (1, 3, 4, 2, 6, 2, 1, 4)

TRIALS = (
    Trial("equal waits", Waits((0.03,) * 8), 16, (1, 2), 8, _eight_workers(8), waits=True),
    Trial(
        "unequal waits",
        Waits(tuple(0.006 * share for share in UNEQUAL)),
        16,
        (1, 2),
        4,
        _four_workers(8),
        waits=True,
    ),
    Trial("transformer", Small(LARGE), 4 * WORKERS, (1, 2), WORKERS, _computing(8, 1, 2)),
    Trial("llama", Llama(), 4 * WORKERS, (1, 2), WORKERS, _computing(5, 1, 2)),
    Trial("convolutions", Pictures(), 4 * WORKERS, (1, 2), WORKERS, _computing(6, 1, 2)),
)


# ---------------------------------------------------------------- the work


@dataclass(frozen=True)
class Measured:
    layout: Layout
    predicted: float
    steps: list[float]
    waits: bool

    @property
    def seconds(self) -> float:
        """Return the undisturbed time: others can only lengthen a wait. Compute is counted in yardsticks."""
        return min(self.steps) if self.waits else median(self.steps)

    @property
    def error(self) -> float:
        return abs(self.predicted / self.seconds - 1)


@dataclass(frozen=True)
class Compared:
    """All of one trial."""

    name: str
    sort: str
    measured: list[Measured]
    chosen: Measured  # the one that the planner's search has found

    @property
    def best(self) -> Measured:
        return min(self.measured, key=lambda one: one.seconds)


def profile(trial: Trial, folder: Path) -> Profile:
    """Runs on every rank that takes part."""
    profiler = Profiler(
        trial.subject.make(),
        trial.subject.batch,
        device="cpu",
        out_folder=folder,
        gpus_per_node=trial.devices,
        message_bytes=MESSAGE_BYTES,
        effort=trial.effort,
    )
    return profiler.profile_all(trial.sizes)


def predict(trial: Trial, found: Profile, layout: Layout) -> float:
    forecast, _ = forecast_plan(
        found, trial.cluster, layout.plan(trial.batch_size), shard_optimizer=layout.shard
    )
    return forecast.seconds


def choose(trial: Trial, found: Profile) -> Layout:
    plan = search(found, trial.cluster, batch_size=trial.batch_size, microbatch_sizes=trial.sizes).best.plan
    return Layout(
        tuple((stage.first, stage.stop) for stage in plan.stages),
        plan.microbatch_size,
        plan.width,
        plan.schedule,
        any(stage.recompute for stage in plan.stages),
    )


class Turn(NamedTuple):
    """On one rank."""

    started: float
    ended: float
    yardsticks: tuple[float, ...]  # before and after


def train(trial: Trial, layouts: Sequence[Layout]) -> list[list[Turn]]:
    """On every rank: trains the layouts in turn."""
    yardsticks = {} if trial.waits else {size: Yardstick(trial.subject, size) for size in trial.sizes}
    runs = [_Run(trial, layout, yardsticks.get(layout.microbatch)) for layout in layouts]
    for run in runs:
        run.step()  # the first of all finds nothing ready
    for _ in range(trial.turns):
        for run in runs:
            run.take_turn()
    for run in runs:
        dist.barrier()
        run.model.close()
    return [run.turns for run in runs]


class Yardstick:
    """One micro-batch through one segment of each kind, forward and back, as the profiler runs them.

    Cores that are lent to others are now faster and now slower, by a half and within a second. So what steps
    take is told in this measure, which the profile holds too. It is taken before and after each turn, on all
    ranks at once: where these differ, nobody knows how fast the machine was in between.
    """

    def __init__(self, subject: Subject, microbatch: int) -> None:
        model = subject.make()  # a source keeps none of its values
        source = Source(model)
        sample, inputs = subject.batch(2), subject.batch(microbatch)
        segments = find_kinds(source, source.capture(sample, training=True))
        batch = Batch(microbatch, source.batch(sample).dims)
        captured = source.capture(inputs, training=True, batch=batch)
        factory = SegmentFactory(source, segments, device=torch.device("cpu"))
        self._chain = [
            LinkedSegment(factory.make(kind, captured, inputs), factory.before(kind))
            for kind in range(max(segments) + 1)
        ]
        self._stopwatch = Stopwatch()

    def take(self) -> float:
        started = time.perf_counter()
        for _ in range(ROUNDS):
            run_once(self._chain, self._stopwatch)
        return (time.perf_counter() - started) / ROUNDS


def yardstick_of(found: Profile, microbatch: int) -> float:
    """The same, as the profile has it."""
    costs = [next(cost for cost in kind.sizes if cost.microbatch_size == microbatch) for kind in found.kinds]
    calls = 2 * len(costs) * found.overheads.instruction_seconds
    return calls + sum(cost.forward.seconds + cost.backward.seconds for cost in costs)


class _Run:
    def __init__(self, trial: Trial, layout: Layout, yardstick: Yardstick | None) -> None:
        subject = trial.subject
        with pace.hurried():
            self.model = Varuna(
                subject.make(),
                format_stage_map(layout.ranks()),
                subject.batch(2),
                batch_size=trial.batch_size,
                chunk_size=layout.microbatch,
                device="cpu",
                seed=SEED,
                from_cache=False,
                spans=layout.spans,
                schedule=layout.schedule,
                recompute=layout.recompute,
                shard_optimizer=layout.shard,
            )
        share = trial.batch_size // layout.width
        first = self.model.rank_within_stage * share
        batch = subject.batch(trial.batch_size)
        self.inputs = {name: tensor[first : first + share] for name, tensor in batch.items()}
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model.set_optimizer(self.optimizer)
        self.yardstick = yardstick
        self.turns: list[Turn] = []

    def step(self) -> None:
        self.model.step(self.inputs)
        self.optimizer.step()
        self.model.zero_grad()

    def take_turn(self) -> None:
        """One step, after one that finds its caches."""
        dist.barrier()
        before = [self.yardstick.take()] if self.yardstick else []
        self.step()
        started = time.perf_counter()
        self.step()
        ended = time.perf_counter()
        dist.barrier()
        after = [self.yardstick.take()] if self.yardstick else []
        self.turns.append(Turn(started, ended, (*before, *after)))


def step_seconds(of_ranks: Sequence[Sequence[Turn]], yardstick: float) -> list[float]:
    """The steps of the steadiest turns, at the speed of the machine at which the yardstick takes so long.

    A step has ended when its last rank has, and takes as long as that is after the one before.
    """
    found = []
    for ranks in zip(*of_ranks, strict=True):
        seconds = max(turn.ended for turn in ranks) - max(turn.started for turn in ranks)
        taken = [one for turn in ranks for one in turn.yardsticks]
        change = max(taken) / min(taken) if taken else 1.0
        found.append((change, seconds * yardstick / fmean(taken) if taken else seconds))
    steadiest = sorted(found)[: ceil(STEADIEST * len(found))] if yardstick else found
    return [seconds for _, seconds in steadiest]


def compare_in(trial: Trial, run: Callable[..., list[Any]], folder: Path) -> Compared:
    """Profile, predict and measure. `run(task, world, *args)` runs a task on so many ranks."""
    found = run(profile, 1 if trial.waits else trial.devices, trial, folder / trial.name)[0]
    chosen = choose(trial, found)
    layouts = list(dict.fromkeys([*trial.layouts, chosen]))
    predicted = {layout: predict(trial, found, layout) for layout in layouts}
    measured: dict[Layout, Measured] = {}
    for world in sorted({layout.world for layout in layouts}):
        own = [layout for layout in layouts if layout.world == world]
        by_rank = run(train, world, trial, own)
        for layout, of_ranks in zip(own, zip(*by_rank, strict=True), strict=True):
            yardstick = 0.0 if trial.waits else yardstick_of(found, layout.microbatch)
            measured[layout] = Measured(
                layout, predicted[layout], step_seconds(of_ranks, yardstick), trial.waits
            )
    return Compared(trial.name, trial.sort, [measured[layout] for layout in layouts], measured[chosen])
