"""The simulator gives what can be worked out by hand, and plays by the engine's own rule."""

import heapq
import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import varuna.plan.cost.simulate as simulator
from varuna.errors import ScheduleError
from varuna.observe import bubble
from varuna.plan.cost import kernel
from varuna.plan.cost.simulate import (
    LinkTimes,
    Orders,
    PipelineTimes,
    StageTimes,
    TiedStages,
    name_orders,
    simulate,
)
from varuna.schedule import NAMES, Cursor, build
from varuna.types import Instruction, Schedule

Times = tuple[float, float, float, float, float]


def stage(times: Times, **more: object) -> StageTimes:
    return StageTimes(times, times, **more)  # type: ignore[arg-type]


def equal_stages(stages: int, times: Times = (1.0, 1.0, 2.0, 1.0, 1.0)) -> PipelineTimes:
    ways = (LinkTimes(0.0, 0.0),) * (stages - 1)
    return PipelineTimes((stage(times),) * stages, ways, ways)


def read_orders(schedule: Schedule) -> Orders:
    letters = tuple("".join(instruction.op for instruction in row) for row in schedule.rows)
    return Orders(letters, schedule.limits, schedule.opportunistic, letters[0].count("F"))


def seconds(name: str, pipeline: PipelineTimes, microbatches: int, **options: object) -> float:
    orders = name_orders(name, stages=len(pipeline.stages), microbatches=microbatches, **options)  # type: ignore[arg-type]
    return simulate(orders, [pipeline]).seconds


# ---------------------------------------------------------------- closed forms

sizes = st.integers(1, 9)


@given(sizes, st.integers(0, 20), st.sampled_from([1.0, 0.25, 3.0]), st.sampled_from([1.0, 2.0, 2.5]))
def test_equal_stages_take_one_round_for_each_micro_batch_and_each_stage_but_one(
    stages: int, more: int, forward: float, backward: float
) -> None:
    """V23: (M + P - 1) × (f + b), for gpipe, 1f1b and varuna alike."""
    microbatches = stages + more
    pipeline = equal_stages(stages, (forward, 0.0, backward, 0.0, 0.0))
    for name in ("gpipe", "1f1b", "varuna"):
        assert seconds(name, pipeline, microbatches) == (microbatches + stages - 1) * (forward + backward)


@given(sizes, st.integers(0, 20))
def test_zero_bubble_waits_only_until_the_first_micro_batch_is_through(stages: int, more: int) -> None:
    """V23: 3M + (P - 1) where all three parts take 1."""
    assert seconds("zero-bubble", equal_stages(stages), stages + more) == 3 * (stages + more) + stages - 1


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(1, 12),
)
def test_unequal_stages_and_links_of_gpipe_are_a_flow_shop(
    stages: list[tuple[int, int]], sending: int, latency: int, microbatches: int
) -> None:
    """V23: each direction costs the sum once, plus the slowest stage or link for each further micro-batch."""
    way = LinkTimes(sending, sending, latency)
    links = len(stages) - 1
    pipeline = PipelineTimes(
        tuple(stage((f, 0.0, b, 0.0, 0.0)) for f, b in stages), (way,) * links, (way,) * links
    )
    there = sum(f for f, _ in stages) + (microbatches - 1) * max(
        sending * bool(links), *(f for f, _ in stages)
    )
    back = sum(b for _, b in stages) + (microbatches - 1) * max(
        sending * bool(links), *(b for _, b in stages)
    )
    assert seconds("gpipe", pipeline, microbatches) == there + back + 2 * links * (sending + latency)


def test_recompute_costs_a_forward_more_where_the_backward_is_not_due_at_once() -> None:
    pipeline = equal_stages(4, (1.0, 1.0, 2.0, 0.0, 0.0))
    assert seconds("1f1b", pipeline, 64, recompute=(False, False, False, True)) == 67 * 3
    slower = seconds("1f1b", pipeline, 64, recompute=(True, True, True, True))
    assert 64 * 4 <= slower <= 67 * 4


