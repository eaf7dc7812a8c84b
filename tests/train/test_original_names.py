"""Names and arguments of the original Varuna that change or show numbers, in any layout."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.tasks import stage_map
from tests.train.faces import BATCH, LAYOUTS, batch_of, check_state, play
from varuna import CutPoint, Varuna
from varuna.errors import WorkerError

Run = Callable[[int], float]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """Has a weight in two stages, and an attribute that a script may read."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 6}
        self.first, self.last, self.cut = Block(), Block(), CutPoint()
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.last(self.cut(self.first(x)))).square().mean()


def own_part(model: Any, x: Tensor) -> dict[str, Tensor]:
    return {"x": x.chunk(model.data_depth)[model.rank_within_stage]}


def three_values(model: Any, optimizer: torch.optim.Optimizer, run: Run) -> list[Any]:
    """Train as the original's examples do; the plain model takes its norm from torch."""
    seen: list[Any] = []
    for step, limit in enumerate([None, 0.1, math.inf]):
        x = batch_of(step)
        if isinstance(model, Varuna):
            loss, overflow, norm = model.step(own_part(model, x), limit, with_norm=True)
            assert not overflow
            status = model.get_status()
            assert status["average_loss"] == model.average_loss == loss
            assert (status["grad_norm"], status["iteration"]) == (norm, step + 1)
            evaluation = model.evaluate(own_part(model, x), BATCH)
            check_ragged_evaluation(model, x)
        else:
            plain_loss = model(x)
            plain_loss.backward()
            loss = float(plain_loss.detach())
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), math.inf if limit is None else limit))
            with torch.no_grad():
                evaluation = float(model(x))
        seen.append([loss, norm, evaluation])
        optimizer.step()
        model.zero_grad()
    return seen


def check_ragged_evaluation(model: Varuna, x: Tensor) -> None:
    """Evaluate three samples of each replica, with a batch size that is larger."""
    found = model.evaluate({"x": own_part(model, x)["x"][:3]}, batch_size=4)
    plain = Net()
    plain.load_state_dict(model.full_state_dict())
    with torch.no_grad():
        expected = float(plain(torch.cat([part[:3] for part in x.chunk(model.data_depth)])))
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("depth", "width"), LAYOUTS)
def test_three_values_of_a_step_and_evaluations_equal_one_process(pool: Pool, depth: int, width: int) -> None:
    """V13, V18: with_norm, average_loss, get_status and evaluate(batch, batch_size); with a tied weight."""
    expected, state = play("plain", 1, 1, Net, three_values)
    for found, own_state in pool.run(play, depth * width, "varuna", depth, width, Net, three_values):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        check_state(own_state, state)


def fewer_than_given(model: Any, optimizer: torch.optim.Optimizer, run: Run) -> str:
    with pytest.raises((ValueError, WorkerError)) as refusal:
        model.evaluate(own_part(model, batch_of(0)), batch_size=1)
    return str(refusal.value)


def test_a_batch_size_below_the_number_of_samples_is_refused(pool: Pool) -> None:
    """V18: the original evaluated the first samples only."""
    for message, _ in pool.run(play, 2, "varuna", 2, 1, Net, fewer_than_given):
        assert "evaluate was given 8 samples and batch_size=1" in message


