"""Which ranks may be which stages, as far as `partition_num` and `replica_num` leave that open."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf

from pyrannc.configuration import Configuration
from varuna.capture import Captured
from varuna.errors import CaptureError, PlanError, some
from varuna.plan.cost.costs import CostTable
from varuna.plan.cut.partition import Spans, balance_over
from varuna.plan.cut.place import ClusterMap
from varuna.plan.search.search import UNEVEN_GAIN
from varuna.plan.search.uneven import UnevenRequest, best_uneven
from varuna.types import Cluster, Profile, Proposal, ScheduleName, StageMap, format_widths, in_few
from varuna.units import count


class Layouts:
    """Of a model's stages on so many ranks; a PlanError says why there are none."""

    def __init__(self, world: int, num_segments: int, configuration: Configuration) -> None:
        stages, widths = configuration.partition_num, _forced_widths(world, configuration)
        depth = stages if widths is None else len(widths)
        if depth > min(world, num_segments):
            raise PlanError(
                f"partition_num {stages or 'open'} and replica_num {_shown(configuration)} ask for "
                f"{count(depth, 'stage')}, but there are {count(world, 'rank')}, and the model can be cut "
                f"into {num_segments} at most (ask for fewer stages)"
            )
        self.forced = widths is not None
        """Whether there is one layout alone."""
        self.maps: list[StageMap] = [map_of(widths)] if widths is not None else []
        """The one; or all in which stages have equally many replicas."""
        self.uneven_depths: range = range(0)
        """The numbers of stages whose replicas may be as many as serves each best."""
        if widths is None and stages:
            self.uneven_depths = range(stages, stages + 1)
        elif widths is None:
            most = min(world, num_segments)
            self.maps = [
                interleaved(depth, world // depth) for depth in range(1, most + 1) if not world % depth
            ]
            self.uneven_depths = range(2, min(world - 1, num_segments) + 1)

    @property
    def widths(self) -> list[int]:
        """The fewest replicas of any stage, in each layout."""
        found = [min(map(len, stage_map)) for stage_map in self.maps]
        return [*found, 1] if self.uneven_depths else found


def interleaved(depth: int, width: int) -> StageMap:
    """Neighbouring ranks are neighbouring stages."""
    return tuple(tuple(stage + depth * replica for replica in range(width)) for stage in range(depth))


def map_of(widths: Sequence[int]) -> StageMap:
    """Where stages differ in their replicas, those of a stage are neighbours."""
    if len(set(widths)) == 1:
        return interleaved(len(widths), widths[0])
    ranks = iter(range(sum(widths)))
    return tuple(tuple(next(ranks) for _ in range(width)) for width in widths)


def _forced_widths(world: int, configuration: Configuration) -> tuple[int, ...] | None:
    """The replicas of each stage; None where they are to be chosen."""
    stages, replicas = configuration.partition_num, configuration.replica_num
    if isinstance(replicas, tuple):
        if sum(replicas) != world or stages not in (0, len(replicas)):
            raise PlanError(
                f"replica_num {_shown(configuration)} asks for {count(len(replicas), 'stage')} on "
                f"{count(sum(replicas), 'rank')}, but there are {count(world, 'rank')}, and partition_num is "
                f"{stages or 'open'} (give each stage its replicas, as many in all as there are ranks, or "
                f"start {sum(replicas)} ranks)"
            )
        return replicas
    if replicas and not stages and world % replicas == 0:
        return (replicas,) * (world // replicas)
    if stages and stages * (replicas or world // stages) == world:
        return (world // stages,) * stages
    if replicas:
        raise PlanError(
            f"partition_num {stages or 'open'} and replica_num {replicas} do not fit {count(world, 'rank')}: "
            "expected as many ranks as stages times replicas (start another number of ranks, leave one "
            'open, or give each stage its own: replica_num="2+1")'
        )
    return None


def _shown(configuration: Configuration) -> str:
    replicas = configuration.replica_num
    return "+".join(map(str, replicas)) if isinstance(replicas, tuple) else str(replicas or "open")


# ---------------------------------------------------------------- where stages may differ in their replicas


def separable_cuts(captured: Captured) -> list[int]:
    """The segments before which all that crosses a cut can be parted by sample."""
    return [cut for cut in range(1, captured.num_segments) if not captured.inseparable(cut)]


def spans_for(widths: Sequence[int], captured: Captured) -> Spans:
    """Cuts at such places, so that every replica has about as much to do, by the model's shapes."""
    bounds = [0, *separable_cuts(captured), captured.num_segments]
    if len(bounds) <= len(widths):
        reasons = [why for cut in range(1, captured.num_segments) for why in captured.inseparable(cut)]
        raise CaptureError(
            f"replica_num {in_few(widths)} needs {count(len(widths) - 1, 'cut')} over which all can be "
            f"parted by sample, but the model has {len(bounds) - 2}: {some(reasons)} (give all stages as "
            "many replicas, or ask for fewer stages)"
        )
    segments = captured.graph.segments
    work = [sum(s.flops_per_sample for s in segments[first:stop]) for first, stop in pairwise(bounds)]
    return tuple((bounds[first], bounds[stop]) for first, stop in balance_over(work, widths))


def best_unequal(
    profile: Profile,
    cluster: Cluster,
    captured: Captured,
    configuration: Configuration,
    *,
    depths: Sequence[int],
    batch_size: int,
    schedule: ScheduleName,
    than: float,  # seconds, of the best in which stages have equally many replicas
) -> Proposal | None:
    """The fastest in which they have not, where that is faster still."""
    request = UnevenRequest(
        batch_size,
        depths,
        (schedule,),
        recompute=configuration.checkpointing,
        headroom=configuration.mem_margin,
        cuts=separable_cuts(captured),
        uses_all_devices=True,
        microbatch_counts=numbers_of_microbatches(batch_size, configuration),
        start_schedule=schedule,
    )
    found = best_uneven(CostTable(profile), ClusterMap(cluster), request, limit=than / UNEVEN_GAIN)
    if found is None:
        return None
    gain = "" if than == inf else f", {1 - found.forecast.seconds / than:.1%} less than with equal numbers"
    reason = f"the shortest step of all layouts: {format_widths(found.plan.widths)}{gain}"
    return Proposal(found.plan, found.forecast, (), reason)


def numbers_of_microbatches(batch_size: int, configuration: Configuration) -> list[int]:
    """Those to look at; the samples that are counted are those of a stage with one replica."""
    if configuration.pipeline_num:
        return [configuration.pipeline_num]
    least, number = configuration.min_pipeline, configuration.min_pipeline
    found = [least]
    while (number := 2 * number) <= min(configuration.max_pipeline, batch_size):
        if batch_size // number >= configuration.min_pipeline_bs:
            found.append(number)
    return found
