"""A model that cannot be captured is refused with its line and what to do."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.comparison import assert_same
from tests.capture.models import batch_of
from varuna.capture import CutPoint, Source, opaque
from varuna.errors import CaptureError


class Layers(nn.Module):
    """Two layers and something between them."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.between = between
        self.last = nn.Linear(6, 6)
        self.cut = CutPoint()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.cut(self.between(self.first(x)))
        return F.mse_loss(self.last(h), y)


def refusal(model: nn.Module, inputs: dict[str, Any] | None = None) -> str:
    with pytest.raises(CaptureError) as caught:
        Source(model).capture(inputs or batch_of(4), training=True)
    return str(caught.value)


def line_of(cls: type, text: str) -> str:
    lines, start = inspect.getsourcelines(cls)
    return f"{__file__}:{start + next(i for i, line in enumerate(lines) if text in line)}: "


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * self.scale
        return x - self.scale


def test_a_branch_on_data_is_named_by_its_line_and_module() -> None:
    """V7"""
    text = refusal(Layers(Branches()))
    assert text.startswith(line_of(Branches, "if x.sum()"))
    assert 'varuna.opaque(model, "between")' in text
    assert "torch.where" in text


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x)


class Scaled(torch.autograd.Function):
    """With a parameter, a constant and two results, one of them without gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.factor = factor
        ctx.save_for_backward(x, weight)
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        return x * weight * factor, signs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return grad * weight * 3, (grad * x).sum(0), None


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        y, signs = Scaled.apply(x, self.weight, 0.5)
        y, _ = Scaled.apply(F.dropout(y, 0.3), self.weight, 0.25)
        return y + signs


@pytest.mark.parametrize("between", [Custom, Weighted])
def test_a_custom_function_keeps_its_own_backward(between: type[nn.Module]) -> None:
    """V7, R6: also with one sample, and with dropout beside it."""
    captured = assert_same(Layers(between()), batch_of(4), batch=4)
    assert not captured.carve(0, 1).leaves
    assert_same(Layers(between()), batch_of(1), batch=1)


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, changes: bool) -> Tensor:
        return x.mul_(2) if changes else x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Careless(nn.Module):
    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.changes = changes

    def forward(self, x: Tensor) -> Tensor:
        return Noisy.apply(x.clone(), self.changes)


@pytest.mark.parametrize(
    ("changes", "why"), [(True, "changes an input in place"), (False, "draws random numbers")]
)
def test_a_custom_function_that_is_not_pure_is_refused_by_its_line(changes: bool, why: str) -> None:
    """V7, R6"""
    text = refusal(Layers(Careless(changes)))
    assert text.startswith(line_of(Careless, "Noisy.apply"))
    assert f"Noisy {why}" in text and 'varuna.opaque(model, "between")' in text


class Meddling(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table = nn.Embedding(3, 6, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "Tensor.register_hook":
            (x * 2).register_hook(torch.neg)
        if self.how == "torch.autograd.grad":
            return torch.autograd.grad(x.square().sum(), x)[0]
        return x + self.table(x.argmax(1) % 3) if self.how == "sparse=True" else x


@pytest.mark.parametrize("how", ["Tensor.register_hook", "torch.autograd.grad", "sparse=True"])
def test_work_on_gradients_is_refused_by_its_line(how: str) -> None:
    """V7"""
    text = refusal(Layers(Meddling(how)))
    line = {"T": "2).register_hook", "t": "return torch", "s": "self.table(x"}[how[0]]
    assert text.startswith(line_of(Meddling, line)) and how in text


class Asserting(nn.Module):
    """Allowed: assertions on data, len of a tensor, a move that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        assert torch.isfinite(x).all(), "not a number"
        assert (x < 1e6).all().item()
        self.inner = self.inner.to(x.dtype)
        return self.inner(x).view(len(x), 2, 3).flatten(1)


