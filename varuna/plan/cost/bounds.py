"""Lower bounds of the time of a step, computed without simulating it.

The search simulates only layouts whose bound is low enough. Every bound is sound: the simulation never
takes less (a test compares them).
"""

from typing import NamedTuple

from varuna.plan.cost.simulate import Orders, PipelineTimes

F, R, B, I, W = range(5)  # noqa: E741 - the letters of the instructions
ROUNDING = 1 - 1e-12


def least_seconds(orders: Orders, pipeline: PipelineTimes) -> tuple[float, float]:
    """Return lower bounds of a step for one replica with known stages: with and without reductions."""
    split = "I" in orders.letters[0]
    final = W if split else B
    starts, forwards = _forward_ends(orders, pipeline)
    last_backward, stops = _backward_ends(orders, pipeline, starts, forwards[-1], split)
    losses_known = last_backward + pipeline.totals_seconds
    bare = longest = 0.0
    # The end of a step, as the simulator computes it, but from the earliest possible times.
    for stage, start, stop in zip(pipeline.stages, starts, stops, strict=True):
        ending = stage.ending_seconds - start
        bare = max(bare, stop + ending, losses_known + ending)
        if stage.buckets:
            longest = max(longest, stop + exposed(stage.buckets, stage.last_seconds[final]) + ending)
    if pipeline.lanes:
        longest = max(longest, _in_lanes(pipeline, stops, starts, split))
    return max(bare, longest) * ROUNDING, bare * ROUNDING


def _forward_ends(orders: Orders, pipeline: PipelineTimes) -> tuple[list[float], list[float]]:
    """Return, for each stage, the earliest start of its first forward and end of its last forward."""
    stages, more = pipeline.stages, orders.microbatches - 1
    start, end = 0.0, more * stages[0].seconds[F] + stages[0].last_seconds[F]
    starts, ends = [start], [end]
    for link, before, stage in zip(pipeline.forward, stages, stages[1:], strict=False):
        first = before.seconds if more else before.last_seconds
        left = start + first[F] - link.sender_seconds
        sent = max(end - link.sender_seconds, left + more * link.sending)
        start = left + (link.sending if more else link.last_sending) + link.latency
        end = max(sent + link.last_sending + link.latency, start + more * stage.seconds[F])
        end += stage.last_seconds[F]
        starts.append(start)
        ends.append(end)
    return starts, ends


def _backward_ends(
    orders: Orders, pipeline: PipelineTimes, starts: list[float], forward_end: float, split: bool
) -> tuple[float, list[float]]:
    """Return the earliest start of the last backward of all, and the earliest end of each stage.

    A stage has all its forwards and backwards to do from its first forward on. Its last backward comes
    after the last one of the next stage. A stage with a limit makes the trip to the end and back
    microbatches / limit times.
    """
    more, back = orders.microbatches - 1, I if split else B
    links = [*zip(pipeline.forward, pipeline.backward, strict=True), None]
    first_end = end = trip = last_backward = 0.0
    stops = [0.0] * len(starts)
    for s in reversed(range(len(starts))):
        stage, start = pipeline.stages[s], starts[s]
        seconds, lasts = stage.seconds, stage.last_seconds
        first = seconds if more else lasts
        there_and_back = first[F] + first[back]
        link = links[s]
        if link is None:
            first_end = start + there_and_back  # end of the first backward
            end = forward_end + lasts[back]  # end of the last backward, without its weight part
            trip = there_and_back  # from a forward to the end of its backward
        else:
            forward, backward = link
            sending = backward.sending if more else backward.last_sending
            left = first_end - backward.sender_seconds
            sent = max(end - backward.sender_seconds, left + more * backward.sending)
            first_end = left + sending + backward.latency + first[back]
            end = sent + backward.last_sending + backward.latency + lasts[back]
            trip += forward.latency + backward.latency - forward.sender_seconds - backward.sender_seconds
            trip += there_and_back + sending + (forward.sending if more else forward.last_sending)
        last_trip = lasts[F] + lasts[back]
        work = more * (seconds[F] + seconds[back]) + last_trip
        if "R" in orders.letters[s]:
            work += more * seconds[R] + lasts[R]
        rounds, rest = divmod(more, orders.limits[s])
        end = max(end, start + work, start + rounds * trip + (trip if rest else last_trip))
        if more:
            end = max(end, first_end + (more - 1) * seconds[back] + lasts[back])
        last_backward = max(last_backward, end - lasts[back])
        stops[s] = end
        if split:
            stops[s] = max(end + lasts[W], start + work + more * seconds[W] + lasts[W])
    return last_backward, stops


