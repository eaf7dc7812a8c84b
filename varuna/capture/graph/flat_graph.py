"""Turns the output of torch.export into one flat graph of operations on named state and inputs.

torch.export nests regions without gradient and regions with another precision. They are inlined here, so
that cuts, randomness and values can be followed through them:

    wrap_with_set_grad_enabled(False, region, x)   →   the region's nodes, on x.detach()
    wrap_with_autocast(..., region, x)             →   the region's nodes, each with its autocast

CutPoints become segment numbers, assertions are dropped, and tied names become one name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch.export.graph_signature import InputKind

from varuna.capture.model.batch import dim_of
from varuna.capture.trace.custom_function import FunctionCall, FunctionModule
from varuna.capture.trace.data_branches import CHECK, CHECK_NUMBER
from varuna.capture.trace.opaque_module import OPAQUE, OpaqueLeaf, RecordedCall
from varuna.capture.trace.recorder import CHECKS, CUT
from varuna.capture.trace.trace import Trace
from varuna.errors import CaptureError
from varuna.types import Dim

aten = torch.ops.aten
DETACH = aten.detach.default

Autocast = tuple[str, Any, bool]  # device type, dtype, enabled


@dataclass
class FlatGraph:
    """The whole model as one graph. The `meta` of every node holds:

    segment    the number of cuts before it
    val        a fake tensor (or number) with the shape of its value
    autocast   the autocast in which it runs, if the model changes it
    """

    graph: fx.Graph
    attributes: dict[str, Any] = field(default_factory=dict)  # constants and nested graphs, by get_attr name
    state: dict[str, fx.Node] = field(default_factory=dict)  # by canonical name
    parameters: set[str] = field(default_factory=set)  # names of the state that are parameters
    gradients: frozenset[str] = frozenset()  # inputs that get a gradient
    inputs: dict[str, fx.Node] = field(default_factory=dict)
    num_segments: int = 1
    symbol: sympy.Symbol | None = None  # of the batch size; None: the batch is one sample
    work: fx.Node | None = None  # placeholder of the Work that seeds random operations
    batch: fx.Node | None = None  # the batch size, if it is symbolic
    lengths: Mapping[sympy.Symbol, int] = field(default_factory=dict)  # other symbols, with traced sizes
    length_nodes: dict[sympy.Symbol, fx.Node] = field(default_factory=dict)  # of the other symbols

    def dim(self, size: Any, lengths: Mapping[sympy.Symbol, int] | None = None) -> Dim | None:
        """Return a size for given values of the symbols, by default those of the trace."""
        return dim_of(size, self.symbol, lengths or self.lengths)

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The loss, or all outputs of the model."""
        return self.graph.output_node().args[0]  # type: ignore[return-value]

    @property
    def nodes(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]

    @property
    def calls(self) -> list[fx.Node]:
        return [node for node in self.nodes if node.op != "get_attr"]

    def by_segment(self) -> list[list[fx.Node]]:
        """Return the calls of each segment."""
        segments: list[list[fx.Node]] = [[] for _ in range(self.num_segments)]
        for node in self.calls:
            segments[node.meta["segment"]].append(node)
        return segments


def flatten(trace: Trace, canonical: Mapping[str, str], batch_dims: Mapping[str, int]) -> FlatGraph:
    """Flatten a trace. `canonical` maps each tied name to the first name of its tensor."""
    exported = trace.exported
    flat = FlatGraph(fx.Graph(), gradients=trace.gradients, lengths=trace.guards.traced)
    flattener = _Flattener(flat, trace, canonical)
    values: dict[fx.Node, Any] = {}
    body = exported.graph_module
    for node, spec in zip(body.graph.nodes, exported.graph_signature.input_specs, strict=False):
        target = spec.target or ""
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            name = canonical.get(target, target)
            if name not in flat.state:
                flat.state[name] = flattener.placeholder(f"s_{name}", node)
            values[node] = flat.state[name]
            if spec.kind == InputKind.PARAMETER:
                flat.parameters.add(name)
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            values[node] = flattener.constant(exported.constants[target], node)
        elif isinstance(node.meta.get("val"), Tensor):
            flat.inputs[node.target] = flattener.placeholder(f"i_{node.target}", node)
            values[node] = flat.inputs[node.target]
        else:
            values[node] = node.meta.get("val")
    results = flattener.inline(body, values, autocast=None, no_grad=False)
    flat.graph.output(tuple(results)).meta = {"segment": flattener.segment}
    flat.num_segments = flattener.segment + 1
    sizes = [flat.inputs[n].meta["val"].shape[dim] for n, dim in batch_dims.items() if n in flat.inputs]
    flat.symbol = next((size.node.expr for size in sizes if isinstance(size, torch.SymInt)), None)
    if flat.num_segments != trace.num_cuts + 1:
        raise CaptureError(
            f"{trace.num_cuts} CutPoints were called, but the graph has {flattener.segment}: one is inside a "
            "region that is traced separately, such as torch.cond. Move it out of the region."
        )
    return flat


