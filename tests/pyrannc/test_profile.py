"""Limits of the measurement before a layout is chosen: memory, time, and what is estimated instead."""

import logging
import random
from typing import Any

import pytest
import torch

from pyrannc import profile as module
from pyrannc.profile import (
    RUNS,
    SAMPLE_BYTES,
    MeasureRequest,
    TimedSweep,
    estimate_missing,
    first_samples,
    isolated_randomness,
)
from tests.measure.profiles import size_cost, subject
from tests.measure.virtual import VirtualClock
from varuna.measure.draft import new_draft
from varuna.plan.cost.estimate import Speed
from varuna.profile.driver import SizeResult
from varuna.types import Dim, Segment

CPU = torch.device("cpu")
SPEED = Speed(flops_per_second=1e9, bytes_per_second=1e9, seconds_per_operation=0.0, memory_bytes=1)
SEGMENTS = tuple(
    Segment(kind, (), (), 1, flops_per_sample=1e6, parameter_bytes=0, kept_bytes=Dim(1000, 0))
    for kind in range(2)
)


def sweep(monkeypatch: pytest.MonkeyPatch, *, available: int | None = None, **options: Any) -> TimedSweep:
    """A sweep at most 10 seconds long, on a clock that shows 0."""
    clock = VirtualClock()
    clock.now = options.pop("now", 0.0)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "available_bytes", lambda _: available)
    request = MeasureRequest((1, 2, 4), options.pop("seconds", 10.0), 3, SPEED, (1e-5, 1e9), (1e-4, 1e8))
    given = {"device": CPU, "ranks_on_machine": 1, "warns": True, "started": 0.0, **options}
    return TimedSweep(request, subject(), SEGMENTS, **given)


def needed_bytes(kind: int, size: int, held: int) -> int:
    """Weights, two gradients, and the activations of those held and two more."""
    weights = (400, 800)[kind]
    return 3 * weights + (held + 2) * 1000 * size


def test_a_chain_must_fit_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = sum(needed_bytes(kind, 4, held=2) for kind in range(2))  # three segments of two kinds: two held
    assert sweep(monkeypatch, available=needed).allows_chain(4)
    assert not sweep(monkeypatch, available=needed - 1).allows_chain(4)
    assert not sweep(monkeypatch, available=needed, ranks_on_machine=2).allows_chain(4)
    assert sweep(monkeypatch, available=None, seconds=1e9).allows_chain(1 << 20), "unknown memory is no limit"


def test_a_chain_must_fit_the_time_and_needs_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    # Forward and backward of both kinds take 3 x 1 ms each for every sample.
    expected = RUNS * sum(
        SPEED.seconds(segment, 4) + SPEED.backward_seconds(segment, 4) for segment in SEGMENTS
    )
    assert sweep(monkeypatch, seconds=1.001 * expected).allows_chain(4)
    assert not sweep(monkeypatch, seconds=0.999 * expected).allows_chain(4)
    assert not sweep(monkeypatch, device=torch.device("cuda")).allows_chain(1)


def test_a_kind_must_fit_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = new_draft(subject())
    limited = sweep(monkeypatch, available=needed_bytes(0, 4, held=1))
    assert limited.refuse_kind(0, 4, draft) is None
    why = limited.refuse_kind(1, 4, draft)
    assert why is not None and "MiB are available" in why


def test_the_time_of_a_kind_is_predicted_from_a_smaller_size(monkeypatch: pytest.MonkeyPatch) -> None:
    # At size 1 a forward and a backward take 0.03 s: about 0.42 s to measure, four times that at size 4.
    draft = new_draft(subject()).with_sizes({0: size_cost(1, 0.01)})
    seconds = RUNS * 0.03 * 4
    assert sweep(monkeypatch, now=10.0 - 1.001 * seconds).refuse_kind(0, 4, draft) is None
    assert sweep(monkeypatch, now=10.0 - 0.999 * seconds).refuse_kind(0, 4, draft) == (
        "it would have taken longer than 10 s"
    )
    assert sweep(monkeypatch, now=9.0).refuse_kind(1, 4, draft) is None, "never measured: unknown"
    assert sweep(monkeypatch, now=10.1).refuse_kind(1, 4, draft) is not None, "the time is over"


