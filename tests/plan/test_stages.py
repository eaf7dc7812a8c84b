"""Stages with free replicas: as good as trying everything; nothing that does not fit."""

import random
from itertools import pairwise, product

import pytest

from tests.plan.profiles import GB, MB, machines, profile, segment
from varuna.errors import PlanError
from varuna.plan.cost.costs import Costs
from varuna.plan.cut.place import Ground
from varuna.plan.search.stages import NOTHING, Share, Table, stage
from varuna.types import Cluster, CutCost, Dim, Profile


def random_case(seed: int) -> tuple[Profile, Cluster, int, list[int]]:
    draw = random.Random(seed)
    segments = draw.randint(1, 8)
    kinds = [
        segment(
            draw.uniform(1e-4, 1e-2),
            sizes=(1, 2, 4, 8, 16),
            fixed=draw.choice([0.0, 1e-3]),
            parameter_bytes=draw.randint(1, 64) * MB,
            activation_bytes=draw.randint(1, 32) * MB,
        )
        for _ in range(segments)
    ]
    cuts = tuple(
        CutCost(Dim(draw.randint(1, 64) << 14, 0), Dim(draw.randint(1, 64) << 14, 0)) for _ in kinds[1:]
    )
    devices = draw.randint(1, 6)
    memory = draw.choice([80 * GB, draw.randint(300, 1500) * MB])
    cluster = machines(1, devices, memory_bytes=memory)
    if devices % 2 == 0 and draw.random() < 0.5:
        cluster = machines(2, devices // 2, memory_bytes=memory)
    batch = draw.randint(1, 16)
    return profile(kinds, range(segments), cuts=cuts), cluster, batch, draw.sample([1, 2, 3, 4, 8], 2)


def compositions(total: int, *, most: int) -> list[tuple[int, ...]]:
    """All ways to give some stages one device or more each, `total` at most."""
    if not most:
        return [()]
    return [
        own
        for count in range(1, most + 1)
        for own in product(range(1, total + 1), repeat=count)
        if sum(own) <= total
    ]


def every_layout(table: Table) -> list[tuple[Share, ...]]:
    found = []
    for replicas in compositions(table.devices, most=min(table.devices, table.segments)):
        after = [sum(replicas[s + 1 :]) for s in range(len(replicas))]
        for marks in product((False, True), repeat=table.segments - 1):
            if sum(marks) == len(replicas) - 1:
                bounds = [0, *(i + 1 for i, mark in enumerate(marks) if mark), table.segments]
                shares = [
                    table.share(first, stop, after[s], len(replicas) - 1 - s, replicas[s])
                    for s, (first, stop) in enumerate(pairwise(bounds))
                ]
                if None not in shares:
                    found.append(tuple(share for share in shares if share is not None))
    return found


def ticks(table: Table, shares: tuple[Share, ...]) -> float:
    front = NOTHING
    for share in reversed(shares):
        front = front.before(share)
    return table.ticks(front)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_the_best_plan_is_that_of_trying_everything(first: int) -> None:
    """R10: over cuts, replicas and micro-batches, with k up to 8 segments and W up to 6 devices."""
    for seed in range(first, first + 50):
        model, cluster, batch, numbers = random_case(seed)
        costs, ground = Costs(model), Ground(cluster)
        tables = [Table(costs, ground, batch, number) for number in numbers]
        seconds = [
            table.simulated(shares) for table in tables if table.sensible for shares in every_layout(table)
        ]
        if not seconds:
            with pytest.raises(PlanError, match="no plan"):
                stage(model, cluster, batch_size=batch, microbatches=numbers)
            continue
        found = stage(model, cluster, batch_size=batch, microbatches=numbers)
        assert found.seconds == pytest.approx(min(seconds), rel=1e-9), seed


def test_dynamic_programming_finds_the_best_of_each_depth() -> None:
    """R10: what serves where there are too many layouts to look at each, checked where there are few."""
    for seed in range(200):
        model, cluster, batch, numbers = random_case(seed)
        table = Table(Costs(model), Ground(cluster), batch, numbers[0])
        if not table.sensible:
            continue
        best: dict[int, float] = {}
        for shares in every_layout(table):
            seconds = ticks(table, shares)
            best[len(shares)] = min(best.get(len(shares), seconds), seconds)
        found = {len(some[0]): ticks(table, some[0]) for some in table.best_layouts() if some}
        assert found == pytest.approx(best), seed


def test_costs_of_three_to_one_on_four_devices_give_three_replicas_and_one() -> None:
    """R10: too large for one device, so there are two stages."""
    kinds = [
        segment(3e-3, sizes=(1, 2, 4, 8, 16, 32), parameter_bytes=GB, activation_bytes=0),
        segment(1e-3, sizes=(1, 2, 4, 8, 16, 32), parameter_bytes=GB, activation_bytes=0),
    ]
    model = profile(kinds, [0, 1], cut_bytes=64)
    found = stage(model, machines(1, 4, memory_bytes=6 * GB), batch_size=96, microbatches=[8, 16, 32])
    assert [len(s.ranks) for s in found.plan.stages] == [3, 1]
    assert sorted(rank for s in found.plan.stages for rank in s.ranks) == [0, 1, 2, 3]


def test_a_model_that_fits_is_one_stage_on_all_devices_without_recompute() -> None:
    """R10"""
    model = profile([segment(1e-2, sizes=(1, 2, 4, 8, 16), parameter_bytes=MB)], [0] * 6)
    found = stage(model, machines(1, 4), batch_size=32)
    assert len(found.plan.stages) == 1
    assert found.plan.stages[0].ranks == (0, 1, 2, 3) and not found.plan.stages[0].recompute


def test_stages_recompute_one_by_one_where_memory_asks_for_it() -> None:
    kinds = [
        segment(1e-3, sizes=(1, 2, 4), parameter_bytes=MB, activation_bytes=100 * MB),
        segment(1e-3, sizes=(1, 2, 4), parameter_bytes=200 * MB, activation_bytes=MB),
    ]
    model = profile(kinds, [0, 1], cut_bytes=64)
    found = stage(model, machines(1, 2, memory_bytes=900 * MB), batch_size=64, microbatches=[32, 64])
    assert [s.recompute for s in found.plan.stages] in ([True, False], [False, False], [False])
    tight = stage(model, machines(1, 2, memory_bytes=850 * MB), batch_size=64, microbatches=[16])
    assert all(isinstance(s.recompute, bool) for s in tight.plan.stages)


def test_where_nothing_fits_the_smallest_need_is_named() -> None:
    """R11"""
    model = profile([segment(1e-3, parameter_bytes=GB)], [0] * 4)
    with pytest.raises(PlanError, match=r"no plan fits: even one segment needs \d+ bytes, a device has"):
        stage(model, machines(1, 4, memory_bytes=GB), batch_size=4)


def test_a_large_case_is_planned_and_no_worse_than_equal_replicas() -> None:
    """R10: 24 segments on 8 devices: by dynamic programming."""
    model = profile(
        [segment(1e-3, sizes=(1, 2, 4, 8)), segment(4e-3, sizes=(1, 2, 4, 8))], [0] * 20 + [1] * 4
    )
    cluster = machines(1, 8)
    found = stage(model, cluster, batch_size=64, microbatches=[8, 16])
    for number in (8, 16):
        table = Table(Costs(model), Ground(cluster), 64, number)
        assert not table.has_few
        for depth in (1, 2, 4, 8):
            bounds = [24 * s // depth for s in range(depth + 1)]
            shares = table.shares(bounds, [8 * s // depth for s in range(depth + 1)])
            assert shares is not None
            assert found.seconds <= table.simulated(shares) * (1 + 1e-9)
