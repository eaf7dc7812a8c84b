"""A small language model, and ways to make its capture wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from varuna.capture import Captured, CutPoint
from varuna.capture.run.program import SpanProgram, attributes, build

aten = torch.ops.aten
WIDTH, WORDS, LENGTH = 8, 19, 5


class Halved(torch.autograd.Function):
    """Halves the gradient, which no derivative of its forward does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 0.5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norm(x)
        scores = self.query(h) @ self.key(h).transpose(1, 2) * 0.35
        x = x + self.dropout(scores.masked_fill(mask, -1e4).softmax(-1) @ self.value(h))
        return x + self.down(F.gelu(self.up(x)))


class LanguageModel(nn.Module):
    """Has what captures get wrong: ties, masks, residuals, dropout, buffers, positions, an own backward."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH + 2, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight
        self.cut = CutPoint()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, ids: Tensor, labels: Tensor, ignored: Tensor) -> Tensor:
        self.steps.add_(1)
        x = self.words(ids) + self.places(torch.arange(LENGTH, device=ids.device))
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=ids.device).triu(1)
        mask = future | ignored.unsqueeze(1)
        for block in self.blocks:
            x = self.cut(Halved.apply(block(x, mask))) if block is self.blocks[0] else block(x, mask)
        x = self.norm(x.flatten(0, 1)).view_as(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def sentences(size: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(size)
    ids = torch.randint(0, WORDS, (size, LENGTH), generator=generator)
    labels = torch.randint(0, WORDS, (size, LENGTH), generator=generator)
    ignored = torch.zeros(size, LENGTH, dtype=torch.bool)
    ignored[1, 3:] = True
    return {"ids": ids, "labels": labels, "ignored": ignored}


Change = Callable[[fx.Graph, fx.Node], None]


def corrupt(captured: Captured, operation: Any, change: Change, number: int = 0) -> None:
    """Change one operation of every program that is carved: the `number`th of its kind in the model."""
    original = captured.carve
    whole = original(0, captured.num_segments)
    kind = [node.name for node in whole.graph_module.graph.nodes if _is(node, operation)]
    assert kind, f"the model has no {operation}"
    name = kind[number]

    def carve(first: int, stop: int) -> SpanProgram:
        program = original(first, stop)
        graph = fx.Graph()
        graph.output(graph.graph_copy(program.graph_module.graph, {}))
        for node in [node for node in graph.nodes if node.name == name]:
            change(graph, node)
        return replace(program, graph_module=build(graph, attributes(program.graph_module)))

    captured.carve = carve  # type: ignore[method-assign]


def _is(node: fx.Node, operation: Any) -> bool:
    return bool(node.target is operation or getattr(node.target, "__name__", node.target) == operation)


def after(function: Callable[[Tensor], Any], *, gradient: Callable[[Tensor], Tensor] | None = None) -> Change:
    """Pass the operation's value through a function; or only its gradient, if one is given for it."""

    def changed(x: Tensor) -> Any:
        y = function(x)
        if gradient is None or not x.requires_grad:
            return y
        y = y.view_as(y)
        y.register_hook(gradient)
        return y

    def change(graph: fx.Graph, node: fx.Node) -> None:
        with graph.inserting_after(node):
            new = graph.call_function(changed, (node,))
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    return change


def with_args(function: Callable[..., tuple[Any, ...]]) -> Change:
    """Replace the arguments of the operation."""

    def change(graph: fx.Graph, node: fx.Node) -> None:
        node.args = function(*node.args)

    return change


def instead(function: Callable[..., Any]) -> Change:
    """Call another function in place of the operation."""

    def change(graph: fx.Graph, node: fx.Node) -> None:
        node.target = function
        node.op = "call_function"

    return change