def test_the_bubbles_of_the_papers_come_out() -> None:
    """V23: 17.9 % for 1f1b with 8 stages and 32 micro-batches, 6.8 % for ZB-H1, none for ZB-H2.

    A single step, from the first start to the last end, can have no less than 6.8 % with one stage on each
    rank: the last one begins when the first micro-batch has come through. But steps overlap.
    """
    single = {"1f1b": 21 / 117, "gpipe": 21 / 117, "zero-bubble": 7 / 103, "zero-bubble-2x": 7 / 103}
    for name, share in (single | {"zero-bubble-2x": 0.0}).items():
        step = simulate(name_orders(name, stages=8, microbatches=32), [equal_stages(8)])
        assert 1 - 96 / step.seconds == pytest.approx(share)
        assert bubble(step.timeline()) == {s: pytest.approx(single[name]) for s in range(8)}


# ---------------------------------------------------------------- the engine's own rule


class World:
    """The same pipeline as events: a free stage calls its Cursor, as the engine does."""

    def __init__(self, schedule: Schedule, pipeline: PipelineTimes, seed: int) -> None:
        self.schedule, self.pipeline, self.seed = schedule, pipeline, seed
        self.stages = len(schedule.rows)
        self.microbatches = sum(i.op == "F" for i in schedule.rows[0])
        self.cursors = [
            Cursor(row, stage=stage, stages=self.stages, limit=limit, opportunistic=schedule.opportunistic)
            for stage, (row, limit) in enumerate(zip(schedule.rows, schedule.limits, strict=True))
        ]
        self.arrived = [[0, 0] for _ in range(self.stages)]
        self.free = [True] * self.stages
        self.way_free: dict[tuple[int, int], tuple[float, float]] = {}
        self.events: list[tuple[float, int, str, int, int]] = []
        self.ran: dict[Instruction, tuple[float, float]] = {}

    def run(self) -> dict[Instruction, tuple[float, float]]:
        now = 0.0
        while True:
            for stage in range(self.stages):
                if self.free[stage] and not self.cursors[stage].finished:
                    instruction = self.cursors[stage].next(*self.arrived[stage])
                    if instruction is not None:
                        self.start(instruction, now)
            if not self.events:
                return self.ran
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, _, kind, stage, direction = heapq.heappop(self.events)
                if kind == "free":
                    self.free[stage] = True
                else:
                    self.arrived[stage][direction] += 1

    def start(self, instruction: Instruction, now: float) -> None:
        stage, kind = instruction.stage, kernel.KINDS.index(instruction.op)
        times = self.pipeline.stages[stage]
        last = instruction.microbatch == self.microbatches - 1
        taken = (times.last_seconds if last else times.seconds)[kind]
        if self.seed and times.spreads[kind] > 0:
            lane = (stage * 5 + kind) * 2
            taken = max(
                0.0, taken + times.spreads[kind] * kernel.noise(self.seed, lane, instruction.microbatch)
            )
        self.free[stage] = False
        self.ran[instruction] = (now, now + taken)
        self.post(now + taken, "free", stage, 0)
        if instruction.op == "F" and stage < self.stages - 1:
            self.send(
                self.pipeline.forward[stage], stage, stage + 1, 0, now + taken, instruction.microbatch, last
            )
        elif instruction.op in "BI" and stage > 0:
            self.send(
                self.pipeline.backward[stage - 1],
                stage,
                stage - 1,
                1,
                now + taken,
                instruction.microbatch,
                last,
            )

    def send(
        self, way: LinkTimes, sender: int, to: int, direction: int, stop: float, number: int, last: bool
    ) -> None:
        free, arrival_before = self.way_free.get((sender, to), (0.0, 0.0))
        leaves = max(stop - way.sender_seconds, free)
        sent = leaves + (way.last_sending if last else way.sending)
        arrival = sent + way.latency
        if self.seed and way.spread > 0:
            lane = (direction * self.stages + sender) * 2 + 1
            arrival = max(leaves, arrival + way.spread * kernel.noise(self.seed, lane, number))
        arrival = max(arrival, arrival_before)
        self.way_free[sender, to] = (sent, arrival)
        self.post(arrival, "arrived", to, direction)

    def post(self, when: float, kind: str, stage: int, direction: int) -> None:
        heapq.heappush(self.events, (when, len(self.events), kind, stage, direction))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Schedule, PipelineTimes, int]:
    stages = draw(st.integers(1, 6))
    time = st.one_of(st.integers(1, 4).map(float), st.floats(0.01, 5.0))
    maybe = st.one_of(st.just(0.0), st.floats(0.0, 2.0))
    times = st.tuples(time, time, time, time, time)
    spreads = st.tuples(maybe, maybe, maybe, maybe, maybe)
    way = st.builds(LinkTimes, maybe, maybe, maybe, maybe, st.just(0.0))
    recompute = draw(st.one_of(st.just(()), st.tuples(*[st.booleans()] * stages)))
    microbatches = draw(st.integers(1, 12))
    schedule = build(
        draw(st.sampled_from(NAMES)), stages=stages, microbatches=microbatches, recompute=recompute
    )
    pipeline = PipelineTimes(
        draw(st.tuples(*[st.builds(StageTimes, times, times, spreads, st.just(()), st.just(0.0))] * stages)),
        draw(st.tuples(*[way] * (stages - 1))),
        draw(st.tuples(*[way] * (stages - 1))),
    )
    return schedule, pipeline, draw(st.integers(0, 1 << 30))


