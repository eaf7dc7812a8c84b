"""What a step takes at least, known without playing it: so that most layouts need not be played.

Every bound here is sound: the simulation never takes less (a test holds them against each other).
"""

from typing import NamedTuple

from varuna.plan.cost.simulate import Orders, PipelineTimes

F, R, B, I, W = range(5)  # noqa: E741 - the letters of the instructions


def least_seconds(orders: Orders, pipeline: PipelineTimes) -> tuple[float, float]:
    """What a step takes at least, and what it would if there were nothing to reduce.

    For one replica with known stages: what follows from the order of things along the pipeline.

    The first micro-batch reaches stage s no sooner than `down[s]`. From then on the stage has all its
    forwards and backwards to do. The last forward comes after the last forward of the stage before, the
    last backward after that of the stage behind, and after as many backwards of its own; a stage that
    holds no more than its limit goes there and back so and so often.
    """
    stages = pipeline.stages
    depth, again = len(stages), orders.microbatches - 1
    split = "I" in orders.letters[0]
    back, final = (I, W) if split else (B, B)

    down = [0.0]  # when the first forward begins
    ended = again * stages[0].seconds[F] + stages[0].last_seconds[F]  # when the last forward ends
    forwards = [ended]
    begun = 0.0
    for way, before, stage in zip(pipeline.forward, stages, stages[1:], strict=False):
        first, sending = (before.seconds, way.sending) if again else (before.last_seconds, way.last_sending)
        left = begun + first[F] - way.sender
        sent = max(ended - way.sender, left + again * way.sending)
        begun = left + sending + way.latency
        last = stage.last_seconds[F]
        ended = max(sent + way.last_sending + way.latency, begun + again * stage.seconds[F]) + last
        down.append(begun)
        forwards.append(ended)

    came_back = 0.0  # when the first backward ends
    trip = 0.0  # from a forward to the end of its backward
    end = 0.0  # when the last backward ends, weight part not counted
    told = 0.0  # when the last of all begins
    bare = longest = 0.0
    stops = [0.0] * depth  # when the last instruction ends
    for s in reversed(range(depth)):
        stage, begun, limit = stages[s], down[s], orders.limits[s]
        seconds, lasts = stage.seconds, stage.last_seconds
        first = seconds if again else lasts
        there_and_back = lasts[F] + lasts[back]
        if s == depth - 1:
            came_back = begun + first[F] + first[back]
            end = forwards[s] + lasts[back]
            trip = first[F] + first[back]
        else:
            there, here = pipeline.forward[s], pipeline.backward[s]
            sending = here.sending if again else here.last_sending
            left = came_back - here.sender
            sent = max(end - here.sender, left + again * here.sending)
            came_back = left + sending + here.latency + first[back]
            end = sent + here.last_sending + here.latency + lasts[back]
            trip += there.latency + here.latency - there.sender - here.sender + first[F] + first[back]
            trip += there.sending + sending if again else there.last_sending + sending
        work = again * (seconds[F] + seconds[back]) + there_and_back
        if "R" in orders.letters[s]:
            work += again * seconds[R] + lasts[R]
        limited = begun + again // limit * trip
        end = max(end, begun + work, limited + (trip if again % limit else there_and_back))
        if again:
            end = max(end, came_back + (again - 1) * seconds[back] + lasts[back])
        stop = end
        if split:
            stop = max(end + lasts[W], begun + work + again * seconds[W] + lasts[W])
        stops[s] = stop
        told = max(told, end - lasts[back])
        # The end of a step, as the simulator plays it: with the earliest ends, nothing is later than it is.
        ending = stage.ending_seconds - begun
        bare = max(bare, stop + ending)
        if stage.buckets:
            longest = max(longest, stop + exposed(stage.buckets, lasts[final]) + ending)
    told += pipeline.totals_seconds
    bare = max(
        bare, max([told + stage.ending_seconds - begun for stage, begun in zip(stages, down, strict=True)])
    )
    if pipeline.lanes:
        longest = max(longest, _in_lanes(pipeline, stops, down, split))
    return max(bare, longest) * (1 - 1e-12), bare * (1 - 1e-12)


