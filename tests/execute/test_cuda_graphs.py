"""Recorded stages train like unrecorded ones; tested with a recorder of CPU operations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.execute.recorded_calls import recorders, train_replayed
from tests.pool import Pool
from tests.tasks import compare, logged, train_plainly
from varuna import Varuna
from varuna.execute.step.cuda_graphs import MAX_FORMS, GraphedStage, Recording
from varuna.schedule import NAMES

F64 = {"rtol": 1e-10, "atol": 1e-12}


@pytest.mark.parametrize(("depth", "width", "chunk"), [(1, 1, 3), (2, 1, 3), (3, 1, 1), (1, 2, 2), (2, 2, 1)])
@pytest.mark.parametrize("name", ["GPT", "Odd", "Reused", "Shared"])
def test_replayed_stages_train_as_one_process(
    pool: Pool, name: str, depth: int, width: int, chunk: int
) -> None:
    """V14: ties, skips, inputs that are not tensors, a smaller last micro-batch."""
    expected = train_plainly(name, batch=8, dtype=torch.float64)
    options = {"batch": 8, "chunk": chunk, "recompute": False, "dtype": torch.float64}
    for found, num_recorded in pool.run(train_replayed, depth * width, name, depth, width, **options):
        compare(found, expected, **F64)
        assert num_recorded > 0


@pytest.mark.parametrize("schedule", NAMES)
def test_replayed_under_every_schedule(pool: Pool, schedule: str) -> None:
    """V19: at most as many recordings as held micro-batches."""
    options = {"schedule": schedule, "batch": 12, "chunk": 1, "recompute": False, "dtype": torch.float64}
    expected = train_plainly("GPT", batch=12, dtype=torch.float64)
    for found, num_recorded in pool.run(train_replayed, 4, "GPT", 2, 2, **options):
        compare(found, expected, **F64)
        assert 0 < num_recorded <= found["most_held"]


@pytest.mark.parametrize("depth", [1, 2])
def test_buffers_that_a_replayed_forward_changes(pool: Pool, depth: int) -> None:
    """V12: recording changes no buffer."""
    expected = train_plainly("Conv", batch=8, chunk=2, dtype=torch.float64)
    options = {"batch": 8, "chunk": 2, "recompute": False, "dtype": torch.float64}
    for found, num_recorded in pool.run(train_replayed, depth, "Conv", depth, 1, **options):
        compare(found, expected, **F64)
        assert num_recorded > 0


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    layout=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
    batches=st.lists(st.integers(2, 9), min_size=1, max_size=3),
    chunk=st.integers(1, 4),
    schedule=st.sampled_from(NAMES),
    recompute=st.booleans(),
    accumulate=st.sampled_from([1, 2]),
    evaluate_between=st.booleans(),
    clip=st.sampled_from([None, 0.05]),
)
def test_any_layout_replayed_is_the_same_training(
    pool: Pool, layout: tuple[int, int], batches: list[int], chunk: int, recompute: bool, **options: Any
) -> None:
    """V2, V10: batches of other sizes in between, and accumulated gradients."""
    depth, width = layout
    plain = {key: value for key, value in options.items() if key != "schedule"}
    plain |= {"batch": max(batches), "batches": batches, "steps": 4, "dtype": torch.float64}
    expected = train_plainly("GPT", **plain)
    options |= {"schedule": options["schedule"], "chunk": chunk, "recompute": recompute, **plain}
    for found, _ in pool.run(train_replayed, depth * width, "GPT", depth, width, **options):
        compare(found, expected, **F64)


# ---------------------------------------------------------------- changes between recordings


class Little(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, power: object = 2) -> Tensor:
        y = self.second(torch.tanh(self.first(x)))
        return (y**power).mean()  # type: ignore[operator, no-any-return]


Step = Callable[[], tuple[float, list[Tensor | None]]]


def make(model: nn.Module, *, graphs: bool, **inputs: object) -> tuple[Varuna, Step]:
    torch.manual_seed(0)
    x = torch.randn(8, 4, dtype=torch.float64)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    batch = {"x": x, **inputs}
    wrapped = Varuna(model.double(), "0", batch, 8, 2, device="cpu", from_cache=False, cuda_graphs=graphs)
    wrapped.set_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))

    def step() -> tuple[float, list[Tensor | None]]:
        wrapped.zero_grad()
        loss, _ = wrapped.step(batch)
        return loss, [None if p.grad is None else p.grad.clone() for p in wrapped.parameters()]

    return wrapped, step


def both(
    between: Callable[[Varuna], object], **inputs: object
) -> tuple[list[tuple[float, list[Tensor | None]]], int]:
    """Run steps before and after a change of the model, recorded and not; both must be equal."""
    plain, plain_step = make(Little(), graphs=False, **inputs)
    expected = [plain_step(), plain_step()]
    between(plain)
    expected += [plain_step(), plain_step()]
    with recorders() as made:
        wrapped, step = make(Little(), graphs=True, **inputs)
        found = [step(), step()]
        between(wrapped)
        found += [step(), step()]
    for (loss, gradients), (plain_loss, plain_gradients) in zip(found, expected, strict=True):
        assert loss == pytest.approx(plain_loss, rel=1e-12)
        for gradient, other in zip(gradients, plain_gradients, strict=True):
            assert (gradient is None) == (other is None)
            torch.testing.assert_close(gradient, other, **F64)  # type: ignore[arg-type]
    stage = wrapped._trainer.engine.stage
    assert isinstance(stage, GraphedStage) and stage.num_recorded == len(made)
    return found, len(made)


def test_one_recording_serves_all_micro_batches() -> None:
    assert both(lambda model: None)[1] == 1


def test_weights_that_have_moved_are_recorded_again() -> None:
    def move(model: Varuna) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5

    found, num_recorded = both(move)
    assert num_recorded == 2 and found[0][0] != found[-1][0]


def test_a_weight_that_is_frozen_later_has_no_gradient() -> None:
    found, num_recorded = both(lambda model: next(model.parameters()).requires_grad_(False))
    assert num_recorded == 2 and found[0][1][0] is not None and found[-1][1][0] is None


def test_hooks_of_weights_are_called() -> None:
    def hook(model: Varuna) -> None:
        next(model.parameters()).register_hook(lambda gradient: gradient * 3)

    found, num_recorded = both(hook)
    assert num_recorded == 1  # hooks run after the step's backwards, outside of the recording
    gradients = [step[1][0] for step in found]
    assert gradients[1] is not None and gradients[2] is not None
    torch.testing.assert_close(gradients[2], gradients[1] * 3, **F64)


def test_an_input_that_is_not_a_tensor_is_part_of_the_form() -> None:
    x = torch.ones(8, 4, dtype=torch.float64)
    with recorders() as made:
        wrapped, _ = make(Little(), graphs=True, power=2)
        found = [wrapped.step({"x": x, "power": power})[0] for power in (2, 3, 2, 3)]
    assert found[:2] == found[2:] and found[0] != found[1] and len(made) == 2


def test_recordings_of_the_most_recent_forms_are_kept() -> None:
    """V21: else sequences of ever new lengths would fill the device."""
    lengths = [*range(1, 11), 10, 9, 3, 1]
    batches = [torch.full((4, length, 4), 0.1 * length, dtype=torch.float64) for length in lengths]
    found = {}
    for graphs in (False, True):
        with recorders() as made:
            wrapped, _ = make(Little(), graphs=graphs)
            found[graphs] = [wrapped.step({"x": x})[0] for x in batches]
    stage = wrapped._trainer.engine.stage
    assert isinstance(stage, GraphedStage) and len(stage._free) == MAX_FORMS
    assert found[True] == found[False]
    assert len(made) == 10 + 1  # those of lengths 1 and 2 were gone


def test_a_step_that_fails_loses_no_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """V21: its recordings are free for the next step."""
    with recorders() as made:
        _, step = make(Little(), graphs=True)
        before = step()
        with monkeypatch.context() as patched:
            patched.setattr(Recording, "backward", lambda *_: torch.ones(2) @ torch.ones(3))
            with pytest.raises(RuntimeError, match="size"):
                step()
        after = step()
    assert len(made) == 1 and before[0] == after[0]
    torch.testing.assert_close(after[1], before[1], **F64)  # type: ignore[arg-type]


def test_gradients_that_are_not_cleared_add_up() -> None:
    """V14: although every step writes to the same address."""
    with recorders():
        wrapped, step = make(Little(), graphs=True)
        _, once = step()
        x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        wrapped.step({"x": x})
        added = [p.grad.clone() for p in wrapped.parameters() if p.grad is not None]
        wrapped.zero_grad()
        wrapped.step({"x": x})
        alone = [p.grad for p in wrapped.parameters()]
    for whole, first, second in zip(added, once, alone, strict=True):
        assert first is not None and second is not None
        torch.testing.assert_close(whole, first + second, **F64)  # type: ignore[arg-type]


def test_a_stage_that_recomputes_runs_unrecorded_and_logs_it(pool: Pool) -> None:
    (warnings, num_recorded), (warnings_last, num_recorded_last) = pool.run(recompute_replayed, 2)
    assert warnings == ["micro-batches run without CUDA graphs: they are recomputed"] and not num_recorded
    assert not warnings_last and num_recorded_last  # its backward follows its forward at once


def recompute_replayed() -> tuple[list[str], int]:
    with logged() as warnings:
        _, num_recorded = train_replayed("Plain", 2, 1, batch=4, chunk=2, recompute=True)
    return warnings, num_recorded


def test_what_cannot_be_recorded_runs_unrecorded(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(function: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    with recorders(refuse):
        _, step = make(Little(), graphs=True)
        found = [step() for _ in range(3)]
    _, plain_step = make(Little(), graphs=False)
    assert [loss for loss, _ in found] == [plain_step()[0] for _ in range(3)]
    assert caplog.text.count("run without CUDA graphs") == 1 and "not permitted" in caplog.text


class Drawing(Little):
    def forward(self, x: Tensor, power: object = 2) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5), power)


def test_a_stage_that_draws_runs_unrecorded_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    with recorders() as made:
        _, step = make(Drawing(), graphs=True)
        found = [step() for _ in range(3)]
    _, plain_step = make(Drawing(), graphs=False)
    assert [loss for loss, _ in found] == [plain_step()[0] for _ in range(3)]
    assert not made and caplog.text.count("without CUDA graphs: they draw random numbers") == 1
