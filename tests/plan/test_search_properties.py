"""Relations between the results of searches: more memory, more devices, other names, other units."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.profiles import GB, MB, NONE, link, machines, profile, reductions, segment
from varuna.errors import PlanError
from varuna.plan.cost.forecast import forecast_plan
from varuna.plan.plan_file import check_plan
from varuna.plan.search.search import UNEVEN_GAIN, Ranking, search
from varuna.types import (
    Cluster,
    CutCost,
    Dim,
    Duration,
    LinkCost,
    Machine,
    OptimizerCost,
    Overheads,
    Profile,
    SegmentCost,
    TieCost,
)

FIXED_ORDER = ("1f1b", "gpipe")
"""Schedules whose step never becomes shorter if some instruction takes longer."""
EVEN = {"microbatch_sizes": (1, 2, 4), "schedules": FIXED_ORDER}
"""Options with which the search tries only equal numbers of replicas."""


@st.composite
def kinds(draw: st.DrawFn) -> SegmentCost:
    return segment(
        draw(st.integers(1, 20)) * 5e-4,
        fixed=draw(st.sampled_from([0.0, 1e-3])),
        parameter_bytes=draw(st.integers(1, 40)) * MB,
        activation_bytes=draw(st.integers(1, 40)) * MB,
        working_bytes=draw(st.integers(0, 8)) * MB,
    )


@st.composite
def models(draw: st.DrawFn, most_segments: int = 4) -> Profile:
    some = draw(st.lists(kinds(), min_size=1, max_size=3))
    count = draw(st.integers(1, most_segments))
    dims = st.builds(Dim, st.integers(1, 64).map(lambda n: n << 14), st.just(0))
    return profile(
        some,
        [draw(st.integers(0, len(some) - 1)) for _ in range(count)],
        cuts=tuple(CutCost(draw(dims), draw(dims)) for _ in range(count - 1)),
        within=link(1e-6, draw(st.sampled_from([1e9, 1e11]))),
        between=link(1e-5, draw(st.sampled_from([1e8, 1e10]))),
        reduce_costs=reductions(draw(st.sampled_from([1e9, 1e11])), between=False)
        + reductions(draw(st.sampled_from([1e8, 1e10])), between=True),
    )


batches = st.integers(1, 24)
small_memory = st.integers(4, 24).map(lambda n: n * 64 * MB)


def seconds_or_none(model: Profile, cluster: Cluster, batch: int, **options: object) -> float | None:
    try:
        found = search(model, cluster, batch_size=batch, **options)  # type: ignore[arg-type]
    except PlanError as error:
        assert "no layout fits" in str(error)
        return None
    return found.best.forecast.seconds


def assert_no_slower(before: float | None, after: float | None, *, tolerance: float = 1e-9) -> None:
    if before is not None:
        assert after is not None and after <= before * (1 + tolerance)


# ---------------------------------------------------------------- more of something


@settings(max_examples=20)
@given(models(), st.integers(1, 2), st.integers(1, 3), batches, small_memory, st.integers(0, 8))
def test_more_memory_is_never_slower(
    model: Profile, count: int, devices: int, batch: int, memory: int, more: int
) -> None:
    small, large = (
        machines(count, devices, memory_bytes=size) for size in (memory, memory + more * 128 * MB)
    )
    before, after = (seconds_or_none(model, cluster, batch, **EVEN) for cluster in (small, large))
    assert_no_slower(before, after)
    # Unequal replicas must gain 2 %, so that a better even layout may displace a slightly faster uneven one.
    before, after = (
        seconds_or_none(model, cluster, batch, schedules=FIXED_ORDER) for cluster in (small, large)
    )
    assert_no_slower(before, after, tolerance=UNEVEN_GAIN - 1 + 1e-9)


@settings(max_examples=20)
@given(models(), st.integers(1, 5), batches, small_memory, st.integers(1, 3))
def test_more_devices_on_a_machine_are_never_slower(
    model: Profile, devices: int, batch: int, memory: int, more: int
) -> None:
    """Devices that do not help are idle."""
    before, after = (
        seconds_or_none(model, machines(1, number, memory_bytes=memory), batch, **EVEN)
        for number in (devices, devices + more)
    )
    assert_no_slower(before, after)


@settings(max_examples=15)
@given(models(), st.integers(1, 4), batches, small_memory)
def test_more_choice_is_never_slower(model: Profile, devices: int, batch: int, memory: int) -> None:
    """Any depth against one, any micro-batch size against one, any schedule against one."""
    cluster = machines(1, devices, memory_bytes=memory)
    free = seconds_or_none(model, cluster, batch, microbatch_sizes=(1, 2, 4))
    restrictions: list[dict[str, object]] = [
        {"depths": [min(2, len(model.segments))]},
        {"microbatch_sizes": [2]},
        {"schedules": ["zero-bubble"]},
        {"recompute": True},
        {"recompute": False},
    ]
    for restriction in restrictions:
        bound = seconds_or_none(model, cluster, batch, **{"microbatch_sizes": (1, 2, 4), **restriction})
        assert_no_slower(bound, free)


@settings(max_examples=20)
@given(models(), st.integers(2, 5), batches)
def test_sharding_the_optimizer_never_makes_a_model_too_large(
    model: Profile, devices: int, batch: int
) -> None:
    for memory in (300 * MB, 500 * MB, 900 * MB):
        cluster = machines(1, devices, memory_bytes=memory)
        if seconds_or_none(model, cluster, batch, **EVEN) is not None:
            assert seconds_or_none(model, cluster, batch, shard_optimizer=True, **EVEN) is not None


# ---------------------------------------------------------------- the same case, written otherwise


@settings(max_examples=15)
@given(models(), st.integers(1, 3), st.integers(1, 2), batches, small_memory)
def test_names_of_machines_do_not_matter(
    model: Profile, count: int, devices: int, batch: int, memory: int
) -> None:
    cluster = machines(count, devices, memory_bytes=memory)
    renamed = Cluster(
        tuple(
            msgspec.structs.replace(machine, name=f"x{9 - i}") for i, machine in enumerate(cluster.machines)
        )
    )
    assert plans(model, cluster, batch) == plans(model, renamed, batch)


def plans(model: Profile, cluster: Cluster, batch: int) -> list[object]:
    try:
        found = search(model, cluster, batch_size=batch)
    except PlanError:
        return []
    return [(proposal.plan, proposal.forecast.seconds) for proposal in found.proposals]


unlike = st.permutations(
    [
        Machine("a", 1, GB, 1.0),
        Machine("b", 2, 80 * GB, 0.5),
        Machine("c", 2, 2 * GB, 0.8),
        Machine("d", 1, 80 * GB, 0.8),
    ]
)


@settings(max_examples=15)
@given(models(), unlike, st.integers(1, 4), batches)
def test_the_order_of_unequal_machines_does_not_matter(
    model: Profile, shuffled: list[Machine], count: int, batch: int
) -> None:
    chosen = shuffled[:count]
    in_order = sorted(chosen, key=lambda machine: machine.name)
    one, other = (seconds_or_none(model, Cluster(tuple(some)), batch, **EVEN) for some in (chosen, in_order))
    assert one == pytest.approx(other) if other is not None else one is None


def scaled(model: Profile, factor: float, *, only_compute: bool = False) -> Profile:
    """The profile of a machine that takes `factor` times as long for everything, or for computing."""

    def duration(of: Duration) -> Duration:
        return Duration(of.seconds * factor, of.spread * factor)

    def kind(of: SegmentCost) -> SegmentCost:
        names = ("forward", "forward_only", "backward", "backward_inputs", "backward_weights")
        sizes = tuple(
            msgspec.structs.replace(
                size,
                **{name: duration(getattr(size, name)) for name in names},
                entry_seconds=size.entry_seconds * factor,
            )
            for size in of.sizes
        )
        return msgspec.structs.replace(of, sizes=sizes)

    def one_link(of: LinkCost | None) -> LinkCost | None:
        if of is None:
            return None
        return LinkCost(
            tuple(
                msgspec.structs.replace(
                    message,
                    one_way=duration(message.one_way),
                    both_ways=duration(message.both_ways),
                    sender_seconds=message.sender_seconds * factor,
                    receiver_seconds=message.receiver_seconds * factor,
                )
                for message in of.messages
            )
        )

    made = msgspec.structs.replace(model, kinds=tuple(map(kind, model.kinds)))
    if only_compute:
        return made
    return msgspec.structs.replace(
        made,
        within=one_link(model.within),
        between=one_link(model.between),
        reductions=tuple(
            msgspec.structs.replace(cost, duration=duration(cost.duration)) for cost in model.reductions
        ),
        optimizer=OptimizerCost(
            model.optimizer.name,
            model.optimizer.fixed_seconds * factor,
            model.optimizer.seconds_per_element * factor,
            model.optimizer.state_bytes_per_element,
        ),
        overheads=Overheads(
            model.overheads.instruction_seconds * factor, model.overheads.step_seconds * factor
        ),
    )


@settings(max_examples=20)
@given(models(most_segments=5), st.integers(1, 2), st.integers(1, 3), batches, st.sampled_from([0.25, 4.0]))
def test_a_slower_clock_changes_the_time_and_not_the_plan(
    model: Profile, count: int, devices: int, batch: int, factor: float
) -> None:
    """The factor is a power of two, so that no rounding differs."""
    cluster = machines(count, devices)
    before = search(model, cluster, batch_size=batch).best
    after = search(scaled(model, factor), cluster, batch_size=batch).best
    assert after.plan == before.plan
    assert after.forecast.seconds == pytest.approx(before.forecast.seconds * factor)


def test_a_slower_clock_does_not_change_the_plan_of_a_long_model() -> None:
    """Where cuts are too many to try, and stages have unequal replicas."""
    some = [segment(2e-3, parameter_bytes=MB), segment(1e-3, parameter_bytes=GB // 4)]
    model = profile(some, [0] * 12 + [1] * 12, cut_bytes=64, overheads=Overheads(1e-5, 1e-4))
    cluster = machines(3, 2, memory_bytes=4 * GB)
    before = search(model, cluster, batch_size=48).best
    after = search(scaled(model, 4.0), cluster, batch_size=48).best
    assert after.plan == before.plan
    assert after.forecast.seconds == pytest.approx(4 * before.forecast.seconds)


@settings(max_examples=20)
@given(models(), st.integers(1, 4), batches)
def test_devices_of_twice_the_speed_equal_a_profile_of_half_the_time(
    model: Profile, devices: int, batch: int
) -> None:
    model = msgspec.structs.replace(model, overheads=NONE)
    fast = search(model, machines(1, devices, speed=2.0), batch_size=batch).best
    short = search(scaled(model, 0.5, only_compute=True), machines(1, devices), batch_size=batch).best
    assert fast.plan == short.plan
    assert fast.forecast.seconds == pytest.approx(short.forecast.seconds)


@settings(max_examples=20)
@given(models(), st.integers(1, 4), batches, st.integers(4, 24))
def test_headroom_equals_less_memory(model: Profile, devices: int, batch: int, memory: int) -> None:
    whole, rest = memory * 64 * MB, memory * 48 * MB
    options = {"batch_size": batch}
    try:
        expected = search(model, machines(1, devices, memory_bytes=rest), **options).proposals
    except PlanError:
        with pytest.raises(PlanError, match="no layout fits"):
            search(model, machines(1, devices, memory_bytes=whole), headroom=0.25, **options)
        return
    found = search(model, machines(1, devices, memory_bytes=whole), headroom=0.25, **options).proposals
    assert [(p.plan, p.forecast) for p in found] == [(p.plan, p.forecast) for p in expected]


# ---------------------------------------------------------------- every proposal can be run


def check_ranking(model: Profile, cluster: Cluster, batch: int, ranking: Ranking) -> None:
    """Stages cover the segments, ranks and idle devices cover the cluster, and stages fit in memory."""
    names = {f"{machine.name}:{device}" for machine in cluster.machines for device in range(machine.devices)}
    seconds = [proposal.forecast.seconds for proposal in ranking.proposals]
    assert seconds == sorted(seconds)
    for proposal in ranking.proposals:
        plan = proposal.plan
        check_plan(plan, "the plan")
        assert plan.stages[-1].stop == len(model.segments)
        assert plan.batch_size == batch and (plan.precision, plan.fingerprint) == (
            model.precision,
            model.fingerprint,
        )
        assert set(proposal.idle) <= names and len(set(proposal.idle)) == len(proposal.idle)
        assert len(plan.ranks) + len(proposal.idle) == cluster.num_devices
        idle = [index for index, name in enumerate(in_order(cluster)) if name in proposal.idle]
        forecast, _ = forecast_plan(model, cluster, plan, idle=idle)
        assert forecast.seconds == pytest.approx(proposal.forecast.seconds)
        assert forecast.stages == proposal.forecast.stages
        used = [index for index in range(cluster.num_devices) if index not in idle]
        owner = [machine for machine in cluster.machines for _ in range(machine.devices)]
        for stage, cost in zip(plan.stages, proposal.forecast.stages, strict=True):
            assert cost.memory.total <= min(owner[used[rank]].memory_bytes for rank in stage.ranks)
            assert cost.seconds == pytest.approx(proposal.forecast.seconds)


def in_order(cluster: Cluster) -> list[str]:
    return [f"{machine.name}:{device}" for machine in cluster.machines for device in range(machine.devices)]


some_machines = st.lists(
    st.builds(
        Machine,
        st.just(""),
        st.integers(1, 3),
        st.sampled_from([500 * MB, 2 * GB]),
        st.sampled_from([1.0, 0.5]),
        st.integers(1, 2),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=20)
@given(models(), some_machines, batches)
def test_every_proposal_covers_the_model_and_fits(
    model: Profile, some: Sequence[Machine], batch: int
) -> None:
    cluster = Cluster(tuple(msgspec.structs.replace(machine, name=f"m{i}") for i, machine in enumerate(some)))
    try:
        ranking = search(model, cluster, batch_size=batch, every_depth=True)
    except PlanError as error:
        assert "no layout fits" in str(error) and "needs" in str(error)
        return
    check_ranking(model, cluster, batch, ranking)
    depths = [proposal.plan.depth for proposal in ranking.proposals if not proposal.plan.uneven]
    assert len(set(depths)) == len(depths)


@pytest.mark.parametrize(
    ("count", "devices", "batch"), [(1, 8, 32), (2, 3, 48), (5, 4, 100)], ids=["8", "2x3", "5x4"]
)
def test_every_proposal_for_a_long_model_covers_it_and_fits(count: int, devices: int, batch: int) -> None:
    """Where cuts are too many to try."""
    some = [
        segment(1e-3, parameter_bytes=64 * MB, activation_bytes=8 * MB),
        segment(3e-3, fixed=1e-3, parameter_bytes=32 * MB, activation_bytes=32 * MB),
    ]
    model = profile(some, [0, *[0, 1, 1] * 6, 0], ties=(TieCost((0, 19), 16 * MB, 4 * MB),))
    cluster = machines(count, devices, memory_bytes=GB)
    check_ranking(model, cluster, batch, search(model, cluster, batch_size=batch, every_depth=True))