def _in_lanes(pipeline: PipelineTimes, stops: list[float], down: list[float], split: bool) -> float:
    """Reductions over one card queue.

    The first stage among them is the last to have all its gradients, and so the last to be done; where
    weight parts come in any order, it may be any of them.
    """
    lanes: dict[int, list[int]] = {}
    for s, lane in enumerate(pipeline.lanes):
        lanes.setdefault(lane, []).append(s)
    final = W if split else B
    longest = 0.0
    for members in lanes.values():
        buckets = []
        for s in reversed(members):  # about the order in which they are full
            stage, stop = pipeline.stages[s], stops[s]
            backward = stage.last_seconds[final]
            for share, seconds in stage.buckets:
                buckets.append((stop - (1.0 - share) * backward, seconds))
        buckets.sort()
        free = 0.0
        for full, seconds in buckets:
            free = (full if full > free else free) + seconds
        last = members if split else members[:1]
        longest = max(longest, free + min([pipeline.stages[s].ending_seconds - down[s] for s in last]))
    return longest


def exposed(buckets: tuple[tuple[float, float], ...], backward: float) -> float:
    """How long the reductions of a stage outlast its last backward, even if they wait for nobody."""
    left = 0.0
    longest = 0.0
    for share, seconds in reversed(buckets):
        left += seconds
        outlasts = left - (1.0 - share) * backward
        if outlasts > longest:
            longest = outlasts
    return longest


class Open(NamedTuple):
    """A layout whose cuts are still open. Seconds are of the whole model on the fastest device."""

    depth: int
    microbatches: int
    forward: float  # of a micro-batch; likewise the next two
    backward: float  # what the stage before waits for
    weights: float  # what nobody waits for; zero where the backward is in one part
    last_forward: float  # of the last micro-batch, which may be smaller
    last_backward: float
    last_weights: float
    heaviest: float  # what some stage does in the whole step, however the model is cut
    forward_share: float  # of all three, in the segment where it is most
    at_the_end: float  # the stages' reductions and optimizers together, as far as nothing hides them
    messages: tuple[float, float] = (0.0, 0.0)  # down the pipeline, at least and at most
    lanes: int = 0  # over which the stages' reductions queue, and how many in one of them
    longest_lane: int = 0
    reduction: float = 0.0  # seconds of all-reduce for each second of a micro-batch, at least


def least_of_any_cut(layout: Open) -> float:
    """For a layout whose cuts are still open: stages may be as equal as one could wish.

    All stages together do the whole work, so one of them does a `depth`-th of it.
    """
    depth, microbatches = layout.depth, layout.microbatches
    forward, backward = layout.forward, layout.backward
    whole = forward + backward + layout.weights
    last = layout.last_forward + layout.last_backward + layout.last_weights
    again = microbatches - 1
    there_and_back = 2 * layout.messages[0]
    longest = max(
        (again * whole + last + layout.at_the_end) / depth,
        layout.heaviest,
        layout.last_forward + layout.last_backward + there_and_back + again * max(forward, backward) / depth,
    )
    if not again:
        return longest * (1 - 1e-12)
    longest = max(
        longest,
        forward + backward + there_and_back,
        forward + layout.last_backward + there_and_back + (again - 1) * backward / depth,
    )
    # Down to a stage, all its forwards and backwards, and up again.
    through = forward + backward
    full = microbatches if layout.last_forward + layout.last_backward >= through else again
    longest = max(longest, _spread_out(through, depth, work=full, before=1.0))
    if layout.reduction and layout.lanes:
        # A stage's reductions begin with its last backward at the earliest, and those of the stages of
        # its lane that are later than it queue up behind. Which of them is last, and begins when, is
        # known only where the backward is in one part.
        share = _spread_out(1.0, layout.longest_lane, work=again + layout.reduction, before=layout.reduction)
        if layout.weights:
            longest = max(longest, (share - layout.forward_share) * whole / layout.lanes - layout.messages[1])
        else:
            longest = max(longest, share * whole / layout.lanes)
    return longest * (1 - 1e-12)


def _spread_out(whole: float, stages: int, *, work: float, before: float) -> float:
    """The least that all of `before × (t[0] + ... + t[s-1]) + work × t[s]` can be at once, where t sums to
    a whole: each t[s] is then smaller than the one before it by the same share."""
    if work <= before:
        return max(0.0, work * whole)
    return before * whole / (1.0 - (1.0 - before / work) ** stages)
