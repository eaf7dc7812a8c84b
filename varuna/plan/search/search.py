"""Choose depth, replicas, micro-batch, schedule, recompute, cuts and placement for the shortest step.

`search` tries all layouts: `queue` those with equal numbers of replicas, `uneven` the others. `cut_layout`
takes a layout and chooses only its cuts and recompute flags. `rank_depths` compares depths.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from varuna.errors import PlanError
from varuna.plan.cost.costs import CostTable
from varuna.plan.cost.forecast import describe, orders_of, pipelines, plan_of
from varuna.plan.cut.cuts import RecomputeMode
from varuna.plan.cut.place import ClusterMap
from varuna.plan.search.explanation import least_need, need_of_placement, why_nothing_fits, why_slower
from varuna.plan.search.queue import LayoutSearch
from varuna.plan.search.request import SearchRequest, check_depths, check_microbatch_sizes, check_schedules
from varuna.plan.search.space import LayoutSpace
from varuna.plan.search.uneven import UnevenRequest, best_uneven, cut_uneven
from varuna.types import Cluster, Profile, Proposal, ScheduleName, StageMap

HEADROOM = 0.05
"""Default share of each device's memory that jobs leave free, for fragmentation."""
UNEVEN_GAIN = 1.02
"""Take unequal replicas only if equal ones are this many times slower: their forecast is more reliable."""


class Ranking(msgspec.Struct, frozen=True):
    """Layouts that a search found, best first, and reasons why other depths do not fit.

    There is one proposal per depth. If the stages of the best one have different numbers of replicas, the
    best layout of its depth with equal numbers follows as well.
    """

    proposals: tuple[Proposal, ...]
    refused: tuple[str, ...]
    num_simulated: int

    @property
    def best(self) -> Proposal:
        return self.proposals[0]


class SearchOptions(NamedTuple):
    """Keyword arguments of `search`."""

    batch_size: int
    depths: Sequence[int] | None
    microbatch_sizes: Sequence[int] | None
    schedules: Sequence[str] | None
    recompute: bool | None
    shard_optimizer: bool
    headroom: float


def search(
    profile: Profile,
    cluster: Cluster,
    *,
    batch_size: int,
    depths: Sequence[int] | None = None,
    microbatch_sizes: Sequence[int] | None = None,
    schedules: Sequence[ScheduleName] | None = None,
    recompute: bool | None = None,  # None: where memory requires it, or where it is faster
    shard_optimizer: bool = False,
    headroom: float = 0.0,  # share of each device's memory to leave free
    fill_in: bool = False,  # see `CostTable`
    every_depth: bool = False,  # also return a layout for depths that cannot be the best
) -> Ranking:
    """Return the fastest layouts; raise PlanError if none fits."""
    if batch_size < 1:
        raise PlanError(f"the batch must have at least one sample, not {batch_size}")
    if not cluster.machines:
        raise PlanError("the cluster has no machine (name at least one)")
    if not 0.0 <= headroom < 1.0:
        raise PlanError(
            f"headroom is the share of a device's memory to leave free, from 0 to below 1, not {headroom}"
        )
    costs, cluster_map = CostTable(profile, fill_in=fill_in), ClusterMap(cluster)
    request = SearchRequest(
        batch_size,
        check_depths(costs, depths),
        check_microbatch_sizes(costs, microbatch_sizes),
        check_schedules(schedules),
        ("where needed", "everywhere") if recompute is None else ("everywhere",) if recompute else ("never",),
        shard_optimizer,
        headroom,
    )
    found = LayoutSearch(LayoutSpace(costs, cluster_map, request), every_depth=every_depth)
    found.run()
    if not found.found:
        raise PlanError(why_nothing_fits(found.space))
    ranking = _rank(found)
    if microbatch_sizes is not None or recompute is not None:  # these are for equal replicas only
        return ranking
    return _with_uneven(ranking, found.space)


def cut_layout(
    profile: Profile,
    cluster: Cluster,
    stage_map: StageMap,  # ranks are the cluster's devices, in order
    *,
    batch_size: int,
    microbatch_size: int,
    schedule: ScheduleName,
    recompute: bool | None = None,  # None: only where memory requires it
    shard_optimizer: bool = False,
    headroom: float = 0.0,
    cuts: Sequence[int] | None = None,  # segments that may start a stage, if stages have unequal replicas
    suggest: bool = True,  # if nothing fits, search for another layout that does
) -> Proposal:
    """Return the fastest cut of a model for a given layout; raise PlanError if none fits."""
    costs, cluster_map = CostTable(profile), ClusterMap(cluster)
    mode: RecomputeMode = "where needed" if recompute is None else "everywhere" if recompute else "never"
    request = SearchRequest(
        batch_size,
        check_depths(costs, [len(stage_map)]),
        check_microbatch_sizes(costs, [microbatch_size]),
        check_schedules([schedule]),
        (mode,),
        shard_optimizer,
        headroom,
    )
    if len({len(ranks) for ranks in stage_map}) > 1:
        uneven = UnevenRequest(
            batch_size, request.depths, request.schedules, shard_optimizer, recompute, headroom, cuts
        )
        cut = cut_uneven(costs, cluster_map, stage_map, uneven, microbatch_size=microbatch_size)
        return Proposal(cut.plan, cut.forecast, (), "the shortest step of all cuts")
    found = LayoutSearch(LayoutSpace(costs, cluster_map, request))
    placement = cluster_map.placement_of(stage_map)
    found.cut(placement)
    if found.found:
        return _rank(found).best
    if suggest:
        raise PlanError(why_nothing_fits(found.space))
    raise PlanError(str(need_of_placement(found.space, placement)))