def result(left_out: dict[int, str] | None = None, elapsed: float = 0.0, **costs: float) -> SizeResult:
    found = {int(kind[1:]): size_cost(2, seconds) for kind, seconds in costs.items()}
    return SizeResult(found, None, left_out or {}, elapsed)


def test_a_sweep_ends_when_no_time_is_left_for_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, draft = sweep(monkeypatch), new_draft(subject())
    # Both kinds took 6 ms a run: 14 runs of each are expected again.
    draft, end = policy.record(draft, 2, result(k0=0.001, k1=0.001, elapsed=10.0 - 2 * RUNS * 0.0061))
    assert end is None and draft.measured_sizes() == [2]
    _, end = policy.record(draft, 2, result(k0=0.001, k1=0.001, elapsed=10.0 - 2 * RUNS * 0.0059))
    assert end is not None and "no time is left" in end
    _, end = policy.record(draft, 2, result(left_out={0: "no memory", 1: "no memory"}))
    assert end is not None, "nothing could be measured"


@pytest.mark.parametrize("warns", [True, False])
def test_what_is_left_out_is_noted_with_its_segments(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, warns: bool
) -> None:
    with caplog.at_level(logging.INFO, "pyrannc.measure"):
        draft, _ = sweep(monkeypatch, warns=warns).record(
            new_draft(subject()), 2, result(left_out={1: "no memory"}, k0=0.001)
        )
    (note,) = draft.notes
    assert note.why == "estimated: no memory" and note.about.startswith("segments 1")
    assert note.about.endswith("with micro-batches of 2")
    assert [record.levelname for record in caplog.records] == ["WARNING" if warns else "INFO"]


def test_a_kind_that_was_measured_at_another_size_is_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draft = new_draft(subject()).with_sizes({1: size_cost(1)})
    with caplog.at_level(logging.INFO, "pyrannc.measure"):
        sweep(monkeypatch).record(draft, 2, result(left_out={1: "no time"}, k0=0.001))
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_missing_sizes_are_estimated_and_measured_ones_stay() -> None:
    draft = new_draft(subject()).with_sizes({0: size_cost(1)}).with_sizes({0: size_cost(4)})
    whole = estimate_missing(draft, SEGMENTS)
    assert whole.measured_sizes() == [1, 4]
    assert whole.sizes[0] == draft.sizes[0]
    one, four = whole.sizes[1]
    assert one.forward.seconds < four.forward.seconds and four.activation_bytes > one.activation_bytes
    again = estimate_missing(whole, SEGMENTS)
    assert again == whole, "nothing is missing any more"


# ---------------------------------------------------------------- samples


def test_samples_repeat_if_there_are_too_few() -> None:
    x = torch.arange(3.0).reshape(3, 1)
    samples = first_samples({"x": x, "scale": 2.0, "table": torch.ones(5)}, {"x": 0}, most=8)
    assert samples.of(7)["x"].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert samples.of(2)["x"].flatten().tolist() == [0, 1]
    assert samples.of(2)["scale"] == 2.0 and len(samples.of(2)["table"]) == 5


def test_samples_are_few_and_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 100)
    samples = first_samples({"x": x}, {"x": 1}, most=8)
    assert samples.inputs.value["x"].shape == (4, 8)
    assert samples.inputs.value["x"].untyped_storage().nbytes() == 4 * 8 * 4, (
        "not the storage of the whole batch"
    )
    monkeypatch.setattr(module, "SAMPLE_BYTES", 3 * 4 * 4)
    assert first_samples({"x": x}, {"x": 1}, most=8).inputs.value["x"].shape == (4, 3)
    monkeypatch.setattr(module, "SAMPLE_BYTES", 1)
    assert first_samples({"x": x}, {"x": 1}, most=8).inputs.value["x"].shape == (4, 1), "at least one"
    assert SAMPLE_BYTES == 64 << 20


def test_measuring_draws_from_other_generators() -> None:
    random.seed(5)
    torch.manual_seed(5)
    expected = (random.random(), torch.rand(()).item())
    random.seed(5)
    torch.manual_seed(5)
    with torch.no_grad(), isolated_randomness(CPU):
        assert torch.is_grad_enabled()
        random.random()
        torch.rand(7)
    assert (random.random(), torch.rand(()).item()) == expected
