"""Predictions of the planner against measurements: the bubble of a step, and memory.

A bubble is measured on the engine, with a timed wait for each instruction, so that more stages than cores
run at once. Memory is the resident memory of new processes that train and nothing else. They are started
with `MALLOC_MMAP_THRESHOLD_` set: else glibc keeps much of what was freed, which belongs to no model.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from benchmarks.models import TINY, Size, chain, make_batch, make_model, spans
from benchmarks.sides import Ours
from varuna.measure.stopwatch import Effort
from varuna.plan.cost.forecast import forecast_plan
from varuna.profile.profiler import Profiler
from varuna.types import Cluster, Machine, Op, Plan, Profile, ScheduleName, StagePlan

UNIT_SECONDS = 0.02
"""Seconds of a forward, and of each half of a backward."""
STEPS_IN_A_ROW = 3


def bubbles(schedule: ScheduleName, depth: int, microbatches: int, repeats: int) -> list[float]:
    """The share of a step in which this rank's stage does not compute, for each repeat.

    A stage that is done goes on to its next step, so of several in a row the last is timed.
    """
    unit = UNIT_SECONDS
    delays: Mapping[Op, float] = {"F": unit, "B": 2 * unit, "I": unit, "W": unit}
    side = Ours(
        chain(depth),
        depth=depth,
        microbatches=microbatches,
        schedule=schedule,
        compute_delay=lambda op, microbatch: delays[op],
    )
    side.step()
    found = []
    for _ in range(repeats):
        for _ in range(STEPS_IN_A_ROW):
            started = time.perf_counter()
            side.step()
        seconds = time.perf_counter() - started
        busy = sum(
            interval.stop_seconds - interval.start_seconds
            for interval in side.model.timeline().intervals
            if interval.what in delays and interval.rank == dist.get_rank()
        )
        found.append(1.0 - busy / seconds)
    side.close()
    return found


# ---------------------------------------------------------------- memory


class Trained(msgspec.Struct, frozen=True):
    """A training configuration whose memory is predicted and measured."""

    size: Size
    optimizer: str = "Adam"
    depth: int = 1
    width: int = 1
    schedule: ScheduleName = "1f1b"
    recompute: bool = False
    shard_optimizer: bool = False

    def __str__(self) -> str:
        extras = ["recomputing"] * self.recompute + ["sharded optimizer"] * self.shard_optimizer
        layout = f"P={self.depth}, D={self.width}, M={MICROBATCHES}, {self.schedule}"
        return ", ".join([self.size.name, self.optimizer, layout, *extras])

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        kind = getattr(torch.optim, self.optimizer)
        made: torch.optim.Optimizer = kind(parameters, lr=1e-4)
        return made


MICROBATCHES = 4
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
"""Environment variables of processes whose memory is measured."""
NARROW = Size("gpt", blocks=8, width=256, tokens=128, vocab=1024, microbatch=8)
LADDER = Size("ladder", kind="chain", blocks=8, width=2048, microbatch=16)
GLIMPSE = (Trained(TINY),)
TRAININGS = (
    Trained(NARROW),
    Trained(NARROW, "SGD"),
    Trained(NARROW, depth=2),
    Trained(NARROW, depth=2, schedule="gpipe"),
    Trained(NARROW, depth=2, schedule="gpipe", recompute=True),
    Trained(NARROW, depth=2, schedule="zero-bubble"),
    Trained(NARROW, width=2),
    Trained(LADDER),
    Trained(LADDER, "SGD"),
    Trained(LADDER, depth=2, schedule="zero-bubble"),
    Trained(LADDER, width=2),
    Trained(LADDER, width=2, shard_optimizer=True),
)


def take_profile(trained: Trained, folder: str) -> Profile:
    """Only its bytes are asked for: its times need not be good."""
    size = trained.size

    def get_batch(samples: int) -> dict[str, torch.Tensor]:
        tokens, labels = make_batch(size, samples)
        return {"tokens": tokens, "labels": labels}

    effort = Effort(seconds=0.0, fewest=1, most=1, warmups=1)
    profiler = Profiler(
        make_model(size), get_batch, "cpu", out_folder=folder, message_bytes=(1 << 10, 1 << 20), effort=effort
    )
    profiler.set_optimizer(trained.make_optimizer)
    return profiler.profile_all([size.microbatch])


def peak_bytes(trained: Trained) -> int:
    """The most resident memory of this process, which must be a new one, in three steps.

    What wrapping the model takes, when the original is there as well, is over by then and not counted.
    """
    side = Ours(
        trained.size,
        depth=trained.depth,
        width=trained.width,
        microbatches=MICROBATCHES,
        schedule=trained.schedule,
        recompute=trained.recompute,
        shard_optimizer=trained.shard_optimizer,
    )
    side.optimizer = trained.make_optimizer(side.model.parameters())
    side.model.set_optimizer(side.optimizer)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    for _ in range(3):
        side.step()
    side.close()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def predicted_bytes(trained: Trained, profile: Profile) -> list[int]:
    """By stage."""
    ranks = [
        tuple(stage + trained.depth * replica for replica in range(trained.width))
        for stage in range(trained.depth)
    ]
    plan = Plan(
        stages=tuple(
            StagePlan(first, stop, ranks[stage], trained.recompute)
            for stage, (first, stop) in enumerate(spans(trained.size, trained.depth))
        ),
        batch_size=MICROBATCHES * trained.size.microbatch * trained.width,
        microbatch_size=trained.size.microbatch,
        schedule=trained.schedule,
        precision=profile.precision,
    )
    cluster = Cluster((Machine("this one", trained.depth * trained.width, 1 << 40),))
    forecast, _ = forecast_plan(profile, cluster, plan, shard_optimizer=trained.shard_optimizer)
    return [stage.memory.total for stage in forecast.stages]