class Routed(nn.Module):
    """Every expert sees every token; the strides depend on the smaller of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 6, 8) * 0.3)
        self.down = nn.Parameter(torch.randn(4, 4, 6) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.bmm(x.repeat(4, 1).view(4, -1, 6), self.up).chunk(2, dim=-1)
        out = torch.bmm(up * F.silu(gate), self.down).view(-1, 6)
        return x + out.reshape(4, -1, out.shape[-1]).sum(dim=0)


def test_strides_that_depend_on_the_batch_are_accepted() -> None:
    """R6"""
    assert_same(Layers(Routed()), batch_of(4), batch=4)


def test_asserts_len_and_needless_moves_are_accepted() -> None:
    """R6"""
    assert_same(Layers(Asserting()), batch_of(4), batch=4)


@pytest.mark.parametrize("between", [Branches, Custom])
def test_the_advice_of_the_error_works(between: type[nn.Module]) -> None:
    model = Layers(between())
    opaque(model, "between")
    captured = assert_same(model, batch_of(4), batch=4)
    assert list(captured.carve(0, 1).leaves) == ["between"]
    assert_same(model, batch_of(1), batch=1)


class Structured(nn.Module):
    """Takes and returns nested structures, holds a buffer, and branches on data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, pair: tuple[Tensor, dict[str, Tensor]], *, factor: float) -> dict[str, Any]:
        self.count.add_(1)
        x, more = pair
        if x.sum() > 1e6:
            x = x + 1
        return {"a": self.inner(x) * factor, "b": (more["y"].sum(1), "text"), "flat": x.flatten()}


def test_an_opaque_module_takes_and_returns_structures() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.body = opaque(Structured())
            self.cut = CutPoint()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out = self.body((self.first(x), {"y": y}), factor=2.0)
            assert out["b"][1] == "text"
            h = self.cut(out["a"])
            return (h + out["b"][0][:, None]).square().mean() + out["flat"].mean()

    captured = assert_same(Model(), batch_of(4), batch=4)
    assert captured.carve(0, 1).mutated == ("body.count",)
    assert [str(spec.dims[0]) for spec in captured.carve(0, 1).sent] == ["b", "b", "6b"]


def test_a_cutpoint_called_twice_never_or_inside_an_opaque_module_is_refused() -> None:
    """V7"""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.cut = CutPoint()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.cut(self.layer(self.cut(self.layer(x)))), y)

    assert "CutPoint cut is called twice" in refusal(Twice())
    never = Layers(nn.Identity())
    never.spare = [CutPoint()]  # type: ignore[assignment]
    assert "CutPoint spare[0] was never called" in refusal(never)
    assert "inside the opaque module 'between'" in refusal(Layers(opaque(nn.Sequential(CutPoint()))))


def test_a_model_without_a_loss_is_refused_with_what_it_returned() -> None:
    """V7"""

    class NoLoss(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"logits": x}

    assert "returned a dict of logits; expected its loss" in refusal(NoLoss())


def test_a_loss_that_compares_samples_is_refused() -> None:
    """V7"""

    class Contrastive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            scores = self.layer(x) @ y.t()
            return F.cross_entropy(scores, torch.arange(x.shape[0]))

    text = refusal(Contrastive())
    assert "compares every sample with every other" in text
    assert line_of(Contrastive, "scores =").split(": ")[0] in text


