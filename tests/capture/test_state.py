"""Each stage holds its own state under the model's names; no process holds a whole model on `meta`."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.models import Everything, Mlp, batch_of, tokens
from varuna.capture import CutPoint, Source, stage_state
from varuna.capture.model.tied_weights import named_tensors
from varuna.errors import CaptureError
from varuna.types import Work


def test_the_stages_together_have_the_state_dict_of_the_model() -> None:
    """V5"""

    class Unused(Everything):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.Linear(2, 2)
            self.register_buffer("idle", torch.ones(2))
            self.register_buffer("temporary", torch.ones(2), persistent=False)

    source = Source(model := Unused())
    captured = source.capture(tokens(2), training=True)
    union: dict[str, Tensor] = {}
    for first in range(4):
        state = stage_state(source, captured, first, first + 1, device="cpu").state_dict()
        assert first == 3 or len(state) < len(model.state_dict())
        union.update(state)
    assert set(union) == set(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(union[name], value)


def test_a_stage_uses_the_memory_of_a_model_that_is_on_its_device() -> None:
    """EXA-7: its weights are not there twice; values of others, or that other processes see, are copied."""
    model = Mlp()
    model.register_buffer("strided", torch.ones(6, 6)[:, ::2])
    model.layers[3].weight.data.share_memory_()
    source = Source(model)
    captured = source.capture(batch_of(2), training=True)
    given = {"layers.1.weight": model.layers[1].weight.detach()}
    state = stage_state(source, captured, 0, 4, device="cpu", shares=True, initialize=given)
    for name in state.canonical:
        shared = state.tensor(name).data_ptr() == named_tensors(model)[name].data_ptr()
        assert shared is (name not in ("layers.1.weight", "layers.3.weight", "strided")), name
    assert state.tensor("layers.0.weight") is not model.get_parameter("layers.0.weight")  # nor its .grad
    copied = stage_state(source, captured, 0, 4, device="cpu")
    assert copied.tensor("layers.0.weight").data_ptr() != model.get_parameter("layers.0.weight").data_ptr()


def test_ties_are_found_by_object_by_storage_and_by_declaration() -> None:
    """V6"""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(6, 6, bias=False) for _ in range(4))
            self.b.weight = self.a.weight
            self.c.weight = nn.Parameter(self.a.weight.data)
            self.cut = CutPoint()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.cut(self.b(self.a(x)))
            return F.mse_loss(self.d(self.c(h)), y)

    model = Tied()
    found = Source(model).capture(batch_of(2), training=True)
    assert found.graph.ties == (("a.weight", "b.weight", "c.weight"),)
    assert [segment.parameters for segment in found.graph.segments] == [
        ("a.weight",),
        ("a.weight", "d.weight"),
    ]
    source = Source(model, shared_weights=[("a.weight", "d.weight")])
    captured = source.capture(batch_of(2), training=True)
    assert captured.graph.ties == (("a.weight", "b.weight", "c.weight", "d.weight"),)
    state = stage_state(source, captured, 0, 1, device="cpu")
    assert state.a.weight is state.d.weight is state.tensor("a.weight")
    assert Source(Mlp()).capture(batch_of(2), training=True).graph.ties == ()
    with pytest.raises(CaptureError, match=r"names 'z\.weight', which is no parameter"):
        Source(model, shared_weights=[("a.weight", "z.weight")])


def run(source: Source, inputs: dict[str, Tensor], cuts: list[int], **how: object) -> Tensor:
    captured = source.capture(inputs, training=True)
    values: tuple[Tensor, ...] = ()
    for first, stop in pairwise(cuts):
        program = captured.carve(first, stop)
        state = stage_state(source, captured, first, stop, device="cpu", **how)  # type: ignore[arg-type]
        values = program([state.tensor(name) for name in program.state], values, inputs, Work(0, 0, 0))
    return values[0]


def test_a_model_on_meta_starts_from_the_same_values_at_every_layout() -> None:
    """V5"""
    with torch.device("meta"):
        model = Everything()
    source = Source(model)
    losses = [run(source, tokens(3), cuts, seed=5) for cuts in ([0, 4], [0, 1, 4], [0, 1, 2, 3, 4])]
    assert torch.isfinite(losses[0])
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert not torch.equal(run(source, tokens(3), [0, 4], seed=6), losses[0])


def test_a_model_on_meta_takes_given_values() -> None:
    """V5"""
    real = Mlp()
    with torch.device("meta"):
        source = Source(model := Mlp())
    assert model.layers[0].weight.is_meta
    expected = real(**batch_of(3))
    torch.testing.assert_close(run(source, batch_of(3), [0, 2, 4], initialize=real.state_dict()), expected)

    def fill(name: str, tensor: Tensor) -> None:
        tensor.copy_(real.state_dict()[name])

    torch.testing.assert_close(run(source, batch_of(3), [0, 2, 4], initialize=fill), expected)


class Waves(nn.Module):
    """With buffers outside the state_dict, one of them computed from sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.register_buffer("offset", torch.empty(4), persistent=False)

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.linear(x)) * self.table + self.offset
        return found.mean()


def test_a_function_fills_the_state_dict_and_the_model_makes_the_rest() -> None:
    """V5: also tensors that the function leaves unfilled."""
    filled: list[str] = []

    def fill(name: str, tensor: Tensor) -> None:
        filled.append(name)
        if "norm" not in name:
            tensor.fill_(0.5)

    with torch.device("meta"):
        source = Source(model := Waves())
    captured = source.capture({"x": torch.randn(2, 4)}, training=True)
    assert model.table.is_meta
    state = stage_state(source, captured, 0, 1, device="cpu", initialize=fill)
    assert set(filled) == {"linear.weight", "linear.bias", "norm.weight", "norm.bias", "offset"}
    found = {name: state.tensor(name).flatten()[:4].tolist() for name in (*filled, "table")}
    assert found["linear.weight"] == found["offset"] == [0.5] * 4 and found["norm.weight"] == [1.0] * 4
    assert found["table"] == [0.0, 1.0, 2.0, 3.0]


def test_values_without_initialization_are_refused_by_name() -> None:
    """V5"""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(x * self.scale, y)

    with torch.device("meta"):
        source = Source(model := Bare())
    captured = source.capture(batch_of(2), training=True)
    with pytest.raises(CaptureError, match="nothing initializes 'scale'"):
        stage_state(source, captured, 0, 1, device="cpu")
    assert model.scale.is_meta


def test_frozen_parameters_and_buffers_outside_the_state_dict_stay_so() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.layer.bias.requires_grad_(False)
            self.register_buffer("table", torch.ones(6), persistent=False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.layer(x) * self.table, y)

    source = Source(model := Model())
    state = stage_state(source, source.capture(batch_of(2), training=True), 0, 1, device="cpu")
    assert not state.tensor("layer.bias").requires_grad and state.tensor("layer.weight").requires_grad
    assert "table" not in state.state_dict() and torch.equal(state.tensor("table"), model.table)
