"""Hooks run on the gradient of the global batch or are refused by name, the same in both interfaces."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pyrannc import RaNNCModule
from tests.pool import Pool
from tests.train.faces import FACES, LAYOUTS, check_state, play
from varuna import CutPoint, Varuna, opaque
from varuna.errors import CaptureError

Run = Callable[[int], float]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.cut = nn.Linear(6, 6), nn.Linear(6, 6), CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cut(torch.tanh(self.first(x)))).square().mean()


def sign(gradient: Tensor) -> Tensor:
    """Differs for a sum and for its parts."""
    return gradient.sign() * 0.01


def clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.02, 0.02)


class Hooked(Net):
    """The hooks are registered before the model is wrapped."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.first, self.last):
            layer.weight.register_hook(sign)
            layer.bias.register_post_accumulate_grad_hook(clamp)


def accumulate(model: Any, optimizer: torch.optim.Optimizer, run: Run) -> None:
    for step in range(6):
        run(step)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def register_later(model: Any, optimizer: torch.optim.Optimizer, run: Run) -> None:
    """Register hooks after the first step, remove them before the last; one updates in the backward."""
    run(0)
    optimizer.step()
    optimizer.zero_grad()
    handles = [p.register_hook(sign) for name, p in model.named_parameters() if name.endswith("bias")]

    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for name, p in model.named_parameters():
        if name == "last.weight":
            handles.append(p.register_post_accumulate_grad_hook(update))
    for step in range(1, 4):
        run(step)
        optimizer.step()
        optimizer.zero_grad()
    for handle in handles:
        handle.remove()
    run(4)
    optimizer.step()


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("depth", "width"), LAYOUTS)
def test_hooks_of_parameters_see_the_gradient_of_the_global_batch(
    pool: Pool, face: str, depth: int, width: int
) -> None:
    """EXA-6: before and after wrapping, with accumulation, and removed again."""
    for make, script in ((Hooked, accumulate), (Net, register_later)):
        _, expected = play("plain", 1, 1, make, script)
        for _, state in pool.run(play, depth * width, face, depth, width, make, script):
            check_state(state, expected, script.__name__)


class Looking(nn.Module):
    """An embedding with options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(9, 6, **options), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embed(x)).square().mean()


class Drawing(Net):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw
        self.own = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.draw())


class DrawingOwn(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        return Net.forward(self, x * self.own.random())


def hooked_module() -> nn.Module:
    model = Net()
    model.last.register_full_backward_hook(lambda *_: None)
    return model


def hooked_before() -> nn.Module:
    model = Net()
    model.first.register_full_backward_pre_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (hooked_module, r"the module 'last' \(Linear\) has a backward hook"),
        (hooked_before, r"the module 'first' \(Linear\) has a backward hook"),
        (lambda: Looking(max_norm=1.0), "an embedding with max_norm changes its weight"),
        (lambda: Looking(scale_grad_by_freq=True), "an embedding with scale_grad_by_freq=True"),
        (lambda: Drawing(lambda: float(np.random.rand())), "draws random numbers from numpy.random"),
        (lambda: Drawing(random.random), "draws random numbers from Python's random"),
        (lambda: DrawingOwn(float), "draws random numbers from the generator 'own' of DrawingOwn"),
    ],
)
def test_what_a_captured_model_cannot_do_is_refused_by_name(
    face: str, make: Callable[[], nn.Module], message: str
) -> None:
    """EXA-6: with the same message in both interfaces."""
    model = make()
    x = torch.randint(0, 9, (4, 6)) if isinstance(model, Looking) else torch.randn(4, 6)
    with pytest.raises(CaptureError, match=message):
        if face == "varuna":
            Varuna(model, "0;", {"x": x}, 4, 2, device="cpu")
        else:
            RaNNCModule(model, device="cpu")(x)


def test_a_module_hook_that_is_registered_later_is_refused_too() -> None:
    """EXA-6"""
    wrapped = RaNNCModule(Net(), device="cpu")
    wrapped(torch.randn(4, 6))
    handle = wrapped.last.register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="has a backward hook"):
        wrapped(torch.randn(4, 6))
    handle.remove()
    wrapped(torch.randn(4, 6)).backward()


class Whole(nn.Module):
    def __init__(self, calls: list[int]) -> None:
        super().__init__()
        self.inner = opaque(nn.Linear(6, 6))
        self.inner.register_full_backward_hook(lambda *_: calls.append(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


@pytest.mark.parametrize("face", FACES)
def test_an_opaque_module_keeps_its_hooks(face: str) -> None:
    """EXA-6: the way out that the refusal offers; once for each micro-batch."""
    calls: list[int] = []
    x = torch.randn(4, 6)
    if face == "varuna":
        wrapped: Any = Varuna(Whole(calls), "0;", {"x": x}, 4, 2, device="cpu")
        wrapped.set_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.0))
        calls.clear()  # the check of the capture runs the model, too
        wrapped.step({"x": x})
        assert len(calls) == 2
    else:
        wrapped = RaNNCModule(Whole(calls), device="cpu", pipeline_num=1)
        wrapped(x).backward()
        assert calls