def rank_depths(profile: Profile, cluster: Cluster, options: SearchOptions, *, runners_up: int) -> Ranking:
    """Return the best layout of all, and the best layouts of some other depths.

    One search stops at a depth as soon as it knows that the depth cannot win. So each runner-up gets a
    search of its own, which finds the best layout of its depth.
    """
    found = search(profile, cluster, **options._asdict())
    best = found.best
    seen = [proposal.plan.depth for proposal in found.proposals[1:]]
    possible = options.depths or range(1, min(len(profile.segments), cluster.num_devices) + 1)
    ranked = [best]
    for depth in other_depths(best.plan.depth, seen, possible)[:runners_up]:
        try:
            layouts = search(profile, cluster, **options._replace(depths=[depth])._asdict()).proposals
        except PlanError:  # it does not fit; `refused` has the reason
            continue
        # Unequal replicas that are barely faster than the best layout do not win: skip them.
        slower = (layout for layout in layouts if layout.forecast.seconds >= best.forecast.seconds)
        ranked.append(next(slower, layouts[-1]))
    ranked.sort(key=lambda proposal: proposal.forecast.seconds)
    first, *others = ranked
    return _put_first(msgspec.structs.replace(first, reason=best.reason), found, others)


def other_depths(best: int, seen: Sequence[int], possible: Sequence[int]) -> list[int]:
    """Return depths to compare with the best: close competitors, double, half, one more, one fewer."""
    wanted = [*seen[:1], best * 2, best // 2, best + 1, best - 1, *seen[1:], best * 4, best + 2]
    return [depth for depth in dict.fromkeys(wanted) if depth in possible and depth != best]


def _rank(found: LayoutSearch) -> Ranking:
    costs, profile = found.space.costs, found.space.costs.profile
    ranked = found.ranked()
    forecasts = []
    for layout in ranked:
        costs.start_notes()
        pipelines(costs, layout.candidate, orders_of(layout.candidate))
        forecasts.append(describe(costs, layout.candidate, layout.simulation))
    proposals = tuple(
        Proposal(
            plan_of(layout.candidate, profile),
            forecast,
            _idle(
                found.space.cluster_map,
                {device for replica in layout.candidate.placement.replicas for device in replica},
            ),
            why_slower(forecast, forecasts[0]) if index else "the shortest step of all layouts",
        )
        for index, (layout, forecast) in enumerate(zip(ranked, forecasts, strict=True))
    )
    depths = sorted(found.misfit_depths - found.fitting_depths)
    needs = [least_need(found.space, depth) for depth in depths]
    # A depth without a shortage has a layout that fits; it cannot be the best, so the search skipped it.
    refused = tuple(str(need) for need in needs if need.missing > 0)
    return Ranking(proposals, refused, found.num_simulated)


def _with_uneven(ranking: Ranking, space: LayoutSpace) -> Ranking:
    """Put the best layout with unequal replicas first, if it is faster than all others."""
    even, request = ranking.best, space.request
    uneven = UnevenRequest(
        request.batch_size, request.depths, request.schedules, request.shard_optimizer, None, request.headroom
    )
    limit = even.forecast.seconds / UNEVEN_GAIN
    found = best_uneven(space.costs, space.cluster_map, uneven, limit=limit)
    if found is None:
        return ranking
    widths = "+".join(map(str, found.plan.widths))
    gain = 1 - found.forecast.seconds / even.forecast.seconds
    reason = f"the shortest step of all layouts: {widths} replicas, {gain:.1%} less than with equal numbers"
    best = Proposal(found.plan, found.forecast, _idle(space.cluster_map, set(found.devices)), reason)
    return _put_first(best, ranking, ranking.proposals)


def _put_first(best: Proposal, ranking: Ranking, others: Sequence[Proposal]) -> Ranking:
    """Return the ranking with these proposals; say why the others are slower than the best."""
    slower = [
        msgspec.structs.replace(other, reason=why_slower(other.forecast, best.forecast)) for other in others
    ]
    return msgspec.structs.replace(ranking, proposals=(best, *slower))


def _idle(cluster_map: ClusterMap, used: set[int]) -> tuple[str, ...]:
    return tuple(cluster_map.name(device) for device in range(cluster_map.num_devices) if device not in used)
