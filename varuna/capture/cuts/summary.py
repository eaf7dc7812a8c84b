"""Summary of a captured model: its segments, their estimated cost, and its fingerprint."""

import hashlib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from varuna.capture.cuts.rematerialization import Rematerialization
from varuna.capture.graph import randomness
from varuna.capture.graph.flat_graph import FlatGraph
from varuna.capture.graph.flow import Flow, tensors_of
from varuna.types import Dim, ModelGraph, Segment

aten = torch.ops.aten
_VIEWS = frozenset(
    {"view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "slice", "select"}
    | {"detach", "t"}
)


def summarize(flow: Flow, ties: Sequence[tuple[str, ...]]) -> ModelGraph:
    """Summarize the segments. State that nothing reads belongs to the first one, so that none is lost."""
    flat = flow.flat
    unused = [name for name, node in flat.state.items() if not node.users]
    names = {node: name for name, node in flat.state.items()}
    rematerialization = Rematerialization(flow)
    segments = []
    for index, nodes in enumerate(flat.by_segment()):
        used = {names[state] for node in nodes for state in rematerialization.reads(node)}
        if index == 0:
            used.update(unused)
        if index == flat.num_segments - 1:
            used.update(
                names[state] for result in flat.results for state in rematerialization.state_of(result)
            )
        ordered = [name for name in flat.state if name in used]
        parameters = tuple(name for name in ordered if name in flat.parameters)
        segments.append(
            Segment(
                index=index,
                parameters=parameters,
                buffers=tuple(name for name in ordered if name not in flat.parameters),
                num_operations=len(nodes),
                flops_per_sample=float(sum(flops_per_sample(node, flat) for node in nodes)),
                parameter_bytes=sum(flat.state[name].meta["val"].nbytes for name in parameters),
                moved_bytes=_linear([moved_bytes(node, flat, batch) for batch in (1, 2) for node in nodes]),
                kept_bytes=_linear([_kept_bytes(node, flow, batch) for batch in (1, 2) for node in nodes]),
            )
        )
    fingerprint = hashlib.sha256("\n".join(listing(flat, ties)).encode()).hexdigest()
    return ModelGraph(tuple(segments), tuple(ties), fingerprint)


def _linear(at_one_and_two: Sequence[int]) -> Dim:
    """Return a sum as a linear function of the batch size, from its terms for one sample and for two."""
    half = len(at_one_and_two) // 2
    one, two = sum(at_one_and_two[:half]), sum(at_one_and_two[half:])
    return Dim(two - one, 2 * one - two)


def _sizes(value: Tensor, flat: FlatGraph, batch: int = 1) -> list[int]:
    """Return the shape for a batch size."""
    dims = [flat.dim(size) for size in value.shape]
    return [1 if dim is None else max(dim.size(batch), 1) for dim in dims]


def num_bytes(node: fx.Node, flat: FlatGraph, batch: int = 1) -> int:
    """Return the bytes of a node's value for a batch size."""
    values = tensors_of(node)
    return sum(math.prod(_sizes(value, flat, batch)) * value.element_size() for value in values)


def _kept_bytes(node: fx.Node, flow: Flow, batch: int) -> int:
    """Return the bytes that a node may keep for the backward: its value, if it is new memory."""
    made = node in flow.needs_grad and flow.root[node] is node
    return num_bytes(node, flow.flat, batch) if made else 0


def moved_bytes(node: fx.Node, flat: FlatGraph, batch: int = 1) -> int:
    """Return the bytes that an operation reads and writes; 0 for a view."""
    name = operation_name(node)
    if name in _VIEWS or node.target is operator.getitem:
        return 0
    # An embedding reads only the selected rows of the table.
    read = [node] if name == "embedding" else node.all_input_nodes
    return sum(num_bytes(value, flat, batch) for value in (node, *read))


def operation_name(node: fx.Node) -> str:
    """Return the name of torch's operation, such as "linear"; "" for others."""
    target: Any = node.target
    if target in (randomness.draw, randomness.draw_in_place):
        target = node.args[0]
    return target._schema.name.split("::")[-1] if isinstance(target, torch._ops.OpOverload) else ""


def flops_per_sample(node: fx.Node, flat: FlatGraph) -> int:
    name = operation_name(node)
    elements = sum(math.prod(_sizes(value, flat)) for value in tensors_of(node))
    given = [arg.meta.get("val") for arg in node.all_input_nodes]
    operands = [_sizes(value, flat) for value in given if isinstance(value, Tensor)]
    if name in _VIEWS:
        return 0
    if name in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm") and len(operands) >= 2:
        last = operands[1] if name == "linear" else operands[-1]
        inner = last[-1] if name == "linear" or len(last) == 1 else last[-2]
        return 2 * elements * inner
    if name.startswith("conv") and len(operands) >= 2:
        return 2 * elements * math.prod(operands[1][1:])
    if name == "scaled_dot_product_attention" and len(operands) >= 1:
        keys = operands[min(1, len(operands) - 1)][-2]
        return 4 * elements * keys
    return elements


def listing(flat: FlatGraph, ties: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the model's operations, shapes, names, ties and cuts (no values) line by line.

    The fingerprint hashes these lines: keep the format, for files name it.
    """
    index = {node: i for i, node in enumerate(flat.graph.nodes)}

    def shape(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{value.dtype}[{','.join(_size_text(flat, size) for size in value.shape)}]"
        if isinstance(value, tuple | list):
            return f"({','.join(map(shape, value))})"
        return _size_text(flat, value)

    argument = partial(argument_text, numbers=index, function_text=_callable_text)
    named = {node: name for name, node in (*flat.state.items(), *flat.inputs.items())}
    lines = [f"ties {ties}", f"results {[index[node] for node in flat.results]}"]
    for node in flat.graph.nodes:
        if node.op == "output":
            continue
        what = named.get(node) or (
            _constant_text(flat, node) if node.op == "get_attr" else _callable_text(node.target)
        )
        lines.append(
            f"%{index[node]} @{node.meta['segment']} {node.op} {what} "
            f"{argument(node.args)} {argument(node.kwargs)} {shape(node.meta.get('val'))}"
        )
    return lines


def argument_text(arg: Any, numbers: Mapping[fx.Node, int], function_text: Callable[[Any], str]) -> str:
    """Return an argument as text that depends neither on the names of nodes nor on the device."""
    inner = partial(argument_text, numbers=numbers, function_text=function_text)
    if isinstance(arg, fx.Node):
        return f"%{numbers[arg]}"
    if isinstance(arg, tuple | list):
        return f"[{','.join(map(inner, arg))}]"
    if isinstance(arg, dict):
        return f"{{{','.join(f'{key}:{inner(value)}' for key, value in sorted(arg.items()))}}}"
    if isinstance(arg, torch.device):
        return "device"
    return function_text(arg) if callable(arg) else str(arg)


def _size_text(flat: FlatGraph, size: Any) -> str:
    if isinstance(size, torch.SymInt):
        dim = flat.dim(size)
        return "?" if dim is None else str(dim)
    return str(size) if isinstance(size, int | float | bool | str) else ""


def _constant_text(flat: FlatGraph, node: fx.Node) -> str:
    value = flat.attributes[str(node.target)]
    if isinstance(value, Tensor):
        return f"constant {value.dtype}{list(value.shape)}"
    return type(value).__name__


def _callable_text(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return getattr(target, "__name__", None) or str(target)
