"""Kinds of segments: segments with equal graphs cost the same, so that one of each kind is measured.

Two segments are of one kind if their graphs are equal node by node: the same operations on the same values,
shapes, dtypes and constants. Names may differ, and the ordinals of random operations. A segment with an
opaque module or a nested graph is a kind of its own.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from varuna.capture.cuts.summary import argument_text
from varuna.capture.graph import randomness
from varuna.capture.model.source import Source
from varuna.capture.run.captured import Captured
from varuna.capture.run.program import SpanProgram, UnderAutocast, attributes, build

ORDINAL_INDICES: dict[Any, int] = {randomness.dropout: 3, randomness.draw: 4, randomness.draw_in_place: 4}
"""Index of the argument that holds the ordinal."""


def find_kinds(source: Source, captured: Captured) -> list[int]:
    """Return the kind of each segment, numbered in order of first appearance."""
    known: dict[str, int] = {}
    return [
        known.setdefault(_text(source, captured, index), len(known)) for index in range(captured.num_segments)
    ]


def is_trained(source: Source, name: str) -> bool:
    """Return whether a tensor of the model is a parameter that is not frozen."""
    path, _, leaf = name.rpartition(".")
    parameter = source.meta_model.get_submodule(path)._parameters.get(leaf)
    return parameter is not None and parameter.requires_grad


def trains_before(source: Source, captured: Captured, segment: int) -> bool:
    """Return whether a segment before this one has a trained parameter, and so wants gradients."""
    before = captured.graph.segments[:segment]
    return any(is_trained(source, name) for other in before for name in other.parameters)


def relayed(captured: Captured, segment: int) -> tuple[bool, ...]:
    """Return for each tensor that a segment receives whether it also crosses the cut before."""
    before = captured.carve(segment - 1, segment).received if segment else ()
    known = {spec.name for spec in before}
    return tuple(spec.name in known for spec in captured.carve(segment, segment + 1).received)


def entry(program: SpanProgram, first: int) -> SpanProgram | None:
    """Return the part of a span's program that recomputes earlier values; None if there is none.

    A stage that begins with segment `first` runs it; one that begins earlier has the values already.
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
    known = attributes(program.graph_module)
    used = {str(node.target): known[str(node.target)] for node in graph.nodes if node.op == "get_attr"}
    return replace(program, graph_module=build(graph, used), sent=())


def _text(source: Source, captured: Captured, index: int) -> str:
    program = captured.carve(index, index + 1)
    segment = captured.graph.segments[index]
    module = program.graph_module
    if any(isinstance(child, nn.Module) for child in module.children()):
        return f"segment {index}"
    others = sorted({*segment.parameters, *segment.buffers} - {*program.state})
    lines = [
        f"state {[_state_text(source, name, name in program.mutated) for name in program.state]}",
        f"other state {sorted(_state_text(source, name, False) for name in others)}",
        f"received {[(s.dtype, str(s.dims), s.needs_grad) for s in program.received]}",
        f"relayed {relayed(captured, index)}",
        f"sent {[(s.dtype, str(s.dims), s.needs_grad) for s in program.sent]}",
        f"inputs {program.inputs}",
        f"returns {bool(program.received) and trains_before(source, captured, index)}",
    ]
    numbers = {node: number for number, node in enumerate(module.graph.nodes)}

    for node in module.graph.nodes:
        if node.op == "get_attr":
            lines.append(f"constant {_constant_text(getattr(module, str(node.target)))}")
        elif node.op != "placeholder":
            args: list[Any] = list(node.args)
            if (place := ordinal_index(node)) is not None:
                args[place] = "ordinal"
            called = argument_text([args, node.kwargs], numbers, _function_text)
            lines.append(f"{_function_text(node.target)} {called} {_shape_text(node)}")
    return "\n".join(lines)


def _state_text(source: Source, name: str, changed: bool) -> str:
    path, _, leaf = name.rpartition(".")
    shell = source.meta_model.get_submodule(path)._parameters.get(leaf)
    what = "buffer" if shell is None else "trained" if shell.requires_grad else "frozen"
    return f"{what} {source.dtype(name)} {source.shape(name)} {changed}"


def ordinal_index(node: fx.Node) -> int | None:
    """Return the index of the argument that holds a random node's ordinal; None if it draws nothing."""
    target = node.target
    return ORDINAL_INDICES.get(target.operation if isinstance(target, UnderAutocast) else target)


def _function_text(target: Any) -> str:
    if isinstance(target, str | torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _constant_text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data.numpy().tobytes()).hexdigest()}"


def _shape_text(node: fx.Node) -> str:
    found: Sequence[Any] = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return " ".join(
        f"{value.dtype}{tuple(map(str, value.shape))}{tuple(map(str, value.stride()))}"
        if isinstance(value, Tensor) and value.layout == torch.strided
        else str(value)
        for value in found
    )
