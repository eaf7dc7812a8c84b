"""Which segments cost the same, told from their graphs: one of each kind needs to be measured.

Two segments are alike where their graphs are equal node by node: the same operations on the same
values, shapes, precisions and constants. Names may differ, and the numbers under which random
operations draw. Whatever cannot be looked into (an opaque module, a nested graph) is like nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from varuna.capture.graph import randomness as random
from varuna.capture.model.source import Source
from varuna.capture.run.captured import Captured
from varuna.capture.run.program import SpanProgram, build, under_autocast

ORDINALS: dict[Any, int] = {random.dropout: 3, random.draw: 4, random.draw_in_place: 4}
"""Where the operations that draw have their number among their arguments."""


def find_kinds(source: Source, captured: Captured) -> list[int]:
    """For each segment the number of its kind, counted in the order in which kinds first appear."""
    known: dict[str, int] = {}
    return [
        known.setdefault(_text(source, captured, index), len(known)) for index in range(captured.num_segments)
    ]


def relayed(captured: Captured, segment: int) -> tuple[bool, ...]:
    """Which of the tensors that a segment is given have crossed the cut before as well."""
    before = captured.carve(segment - 1, segment).received if segment else ()
    known = {spec.name for spec in before}
    return tuple(spec.name in known for spec in captured.carve(segment, segment + 1).received)


def entry(program: SpanProgram, first: int) -> SpanProgram | None:
    """The part of a span's program that makes earlier values again, for they were not sent; None without.

    A stage that begins with a segment runs it; one that begins earlier has the values already.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    made = []
    for node in program.graph_module.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.placeholder(node.name)
        elif node.meta.get("segment", first) < first:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "call_function":
                made.append(copies[node])
    if not made:
        return None
    graph.output(tuple(made))
    names = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    attributes = {name: getattr(program.graph_module, name) for name in names}
    return replace(program, graph_module=build(graph, attributes), sent=())


def _text(source: Source, captured: Captured, index: int) -> str:
    program = captured.carve(index, index + 1)
    segment = captured.graph.segments[index]
    module = program.graph_module
    if any(isinstance(part, nn.Module) for part in module.children()):
        return f"segment {index}"
    others = sorted({*segment.parameters, *segment.buffers} - {*program.state})
    lines = [
        f"state {[_state(source, name, name in program.mutated) for name in program.state]}",
        f"beside it {sorted(_state(source, name, False) for name in others)}",
        f"given {[(s.dtype, str(s.dims), s.needs_grad) for s in program.received]}",
        f"relayed {relayed(captured, index)}",
        f"sends {[(s.dtype, str(s.dims), s.needs_grad) for s in program.sent]}",
        f"inputs {program.inputs}",
    ]
    numbers = {node: number for number, node in enumerate(module.graph.nodes)}

    def written(arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return f"%{numbers[arg]}"
        if isinstance(arg, tuple | list):
            return f"[{', '.join(map(written, arg))}]"
        if isinstance(arg, dict):
            return f"{{{', '.join(f'{key}: {written(arg[key])}' for key in sorted(arg))}}}"
        return _called(arg) if callable(arg) else repr(arg)

    for node in module.graph.nodes:
        if node.op == "get_attr":
            lines.append(f"constant {_constant(getattr(module, str(node.target)))}")
        elif node.op != "placeholder":
            args = _without_ordinal(node)
            lines.append(f"{_called(node.target)} {written(args)} {written(node.kwargs)} {_shapes(node)}")
    return "\n".join(lines)


def _state(source: Source, name: str, changed: bool) -> str:
    shell = source.meta_model.get_submodule(name.rpartition(".")[0])._parameters.get(name.rpartition(".")[2])
    what = "buffer" if shell is None else "trained" if shell.requires_grad else "frozen"
    return f"{what} {source.dtype(name)} {source.shape(name)} {changed}"


def ordinal_place(node: fx.Node) -> int | None:
    """Where among its arguments a node has the number that it draws under; None where it draws nothing."""
    drawn_under_autocast = node.target is under_autocast
    place = ORDINALS.get(node.args[0] if drawn_under_autocast else node.target)
    return None if place is None else place + 4 * drawn_under_autocast


def _without_ordinal(node: fx.Node) -> list[Any]:
    args: list[Any] = list(node.args)
    place = ordinal_place(node)
    if place is not None:
        args[place] = "ordinal"
    return args


def _called(target: Any) -> str:
    if isinstance(target, str | torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _constant(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data.numpy().tobytes()).hexdigest()}"


def _shapes(node: fx.Node) -> str:
    found: Sequence[Any] = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return " ".join(
        f"{value.dtype}{tuple(map(str, value.shape))}{tuple(map(str, value.stride()))}"
        if isinstance(value, Tensor) and value.layout == torch.strided
        else str(value)
        for value in found
    )
