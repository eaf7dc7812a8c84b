"""Every way out that a refusal offers works: the model as changed by the message trains as in one process."""

from __future__ import annotations

import copy
import gc
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.capture.comparison import assert_same
from tests.capture.models import Mlp, batch_of
from tests.capture.test_branches import Guarded, Only
from tests.capture.test_refusals import Careless, Layers, refusal
from tests.ways_out import Way, follow
from varuna.capture import Captured, CutPoint, Source, check_capture, cut_after, opaque, stage_state
from varuna.capture.model.call_convention import StructuredCall
from varuna.capture.model.state import ModelTensors, StageState
from varuna.plan.cut.blocks import partition


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


class Rows(nn.Module):
    """Makes a list of the rows and uses one by an operator, a method or a function; or joins them."""

    def __init__(self, manner: str) -> None:
        super().__init__()
        self.manner = manner

    def forward(self, x: Tensor) -> Tensor:
        rows = list(x)
        if self.manner == "operator":
            return torch.stack([row * 2 for row in rows])
        if self.manner == "method":
            return torch.stack([row.tanh() for row in rows])
        if self.manner == "function":
            return torch.stack([torch.tanh(row) for row in rows])
        return torch.tanh(torch.stack(rows))


class Compares(nn.Module):
    """Compares every sample with every other."""

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(h @ y.t(), torch.arange(h.shape[0]))


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.compare = nn.Linear(6, 6), Compares()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.compare(self.layer(x), y)


class Mixes(nn.Module):
    """Mixes samples in an order that it draws, or that is an input."""

    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        self.layer, self.draws = nn.Linear(6, 6), draws

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        other = x[torch.randperm(x.shape[0])] if self.draws else y
        return self.layer(0.7 * x + 0.3 * other).square().mean()


class Along(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(0)


class Counts(nn.Module):
    """Counts its calls in a number, or in a buffer."""

    calls: Any

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("calls", torch.zeros(()))
        else:
            self.calls = 0.0
        self.buffer = buffer

    def forward(self, x: Tensor) -> Tensor:
        if self.buffer:
            self.calls.add_(1)
        else:
            self.calls += 1
        return x * self.calls


class Keeps(nn.Module):
    """Adds what an earlier call has kept: in an attribute, or in a buffer."""

    kept: Any

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("kept", torch.zeros(6))
        else:
            self.kept = torch.zeros(6)
        self.buffer = buffer

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.kept
        if self.buffer:
            self.kept.copy_(x.detach().mean(0))
        else:
            self.kept = x.detach().mean(0)
        return y


class Draws(nn.Module):
    def __init__(self, *, torch_draws: bool) -> None:
        super().__init__()
        self.torch_draws = torch_draws

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x) if self.torch_draws else x * random.random()


class TakesSize(nn.Module):
    """An opaque module that is told a size, or reads it."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.inner, self.reads = opaque(Scales()), reads

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if self.reads else self.inner(x, x.shape[0])


class Scales(nn.Module):
    def forward(self, x: Tensor, size: int | None = None) -> Tensor:
        return x * (x.shape[0] if size is None else size) if x.sum() > -1e9 else x


class Particular(nn.Module):
    """Runs on no zeros or ones, unless it is lenient; the branch cannot be traced."""

    def __init__(self, *, lenient: bool) -> None:
        super().__init__()
        self.lenient = lenient

    def forward(self, x: Tensor) -> Tensor:
        if not self.lenient and (x.std() == 0).item():
            raise ValueError("constant input")
        return x * 2 if x.sum() > -1e9 else x


class Returns(nn.Module):
    """Returns various outputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(6, 6), kind

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.layer(x)
        loss = F.mse_loss(h, y)
        outputs: dict[str, Any] = {
            "loss": loss,
            "logits": {"logits": h},
            "two": {"a": loss, "b": loss * 2},
            "object": {"loss": loss, "more": range(2)},
            "nothing": {"more": None},
            "detached": loss.detach(),
        }
        return outputs[self.kind]


class Reads(nn.Module):
    """Reads an attribute, in a dict or itself."""

    scale: Any
    holder: dict[str, Any]

    def __init__(self, *, buffer: bool = False) -> None:
        super().__init__()
        self.inner, self.holder = nn.Linear(6, 6), {"gain": 1.0}
        if buffer:
            self.register_buffer("scale", torch.ones(()))
        else:
            self.scale = torch.ones(())
        self.power = 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.inner(x) * self.scale * self.power * self.holder["gain"], y)