def scales(depth: int, width: int) -> list[Any]:
    torch.manual_seed(0)
    mapping, sample = stage_map(depth, width), {"x": batch_of(0)[:2].float()}
    model = Varuna(Net(), mapping, sample, BATCH, 2, True, device="cpu", timeout_seconds=30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_optimizer(optimizer, loss_scale="dynamic", init_loss_scale=2.0**24, min_loss_scale=None)
    seen: list[Any] = []
    for step in range(12):
        scale = model.get_loss_scale()
        loss, overflow, norm = model.step(own_part(model, batch_of(step % 3).float()), with_norm=True)
        if not overflow:
            optimizer.step()
        model.zero_grad()
        seen.append([scale, overflow, loss, norm if math.isfinite(norm) else 0.0])
    model.close()
    return seen


def test_the_initial_loss_scale_overflows_at_the_same_steps_in_every_layout(pool: Pool) -> None:
    """V14: init_loss_scale and min_loss_scale=None."""
    (expected,) = pool.run(scales, 1, 1, 1)
    overflows = [overflow for _, overflow, *_ in expected]
    assert expected[0][0] == 2.0**24
    assert overflows[0] and not overflows[-1]
    assert expected[-1][0] == 2.0 ** (24 - sum(overflows))
    for depth, width in LAYOUTS:
        for found in pool.run(scales, depth * width, depth, width):
            assert [values[:2] for values in found] == [values[:2] for values in expected]
            torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def look_inside(model: Any, optimizer: torch.optim.Optimizer, run: Run) -> dict[str, Any]:
    """Read and use the names of the original; `model.model.module` holds this stage's own parameters."""
    run(0)
    unwrapped = model.model
    while hasattr(unwrapped, "module"):
        unwrapped = unwrapped.module
    assert model.partitioned_model is model.model
    assert model.to(model.device) is model.cpu() is model.double() is model
    held = dict(unwrapped.named_parameters(remove_duplicate=False))
    assert held.keys() == dict(model.named_parameters(remove_duplicate=False)).keys()
    assert all(held[name] is parameter for parameter, name in model.parameter_names.items())
    assert model.optimizer is optimizer
    for refused in (lambda: unwrapped(batch_of(0)), model.half, lambda: model.to("meta"), model.model):
        with pytest.raises(RuntimeError):
            refused()
    for change in (
        lambda: setattr(unwrapped.first, "scale", 2.0),
        lambda: setattr(unwrapped.last.linear, "weight", nn.Parameter(torch.ones(6, 6))),
        unwrapped.eval,
        unwrapped.half,
        lambda: unwrapped.first.register_forward_hook(print),
    ):
        with pytest.raises(RuntimeError, match="no effect on the training"):
            change()
    assert isinstance(unwrapped.last.linear, nn.Linear)
    with pytest.raises(AttributeError, match=r"model\.plan\.schedule"):
        model.schedule  # noqa: B018 - the access itself
    for parameter in unwrapped.last.parameters():  # freezes the stage that holds it
        parameter.requires_grad_(False)
    run(1)
    optimizer.step()
    return {"rank": model.rank, "width": unwrapped.config["width"], "held": sorted(held)}


def freeze_plainly(model: Any, optimizer: torch.optim.Optimizer, run: Run) -> None:
    run(0)
    model.last.requires_grad_(False)
    run(1)
    optimizer.step()


def test_the_model_inside_holds_the_parameters_that_train(pool: Pool) -> None:
    """V18, EXA-4: model.model, rank, parameter_names, optimizer, and to() where nothing changes."""
    _, expected = play("plain", 1, 1, Net, freeze_plainly)
    found = pool.run(play, 2, "varuna", 2, 1, Net, look_inside)
    assert [result["rank"] for result, _ in found] == [0, 1]
    assert all(result["width"] == 6 for result, _ in found)
    first, second = (result["held"] for result, _ in found)
    assert "last.linear.weight" in second and "last.linear.weight" not in first
    check_state(found[0][1], expected)


def test_the_sample_has_the_names_of_all_versions() -> None:
    """V4: `dummy_inputs` and `get_batch_fn`, by position or by name, with or without a device."""

    def get_batch(size: int, device: Any = None) -> dict[str, Tensor]:
        return {"x": torch.randn(size, 6, device=device)}

    sizes: Any = {"batch_size": 4, "chunk_size": 2, "device": "cpu"}
    named: Any = {"model": Net(), "stage_to_rank_map": "0;", **sizes}
    for wrapped in (
        Varuna(Net(), "0;", get_batch, 4, 2, device="cpu"),
        Varuna(Net(), "0;", get_batch_fn=get_batch, **sizes),
        Varuna(**named, get_batch_fn=lambda size: get_batch(size)),
        Varuna(**named, dummy_inputs=get_batch(2)),
    ):
        wrapped.set_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))
        assert wrapped.step(get_batch(4))[0] > 0
        wrapped.close()
    with pytest.raises(TypeError, match="both sample inputs and get_batch_fn"):
        Varuna(Net(), "0;", get_batch, 4, 2, get_batch_fn=get_batch)  # type: ignore[call-arg]
