"""Layouts that a deployment may have, as far as `partition_num` and `replica_num` leave a choice."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

import torch

from pyrannc.configuration import Configuration
from varuna.capture import Captured, Source
from varuna.errors import CaptureError, PlanError, list_some
from varuna.measure.draft import ProfileSubject
from varuna.plan.cost.costs import CostTable
from varuna.plan.cost.estimate import Speed
from varuna.plan.cut.partition import Spans, balance_over
from varuna.plan.cut.place import ClusterMap
from varuna.plan.search.search import UNEVEN_GAIN
from varuna.plan.search.uneven import UnevenRequest, best_uneven
from varuna.profile.description import describe
from varuna.types import Cluster, Profile, Proposal, ScheduleName, StageMap, format_widths, show_widths
from varuna.units import count

SCHEDULE: ScheduleName = "gpipe"
"""All forwards, then all backwards: in between, the script computes its loss from the outputs."""


@dataclass(frozen=True)
class DeploymentTask:
    """The model to deploy, its batch, and the devices."""

    source: Source
    captured: Captured
    batch_size: int
    sample_bytes: int
    machines: Sequence[str]  # of each rank
    device: torch.device
    memory_bytes: int | None = None  # of a device that is not present
    speed: Speed | None = None  # of a device that is not present

    @property
    def world(self) -> int:
        return len(self.machines)

    @property
    def ranks_per_machine(self) -> int:
        """Ranks of the machine with the most ranks."""
        return max(self.machines.count(machine) for machine in self.machines)

    @cached_property
    def subject(self) -> ProfileSubject:
        return describe(
            self.source,
            self.captured,
            sample_bytes=self.sample_bytes,
            device=self.device if self.memory_bytes is None else torch.device("cpu"),
            devices_per_machine=self.ranks_per_machine,
        )


class LayoutChoices:
    """Layouts of a model's stages on `world` ranks; raises PlanError if there are none."""

    def __init__(self, world: int, num_segments: int, configuration: Configuration) -> None:
        stages, widths = configuration.partition_num, _forced_widths(world, configuration)
        depth = stages if widths is None else len(widths)
        most = min(world, num_segments)
        if depth > most:
            raise PlanError(
                f"partition_num {stages or 'open'} and replica_num {_replica_text(configuration)} ask for "
                f"{count(depth, 'stage')}, but there are {count(world, 'rank')}, and the model can be cut "
                f"into {num_segments} at most (ask for fewer stages)"
            )
        self.forced = widths is not None  # there is only one layout
        # The forced layout, or all layouts whose stages have equally many replicas.
        self.maps: list[StageMap] = [stage_map_of(widths)] if widths is not None else []
        self.uneven_depths = range(0)  # for which stages may have different numbers of replicas
        if widths is None and stages:
            self.uneven_depths = range(stages, stages + 1)
        elif widths is None:
            depths = [depth for depth in range(1, most + 1) if world % depth == 0]
            self.maps = [interleaved(depth, world // depth) for depth in depths]
            self.uneven_depths = range(2, min(world - 1, num_segments) + 1)

    @property
    def widths(self) -> list[int]:
        """Fewest replicas of any stage, in each layout."""
        widths = [min(map(len, stage_map)) for stage_map in self.maps]
        return [*widths, 1] if self.uneven_depths else widths


def interleaved(depth: int, width: int) -> StageMap:
    """Return a map in which consecutive ranks hold consecutive stages."""
    return tuple(tuple(stage + depth * replica for replica in range(width)) for stage in range(depth))


def stage_map_of(widths: Sequence[int]) -> StageMap:
    """Return the map for these numbers of replicas; if they differ, a stage has consecutive ranks."""
    if len(set(widths)) == 1:
        return interleaved(len(widths), widths[0])
    ranks = iter(range(sum(widths)))
    return tuple(tuple(next(ranks) for _ in range(width)) for width in widths)


def _forced_widths(world: int, configuration: Configuration) -> tuple[int, ...] | None:
    """Return the replicas of each stage; None if they are to be chosen."""
    stages, replicas = configuration.partition_num, configuration.replica_num
    if isinstance(replicas, tuple):
        if sum(replicas) != world or stages not in (0, len(replicas)):
            raise PlanError(
                f"replica_num {_replica_text(configuration)} asks for {count(len(replicas), 'stage')} on "
                f"{count(sum(replicas), 'rank')}, but there are {count(world, 'rank')}, and partition_num is "
                f"{stages or 'open'} (give one number for each stage, with a sum of {world}, or start "
                f"{sum(replicas)} ranks)"
            )
        return replicas
    if replicas and not stages and world % replicas == 0:
        return (replicas,) * (world // replicas)
    if stages and stages * (replicas or world // stages) == world:
        return (world // stages,) * stages
    if replicas:
        raise PlanError(
            f"partition_num {stages or 'open'} and replica_num {replicas} do not fit {count(world, 'rank')}: "
            "expected stages x replicas ranks (start another number of ranks, leave one of the two open, or "
            'give each stage its own number: replica_num="2+1")'
        )
    return None


def _replica_text(configuration: Configuration) -> str:
    replicas = configuration.replica_num
    return "+".join(map(str, replicas)) if isinstance(replicas, tuple) else str(replicas or "open")


def microbatch_sizes(task: DeploymentTask, configuration: Configuration, width: int) -> Iterator[int]:
    """Yield the micro-batch sizes to try for stages with `width` replicas, largest first."""
    share = -(-task.batch_size // width)
    if configuration.pipeline_num:
        yield max(1, -(-share // configuration.pipeline_num))
        return
    number = configuration.min_pipeline
    while number <= min(configuration.max_pipeline, share):
        size = -(-share // number)
        if number == configuration.min_pipeline or size >= configuration.min_pipeline_bs:
            yield size
        number *= 2
    if configuration.min_pipeline > share:
        yield 1


def all_microbatch_sizes(task: DeploymentTask, configuration: Configuration) -> list[int]:
    """Return the micro-batch sizes of all layouts, in ascending order."""
    widths = LayoutChoices(task.world, task.captured.num_segments, configuration).widths
    sizes = {size for width in widths for size in microbatch_sizes(task, configuration, width)}
    return sorted(sizes | {-(-task.batch_size // task.world)})


def microbatch_counts(batch_size: int, configuration: Configuration) -> list[int]:
    """Return the numbers of micro-batches to try, counted for a stage with one replica."""
    if configuration.pipeline_num:
        return [configuration.pipeline_num]
    number = configuration.min_pipeline
    counts = [number]
    while (number := 2 * number) <= min(configuration.max_pipeline, batch_size):
        if batch_size // number >= configuration.min_pipeline_bs:
            counts.append(number)
    return counts


def separable_cuts(captured: Captured) -> list[int]:
    """Return the segments that may start a stage: all that crosses the cut can be divided by sample."""
    return [cut for cut in range(1, captured.num_segments) if not captured.inseparable(cut)]


def balanced_spans(widths: Sequence[int], captured: Captured) -> Spans:
    """Return spans with separable cuts that give every replica about the same work, by the shapes."""
    bounds = [0, *separable_cuts(captured), captured.num_segments]
    if len(bounds) <= len(widths):
        reasons = [why for cut in range(1, captured.num_segments) for why in captured.inseparable(cut)]
        raise CaptureError(
            f"replica_num {show_widths(widths)} needs {count(len(widths) - 1, 'cut')} at which all tensors "
            f"can be divided by sample, but the model has {len(bounds) - 2}: {list_some(reasons)} (give all "
            "stages equally many replicas, or ask for fewer stages)"
        )
    segments = captured.graph.segments
    work = [sum(s.flops_per_sample for s in segments[first:stop]) for first, stop in pairwise(bounds)]
    return tuple((bounds[first], bounds[stop]) for first, stop in balance_over(work, widths))


def best_uneven_layout(
    task: DeploymentTask,
    configuration: Configuration,
    profile: Profile,
    cluster: Cluster,
    *,
    depths: Sequence[int],
    even_seconds: float,
) -> Proposal | None:
    """Return the fastest layout with different numbers of replicas, if faster than `even_seconds`."""
    request = UnevenRequest(
        task.batch_size,
        depths,
        (SCHEDULE,),
        recompute=configuration.checkpointing,
        headroom=configuration.mem_margin,
        cuts=separable_cuts(task.captured),
        uses_all_devices=True,
        microbatch_counts=microbatch_counts(task.batch_size, configuration),
        start_schedule=SCHEDULE,
    )
    found = best_uneven(CostTable(profile), ClusterMap(cluster), request, limit=even_seconds / UNEVEN_GAIN)
    if found is None:
        return None
    gain = ""
    if even_seconds != inf:
        gain = f", {1 - found.forecast.seconds / even_seconds:.1%} less than with equal numbers"
    reason = f"the shortest step of all layouts: {format_widths(found.plan.widths)}{gain}"
    return Proposal(found.plan, found.forecast, (), reason)