class Depends(nn.Module):
    """Computes otherwise while it is traced, or not."""

    def __init__(self, *, traced: bool) -> None:
        super().__init__()
        self.layer, self.traced = nn.Linear(6, 6), traced

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layer(x)
        return F.mse_loss(h * 2 if self.traced and torch.compiler.is_exporting() else h, y)


class Hidden(nn.Module):
    """Counts its calls where no trace sees it, or not."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.layer, self.counts, self.calls = nn.Linear(6, 6), counts, iter(range(1000))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layer(x) * ((1 + next(self.calls)) if self.counts else 1), y)


class Orders(nn.Module):
    """Applies its layers in another order in eval mode, or in the same one."""

    def __init__(self, *, same: bool) -> None:
        super().__init__()
        self.layers, self.same = nn.ModuleList(nn.Linear(6, 6) for _ in range(6)), same

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers if self.training or self.same else reversed(self.layers):
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


class Masked(nn.Module):
    """Divides its loss by a count; with one sample in another manner."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        error = (self.layer(x) - y).square().sum(1)
        counted = (y[:, 0] > 0).float()
        if x.shape[0] == 1:
            return error.sum().tanh()
        return (error * counted).sum() / counted.sum().clamp(min=1)


class Holds(nn.Module):
    """Holds a table on `meta` as an attribute, or a buffer; and a weight that nothing initializes, or not."""

    table: Tensor

    def __init__(self, *, buffer: bool, moves: bool = False) -> None:
        super().__init__()
        self.weight, self.moves = nn.Parameter(torch.ones(6, 6)), moves
        if buffer:
            self.register_buffer("table", torch.ones(6))
        else:
            self.table = torch.ones(6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x @ self.weight * (self.table.to(x.device) if self.moves else self.table), y)


class Shares(nn.Module):
    """Uses a CutPoint under two names, or two CutPoints."""

    def __init__(self, *, same: bool) -> None:
        super().__init__()
        self.layer, self.one = nn.Linear(6, 6), CutPoint()
        self.two = self.one if same else CutPoint()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.two(self.layer(self.one(self.layer(x)))), y)


class Views(nn.Module):
    """Changes one of two views after a cut, or a copy; or a buffer before it that is read after it."""

    def __init__(self, manner: str) -> None:
        super().__init__()
        self.layer, self.cut, self.manner = nn.Linear(6, 6), CutPoint(), manner
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layer(x)
        rows = h.view(-1, 2, 3)
        if self.manner == "buffer":
            self.average.add_(1.0)
        h = self.cut(h)
        if self.manner == "buffer after":
            self.average.add_(1.0)
        if self.manner.startswith("buffer"):
            return F.mse_loss(h + self.average, y)
        return F.mse_loss((h if self.manner == "view" else h.clone()).mul_(2) + rows.flatten(1), y)


