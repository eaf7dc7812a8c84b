"""The simulator against a second one, written event by event from the description alone.

It shares no code with the library: it has its own rule, its own queues and its own end of a step.
"""

import math
from collections import defaultdict
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.plan.cost.simulate import (
    LinkTimes,
    Orders,
    PipelineTimes,
    StageTimes,
    TiedStages,
    name_orders,
    simulate,
)
from varuna.schedule import NAMES

KINDS = "FRBIW"


class Ran(NamedTuple):
    start: float
    stop: float


class Reference:
    """One replica. Time goes from event to event; at each event every free stage decides."""

    def __init__(self, orders: Orders, pipeline: PipelineTimes) -> None:
        self.orders, self.pipeline = orders, pipeline
        self.stages = len(orders.letters)
        self.rows = [self.numbered(letters) for letters in orders.letters]
        self.left = [list(row) for row in self.rows]
        self.ran: dict[tuple[int, str, int], Ran] = {}
        self.free_at = [0.0] * self.stages
        self.arrivals: dict[tuple[int, str, int], float] = {}
        self.link_busy: dict[tuple[int, int], tuple[float, float]] = {}  # (from, to): last message
        self.last_arrival: dict[tuple[int, int], float] = defaultdict(float)

    @staticmethod
    def numbered(letters: str) -> list[tuple[str, int]]:
        counts: dict[str, int] = defaultdict(int)
        row = []
        for letter in letters:
            key = "B" if letter in "BI" else letter
            row.append((letter, counts[key]))
            counts[key] += 1
        return row

    def run(self) -> "Reference":
        now = 0.0
        while any(self.left):
            # Of stages that decide at one moment, the first decides first: its message may delay another.
            for stage in range(self.stages):
                if self.free_at[stage] <= now:
                    choice = self.choose(stage, now)
                    if choice is not None:
                        self.start(stage, *choice, now)
            later = [t for t in (*self.free_at, *self.arrivals.values()) if t > now]
            assert later, "the rows deadlock"
            now = min(later)
        return self

    def choose(self, stage: int, now: float) -> tuple[str, int] | None:
        left = self.left[stage]
        if not left:
            return None

        def here(op: str, number: int) -> bool:
            if op == "F":
                return stage == 0 or self.arrivals.get((stage, "F", number), math.inf) <= now
            if op in "BIR":
                return stage == self.stages - 1 or self.arrivals.get((stage, "B", number), math.inf) <= now
            return True

        head = left[0]
        if here(*head) or (head[0] == "R" and not self.orders.opportunistic):
            return head
        if not self.orders.opportunistic:
            return None
        done = {(op, n) for s, op, n in self.ran if s == stage}
        forwards = sum(op == "F" for op, _ in done)
        backwards = sum(op in "BI" for op, _ in done)
        backward = next(((op, n) for op, n in left if op in "RBI"), None)
        forward = next(((op, n) for op, n in left if op == "F"), None)
        weight = next(((op, n) for op, n in left if op == "W"), None)
        ready = backward is not None and ("F", backward[1]) in done
        if backward is not None and ready and here(*backward):
            return backward
        if forward is not None and here(*forward) and forwards - backwards < self.orders.limits[stage]:
            return forward
        if weight is not None and ("I", weight[1]) in done:
            return weight
        if backward is not None and ready and backward[0] == "R":
            return backward
        return None

    def start(self, stage: int, op: str, number: int, now: float) -> None:
        times = self.pipeline.stages[stage]
        last = number == self.orders.microbatches - 1
        stop = now + (times.last_seconds if last else times.seconds)[KINDS.index(op)]
        self.left[stage].remove((op, number))
        self.ran[stage, op, number] = Ran(now, stop)
        self.free_at[stage] = stop
        if op == "F" and stage < self.stages - 1:
            self.send("F", self.pipeline.forward[stage], stage, stage + 1, stop, number, last)
        elif op in "BI" and stage > 0:
            self.send("B", self.pipeline.backward[stage - 1], stage, stage - 1, stop, number, last)

    def send(
        self, kind: str, link: LinkTimes, sender: int, to: int, stop: float, number: int, last: bool
    ) -> None:
        begin = max(stop - link.sender_seconds, self.link_busy.get((sender, to), (0.0, 0.0))[1])
        occupied = link.last_sending if last else link.sending
        other_begin, other_end = self.link_busy.get((to, sender), (0.0, 0.0))
        overlap = min(begin + occupied, other_end) - max(begin, other_begin)
        if overlap > 0 and self.pipeline.sharing:
            occupied += overlap * self.pipeline.sharing[min(sender, to)]
        self.link_busy[sender, to] = (begin, begin + occupied)
        arrival = max(begin + occupied + link.latency, self.last_arrival[sender, to])
        self.last_arrival[sender, to] = arrival
        self.arrivals[to, kind, number] = arrival

    def last_of(self, stage: int, ops: str) -> Ran:
        return max(ran for (s, op, _), ran in self.ran.items() if s == stage and op in ops)


