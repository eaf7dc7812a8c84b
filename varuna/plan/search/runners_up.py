"""The best layout of a cluster, compared with the best layouts of other depths."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from varuna.errors import PlanError
from varuna.plan.search.messages import why_slower
from varuna.plan.search.search import Ranking, search
from varuna.types import Cluster, Profile


class SearchOptions(NamedTuple):
    """Keyword arguments of `search`."""

    batch_size: int
    depths: Sequence[int] | None
    microbatch_sizes: Sequence[int] | None
    schedules: Sequence[str] | None
    recompute: bool | None
    shard_optimizer: bool
    headroom: float


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
    others = [
        msgspec.structs.replace(other, reason=why_slower(other.forecast, ranked[0].forecast))
        for other in ranked[1:]
    ]
    first = msgspec.structs.replace(ranked[0], reason=best.reason)
    return msgspec.structs.replace(found, proposals=(first, *others))


def other_depths(best: int, seen: Sequence[int], possible: Sequence[int]) -> list[int]:
    """Return depths to compare with the best: close competitors, double, half, one more, one fewer."""
    wanted = [*seen[:1], best * 2, best // 2, best + 1, best - 1, *seen[1:], best * 4, best + 2]
    return [depth for depth in dict.fromkeys(wanted) if depth in possible and depth != best]