def instructions_of(
    orders: Orders, pipeline: PipelineTimes, seed: int
) -> dict[Instruction, tuple[float, float]]:
    played = simulate(orders, [pipeline], seed=seed).played[0]
    letters = "".join(orders.letters)
    found = {}
    for s, (first, stop) in enumerate(pairwise(played.firsts)):
        for place in range(first, stop):
            instruction = Instruction(s, letters[place], int(played.numbers[place]))  # type: ignore[arg-type]
            found[instruction] = (float(played.starts[place]), float(played.stops[place]))
    return found


@given(worlds())
def test_the_simulator_plays_as_the_cursor_says(world: tuple[Schedule, PipelineTimes, int]) -> None:
    """V23: to the bit, for every schedule, recompute, unequal times, links and jitter."""
    schedule, pipeline, seed = world
    assert instructions_of(read_orders(schedule), pipeline, seed) == World(schedule, pipeline, seed).run()


@given(worlds())
def test_compiled_and_plain_give_the_same_bits(world: tuple[Schedule, PipelineTimes, int]) -> None:
    schedule, pipeline, seed = world
    orders = read_orders(schedule)
    shared = pipeline._replace(sharing=(0.5,) * len(pipeline.forward))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, "WORTH_COMPILING", math.inf)
        plain = instructions_of(orders, shared, seed)
        patch.setattr(simulator, "WORTH_COMPILING", 0)
        assert kernel.compiled_play() is not None
        assert instructions_of(orders, shared, seed) == plain


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_a_schedule_by_name_and_one_written_out_are_the_same_orders(
    name: str, stages: int, microbatches: int, recompute: bool
) -> None:
    flags = (recompute,) * stages
    written = build(name, stages=stages, microbatches=microbatches, recompute=flags)
    assert read_orders(written) == name_orders(
        name, stages=stages, microbatches=microbatches, recompute=flags
    )


def test_weight_parts_of_a_mixed_row_have_the_number_of_their_input_part() -> None:
    orders = Orders(("FFFIBWIW",), (3,), False, 3)
    found = instructions_of(orders, equal_stages(1), 0)
    assert [i.microbatch for i in found if i.op == "W"] == [0, 2]


def test_rows_that_deadlock_are_refused() -> None:
    orders = Orders(("FBFB", "FFBB"), (2, 2), False, 2)
    with pytest.raises(ScheduleError, match="deadlocks after 2 of 8 instructions"):
        simulate(orders, [equal_stages(2)])


# ---------------------------------------------------------------- links


def test_messages_of_one_direction_queue_and_travel_while_the_stage_computes_on() -> None:
    pipeline = PipelineTimes(
        (stage((1.0, 0, 1.0, 0, 0)),) * 2, (LinkTimes(3.0, 3.0),), (LinkTimes(0.0, 0.0),)
    )
    step = simulate(name_orders("gpipe", stages=2, microbatches=3), [pipeline])
    forwards = [i for i in step.timeline().intervals if i.what == "F"]
    assert [i.start_seconds for i in forwards if i.stage == 0] == [0.0, 1.0, 2.0]
    assert [i.start_seconds for i in forwards if i.stage == 1] == [4.0, 7.0, 10.0]


