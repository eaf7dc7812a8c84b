"""Any layout, same training: losses, gradients and parameters equal one plain process's."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.pool import Pool
from tests.tasks import compare, train, train_plainly
from varuna.schedule import NAMES

F64 = {"rtol": 1e-10, "atol": 1e-12}
F32 = {"rtol": 1e-5, "atol": 1e-6}


@cache
def plain(name: str, **options: Any) -> dict[str, Any]:
    return train_plainly(name, **options)


LAYOUTS = [(1, 1, 3), (2, 1, 3), (3, 1, 8), (4, 1, 1), (1, 2, 2), (1, 3, 2), (2, 2, 1), (1, 4, 5)]


@pytest.mark.parametrize(("depth", "width", "chunk"), LAYOUTS)
@pytest.mark.parametrize("name", ["Plain", "GPT"])
def test_losses_gradients_and_parameters_equal_one_process(
    pool: Pool, name: str, depth: int, width: int, chunk: int
) -> None:
    """V2, V10, V11: batch 8 and 3 replicas, ragged micro-batches, M < P and m = 1 among them."""
    results = pool.run(train, depth * width, name, depth, width, batch=8, chunk=chunk, dtype=torch.float64)
    expected = plain(name, batch=8, dtype=torch.float64)
    for found in results:
        compare(found, expected, **F64)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", ["Odd", "Reused"])
def test_anything_crosses_a_cut(pool: Pool, name: str, depth: int) -> None:
    """V3, V12: several tensors, [s, b, h], integers, skips over stages, constants, None, a shared input."""
    found = pool.run(train, depth, name, depth, 1, batch=6, chunk=2, optimizer="adam")[0]
    compare(found, plain(name, batch=6, optimizer="adam"), **F32)


@pytest.mark.parametrize(("depth", "width"), [(1, 1), (3, 1), (1, 2), (2, 2)])
def test_an_opaque_module_branches_on_data_and_trains_exactly(pool: Pool, depth: int, width: int) -> None:
    """V7's way out: and a weight that no micro-batch used has no gradient, on any replica."""
    shared = {"batch": 8, "chunk": 1, "dtype": torch.float64, "optimizer": "adam"}
    found = pool.run(train, depth * width, "Branching", depth, width, **shared)[0]
    expected = plain("Branching", **shared)
    assert "fork.low.weight" in expected["gradients"] and "fork.high.weight" in expected["gradients"]
    assert "fork.never.weight" not in found["gradients"]
    compare(found, expected, **F64)


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("recompute", [False, True])
def test_every_schedule_gives_the_same_gradients(pool: Pool, schedule: str, recompute: bool) -> None:
    """V19, and two silent faults of peers: a split backward with replicas, and with tied weights."""
    options = {"schedule": schedule, "recompute": recompute, "batch": 12, "chunk": 1}
    for found in pool.run(train, 4, "GPT", 2, 2, dtype=torch.float64, **options):
        compare(found, plain("GPT", batch=12, dtype=torch.float64), **F64)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    layout=st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (2, 2), (1, 4)]),
    batch=st.integers(1, 11),
    chunk=st.integers(1, 6),
    schedule=st.sampled_from(NAMES),
    recompute=st.lists(st.booleans(), min_size=4, max_size=4),
    clip=st.sampled_from([None, 0.05, float("inf")]),
    accumulate=st.sampled_from([1, 2]),
)
def test_any_layout_is_the_same_training(
    pool: Pool,
    layout: tuple[int, int],
    batch: int,
    chunk: int,
    schedule: str,
    recompute: list[bool],
    clip: float | None,
    accumulate: int,
) -> None:
    """V2, V10, V11, V13, V19, B2: for all of them together; fewer samples than replicas included."""
    depth, width = layout
    shared = {"batch": batch, "steps": 2, "dtype": torch.float64, "accumulate": accumulate, "clip": clip}
    found = pool.run(
        train,
        depth * width,
        "Plain",
        depth,
        width,
        chunk=chunk,
        schedule=schedule,
        recompute=recompute[:depth],
        **shared,
    )[-1]
    expected = plain("Plain", **shared)
    compare(found, expected, **F64)
    if clip is not None:
        torch.testing.assert_close(found["norms"], expected["norms"], **F64)