class Reversible(torch.autograd.Function):
    """Runs a module again in its backward, as the Reformer and old checkpoints do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.layer(x).backward(grad)
        return x.grad, None


class Reruns(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(6, 6), how

    def _run(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "checkpoint":
            return checkpoint(self._run, x, use_reentrant=False)  # type: ignore[no-any-return]
        taken: dict[str, Any] = {"module": self.inner, "method": self._run}
        return Reversible.apply(x, taken.get(self.how, lambda z: self.inner(z)))  # type: ignore[no-any-return]


class Named(nn.Module):
    def __init__(self, *, tensors: bool) -> None:
        super().__init__()
        self.layer, self.name = nn.Linear(6, 6), Text(tensors=tensors)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layer(x)
        found = self.name(h)
        return F.mse_loss(found if isinstance(found, Tensor) else h, y)


class Text(nn.Module):
    def __init__(self, *, tensors: bool) -> None:
        super().__init__()
        self.tensors = tensors

    def forward(self, x: Tensor) -> Any:
        return x if self.tensors else "text"


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x * self.scale).mean(1) - y.mean()).square().mean()


def scripted(module: nn.Module) -> nn.Module:
    return torch.jit.script(module)  # type: ignore[no-any-return,no-untyped-call]


OPAQUE = 'varuna.opaque(model, "between")'
CAPTURE = "varuna/capture/"
DATA, RANGE, FAILED = (f"{CAPTURE}trace/refusals.py explained_failures{n}" for n in ("", " 2", " 3"))
BRANCHES = f"{CAPTURE}trace/refusals.py KnownBranches"


def capture(model: nn.Module, inputs: dict[str, Any] | None = None, **options: Any) -> Captured:
    return Source(model, **options).capture(inputs or batch_of(4), training=True)


def trains(model: nn.Module, inputs: dict[str, Any] | None = None, **options: Any) -> None:
    """Assert that a model trains as in one process."""
    assert_same(model, inputs or batch_of(4), batch=4, source=Source(model, **options))


def between(site: str, refused: nn.Module, words: str, changed: nn.Module | None = None) -> Way:
    """A module between two layers, and the one that replaces it; None: it is made opaque."""
    other = opaque(copy.deepcopy(refused)) if changed is None else changed
    return Way(site, lambda: capture(Layers(refused)), words, lambda: trains(Layers(other)))


def model(site: str, refused: nn.Module, words: str, changed: nn.Module) -> Way:
    return Way(site, lambda: capture(refused), words, lambda: trains(changed))


def check(model: nn.Module, **options: Any) -> None:
    source = Source(model, **options)
    captured = source.capture(batch_of(4), training=True)
    check_capture(model, captured, batch_of(4), convention=source.convention)


def structured(model: nn.Module) -> None:
    inputs = batch_of(4)
    convention, leaves = StructuredCall.of(model, (), inputs, grad_enabled=True)
    captured = Source(model).capture(leaves, training=True, convention=convention)
    check_capture(model, captured, leaves, convention=convention)


def cut_at(model: nn.Module, name: str) -> nn.Module:
    cut_after(model, name)
    return model


def evaluated(model: nn.Module) -> None:
    """Evaluate the last of two stages of a model that was cut for training."""
    source = Source(model, partition=partition)
    trained = source.capture(batch_of(4), training=True)
    source.capture(batch_of(4), training=False).carve(trained.num_segments // 2, trained.num_segments)


def on_meta(make: Any, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return make(**options)  # type: ignore[no-any-return]


def filled(model: nn.Module, **options: Any) -> StageState:
    source = Source(model)
    captured = source.capture(batch_of(4), training=True)
    return stage_state(source, captured, 0, captured.num_segments, device="cpu", **options)


def freed(initialize: Any) -> None:
    source = Source(Mlp(2))
    captured = source.capture(batch_of(4), training=True)
    gc.collect()
    stage_state(source, captured, 0, 2, device="cpu", initialize=initialize)


def assigned(*, in_place: bool) -> None:
    """Give a parameter other values after the stage is made."""
    source = Source(model := Mlp(2))
    captured = source.capture(batch_of(4), training=True)
    state = stage_state(source, captured, 0, 2, device="cpu", shares=True)
    tensors = ModelTensors(source, state)
    if in_place:
        with torch.no_grad():
            model.layers[0].weight.copy_(torch.ones(6, 6))
    else:
        model.layers[0].weight = nn.Parameter(torch.ones(6, 6))
    tensors.follow()
    assert torch.equal(state.tensor("layers.0.weight"), torch.ones(6, 6))


def changed(model: nn.Module, change: Any) -> None:
    """Change a model after its capture; capture it again if the change is accepted."""
    source = Source(model)
    source.capture(batch_of(4), training=True)
    change(model)
    if source.attributes.changes():
        source.attributes.accept()
    assert_same(model, batch_of(4), batch=4, source=source)


def replaced(model: Any) -> nn.Module:
    model.inner = nn.Linear(6, 6)
    return model  # type: ignore[no-any-return]


def hooked(model: Any) -> nn.Module:
    model.layers[0].register_full_backward_hook(lambda module, given, got: None)
    return model  # type: ignore[no-any-return]


def with_global_hook(action: Any) -> None:
    with register_module_full_backward_hook(lambda module, given, got: None):
        action()


def lengths(dynamic_dims: Any) -> None:
    """Capture a model for inputs of two lengths."""
    model = Averages()
    source = Source(model, dynamic_dims=dynamic_dims)
    for size in (5, 7):
        inputs = {"x": torch.ones(4, size), "y": torch.ones(4, size + 3)}
        check_capture(model, source.capture(inputs, training=True), inputs)


CHECKS = f"{CAPTURE}graph/checks.py refuse_"
MODEL, TRACE, RUN = (f"{CAPTURE}{folder}/" for folder in ("model", "trace", "run"))
ROWS = f"{TRACE}batch_rows.py BatchRows"

WAYS: dict[str, Way] = {
    "branch": between(DATA, Gate(), OPAQUE),
    "branch in the root": model(
        DATA, Root(moved=False), "once you have moved these lines into a submodule", Root(moved=True)
    ),
    "packed": between(f"{BRANCHES}.__torch_function__ 2", Packs(), OPAQUE),
    "penalty": between(f"{TRACE}refusals.py refused_gradient_call.refuse", Penalty(), OPAQUE),
    "hook": between(f"{TRACE}refusals.py refused_gradient_call.refuse", Hooked(), OPAQUE),
    "input": model(f"{CHECKS}changed_inputs", Doubles(copies=False), "x = x.clone()", Doubles(copies=True)),
    "iteration": between(f"{BRANCHES}._rows", Iterates(), "iterates over the batch"),
    "rows, operator": between(
        f"{ROWS}._refuse", Rows("operator"), "Work on the whole tensor", Rows("joined")
    ),
    "rows, method": between(
        f"{ROWS}.__getattr__", Rows("method"), "Work on the whole tensor", Rows("joined")
    ),
    "rows, function": between(f"{ROWS}.__torch_function__", Rows("function"), OPAQUE),
    "batch size": between(RANGE, Guarded(Tensor.tanh), OPAQUE),
    "fixed batch": between(FAILED, Wide(fixed=True), "remove the fixed batch size", Wide(fixed=False)),
    "scripted": between(
        FAILED,
        scripted(nn.Sequential(nn.Linear(6, 6), nn.Tanh())),
        "without torch.jit.script",
        nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
    ),
    "layerdrop": between(f"{BRANCHES}.__torch_function__", Drops(0.5), "Set layerdrop to 0", Drops(0.0)),
    "layerdrop, opaque": between(f"{BRANCHES}.__torch_function__", Drops(0.5), OPAQUE),
    "sparse": between(f"{CHECKS}embedding_options", Looks(sparse=True), "sparse=False", Looks(sparse=False)),
    "frequency": between(
        f"{CHECKS}embedding_options 2",
        Looks(scale_grad_by_freq=True),
        "scale_grad_by_freq=False",
        Looks(scale_grad_by_freq=False),
    ),
    "max_norm": between(
        f"{CHECKS}embedding_options 3", Looks(max_norm=1.0), "Make it without max_norm", Looks()
    ),
    "coupled": model(
        f"{CHECKS}coupled_samples", Pairs(), "make the module of this line opaque", opaque(Pairs(), "compare")
    ),
    "shuffled": model(
        f"{CHECKS}shuffled_samples", Mixes(draws=True), "Mix the samples in your script", Mixes(draws=False)
    ),
    "along": between(f"{CHECKS}reordered_samples", Along(), "opaque with varuna.opaque"),
    "buffer over a cut": model(
        f"{CHECKS}divided_buffers", Views("buffer"), "Move the CutPoints", Views("buffer after")
    ),
    "custom function": between(
        f"{TRACE}custom_function.py recorded_functions.apply 3", Careless(False), OPAQUE
    ),
    "counter": between(
        f"{TRACE}attributes.py AttributeLog.watched_numbers",
        Counts(buffer=False),
        "Make it a buffer",
        Counts(buffer=True),
    ),
    "kept": between(
        f"{TRACE}attributes.py AttributeLog._compare",
        Keeps(buffer=False),
        "Make 'kept' a buffer",
        Keeps(buffer=True),
    ),
    "host randomness": between(
        f"{TRACE}host_randomness.py refused_host_randomness",
        Draws(torch_draws=False),
        "Draw them with torch",
        Draws(torch_draws=True),
    ),
    "opaque with a size": between(
        f"{TRACE}opaque_module.py record_call",
        TakesSize(reads=False),
        "Let it read sizes from its tensors",
        TakesSize(reads=True),
    ),
    "opaque with a size, made opaque": between(
        f"{TRACE}opaque_module.py record_call", TakesSize(reads=False), OPAQUE
    ),
    "opaque without shapes": between(
        f"{TRACE}opaque_module.py _results_by_running",
        opaque(Particular(lenient=False)),
        "Let it run on zeros",
        opaque(Particular(lenient=True)),
    ),
    "no loss": model(
        f"{MODEL}call_convention.py find_loss",
        Returns("logits"),
        "Compute the loss inside forward",
        Returns("loss"),
    ),
    "two losses": Way(
        f"{MODEL}call_convention.py _only_loss",
        lambda: capture(Returns("two")),
        "Choose one with loss='a' or loss='b'",
        lambda: check(Returns("two"), loss="a"),
    ),
    "no such loss": Way(
        f"{MODEL}call_convention.py _item",
        lambda: capture(Returns("two"), loss="c"),
        "Pass an index, a key, an attribute, or a function",
        lambda: check(Returns("two"), loss=lambda output: output["b"]),
    ),
    "other inputs": Way(
        f"{MODEL}call_convention.py CallConvention.check",
        lambda: capture(Returns("loss"), {"x": torch.ones(4, 6), "z": torch.ones(4, 6)}),
        "Its signature is (x: ",
        lambda: trains(Returns("loss")),
    ),
    "scripted model": model(
        f"{MODEL}call_convention.py CallConvention.check 2",
        scripted(Doubles(copies=True)),
        "without torch.jit.script",
        Doubles(copies=True),
    ),
    "object": Way(
        f"{MODEL}call_convention.py StructuredCall._output_tensors",
        lambda: structured(Returns("object")),
        "Return a tensor in its place",
        lambda: structured(Returns("two")),
    ),
    "no tensor": Way(
        f"{MODEL}call_convention.py StructuredCall._output_tensors 2",
        lambda: structured(Returns("nothing")),
        "Return at least one tensor",
        lambda: structured(Returns("logits")),
    ),
    "differs while traced": Way(
        f"{RUN}verify.py _Comparison._refuse",
        lambda: check(Depends(traced=True)),
        "on whether it is traced",
        lambda: check(Depends(traced=False)),
    ),
    "differs when called again": Way(
        f"{RUN}verify.py _Comparison._noise",
        lambda: check(Hidden(counts=True)),
        "not on a Python counter",
        lambda: check(Hidden(counts=False)),
    ),
    "cut twice": between(
        f"{TRACE}recorder.py TraceRecorder.mark",
        Cuts("twice"),
        "Use a separate CutPoint() for each place",
        Cuts("separate"),
    ),
    "cut of two names": model(
        f"{TRACE}recorder.py TraceRecorder.mark",
        Shares(same=True),
        "the CutPoint one (also named two: one object)",
        Shares(same=False),
    ),
    "cut in an opaque module": between(
        f"{TRACE}recorder.py TraceRecorder.mark 2",
        opaque(nn.Sequential(nn.Linear(6, 6), CutPoint())),
        "Move the CutPoint out of it",
        nn.Sequential(opaque(nn.Linear(6, 6)), CutPoint()),
    ),
    "cut of nothing": between(
        f"{TRACE}recorder.py TraceRecorder.mark 3", Cuts("nothing"), "x = cutpoint(x)", Cuts("right")
    ),
    "cut never": between(
        f"{TRACE}cutpoint.py require_all_met",
        Cuts("unused"),
        "Call it where the model may be cut",
        Cuts("right"),
    ),
    "cut after text": Way(
        f"{TRACE}cutpoint.py _CutAfterHook.__call__",
        lambda: capture(cut_at(Named(tensors=False), "name")),
        "Name a module that returns its activations",
        lambda: trains(cut_at(Named(tensors=False), "layer")),
    ),
    "cut after none": Way(
        f"{TRACE}cutpoint.py modules_named",
        lambda: cut_after(Named(tensors=True), "nam"),
        "similar names: name",
        lambda: trains(cut_at(Named(tensors=True), "name")),
    ),
    "views over a cut": Way(
        f"{CAPTURE}cuts/carver.py Carver._refuse_changed_views",
        lambda: capture(Views("view")).carve(1, 2),
        "or change a copy",
        lambda: trains(Views("copy")),
    ),
    "too many segments": Way(
        f"{CAPTURE}cuts/carver.py Carver.carve",
        lambda: capture(Mlp()).carve(0, 9),
        "Add CutPoints, or use fewer stages",
        lambda: capture(Mlp(9)).carve(0, 9),
    ),
    "other order": Way(
        f"{RUN}captured.py Captured.carve",
        lambda: evaluated(Orders(same=False)),
        "is used in another order than in training",
        lambda: evaluated(Orders(same=True)),
    ),
    "one sample": Way(
        f"{RUN}captured.py Captured._counterparts.counterpart",
        lambda: capture(Masked(), batch_of(1)),
        "Use larger ones",
        lambda: trains(Masked()),
    ),
    "table on meta": Way(
        f"{CAPTURE}graph/flat_graph.py _Flattener.constant",
        lambda: capture(on_meta(Holds, buffer=False, moves=True)),
        "Register it as a buffer",
        lambda: capture(on_meta(Holds, buffer=True, moves=True)),
    ),
    "table on meta, not moved": Way(
        FAILED,
        lambda: capture(on_meta(Holds, buffer=False)),
        "Register it as a buffer",
        lambda: capture(on_meta(Holds, buffer=True)),
    ),
    "nothing initializes": Way(
        f"{MODEL}initialization.py _make",
        lambda: filled(on_meta(Holds, buffer=True)),
        "pass initialize=",
        lambda: filled(on_meta(Holds, buffer=True), initialize=Holds(buffer=True).state_dict()),
    ),
    "other shape": Way(
        f"{MODEL}state.py _values",
        lambda: filled(Mlp(2), initialize={"layers.0.weight": torch.ones(2)}),
        "Pass values of this model",
        lambda: filled(Mlp(2), initialize=Mlp(2).state_dict()),
    ),
    "freed": Way(
        f"{MODEL}source.py Source.value",
        lambda: freed(None),
        "pass its values with initialize=",
        lambda: freed(Mlp(2).state_dict()),
    ),
    "replaced parameter": Way(
        f"{MODEL}state.py ModelTensors._follow",
        lambda: assigned(in_place=False),
        "parameter.copy_(values)",
        lambda: assigned(in_place=True),
    ),
    "replaced module": Way(
        f"{MODEL}attributes.py ModelAttributes._of_module",
        lambda: changed(Reads(), lambda own: setattr(own, "inner", nn.Linear(6, 6))),
        "Replace it before you wrap the model",
        lambda: trains(replaced(Reads())),
    ),
    "changed tensor": Way(
        f"{MODEL}attributes.py ModelAttributes._of_module 2",
        lambda: changed(Reads(), lambda own: setattr(own, "scale", torch.zeros(()))),
        "make it a buffer (self.register_buffer) and change it in place",
        lambda: changed(Reads(buffer=True), lambda own: own.scale.fill_(2.0)),
    ),
    "number that becomes a tensor": Way(
        f"{MODEL}attributes.py ModelAttributes._of_module 3",
        lambda: changed(Reads(), lambda own: setattr(own, "power", torch.zeros(()))),
        "plain numbers and strings may be changed",
        lambda: changed(Reads(), lambda own: setattr(own, "power", 2.0)),
    ),
    "tensor in a dict": Way(
        f"{MODEL}attributes.py ModelAttributes._inside",
        lambda: changed(Reads(), lambda own: own.holder.update(gain=torch.zeros(()))),
        "plain numbers and strings may be changed",
        lambda: changed(Reads(), lambda own: own.holder.update(gain=3.0)),
    ),
    "module hook": Way(
        f"{MODEL}hooks.py BackwardHooks.refuse",
        lambda: capture(hooked(Mlp(2))),
        'varuna.opaque(model, "layers.0")',
        lambda: trains(opaque(hooked(Mlp(2)), "layers.0")),
    ),
    "hook of all modules": Way(
        f"{MODEL}hooks.py BackwardHooks.refuse 2",
        lambda: with_global_hook(lambda: capture(Mlp(2))),
        "Remove it, or use hooks of parameters",
        lambda: trains(Mlp(2)),
    ),
    "no such dimension": Way(
        f"{MODEL}batch.py find_batch",
        lambda: capture(Mlp(2), batch_dims={"x": 5}),
        "Name one of its dimensions",
        lambda: trains(Mlp(2), batch_dims={"x": 0}),
    ),
    "no batch": Way(
        f"{MODEL}batch.py find_batch 2",
        lambda: capture(Mlp(2), {"x": 1, "y": 2}),
        "Pass at least one tensor",
        lambda: trains(Mlp(2)),
    ),
    "other batch": Way(
        f"{MODEL}batch.py find_batch 3",
        lambda: capture(Averages(), {"x": torch.ones(4, 6), "y": torch.ones(7, 3)}),
        "batch_dims={'y': ...}",
        lambda: trains(Averages(), {"x": torch.ones(4, 6), "y": torch.ones(7, 3)}, batch_dims={"y": None}),
    ),
    "list": Way(
        f"{MODEL}batch.py _signature",
        lambda: capture(Mlp(2), {"x": torch.ones(4, 6), "y": [1]}),
        "Pass the tensors of a structure as separate inputs",
        lambda: trains(Mlp(2)),
    ),
    "one name, two lengths": Way(
        f"{MODEL}lengths.py SeenSizes.groups",
        lambda: lengths({"x": {1: "n"}, "y": {1: "n"}}),
        "Give them different names",
        lambda: lengths({"x": {1: "n"}, "y": {1: "m"}}),
    ),
    "length of no dimension": Way(
        f"{MODEL}lengths.py named_places",
        lambda: lengths({"x": {7: "n"}}),
        "Name one of its dimensions",
        lambda: lengths({"x": {1: "n"}}),
    ),
    "length of the batch": Way(
        f"{MODEL}lengths.py named_places 2",
        lambda: lengths({"x": {0: "n"}}),
        "name other dimensions only",
        lambda: lengths({"x": {1: "n"}}),
    ),
    "tie of no parameter": Way(
        f"{MODEL}tied_weights.py _join",
        lambda: capture(Mlp(2), shared_weights=[("layers.0.weight", "layers.7.weight")]),
        "Use the names of model.named_parameters()",
        lambda: capture(Mlp(2), shared_weights=[("layers.0.weight", "layers.1.weight")]),
    ),
    "tie of other shapes": Way(
        f"{MODEL}tied_weights.py _join 2",
        lambda: capture(Mlp(2), shared_weights=[("layers.0.weight", "layers.1.bias")]),
        "Tie parameters of equal shape",
        lambda: capture(Mlp(2), shared_weights=[("layers.0.bias", "layers.1.bias")]),
    ),
}
WAYS.update(
    {
        f"parameter, {manner}": between(
            f"{TRACE}parameter_changes.py refuse_change",
            Clamps(manner),
            "forward changes the parameter 'between.inner.weight'",
            Clamps("computed"),
        )
        for manner in ("data", "no_grad", "set", "item")
    }
)
WAYS.update(
    {
        f"modules in a Function, {how}": between(
            f"{TRACE}custom_function.py recorded_functions.apply",
            Reruns(how) if how != "method" else opaque(Reruns(how)),
            "use torch.utils.checkpoint.checkpoint",
            Reruns("checkpoint"),
        )
        for how in ("module", "method", "closure")
    }
)
REWRITTEN = "recorded_functions raises it with the line"
BY_LENGTH = "the model is then captured for each length on its own"
INTERNAL = {
    f"{CAPTURE}graph/flat_graph.py flatten": "torch refuses CutPoints in torch.cond and its like first",
    f"{TRACE}symbolic_sizes.py bounded_expressions.evaluate": BY_LENGTH,
    f"{TRACE}opaque_module.py _fake_results": BY_LENGTH,
    f"{CAPTURE}graph/loss_totals.py LossEdits._whole": BY_LENGTH,
    f"{TRACE}custom_function.py _PurityCheck.__torch_dispatch__": REWRITTEN,
    f"{TRACE}custom_function.py _PurityCheck.__torch_dispatch__ 2": REWRITTEN,
    f"{TRACE}custom_function.py recorded_functions.apply 2": REWRITTEN,
}
"""Errors that no user sees, with the reason."""


@pytest.mark.parametrize("name", WAYS)
def test_the_way_out_of_a_refusal_works(name: str) -> None:
    """EXA-9"""
    follow(WAYS[name])


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