def step_seconds(orders: Orders, pipelines: list[PipelineTimes]) -> float:
    """Time of a step of several replicas, from the description of its end."""
    replicas = [Reference(orders, pipeline).run() for pipeline in pipelines]
    first, stages = pipelines[0], range(len(orders.letters))
    final = "W" if any("W" in letters for letters in orders.letters) else "B"
    buckets = []
    for stage in stages:
        for index, (_, seconds) in enumerate(first.stages[stage].buckets):
            full = 0.0
            for replica, pipeline in zip(replicas, pipelines, strict=True):
                start, stop = replica.last_of(stage, final)
                full = max(full, start + pipeline.stages[stage].buckets[index][0] * (stop - start))
            buckets.append((full, stage, index, seconds))
    reduced = {stage: 0.0 for stage in stages}
    lane_free: dict[int, float] = defaultdict(float)
    for full, stage, _, seconds in sorted(buckets):
        lane = first.lanes[stage] if first.lanes else stage
        lane_free[lane] = max(full, lane_free[lane]) + seconds
        reduced[stage] = lane_free[lane]
    losses = max(replica.last_of(stage, "BI").start for replica in replicas for stage in stages)
    losses += first.totals_seconds
    longest = 0.0
    finished: list[list[float]] = []
    for replica, pipeline in zip(replicas, pipelines, strict=True):
        ends = [max(replica.last_of(stage, final).stop, reduced[stage]) for stage in stages]
        for tie in pipeline.ties:
            together = max(ends[stage] for stage in tie.stages) + tie.seconds
            for stage in tie.stages:
                ends[stage] = together
        finished.append([max(end, losses) for end in ends])
    if first.ends_together:
        together = max(map(max, finished)) + first.totals_seconds
        finished = [[together] * len(stages) for _ in finished]
    for replica, pipeline, ends in zip(replicas, pipelines, finished, strict=True):
        for stage in stages:
            begin = min(ran.start for (s, _, _), ran in replica.ran.items() if s == stage)
            longest = max(longest, ends[stage] + pipeline.stages[stage].ending_seconds - begin)
    return longest


seconds = st.integers(1, 40).map(lambda n: n / 8)
maybe = st.one_of(st.just(0.0), st.integers(0, 24).map(lambda n: n / 8))


@st.composite
def pipelines(draw: st.DrawFn, stages: int, buckets: list[list[float]]) -> PipelineTimes:
    """Times in eighths of a second, so that sums are exact. A message leaves after its instruction starts."""
    times = []
    for stage in range(stages):
        each, last = draw(st.tuples(*[seconds] * 5)), draw(st.tuples(*[seconds] * 5))
        shares = sorted(draw(st.sampled_from([0.25, 0.5, 1.0])) for _ in buckets[stage])
        times.append(
            StageTimes(each, last, (0.0,) * 5, tuple(zip(shares, buckets[stage], strict=True)), draw(maybe))
        )
    links = [
        LinkTimes(draw(maybe), draw(maybe), draw(maybe), 0.0, draw(st.sampled_from([0.0, 0.0625])))
        for _ in range(2 * (stages - 1))
    ]
    return PipelineTimes(tuple(times), tuple(links[: stages - 1]), tuple(links[stages - 1 :]))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Orders, list[PipelineTimes]]:
    stages = draw(st.integers(1, 5))
    flags = draw(st.tuples(*[st.booleans()] * stages))
    name = draw(st.sampled_from(NAMES))
    orders = name_orders(name, stages=stages, microbatches=draw(st.integers(1, 7)), recompute=flags)
    buckets = [draw(st.lists(seconds, max_size=3)) for _ in range(stages)]
    more = {
        "sharing": draw(
            st.one_of(st.just(()), st.tuples(*[st.sampled_from([0.0, 0.5, 1.0])] * (stages - 1)))
        ),
        "lanes": draw(st.one_of(st.just(()), st.tuples(*[st.integers(0, 1)] * stages))),
        "ties": draw(st.sampled_from([(), (TiedStages((0, stages - 1), 0.75),)])) if stages > 1 else (),
        "totals_seconds": draw(maybe),
        "ends_together": draw(st.booleans()),
    }
    replicas = [draw(pipelines(stages, buckets))._replace(**more) for _ in range(draw(st.integers(1, 2)))]
    return orders, replicas