def test_every_possible_depth_works_and_another_is_refused_with_the_range(pool: Pool) -> None:
    """V2: five segments give depths 1 to 5, not only divisors; no layer is lost."""
    for depth in (1, 3, 5):
        results = pool.run(train, depth, "Plain", depth, 1, batch=4, chunk=2, steps=1)
        names = [name for found in results for name in found["parameters"]]
        assert sorted(names) == sorted(results[0]["state"]) and len(names) == 10
    for message in pool.run(refused_depth, 6):
        assert "6 pipeline stages" in message and "1 to 5" in message


def refused_depth() -> str:
    with pytest.raises(ValueError) as refusal:
        train("Plain", 6, 1, batch=4, chunk=2)
    return str(refusal.value)


def test_several_steps_before_one_update_accumulate(pool: Pool) -> None:
    """V11, a silent fault of peers: the first contribution must not be reduced or scaled twice."""
    shared = {"batch": 6, "steps": 6, "accumulate": 3, "dtype": torch.float64}
    for depth, width in [(1, 2), (2, 2)]:
        found = pool.run(train, depth * width, "GPT", depth, width, chunk=2, **shared)[0]
        compare(found, plain("GPT", **shared), **F64)


def test_a_smaller_batch_between_full_ones_is_exact(pool: Pool) -> None:
    """V11, a silent fault of peers: stale rows of the larger batch."""
    shared = {"batch": 8, "batches": (8, 3, 7), "steps": 6, "dtype": torch.float64}
    for depth, width in [(2, 1), (1, 2), (2, 2)]:
        found = pool.run(train, depth * width, "GPT", depth, width, chunk=2, **shared)[0]
        compare(found, plain("GPT", **shared), **F64)


def test_link_delays_change_nothing_but_time(pool: Pool) -> None:
    """V20's exact half: random delays on every link."""
    found = pool.run(train, 4, "GPT", 4, 1, batch=12, chunk=1, dtype=torch.float64, link_delay=uneven_delay)[
        0
    ]
    compare(found, plain("GPT", batch=12, dtype=torch.float64), **F64)


def uneven_delay(message: int) -> float:
    return 0.004 * (message * 7 % 5)


def test_ties_stay_equal_to_the_bit(pool: Pool) -> None:
    """V6: over stages and replicas, found by itself."""
    for depth, width in [(1, 1), (2, 1), (4, 1), (2, 2)]:
        shared = {"batch": 8, "optimizer": "adam", "dtype": torch.float64}
        found = pool.run(train, depth * width, "GPT", depth, width, chunk=2, **shared)
        for result in found:
            assert torch.equal(result["state"]["embed.weight"], result["state"]["head.weight"])
        compare(found[0], plain("GPT", **shared), **F64)


def test_stages_may_be_tied_to_different_ones(pool: Pool) -> None:
    """V6: the first to the second and the second to the third, in two replicas; nobody waits in vain."""
    shared: dict[str, Any] = {"batch": 8, "dtype": torch.float64}
    found = pool.run(train, 6, "Paired", 3, 2, chunk=2, **shared)[0]
    compare(found, plain("Paired", **shared), **F64)


def test_held_microbatches_stay_within_the_bound(pool: Pool) -> None:
    """V19: activation memory per stage is bounded by the schedule, in the engine too."""
    from varuna.schedule import held

    for schedule in NAMES:
        results = pool.run(train, 3, "Plain", 3, 1, batch=20, chunk=1, steps=1, schedule=schedule)
        for stage, found in enumerate(results):
            assert 1 <= found["most_held"] <= held(schedule, stage=stage, stages=3, microbatches=20)
