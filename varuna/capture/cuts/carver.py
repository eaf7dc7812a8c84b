"""Carves the program of a span of segments out of the graph.

A value that is made before a cut and used after it is one of three kinds:

    a view of a parameter, or a cheap function of the inputs   → recomputed after the cut
    a value that needs a gradient                              → sent, and its gradient comes back
    any other value                                            → sent one way

The values that cross a cut do not depend on other cuts: everything made before it and used anywhere after
it. A stage in between passes on what only later stages use.
"""

import operator
from collections.abc import Mapping
from functools import cached_property
from itertools import chain
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from varuna.capture.cuts.rematerialization import Rematerialization
from varuna.capture.cuts.summary import num_bytes
from varuna.capture.graph.checks import where
from varuna.capture.graph.flow import Flow
from varuna.capture.run.program import SpanProgram, UnderAutocast, build, in_memory_order, memory_order
from varuna.capture.trace.data_branches import ModelCheck
from varuna.capture.trace.opaque_module import OpaqueLeaf
from varuna.errors import CaptureError
from varuna.types import PrecisionName, TensorSpec


class Carver:
    def __init__(self, flow: Flow, precision: PrecisionName, device: torch.device) -> None:
        self.flat = flow.flat
        self.flow = flow
        self.precision: PrecisionName = precision
        self.device = device
        self._rematerialization = Rematerialization(flow)
        self._recomputed: dict[tuple[fx.Node, int], frozenset[fx.Node] | None] = {}
        self._state = set(self.flat.state.values())
        self._by_segment = self.flat.by_segment()

    def crossing(self, cut: int) -> tuple[fx.Node, ...]:
        """Return the values that are sent over the cut before segment `cut`, in the order of sending."""
        return () if cut in (0, self.flat.num_segments) else self._crossings[cut]

    @cached_property
    def _crossings(self) -> list[tuple[fx.Node, ...]]:
        """The values over every cut: made before it, used after it, and not recomputed."""
        found: list[list[fx.Node]] = [[] for _ in range(self.flat.num_segments)]
        last = self.flat.num_segments - 1
        needed = dict.fromkeys(self.flat.results, last)  # the last segment that uses a value
        for node in reversed(self.flat.nodes):
            first, until = node.meta["segment"], needed.get(node, -1)
            if node.op != "get_attr":
                for arg in node.all_input_nodes:
                    needed[arg] = max(needed.get(arg, -1), first)
            for cut in range(first + 1, until + 1):
                if node.op == "get_attr" or self._nodes_to_recompute(node, cut) is not None:
                    continue
                if isinstance(node.meta.get("val"), Tensor):
                    found[cut].append(node)
                else:
                    # A number that depends on the data, such as the length of x[mask]: send its tensors.
                    for arg in node.all_input_nodes:
                        needed[arg] = max(needed.get(arg, -1), cut)
        return [tuple(reversed(values)) for values in found]

    def crossing_bytes(self, cut: int) -> int:
        """Return the bytes of one sample over a cut, forward and backward."""
        return sum(
            num_bytes(node, self.flat) * (2 if node in self.flow.gets_grad else 1)
            for node in self.crossing(cut)
        )

    def _nodes_to_recompute(self, value: fx.Node, cut: int) -> frozenset[fx.Node] | None:
        """Return the nodes that recompute a value after a cut; None if it must be sent."""
        key = (value, cut)
        if key not in self._recomputed:
            after = chain.from_iterable(self._by_segment[cut:])
            position = next((self.flow.order[node] for node in after), len(self.flow.order))
            self._recomputed[key] = self._rematerialization.closure(value, position)
        return self._recomputed[key]

    def spec(self, node: fx.Node, lengths: Mapping[sympy.Symbol, int] | None = None) -> TensorSpec:
        """Return the spec of a value; `lengths` None: at the lengths of the trace."""
        value = node.meta["val"]
        return TensorSpec(
            name=node.name,
            dtype=str(value.dtype).removeprefix("torch."),
            dims=tuple(self.flat.dim(size, lengths) for size in value.shape),
            needs_grad=node in self.flow.gets_grad,
        )

    def carve(self, first: int, stop: int) -> SpanProgram:
        num_segments = self.flat.num_segments
        if not 0 <= first < stop <= num_segments:
            raise CaptureError(
                f"segments {first}..{stop - 1} do not exist: the model has 0..{num_segments - 1}. "
                "Add CutPoints, or use fewer stages."
            )
        last = stop == num_segments
        received = self.crossing(first)
        outputs = list(self.flat.results) if last else list(self.crossing(stop))
        chosen = self._chosen(first, stop, received, outputs)
        self._refuse_changed_views(received, chosen)
        nodes = self._alive(sorted(chosen, key=self.flow.order.__getitem__), received, outputs)
        return self._build(nodes, received, outputs, last)

    def carve_after(self, values: frozenset[fx.Node]) -> SpanProgram:
        """Return what computes the results from the last of these values, which it receives."""
        chosen: set[fx.Node] = set()
        received: set[fx.Node] = set()
        pending = list(self.flat.results)
        while pending:
            node = pending.pop()
            if node in values:
                received.add(node)
            elif node not in chosen and node.op != "placeholder":
                chosen.add(node)
                pending.extend(self.flow.dependencies(node))
        place = self.flow.order.__getitem__
        outputs = list(self.flat.results)
        return self._build(sorted(chosen, key=place), tuple(sorted(received, key=place)), outputs, last=True)

    def _chosen(
        self, first: int, stop: int, received: tuple[fx.Node, ...], outputs: list[fx.Node]
    ) -> set[fx.Node]:
        """Return the nodes of the span, and those that recompute earlier values."""
        own = [node for segment in self._by_segment[first:stop] for node in segment]
        chosen = set(own)
        pending = [arg for node in own for arg in node.all_input_nodes] + outputs
        while pending:
            value = pending.pop()
            earlier = value.op not in ("placeholder", "get_attr") and value.meta["segment"] < first
            if value in chosen or value in received or not earlier:
                if value.op == "get_attr":
                    chosen.add(value)
                continue
            recomputed = self._nodes_to_recompute(value, first)
            if recomputed is not None:
                chosen.update(recomputed)
            else:
                chosen.add(value)
                pending.extend(value.all_input_nodes)
        return chosen

    def _alive(
        self, nodes: list[fx.Node], received: tuple[fx.Node, ...], outputs: list[fx.Node]
    ) -> list[fx.Node]:
        """Drop the nodes that only other stages need: they recompute them."""
        roots = {self.flow.root[value] for value in (*received, *outputs)} | self._state
        needed = set(outputs)
        kept: list[fx.Node] = []
        for node in reversed(nodes):
            changes = any(root in roots for root in self.flow.writes[node])
            if node in needed or changes or isinstance(node.target, ModelCheck):
                kept.append(node)
                needed.update(node.all_input_nodes)
                roots.update(self.flow.root[arg] for arg in node.all_input_nodes)
        return kept[::-1]

    def _refuse_changed_views(self, received: tuple[fx.Node, ...], chosen: set[fx.Node]) -> None:
        """Refuse a change of one of two received views: they no longer share memory."""
        for node in chosen:
            for root in self.flow.writes[node]:
                views = [value.name for value in received if self.flow.root[value] is root]
                if len(views) > 1:
                    raise CaptureError(
                        f"{where(node)}: this line changes a tensor, but {' and '.join(views)} share "
                        "its memory and cross a cut before it. Move the CutPoint, or change a copy."
                    )

    def _build(
        self, nodes: list[fx.Node], received: tuple[fx.Node, ...], outputs: list[fx.Node], last: bool
    ) -> SpanProgram:
        flat, flow = self.flat, self.flow
        used = {arg for node in nodes for arg in node.all_input_nodes} | set(outputs)
        state = {name: node for name, node in flat.state.items() if node in used}
        inputs = {name: node for name, node in flat.inputs.items() if node in used}
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in (*state.values(), *received, *inputs.values()):
            copies[node] = graph.placeholder(node.name)
        random = flat.work is not None and flat.work in used
        if random:
            assert flat.work is not None
            copies[flat.work] = graph.placeholder("work")
        changed = {root for node in nodes for root in flow.writes[node]}
        passed_on = {value: copies[value] for value in received if flow.root[value] not in changed}
        for value in received:
            order = memory_order(value.meta["val"])
            if order is not None:
                copies[value] = graph.call_function(in_memory_order, (copies[value], order))
            if value not in passed_on:
                copies[value] = graph.call_function(torch.ops.aten.clone.default, (copies[value],))
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            self._apply_autocast(copies[node], node)
        graph.output(tuple(passed_on.get(value, copies[value]) for value in outputs))
        attributes = {
            str(node.target): flat.attributes[str(node.target)]
            for node in nodes
            if node.op in ("get_attr", "call_module")
        }
        return SpanProgram(
            graph_module=build(graph, attributes),
            state=tuple(state),
            received=tuple(map(self.spec, received)),
            sent=() if last else tuple(map(self.spec, outputs)),
            mutated=tuple(name for name, node in state.items() if node in changed),
            inputs=tuple(inputs),
            random=random,
            leaves={leaf.name: leaf.module for leaf in attributes.values() if isinstance(leaf, OpaqueLeaf)},
            precision=self.precision,
            device=self.device,
        )

    def _apply_autocast(self, copy: fx.Node, node: fx.Node) -> None:
        """Run a node in the autocast that the model sets for it."""
        autocast = node.meta.get("autocast")
        if autocast is None or node.op != "call_function" or node.target is operator.getitem:
            return  # getitem takes an item of a list and computes nothing
        device_type, dtype, enabled = autocast
        makes_tensors = isinstance(node.meta.get("val"), Tensor | tuple | list)
        if makes_tensors and (enabled or self.precision != "fp32"):
            target: Any = copy.target
            copy.target = UnderAutocast(target, device_type, dtype, enabled)