class _Flattener:
    def __init__(self, flat: FlatGraph, trace: Trace, canonical: Mapping[str, str]) -> None:
        self.flat = flat
        self.segment = 0
        self._leaf_calls = trace.leaf_calls
        self._checks = trace.checks
        self._canonical = canonical

    def placeholder(self, name: str, node: fx.Node) -> fx.Node:
        new = self.flat.graph.placeholder(name.replace(".", "_"))
        new.meta = {"val": node.meta["val"], "segment": 0}
        return new

    def attribute(self, prefix: str, value: Any) -> fx.Node:
        name = f"{prefix}_{len(self.flat.attributes)}"
        self.flat.attributes[name] = value
        new = self.flat.graph.create_node("get_attr", name)
        new.meta = {"segment": 0}
        return new

    def constant(self, value: Any, node: fx.Node) -> fx.Node:
        if isinstance(value, Tensor) and value.device.type == "meta":
            raise CaptureError(
                f"the model holds a tensor of shape {list(value.shape)} on `meta` that is neither a "
                "parameter nor a buffer, so its values are unknown. Register it as a buffer, or make it in "
                "forward."
            )
        new = self.attribute("constant", value)
        new.meta = {"val": node.meta.get("val"), "segment": 0}
        return new

    def inline(
        self, body: fx.GraphModule, values: dict[fx.Node, Any], *, autocast: Autocast | None, no_grad: bool
    ) -> list[Any]:
        def mapped(arg: Any) -> Any:
            return fx.map_arg(arg, lambda node: values[node])

        for node in body.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                outputs = mapped(node.args[0])
                return list(outputs) if isinstance(outputs, tuple | list) else [outputs]
            if node.op == "get_attr":
                found = attrgetter(node.target)(body)
                # A nested graph is inlined where it is called; others (torch.cond) stay nested.
                values[node] = found if isinstance(found, fx.GraphModule) else self.constant(found, node)
                continue
            if node.target is CUT:
                values[node] = values[node.args[0]]
                self.segment += 1
                continue
            if node.target in CHECKS:
                continue
            values[node] = self._call(node, mapped, autocast, no_grad)
        raise AssertionError("the graph has no output")

    def _call(self, node: fx.Node, mapped: Any, autocast: Autocast | None, no_grad: bool) -> Any:
        name = getattr(node.target, "__name__", str(node.target))
        if name == "wrap_with_set_grad_enabled":
            enabled, region, *operands = mapped(node.args)
            if not enabled:
                operands = [self._detached(operand) for operand in operands]
            return self._region(region, operands, autocast, no_grad or not enabled)
        if name == "wrap_with_autocast":
            device_type, dtype, enabled, _cache, region, *operands = mapped(node.args)
            return self._region(region, operands, (device_type, dtype, enabled), no_grad)
        if name == "getitem" and not isinstance(values := mapped(node.args[0]), fx.Node):
            return values[node.args[1]]
        if node.target is OPAQUE:
            call = self._leaf_calls[int(str(node.args[1]))]
            if not isinstance(call.module, FunctionModule):
                return self._leaf(node, mapped(node.args[0]), call)
            new = self.flat.graph.call_function(FunctionCall(call), tuple(mapped(node.args[0])))
        elif node.target in (CHECK, CHECK_NUMBER):
            check = self._checks[int(str(node.args[1]))]
            new = self.flat.graph.call_function(check, (mapped(node.args[0]),))
        else:
            nested = self._nested if isinstance(node.target, HigherOrderOperator) else lambda args: args
            new = self.flat.graph.create_node(
                node.op, node.target, nested(mapped(node.args)), nested(mapped(node.kwargs)), name=node.name
            )
        kept = ("val", "stack_trace", "nn_module_stack")
        new.meta = {key: node.meta[key] for key in kept if key in node.meta}
        new.meta.update(segment=self.segment, no_grad=no_grad)
        if autocast is not None:
            new.meta["autocast"] = autocast
        return new

    def _leaf(self, node: fx.Node, tensors: list[Any], call: RecordedCall) -> fx.Node:
        """Call an opaque module with all of its state. `bind_randomness` adds the work and the batch size."""
        leaf = OpaqueLeaf(call)
        full = [f"{call.name}.{name}" if call.name else name for name in leaf.names]
        state = [self.flat.state[self._canonical.get(name, name)] for name in full]
        results = torch.utils._pytree.tree_leaves(node.meta["val"])
        leaf.shapes = [[size if isinstance(size, int) else None for size in r.shape] for r in results]
        name = f"leaf_{len(self.flat.attributes)}"
        self.flat.attributes[name] = leaf
        new = self.flat.graph.call_module(name, (state, tensors))
        buffers = dict(call.module.named_buffers(remove_duplicate=False))
        writes = [node for own, node in zip(leaf.names, state, strict=True) if own in buffers]
        new.meta = {"val": node.meta["val"], "segment": self.segment, "writes": writes, "leaf": leaf}
        if "stack_trace" in node.meta:
            new.meta["stack_trace"] = node.meta["stack_trace"]
        return new

    def _region(
        self, region: fx.GraphModule, operands: list[Any], autocast: Autocast | None, no_grad: bool
    ) -> Any:
        inputs = [node for node in region.graph.nodes if node.op == "placeholder"]
        values = dict(zip(inputs, operands, strict=True))
        return self.inline(region, values, autocast=autocast, no_grad=no_grad)

    def _detached(self, operand: Any) -> Any:
        value = operand.meta.get("val") if isinstance(operand, fx.Node) else None
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return operand
        new = self.flat.graph.call_function(DETACH, (operand,))
        new.meta = {"val": value, "segment": self.segment, "no_grad": True}
        return new

    def _nested(self, args: Any) -> Any:
        """Make nested graphs that stay nested attributes of the flat one."""
        return torch.utils._pytree.tree_map(
            lambda arg: self.attribute("region", arg) if isinstance(arg, fx.GraphModule) else arg,
            args,
            is_leaf=lambda arg: isinstance(arg, fx.Node | fx.GraphModule),
        )
