"""Every way out that a refusal offers works: the model as changed by the message trains as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.capture.comparison import assert_same
from tests.capture.models import batch_of
from tests.capture.test_branches import Guarded, Only
from tests.capture.test_refusals import Layers, refusal
from varuna.capture import CutPoint, opaque


class Packs(nn.Module):
    """An LSTM over sequences of 1 to 3 steps of two features."""

    def __init__(self, *, whole: bool = True) -> None:
        super().__init__()
        self.inner = nn.LSTM(2, 2, num_layers=2, batch_first=True)
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        packed = pack_padded_sequence(x.view(-1, 3, 2), lengths.cpu(), batch_first=True, enforce_sorted=False)
        total = 3 if self.whole else None
        return pad_packed_sequence(self.inner(packed)[0], batch_first=True, total_length=total)[0].flatten(1)


class Penalty(nn.Module):
    """Adds the norm of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x))
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + gradient.norm(dim=1, keepdim=True)


class Gate(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h * 2 if h.sum() > 0 else h


class Root(nn.Module):
    """Branches in the outermost forward, or in a submodule."""

    def __init__(self, *, moved: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.gate = opaque(Gate()) if moved else None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        if self.gate is not None:
            h = self.gate(h)
        elif h.sum() > 0:
            h = h * 2
        return F.mse_loss(h, y)


class Doubles(nn.Module):
    """Changes its input, or a copy."""

    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.copies = copies

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.copies:
            x = x.clone()
        x.mul_(2)
        return F.mse_loss(self.first(x), y)


class Hooked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 3)
        return y


class Drops(nn.Module):
    """Skips its layer at random, by a draw that all samples share."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand([]) < self.probability:
            return x
        return self.layer(x)


class Looks(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 6, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(x.argmax(1) % 3)


class Wide(nn.Module):
    def __init__(self, *, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed

    def forward(self, x: Tensor) -> Tensor:
        return x.view(4 if self.fixed else -1, 2, 3).flatten(1)


class Iterates(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * 2 for row in x])


class Lists(nn.Module):
    """Makes a list of the rows; only joining them is known for any batch size."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        rows = list(x)
        if self.counts:
            return torch.stack([row * 2 for row in rows])
        return torch.cat(rows).view(-1, 6) + torch.stack(rows)


class Clamps(nn.Module):
    """Clamps its weight in forward, in several manners, or uses a clamped weight."""

    def __init__(self, manner: str) -> None:
        super().__init__()
        self.inner, self.manner = nn.Linear(6, 6), manner

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight
        if self.manner == "data":
            weight.data.clamp_(-0.1, 0.1)
        elif self.manner == "no_grad":
            with torch.no_grad():
                weight.mul_(0.5)
        elif self.manner == "set":
            weight.data = weight.data.clamp(-0.1, 0.1)
        elif self.manner == "item":
            with torch.no_grad():
                weight[0] = 1.0
        else:
            weight = weight.clamp(-0.1, 0.1) + 0 * self.inner.weight.data
        return F.linear(x, weight, self.inner.bias)


class Cuts(nn.Module):
    """Uses CutPoints wrongly, or as the refusals say."""

    def __init__(self, manner: str) -> None:
        super().__init__()
        self.inner, self.one, self.manner = nn.Linear(6, 6), CutPoint(), manner
        self.other = CutPoint() if manner == "separate" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.manner == "unused":
            return self.inner(x)
        h = self.one(self.inner(x) if self.manner != "nothing" else None)
        return (self.other or self.one)(h * 2) if self.manner in ("twice", "separate") else h


def scripted(module: nn.Module) -> nn.Module:
    return torch.jit.script(module)  # type: ignore[no-any-return,no-untyped-call]


def eager_between(between: nn.Module) -> nn.Module:
    return opaque(Layers(between), "between")


OPAQUE = 'varuna.opaque(model, "between")'
WAYS: dict[str, tuple[Callable[[], nn.Module], str, Callable[[], nn.Module]]] = {
    "branch": (lambda: Layers(Gate()), OPAQUE, lambda: eager_between(Gate())),
    "branch in the root": (
        lambda: Root(moved=False),
        "once you have moved these lines into a submodule",
        lambda: Root(moved=True),
    ),
    "packed": (lambda: Layers(Packs()), OPAQUE, lambda: eager_between(Packs())),
    "penalty": (lambda: Layers(Penalty()), OPAQUE, lambda: eager_between(Penalty())),
    "hook": (lambda: Layers(Hooked()), OPAQUE, lambda: eager_between(Hooked())),
    "input": (lambda: Doubles(copies=False), "x = x.clone()", lambda: Doubles(copies=True)),
    "iteration": (lambda: Layers(Iterates()), "iterates over the batch", lambda: eager_between(Iterates())),
    "list": (
        lambda: Layers(Lists(counts=True)),
        "Work on the whole tensor",
        lambda: Layers(Lists(counts=False)),
    ),
    "batch size": (
        lambda: Layers(Guarded(Tensor.tanh)),
        OPAQUE,
        lambda: eager_between(Guarded(Tensor.tanh)),
    ),
    "fixed batch": (
        lambda: Layers(Wide(fixed=True)),
        "remove the fixed batch size",
        lambda: Layers(Wide(fixed=False)),
    ),
    "scripted": (
        lambda: Layers(scripted(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))),
        "without torch.jit.script",
        lambda: Layers(nn.Sequential(nn.Linear(6, 6), nn.Tanh())),
    ),
    "layerdrop": (lambda: Layers(Drops(0.5)), "Set layerdrop to 0", lambda: Layers(Drops(0.0))),
    "layerdrop, opaque": (lambda: Layers(Drops(0.5)), OPAQUE, lambda: eager_between(Drops(0.5))),
    "sparse": (lambda: Layers(Looks(sparse=True)), "sparse=False", lambda: Layers(Looks(sparse=False))),
    "frequency": (
        lambda: Layers(Looks(scale_grad_by_freq=True)),
        "scale_grad_by_freq=False",
        lambda: Layers(Looks(scale_grad_by_freq=False)),
    ),
}
WAYS.update(
    {
        "max_norm": (
            lambda: Layers(Looks(max_norm=1.0)),
            "Make it without max_norm",
            lambda: Layers(Looks()),
        ),
        "cut twice": (
            lambda: Layers(Cuts("twice")),
            "Use a separate CutPoint for each place",
            lambda: Layers(Cuts("separate")),
        ),
        "cut never": (
            lambda: Layers(Cuts("unused")),
            "Call it where the model may be cut",
            lambda: Layers(Cuts("right")),
        ),
        "cut of nothing": (
            lambda: Layers(Cuts("nothing")),
            "x = cutpoint(x)",
            lambda: Layers(Cuts("right")),
        ),
    }
)
WAYS.update(
    {
        f"parameter, {manner}": (
            lambda manner=manner: Layers(Clamps(manner)),
            "forward changes the parameter 'between.inner.weight'",
            lambda: Layers(Clamps("computed")),
        )
        for manner in ("data", "no_grad", "set", "item")
    }
)


@pytest.mark.parametrize("name", WAYS)
def test_the_way_out_of_a_refusal_works(name: str) -> None:
    """EXA-9"""
    refused, words, changed = WAYS[name]
    assert words in refusal(refused())
    torch.manual_seed(0)
    assert_same(changed(), batch_of(4), batch=4)


def test_a_scripted_model_is_named_whole_and_where_it_is_made_opaque() -> None:
    """EXA-9"""
    assert "is not a Python function" in refusal(scripted(Doubles(copies=True)))
    with pytest.raises(ValueError, match=r"torch\.jit has compiled"):
        opaque(scripted(nn.Linear(2, 2)))


def test_an_opaque_module_whose_sizes_depend_on_the_data_raises_at_run_time() -> None:
    """EXA-9: packed sequences without total_length."""
    model = Only(opaque(Packs(whole=False)))
    with pytest.raises(RuntimeError, match="pass total_length to pad_packed_sequence"):
        assert_same(model, {"x": torch.ones(4, 6)}, batch=4)