@given(jobs())
def test_every_instruction_starts_and_ends_as_in_the_reference(
    job: tuple[Orders, list[PipelineTimes]],
) -> None:
    orders, replicas = job
    timeline = simulate(orders, replicas[:1]).timeline()
    found = {
        (i.stage, i.what, i.microbatch): Ran(i.start_seconds, i.stop_seconds)
        for i in timeline.intervals
        if i.what in KINDS
    }
    assert found == Reference(orders, replicas[0]).run().ran


@given(jobs())
def test_a_step_takes_as_long_as_in_the_reference(job: tuple[Orders, list[PipelineTimes]]) -> None:
    """With reductions over replicas, lanes, ties, the sum of the losses and the optimizer."""
    orders, replicas = job
    assert simulate(orders, replicas).seconds == pytest.approx(step_seconds(orders, replicas), abs=1e-12)


# ---------------------------------------------------------------- closed forms


def equal(stages: int, forward: float, backward: float, link: LinkTimes, **more: object) -> PipelineTimes:
    times = (forward, 0.0, backward, 0.0, 0.0)
    links = (link,) * (stages - 1)
    return PipelineTimes((StageTimes(times, times, **more),) * stages, links, links)  # type: ignore[arg-type]


@given(st.integers(1, 8), st.integers(0, 12), seconds, seconds, maybe)
def test_links_with_latency_only_lengthen_gpipe_by_the_trip_there_and_back(
    stages: int, more: int, forward: float, backward: float, latency: float
) -> None:
    """(M + P - 1)(f + b) + 2(P - 1) latency."""
    microbatches = stages + more
    pipeline = equal(stages, forward, backward, LinkTimes(0.0, 0.0, latency))
    expected = (microbatches + stages - 1) * (forward + backward) + 2 * (stages - 1) * latency
    orders = name_orders("gpipe", stages=stages, microbatches=microbatches)
    assert simulate(orders, [pipeline]).seconds == pytest.approx(expected)