def test_what_the_sender_does_itself_delays_its_next_instruction_but_not_the_message() -> None:
    pipeline = PipelineTimes(
        (stage((1.5, 0, 1.0, 0, 0)),) * 2, (LinkTimes(0.0, 0.0, 2.0, 0.0, 0.5),), (LinkTimes(0.0, 0.0),)
    )
    step = simulate(name_orders("gpipe", stages=2, microbatches=2), [pipeline])
    forwards = [i for i in step.timeline().intervals if i.what == "F"]
    assert [i.start_seconds for i in forwards if i.stage == 0] == [0.0, 1.5]
    assert [i.start_seconds for i in forwards if i.stage == 1] == [3.0, 4.5]


def test_messages_that_meet_share_the_link_as_far_as_it_is_shared() -> None:
    """Two opposite messages at once: with all of the time lost, the second ends when both are through."""
    pipeline = PipelineTimes(
        (stage((1.0, 0, 1.0, 0, 0)),) * 2, (LinkTimes(4.0, 4.0),), (LinkTimes(4.0, 4.0),)
    )
    for sharing, expected in ((0.0, 0.0), (1.0, 1.0)):
        step = simulate(
            name_orders("1f1b", stages=2, microbatches=2), [pipeline._replace(sharing=(sharing,))]
        )
        # F1 leaves stage 0 at 2 but waits for F0's message until 5, and travels until 9;
        # B0 leaves stage 1 at 7 and meets it for 2.
        second = next(i for i in step.timeline().intervals if (i.stage, i.what, i.microbatch) == (0, "B", 0))
        assert second.start_seconds == 11.0 + 2.0 * expected


# ---------------------------------------------------------------- the end of a step


def test_buckets_are_reduced_while_the_last_backward_runs() -> None:
    """Full at half and at the end of a backward of 4 s: the first is hidden, the second is not."""
    one = stage((1.0, 0, 4.0, 0, 0), buckets=((0.5, 1.0), (1.0, 3.0)), ending_seconds=2.0)
    step = simulate(name_orders("1f1b", stages=1, microbatches=2), [PipelineTimes((one,), (), ())])
    reductions = [(i.start_seconds, i.stop_seconds) for i in step.timeline().intervals if i.what == "reduce"]
    assert reductions == [(8.0, 9.0), (10.0, 13.0)]
    assert step.seconds == 15.0


def test_a_reduction_waits_for_the_slowest_replica() -> None:
    fast = PipelineTimes((stage((1.0, 0, 1.0, 0, 0), buckets=((1.0, 3.0),)),), (), ())
    slow = PipelineTimes((stage((2.0, 0, 2.0, 0, 0), buckets=((1.0, 3.0),)),), (), ())
    orders = name_orders("1f1b", stages=1, microbatches=4)
    assert simulate(orders, [fast]).seconds == 11.0
    assert simulate(orders, [fast, slow]).seconds == simulate(orders, [slow]).seconds == 19.0


def test_tied_stages_wait_for_each_other_and_so_do_all_for_the_losses() -> None:
    pipeline = equal_stages(3)
    orders = name_orders("1f1b", stages=3, microbatches=3)  # the stages end at 15, 13 and 11
    tied = simulate(orders, [pipeline._replace(ties=(TiedStages((0, 2), 4.0),))])
    assert tied.ends[0].finished == [19.0, 13.0, 19.0]
    told = simulate(orders, [pipeline._replace(totals_seconds=0.5)])  # the last backward begins at 13
    assert told.ends[0].finished == [15.0, 13.5, 13.5]
    clipped = simulate(orders, [pipeline._replace(totals_seconds=0.5, ends_together=True)])
    assert clipped.ends[0].finished == [15.5, 15.5, 15.5]


