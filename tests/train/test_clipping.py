"""torch's gradient clipping is right over stages, in both interfaces."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from tests.pool import Pool
from tests.train.faces import FACES, LAYOUTS, check_state, play
from varuna import CutPoint
from varuna.execute.update import clipping
from varuna.execute.update.clipping import ModelNorm

Run = Callable[[int], float]


class Tied(nn.Module):
    """Two halves that share a weight, of which the first has larger gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut, self.middle, self.last = (
            nn.Linear(6, 6),
            CutPoint(),
            nn.Linear(6, 6),
            nn.Linear(6, 6),
        )
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(torch.tanh(3 * self.first(x)))
        return self.last(torch.tanh(self.middle(x))).square().mean()


class Bare(nn.Module):
    """The second half has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.cut = nn.Linear(6, 6), nn.Linear(6, 6), CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.cut(self.second(torch.tanh(self.first(x))))).square().mean()


def clip_in_each_manner(model: Any, optimizer: torch.optim.Optimizer, run: Run) -> list[float]:
    """The functions are imported before the model is wrapped."""
    norms: list[float] = []
    for step, (norm_type, foreach) in enumerate(
        [(2.0, None), (1, True), (math.inf, False), (3.0, None), (2, None)]
    ):
        run(step)
        if step < 3:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type, foreach=foreach)
        elif step == 3:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = get_total_norm(gradients, norm_type, error_if_nonfinite=True)
            clip_grads_with_norm_(model.parameters(), 0.02, norm)
        else:
            clip_grad_value_(model.parameters(), 0.01)
            norm = clip_grad_norm_(
                [p for p in model.parameters() if p.dim() == 2], 0.03, error_if_nonfinite=True
            )
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def clip_one_layer(model: Any, optimizer: torch.optim.Optimizer, run: Run) -> list[float]:
    """Only one stage has these parameters; all ranks call the function."""
    norms = []
    for step in range(3):
        run(step)
        part = [p for name, p in model.named_parameters() if name.startswith("middle")]
        norms.append(float(clip_grad_norm_(part, 0.01)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def clip_after_overflow(model: Any, optimizer: torch.optim.Optimizer, run: Run) -> list[str]:
    run(0)
    for name, parameter in model.named_parameters():
        if name == "middle.bias" and parameter.grad is not None:
            parameter.grad.fill_(math.inf)
    found = [str(float(clip_grad_norm_(model.parameters(), math.inf)))]
    try:
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        found.append(
            "refused" if "non-finite" in str(error) or "cannot be clipped" in str(error) else str(error)
        )
    optimizer.zero_grad()
    return found


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("depth", "width"), LAYOUTS)
def test_torchs_clipping_uses_the_norm_of_the_whole_model(
    pool: Pool, face: str, depth: int, width: int
) -> None:
    """EXA-3: norms 1, 2, 3 and infinity, ties counted once, some layers, stages without parameters."""
    for make, script in (
        (Tied, clip_in_each_manner),
        (Bare, clip_in_each_manner),
        (Tied, clip_one_layer),
        (Tied, clip_after_overflow),
    ):
        norms, state = play("plain", 1, 1, make, script)
        for found, its_state in pool.run(play, depth * width, face, depth, width, make, script):
            if script is clip_after_overflow:
                assert found == norms == ["inf", "refused"]
                continue
            torch.testing.assert_close(found, norms, rtol=1e-9, atol=0)
            check_state(its_state, state, f"{make.__name__}, {script.__name__}")


def clip_a_plain_module(model: Any, optimizer: torch.optim.Optimizer, run: Run) -> list[float]:
    run(0)
    other = nn.Linear(6, 6)
    other(torch.ones(2, 6)).sum().backward()
    norms = [float(clip_grad_norm_(other.parameters(), 1.0)), float(get_total_norm([torch.full((3,), 2.0)]))]
    both = clip_grad_norm_([*model.parameters(), *other.parameters()], 100.0)
    return [*norms, float(both)]


def test_other_modules_are_clipped_as_before(pool: Pool) -> None:
    """EXA-3: without any message; together with a wrapped model, their norm counts once."""
    expected, _ = play("plain", 1, 1, Tied, clip_a_plain_module)
    for face in FACES:
        for found, _ in pool.run(play, 2, face, 2, 1, Tied, clip_a_plain_module):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("face", FACES)
def test_a_sharded_optimizer_counts_each_parameter_once(pool: Pool, face: str) -> None:
    """EXA-3: each replica counts the parameters that it steps; `zero_grad` clears those of all."""
    expected, state = play("plain", 1, 1, Tied, clip_in_each_manner)
    options = {"shard_optimizer": True}
    for found, its_state in pool.run(play, 4, face, 2, 2, Tied, clip_in_each_manner, options):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
        check_state(its_state, state)


def test_a_list_of_an_earlier_layout_is_recognized_after_a_morph_that_was_abandoned() -> None:
    """HOT-4: else this rank would clip alone, and the others would wait for its norm."""
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    session: Any = SimpleNamespace(num_ranks=1, depth=2, closed=False)
    reducer: Any = SimpleNamespace(owned=None)
    last = ModelNorm(session, reducer, [first])
    ModelNorm(session, reducer, [first])  # of the layout that was abandoned: it is gone
    following = ModelNorm(session, reducer, [second])
    following.follow(last)
    assert clipping._find_model([first]) is following
    assert [id(one) for one in following.current([first])] == [id(second)]


def test_the_patch_finds_what_it_relies_on_in_torch() -> None:
    """torch 2.11 to 2.13: both functions call the one in their closure's cell `func`."""
    from torch.nn.utils import clip_grad

    assert get_total_norm is clip_grad._get_total_norm
    assert clip_grads_with_norm_ is clip_grad._clip_grads_with_norm_
    for function in (clip_grad._get_total_norm, clip_grad_norm_, clip_grad_value_):
        assert function.__code__.co_freevars == ("func",), f"torch {torch.__version__}: {function.__name__}"