@given(st.integers(2, 8), st.integers(0, 12), seconds, seconds, maybe)
def test_strict_1f1b_waits_for_the_link_in_every_round(
    stages: int, more: int, forward: float, backward: float, latency: float
) -> None:
    """The last two stages alternate: a round is 2 latencies longer unless two forwards cover them.

    With one micro-batch there is one round: P(f + b) + 2(P - 1) latency.
    """
    pipeline = equal(stages, forward, backward, LinkTimes(0.0, 0.0, latency))
    one = simulate(name_orders("1f1b", stages=stages, microbatches=1), [pipeline]).seconds
    assert one == pytest.approx(stages * (forward + backward) + 2 * (stages - 1) * latency)
    two = equal(2, forward, backward, LinkTimes(0.0, 0.0, latency))
    # Stage 0 holds two micro-batches: per two of them one trip there and back, or their own work.
    microbatches = 2 * (more + 1)
    trip = 2 * (forward + backward) + 2 * latency
    expected = (microbatches // 2 - 1) * trip + trip + forward + backward
    orders = name_orders("1f1b", stages=2, microbatches=microbatches)
    found = simulate(orders, [two]).seconds
    assert found <= expected + 1e-9
    assert found >= (microbatches + 1) * (forward + backward) + 2 * latency - 1e-9


@given(st.integers(1, 6), st.integers(1, 12), seconds)
def test_a_link_slower_than_the_stages_sets_the_pace(stages: int, microbatches: int, forward: float) -> None:
    """Each direction sends one message per 2f: M - 1 messages queue before the last."""
    sending = 2 * forward
    pipeline = equal(stages, forward, forward, LinkTimes(sending, sending))
    orders = name_orders("gpipe", stages=stages, microbatches=microbatches)
    pace = sending if stages > 1 else forward
    expected = 2 * (stages * forward + (stages - 1) * sending + (microbatches - 1) * pace)
    assert simulate(orders, [pipeline]).seconds == pytest.approx(expected)


@given(st.integers(1, 6), st.integers(1, 8), seconds, st.lists(seconds, min_size=1, max_size=4))
def test_buckets_that_are_full_at_the_end_are_exposed_and_early_ones_hide_behind_the_backward(
    stages: int, microbatches: int, backward: float, reductions: list[float]
) -> None:
    orders = name_orders("1f1b", stages=stages, microbatches=microbatches)
    none = equal(stages, 1.0, backward, LinkTimes(0.0, 0.0))
    bare = simulate(orders, [none]).seconds
    late = equal(stages, 1.0, backward, LinkTimes(0.0, 0.0), buckets=tuple((1.0, s) for s in reductions))
    assert simulate(orders, [late]).seconds == pytest.approx(bare + sum(reductions))
    early = equal(stages, 1.0, backward, LinkTimes(0.0, 0.0), buckets=((0.0, backward / 2), (1.0, 0.5)))
    assert simulate(orders, [early]).seconds == pytest.approx(bare + 0.5)


@given(st.integers(2, 6), st.integers(1, 8), seconds)
def test_reductions_over_one_card_queue_and_over_own_cards_do_not(
    stages: int, microbatches: int, reduction: float
) -> None:
    """gpipe with free links: the last backwards end one after the other, 2 s apart, the first stage last."""
    orders = name_orders("gpipe", stages=stages, microbatches=microbatches)
    pipeline = equal(stages, 1.0, 2.0, LinkTimes(0.0, 0.0), buckets=((1.0, reduction),))
    bare = (microbatches + stages - 1) * 3.0
    assert simulate(orders, [pipeline]).seconds == pytest.approx(bare + reduction)
    queued = simulate(orders, [pipeline._replace(lanes=(0,) * stages)]).seconds
    # The k-th reduction in the lane starts when its gradients are ready or the one before is done.
    free = 0.0
    for stage in reversed(range(stages)):
        free = max(free, bare - 2.0 * stage) + reduction
    assert queued == pytest.approx(free)


def test_the_optimizer_of_a_stage_overlaps_with_the_next_step_of_others() -> None:
    """Steps follow each other: the time of a step is that of the busiest stage, not the sum of all."""
    pipeline = equal(4, 1.0, 2.0, LinkTimes(0.0, 0.0))
    orders = name_orders("1f1b", stages=4, microbatches=8)
    bare = simulate(orders, [pipeline])
    stages = tuple(
        stage._replace(ending_seconds=ending)
        for stage, ending in zip(pipeline.stages, (0.0, 0.0, 0.0, 5.0), strict=True)
    )
    found = simulate(orders, [pipeline._replace(stages=stages)])
    # The last stage starts 3 s after the first. Its losses are summed when the first stage starts its
    # last backward, at 31 s.
    assert bare.seconds == 33.0
    assert found.ends[0].done[3] == 31.0 + 5.0
    assert found.seconds == 33.0
    stages = (*stages[:3], stages[3]._replace(ending_seconds=5.5))
    assert simulate(orders, [pipeline._replace(stages=stages)]).seconds == 33.5


@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 12), seconds)
def test_all_times_scale_together(name: str, stages: int, microbatches: int, factor: float) -> None:
    orders = name_orders(name, stages=stages, microbatches=microbatches)
    times = (1.0, 1.0, 2.0, 1.0, 1.0)
    links = (LinkTimes(0.5, 0.5, 0.25),) * (stages - 1)
    pipeline = PipelineTimes((StageTimes(times, times),) * stages, links, links)
    scaled_times = tuple(factor * t for t in times)
    scaled_links = (LinkTimes(0.5 * factor, 0.5 * factor, 0.25 * factor),) * (stages - 1)
    scaled = PipelineTimes((StageTimes(scaled_times, scaled_times),) * stages, scaled_links, scaled_links)  # type: ignore[arg-type]
    assert simulate(orders, [scaled]).seconds == pytest.approx(factor * simulate(orders, [pipeline]).seconds)