def test_what_ends_late_on_a_stage_that_begins_late_costs_nothing() -> None:
    """The last stage's optimizer runs while the first already fills the next step, as far as that lasts."""
    first, last = stage((1.0, 0, 2.0, 0, 0)), stage((1.0, 0, 2.0, 0, 0), ending_seconds=4.0)
    pipeline = PipelineTimes((first, last), (LinkTimes(0.0, 0.0),), (LinkTimes(0.0, 0.0),))
    orders = name_orders("1f1b", stages=2, microbatches=8)  # 27 on stage 0, 25 + 4 on stage 1
    assert simulate(orders, [pipeline]).ends[0].done == [27.0, 29.0]
    assert simulate(orders, [pipeline]).seconds == 28.0
    quick = pipeline._replace(stages=(first, last._replace(ending_seconds=3.0)))
    assert simulate(orders, [quick]).seconds == 27.0


# ---------------------------------------------------------------- jitter


def jittery(stages: int) -> PipelineTimes:
    way = LinkTimes(0.1, 0.1, 0.2, 1.0)
    one = stage((1.0, 1.0, 2.0, 1.0, 1.0), spreads=(0.1,) * 5)
    return PipelineTimes((one,) * stages, (way,) * (stages - 1), (way,) * (stages - 1))


def test_jitter_follows_from_the_seed_and_the_replica() -> None:
    """V23"""
    orders = name_orders("varuna", stages=4, microbatches=16)
    both = simulate(orders, [jittery(4), jittery(4)], seed=7)
    assert both.timeline() == simulate(orders, [jittery(4), jittery(4)], seed=7).timeline()
    assert both.timeline() != simulate(orders, [jittery(4), jittery(4)], seed=8).timeline()
    assert list(both.played[0].stops) != list(both.played[1].stops)
    assert list(both.played[0].stops) == list(simulate(orders, [jittery(4)], seed=7).played[0].stops)


def test_under_jitter_the_opportunistic_order_is_faster_than_the_strict_one() -> None:
    """V20, V23"""

    def mean(name: str) -> float:
        orders = name_orders(name, stages=8, microbatches=64)
        return sum(simulate(orders, [jittery(8)], seed=seed).seconds for seed in range(1, 6)) / 5

    assert mean("varuna") < 0.95 * mean("1f1b")


def test_noise_has_a_mean_of_zero_and_a_variance_of_one() -> None:
    drawn = [kernel.noise(3, lane, number) for lane in range(50) for number in range(200)]
    mean = sum(drawn) / len(drawn)
    assert abs(mean) < 0.03
    assert abs(sum((value - mean) ** 2 for value in drawn) / len(drawn) - 1) < 0.05


# ---------------------------------------------------------------- the timeline, and bad input


@given(worlds())
def test_a_timeline_holds_every_instruction_once_and_no_two_at_a_time(
    world: tuple[Schedule, PipelineTimes, int],
) -> None:
    schedule, pipeline, seed = world
    timeline = simulate(read_orders(schedule), [pipeline], seed=seed).timeline()
    computing = [i for i in timeline.intervals if i.what in kernel.KINDS]
    expected = Counter((i.stage, i.op, i.microbatch) for row in schedule.rows for i in row)
    assert Counter((i.stage, i.what, i.microbatch) for i in computing) == expected
    for left, right in pairwise(computing):
        assert left.rank != right.rank or left.stop_seconds <= right.start_seconds
    assert {i.rank: i.stage for i in computing} == {stage: stage for stage in range(len(schedule.rows))}


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_times_that_are_none_are_refused_by_name(wrong: float) -> None:
    pipeline = equal_stages(2)
    orders = name_orders("1f1b", stages=2, microbatches=2)
    bad = stage((1.0, 1.0, wrong, 1.0, 1.0))
    with pytest.raises(ValueError, match=r"stages\[1\]\.seconds must hold finite numbers of zero or more"):
        simulate(orders, [pipeline._replace(stages=(pipeline.stages[0], bad))])
    with pytest.raises(ValueError, match=r"backward\[0\] must hold"):
        simulate(orders, [pipeline._replace(backward=(LinkTimes(wrong, 0.0),))])


def test_times_for_another_number_of_stages_are_refused() -> None:
    orders = name_orders("1f1b", stages=2, microbatches=2)
    with pytest.raises(ValueError, match="the schedule has 2 stages, but times are given for 3"):
        simulate(orders, [equal_stages(3)])
    with pytest.raises(ValueError, match="2 stages have 1 links between them"):
        simulate(orders, [equal_stages(2)._replace(forward=())])
