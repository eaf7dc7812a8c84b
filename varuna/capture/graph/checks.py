"""Checks of the flat graph: refuse models whose result would depend on the micro-batch size or the cuts."""

from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from varuna.capture.graph.flat_graph import FlatGraph
from varuna.capture.graph.flow import Flow, base_name
from varuna.capture.graph.randomness import bound, draw
from varuna.capture.trace.custom_function import FunctionCall
from varuna.errors import CaptureError

_ALONG_A_DIMENSION = frozenset(
    {"flip", "roll", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"}
    | {"softmax", "_softmax", "log_softmax", "_log_softmax"}
)


def where(node: fx.Node) -> str:
    """Return the model's line that made a node, or the node's name."""
    return node.meta.get("stack_trace") or node.name


def refuse_unsupported(flow: Flow) -> None:
    """Refuse models whose micro-batches cannot run one by one."""
    refuse_coupled_samples(flow.flat)
    refuse_reordered_samples(flow.flat)
    refuse_embedding_options(flow.flat)
    refuse_changed_inputs(flow)
    refuse_shuffled_samples(flow.flat)


def refuse_coupled_samples(flat: FlatGraph) -> None:
    """Refuse a matrix of every sample against every other: it differs with the micro-batch."""
    symbol = flat.symbol
    if symbol is None:
        return
    for node in flat.nodes:
        value = node.meta.get("val")
        shape: list[Any] = list(value.shape) if isinstance(value, Tensor) else []
        sizes = tuple(size.node.expr for size in shape if isinstance(size, torch.SymInt))
        if _degree(sizes, symbol) >= 2:
            raise CaptureError(
                f"{where(node)}: the value {node.name} of shape {[str(s) for s in shape]} has the "
                f"batch {symbol} in it twice: it compares every sample with every other, so the loss would "
                "change with the micro-batch size. Compute such a loss outside the model, from its outputs "
                "(pyrannc); or make the module of this line opaque with varuna.opaque, and train with one "
                "micro-batch and one replica."
            )


@lru_cache(maxsize=4096)
def _degree(sizes: tuple[sympy.Expr, ...], symbol: sympy.Symbol) -> int:
    """Return the power of a symbol in the product of the sizes."""
    count = sympy.expand(sympy.Mul(*sizes))
    return int(sympy.degree(count, symbol)) if symbol in count.free_symbols else 0


def refuse_reordered_samples(flat: FlatGraph) -> None:
    """Refuse an operation that goes from sample to sample along the batch.

    Sums are allowed: a mean over the batch means one over the micro-batch, as in BatchNorm. Sorting is
    allowed too: experts sort their tokens and restore the order.
    """
    for node in flat.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or base_name(node) not in _ALONG_A_DIMENSION:
            continue
        arguments = bound(target, node.args, node.kwargs)
        value = node.all_input_nodes[0].meta.get("val")
        dims = arguments.get("dims", arguments.get("dim"))
        for dim in dims if isinstance(dims, list | tuple) else [dims]:
            if not isinstance(value, Tensor) or not isinstance(dim, int) or not value.dim():
                continue
            found = flat.dim(value.shape[dim])
            if found is not None and found.per_sample:
                raise CaptureError(
                    f"{where(node)}: {base_name(node)} goes along the batch, so its result would change with "
                    "the micro-batch size. Do it outside the pipeline or, if it may act on each micro-batch "
                    "separately, make its module opaque with varuna.opaque."
                )


def refuse_shuffled_samples(flat: FlatGraph) -> None:
    """Refuse a random order of the samples, which a micro-batch cannot have."""
    for node in flat.nodes:
        operation: Any = node.args[0] if node.target is draw else None
        if not isinstance(operation, torch._ops.OpOverload) or "randperm" not in operation._schema.name:
            continue
        found = flat.dim(node.meta["val"].shape[0])
        if found is None or found.per_sample:
            raise CaptureError(
                f"{where(node)}: torch.randperm draws an order of the samples, but micro-batches and "
                "replicas have some of them only. Mix the samples in your script (x[order]), and pass both "
                "as inputs."
            )


def find_coupling(flat: FlatGraph) -> fx.Node | None:
    """Return an operation that may couple samples, although rules allow it: sorting, positions in a batch.

    None where BatchNorm couples the samples of a micro-batch anyway.
    """
    suspects = [node for node in flat.nodes if _may_couple(flat, node)]
    names = {base_name(node) for node in flat.nodes} if suspects else set()
    return suspects[0] if suspects and not any("batch_norm" in name for name in names) else None


def _may_couple(flat: FlatGraph, node: fx.Node) -> bool:
    name = base_name(node)
    if isinstance(node.target, FunctionCall):  # its backward may use the number of samples
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if name == "arange":
        return _has_samples(flat, node.meta.get("val"), slice(None))
    value = node.all_input_nodes[0].meta.get("val") if node.all_input_nodes else None
    if name in ("sort", "argsort", "msort"):
        dim = bound(node.target, node.args, node.kwargs).get("dim", 0 if name == "msort" else -1)
        is_float = isinstance(value, Tensor) and value.is_floating_point()  # experts sort integers
        return is_float and _has_samples(flat, value, slice(dim, dim + 1 or None))
    if name.startswith(("conv", "_convolution")):
        return _has_samples(flat, value, slice(1, None))
    if name in ("tril", "triu") or "scaled_dot_product" in name:
        return _has_samples(flat, value, slice(-2, None))
    return False


def _has_samples(flat: FlatGraph, value: Any, dims: slice) -> bool:
    """Return whether one of these dimensions of a value has the batch in it."""
    found = [flat.dim(size) for size in value.shape[dims]] if isinstance(value, Tensor) else []
    return any(dim is not None and dim.per_sample for dim in found)


def refuse_embedding_options(flat: FlatGraph) -> None:
    """Refuse embeddings whose gradient or weight depends on more than the samples of a micro-batch."""
    for node in flat.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or "embedding" not in base_name(node):
            continue
        arguments = bound(node.target, node.args, node.kwargs)
        if arguments.get("sparse"):  # gradients are summed over replicas and stages as dense tensors
            raise CaptureError(
                f"{where(node)}: an embedding with sparse=True has sparse gradients, which are not "
                "supported. Make it with sparse=False."
            )
        if arguments.get("scale_grad_by_freq"):
            raise CaptureError(
                f"{where(node)}: an embedding with scale_grad_by_freq=True divides gradients by how often an "
                "index occurs in the batch, so they would change with the micro-batch size. Make it with "
                "scale_grad_by_freq=False."
            )
        if "renorm" in base_name(node):
            raise CaptureError(
                f"{where(node)}: an embedding with max_norm changes its weight in forward, in other rows on "
                "each replica. Make it without max_norm, and renormalize the weight between two steps: "
                "weight.data.renorm_(2, 0, max_norm)."
            )


def refuse_changed_inputs(flow: Flow) -> None:
    """Refuse a forward that changes an input: other stages and recomputation read the input again."""
    for name, node in flow.flat.inputs.items():
        if node in flow.writers:
            raise CaptureError(
                f"{where(flow.writers[node][0])}: forward changes its input {name!r} in place, but other "
                f"stages read the same input. Change a copy: {name} = {name}.clone()."
            )


def refuse_divided_buffers(flow: Flow) -> None:
    """Refuse a buffer that one segment changes and another one reads."""
    flat = flow.flat
    for name, root in flat.state.items():
        if root not in flow.writers:
            continue
        users = [node for node in flat.nodes if any(flow.root[arg] is root for arg in node.all_input_nodes)]
        segments = sorted({node.meta["segment"] for node in users})
        if len(segments) > 1:
            raise CaptureError(
                f"{where(flow.writers[root][0])}: the buffer {name!r} is changed in place and used in the "
                f"segments {', '.join(map(str, segments))}. Move the CutPoints so that one segment has all "
                "its uses."
            )
