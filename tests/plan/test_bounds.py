"""A bound is never above what the simulation takes: else the search would lose layouts."""

from hypothesis import given
from hypothesis import strategies as st

from varuna.plan.cost.bounds import least_seconds
from varuna.plan.cost.simulate import (
    LinkTimes,
    Orders,
    PipelineTimes,
    StageTimes,
    TiedStages,
    name_orders,
    simulate,
)
from varuna.schedule import NAMES, splits

seconds = st.floats(0.01, 4.0)
maybe = st.one_of(st.just(0.0), st.floats(0.0, 3.0))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Orders, PipelineTimes]:
    """Anything that the planner could ask about: a smaller last micro-batch, reductions in lanes, ties."""
    stages = draw(st.integers(1, 6))
    split = draw(st.booleans())
    flags = draw(st.tuples(*[st.booleans()] * stages))
    name = draw(st.sampled_from([name for name in NAMES if splits(name) == split]))
    orders = name_orders(name, stages=stages, microbatches=draw(st.integers(1, 10)), recompute=flags)
    smaller = draw(st.one_of(st.just(1.0), st.floats(0.1, 1.0)))
    reduces = draw(st.booleans())
    times, ways = [], []
    for _ in range(stages):
        each = draw(st.tuples(seconds, seconds, seconds, seconds, seconds))
        shares = sorted(draw(st.lists(st.floats(0.0, 1.0), max_size=3)))
        buckets = tuple((share, draw(maybe)) for share in [*shares, 1.0]) if reduces else ()
        last = tuple(smaller * second for second in each)
        times.append(StageTimes(each, last, (0.0,) * 5, buckets, draw(maybe)))  # type: ignore[arg-type]
    for stage in range(2 * (stages - 1)):
        sending = draw(maybe)
        sender = times[stage % stages]
        leaving = draw(st.floats(0.0, 1.0)) * min(*sender.seconds, *sender.last_seconds)
        ways.append(LinkTimes(sending, smaller * sending, draw(maybe), 0.0, min(leaving, smaller * 0.01)))
    pipeline = PipelineTimes(
        tuple(times),
        tuple(ways[: stages - 1]),
        tuple(ways[stages - 1 :]),
        (draw(st.floats(0.0, 1.0)),) * (stages - 1),
        draw(st.one_of(st.just(()), st.tuples(*[st.integers(0, 2)] * stages))),
        draw(st.one_of(st.just(()), st.just((TiedStages((0, stages - 1), 0.7),) if stages > 1 else ()))),
        draw(maybe),
        draw(st.booleans()),
    )
    return orders, pipeline


@given(layouts())
def test_no_simulation_takes_less_than_the_bound(layout: tuple[Orders, PipelineTimes]) -> None:
    orders, pipeline = layout
    least, bare = least_seconds(orders, pipeline)
    assert bare <= least <= simulate(orders, [pipeline]).seconds * (1 + 1e-9)
    nothing_to_reduce = tuple(stage._replace(buckets=()) for stage in pipeline.stages)
    assert least_seconds(orders, pipeline._replace(stages=nothing_to_reduce)) == (bare, bare)


@given(st.integers(1, 8), st.integers(1, 30), st.sampled_from(["gpipe", "1f1b", "varuna"]))
def test_for_equal_stages_the_bound_is_what_they_take(stages: int, microbatches: int, name: str) -> None:
    one = StageTimes((1.0, 0.0, 2.0, 0.0, 0.0), (1.0, 0.0, 2.0, 0.0, 0.0))
    ways = (LinkTimes(0.0, 0.0),) * (stages - 1)
    orders = name_orders(name, stages=stages, microbatches=microbatches)
    bound, _ = least_seconds(orders, PipelineTimes((one,) * stages, ways, ways))
    assert abs(bound - 3 * (microbatches + stages - 1)) < 1e-9