@pytest.mark.parametrize("what", ["flip", "roll", "softmax", "cumsum"])
def test_an_operation_along_the_batch_is_refused(what: str) -> None:
    """V7, R2: its result would depend on the micro-batch size; along another dimension it is allowed."""
    along: dict[str, Callable[[Tensor, int], Tensor]] = {
        "flip": lambda x, dim: x.flip(dim),
        "roll": lambda x, dim: x.roll(1, dim),
        "softmax": lambda x, dim: x.softmax(dim),
        "cumsum": lambda x, dim: torch.cumsum(x, dim=dim),
    }

    class Along(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.dim = dim
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(along[what](self.layer(x), self.dim), y)

    for dim in (0, -2):
        text = refusal(Along(dim))
        assert f"{what} goes along the batch" in text
        assert f'"{what}": lambda' in text  # the line
    assert_same(Along(1), batch_of(4), batch=4)


@pytest.mark.parametrize("hard", ["view", "branch"])
def test_a_batch_size_written_into_the_model_is_refused(hard: str) -> None:
    """V7"""

    class Hard(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.layer(x)
            h = h.view(4, 2, 3) if hard == "view" else h * 2 if x.shape[0] == 4 else h
            return F.mse_loss(h.reshape(y.shape), y)

    text = refusal(Hard())
    assert "batch" in text and line_of(Hard, "h = h.view").split(": ")[0] in text


def test_layerdrop_is_refused_unless_its_probability_is_0_or_1() -> None:
    """V7"""

    class Dropped(nn.Module):
        def __init__(self, probability: float) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.probability = probability

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                drawn = torch.rand([])
                if drawn < self.probability:
                    return x
            return self.layer(x)

    assert_same(Layers(Dropped(0.0)), batch_of(3), batch=3)
    assert_same(Layers(Dropped(1.0)), batch_of(3), batch=3)
    text = refusal(Layers(Dropped(0.5)))
    assert text.startswith(line_of(Dropped, "if drawn <"))
    assert "Set layerdrop to 0" in text


def test_the_advice_covers_the_same_module_of_all_layers() -> None:
    """V7: one call, not one for each layer."""
    model = Layers(nn.Sequential(Careless(False), nn.Identity(), Careless(False)))
    assert 'varuna.opaque(model, "between.*")' in refusal(model)
    opaque(model, "between.*")
    assert list(assert_same(model, batch_of(4), batch=4).carve(0, 1).leaves) == [
        f"between.{i}" for i in range(3)
    ]
    with pytest.raises(ValueError, match="no module matches 'betwixt'; similar names: between"):
        opaque(model, "betwixt")


class Deciding(nn.Module):
    """Reads a number from a tensor, and passes it to inner modules that branch on it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Branching(), Branching()])

    def forward(self, x: Tensor) -> Tensor:
        positive = (x.sum() > 0).item()
        for layer in self.layers:
            x = layer(x, positive)
        return x


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor, positive: Any) -> Tensor:
        return self.inner(x) if positive else x


def test_the_advice_names_the_module_that_read_the_number() -> None:
    """V7: not the module that branches; and it works."""
    model = Layers(Deciding())
    assert 'varuna.opaque(model, "between")' in refusal(model)
    assert 'varuna.opaque(model, "between")' in refusal(opaque(Layers(Deciding()), "between.layers.*"))
    opaque(model, "between")
    assert list(assert_same(model, batch_of(4), batch=4).carve(0, 1).leaves) == ["between"]


def test_inputs_of_other_types_are_refused_by_name() -> None:
    """V12"""
    assert "input 'y' is a list" in refusal(Layers(nn.Identity()), {"x": torch.randn(4, 6), "y": [1]})
    assert "no input has a batch" in refusal(Layers(nn.Identity()), {"x": 1, "y": 2})


class Particular(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("You have to specify input_ids")


def test_the_advice_for_a_model_that_raises_itself_is_to_check_its_inputs() -> None:
    """V7: Hugging Face models raise for a misspelt name."""
    message = refusal(Layers(Particular()))
    assert line_of(Particular, "raise") in message
    assert "Check the names and shapes of the inputs" in message and "opaque" not in message


def test_a_failed_capture_undoes_its_patches() -> None:
    refusal(Layers(Careless(True)))
    assert len is builtins.len and isinstance(len(torch.ones(2)), int)
    x = torch.ones(2, requires_grad=True)
    Doubled.apply(x).sum().backward()
    assert x.grad is not None and float(x.grad[0]) == 2
    assert_same(Layers(nn.Tanh()), batch_of(3), batch=3)