def _in_lanes(pipeline: PipelineTimes, stops: list[float], starts: list[float], split: bool) -> float:
    """Return a bound from reductions that queue in one lane.

    The first stage of a lane that has gradients is the last to have all of them, and so the last to be
    done. With a split backward it may be any stage of the lane.
    """
    lanes: dict[int, list[int]] = {}
    for s, lane in enumerate(pipeline.lanes):
        if pipeline.stages[s].buckets:
            lanes.setdefault(lane, []).append(s)
    final = W if split else B
    longest = 0.0
    for members in lanes.values():
        buckets = [
            (stops[s] - (1.0 - share) * pipeline.stages[s].last_seconds[final], seconds)
            for s in members
            for share, seconds in pipeline.stages[s].buckets
        ]
        free = 0.0
        for full, seconds in sorted(buckets):
            free = max(full, free) + seconds
        last = members if split else members[:1]
        longest = max(longest, free + min([pipeline.stages[s].ending_seconds - starts[s] for s in last]))
    return longest


def exposed(buckets: tuple[tuple[float, float], ...], backward: float) -> float:
    """Return how long the reductions of a stage outlast its last backward, without any queue."""
    left = longest = 0.0
    for share, seconds in reversed(buckets):
        left += seconds
        longest = max(longest, left - (1.0 - share) * backward)
    return longest


class UncutLayout(NamedTuple):
    """A layout without cuts yet. Seconds are of the whole model on the fastest device."""

    depth: int
    microbatches: int
    forward: float  # of a micro-batch, as the next two
    backward: float  # the part that the stage before waits for
    weights: float  # the part that no stage waits for; zero if the backward is in one part
    last_forward: float  # of the last micro-batch, which may be smaller
    last_backward: float
    last_weights: float
    heaviest: float  # work of some stage in the whole step, for any cuts
    forward_share: float  # largest share of the forward in all three, over the segments
    at_the_end: float  # reductions and optimizers of all stages that nothing hides
    messages: tuple[float, float] = (0.0, 0.0)  # down the pipeline, at least and at most
    lanes: int = 0  # number of lanes in which reductions queue
    longest_lane: int = 0  # most stages in one lane
    reduction: float = 0.0  # least seconds of all-reduce per second of a micro-batch


def least_of_any_cut(layout: UncutLayout) -> float:
    """Return a lower bound of a step for any cuts, even into equal stages.

    All stages together do the whole work, so one of them does at least 1/depth of it.
    """
    depth, microbatches = layout.depth, layout.microbatches
    forward, backward = layout.forward, layout.backward
    whole = forward + backward + layout.weights
    last = layout.last_forward + layout.last_backward + layout.last_weights
    more = microbatches - 1
    there_and_back = 2 * layout.messages[0]
    longest = max(
        (more * whole + last + layout.at_the_end) / depth,
        layout.heaviest,
        layout.last_forward + layout.last_backward + there_and_back + more * max(forward, backward) / depth,
    )
    if not more:
        return longest * ROUNDING
    longest = max(
        longest,
        forward + backward + there_and_back,
        forward + layout.last_backward + there_and_back + (more - 1) * backward / depth,
    )
    # Down to a stage, all its forwards and backwards, and up again.
    through = forward + backward
    full = microbatches if layout.last_forward + layout.last_backward >= through else more
    longest = max(longest, _spread_out(through, depth, work=full, before=1.0))
    if layout.reduction and layout.lanes:
        # The reductions of a stage start with its last backward at the earliest. Later stages of its
        # lane queue behind it. Which stage is last is known only if the backward is in one part.
        share = _spread_out(1.0, layout.longest_lane, work=more + layout.reduction, before=layout.reduction)
        if layout.weights:
            longest = max(longest, (share - layout.forward_share) * whole / layout.lanes - layout.messages[1])
        else:
            longest = max(longest, share * whole / layout.lanes)
    return longest * ROUNDING


def _spread_out(whole: float, stages: int, *, work: float, before: float) -> float:
    """Return the least maximum of `before × (t[0] + ... + t[s-1]) + work × t[s]`, where t sums to `whole`.

    At the minimum, each t[s] is smaller than the one before it by the same factor.
    """
    if work <= before:
        return max(0.0, work * whole)
    return before * whole / (1.0 - (1.0 - before / work) ** stages)
