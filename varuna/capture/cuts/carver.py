"""Cuts a span of segments out of the whole graph.

A value that is made before a cut and used after it is one of three kinds:

    its memory is a parameter's, or it follows cheaply from the inputs   → made again on the other side
    it needs a gradient                                                  → sent, and a gradient comes back
    neither                                                              → sent, and nothing comes back

What crosses a cut does not depend on where the other cuts are: everything that is made before and
used anywhere after it. So a stage in between passes on what only later stages use.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from varuna.capture.cuts.rematerialization import Rematerialization
from varuna.capture.cuts.summary import num_bytes
from varuna.capture.graph.flat_graph import FlatGraph
from varuna.capture.graph.flow import Flow
from varuna.capture.model.batch import dim_of
from varuna.capture.run.program import SpanProgram, build, laid_out, layout_of, under_autocast
from varuna.capture.trace.opaque_module import OpaqueLeaf
from varuna.errors import CaptureError
from varuna.types import PrecisionName, TensorSpec


class Carver:
    def __init__(
        self,
        flat: FlatGraph,
        flow: Flow,
        *,
        symbol: sympy.Symbol | None,
        precision: PrecisionName,
        device: torch.device,
    ) -> None:
        self.flat = flat
        self.flow = flow
        self.symbol = symbol
        self.precision: PrecisionName = precision
        self.device = device
        self._closures = Rematerialization(flat, flow)
        self._again: dict[tuple[fx.Node, int], frozenset[fx.Node] | None] = {}
        self._state = set(flat.state.values())

    @cached_property
    def _by_segment(self) -> list[list[fx.Node]]:
        segments: list[list[fx.Node]] = [[] for _ in range(self.flat.num_segments)]
        for node in self.flat.nodes:
            if node.op != "get_attr":
                segments[node.meta["segment"]].append(node)
        return segments

    def crossing(self, cut: int) -> tuple[fx.Node, ...]:
        """The values that are sent over the cut before segment `cut`, in the order both sides agree on."""
        return () if cut in (0, self.flat.num_segments) else self._crossings[cut]

    @cached_property
    def _crossings(self) -> list[tuple[fx.Node, ...]]:
        """For every cut: what is used behind it, made before it, and not made again."""
        found: list[list[fx.Node]] = [[] for _ in range(self.flat.num_segments)]
        last = self.flat.num_segments - 1
        needed = dict.fromkeys(self.flat.results, last)  # up to which segment
        for node in reversed(self.flat.nodes):
            first, until = node.meta["segment"], needed.get(node, -1)
            if node.op != "get_attr":
                for arg in node.all_input_nodes:
                    needed[arg] = max(needed.get(arg, -1), first)
            for cut in range(first + 1, until + 1):
                if node.op == "get_attr" or self.made_again(node, cut) is not None:
                    continue
                if isinstance(node.meta.get("val"), Tensor):
                    found[cut].append(node)
                else:
                    # A number that follows from the data, such as the length of x[mask]: its tensors cross.
                    for arg in node.all_input_nodes:
                        needed[arg] = max(needed.get(arg, -1), cut)
        return [tuple(reversed(values)) for values in found]

    def crossing_bytes(self, cut: int) -> int:
        """There and back, for one sample."""
        return sum(
            num_bytes(node.meta["val"], self.symbol) * (2 if node in self.flow.gets_grad else 1)
            for node in self.crossing(cut)
        )

    def _is_before(self, value: fx.Node, cut: int) -> bool:
        return value.op not in ("placeholder", "get_attr") and value.meta["segment"] < cut

    def made_again(self, value: fx.Node, cut: int) -> frozenset[fx.Node] | None:
        """The nodes that make a value again after a cut; None where it must be sent."""
        key = (value, cut)
        if key not in self._again:
            self._again[key] = self._closures.closure(value, self._position(cut))
        return self._again[key]

    def _position(self, cut: int) -> int:
        """The position in the whole graph of a cut."""
        for segment in self._by_segment[cut:]:
            for node in segment:
                return self.flow.order[node]
        return len(self.flow.order)

    def spec(self, node: fx.Node) -> TensorSpec:
        value = node.meta["val"]
        return TensorSpec(
            name=node.name,
            dtype=str(value.dtype).removeprefix("torch."),
            dims=tuple(dim_of(size, self.symbol) for size in value.shape),
            needs_grad=node in self.flow.gets_grad,
        )

    def carve(self, first: int, stop: int) -> SpanProgram:
        flat, flow = self.flat, self.flow
        if not 0 <= first < stop <= flat.num_segments:
            raise CaptureError(
                f"segments {first}..{stop - 1} are asked for, the model has 0..{flat.num_segments - 1} "
                "(put in more CutPoints, or use fewer stages)"
            )
        last = stop == flat.num_segments
        received = self.crossing(first)
        sent = self.crossing(stop)
        outputs = list(flat.results) if last else list(sent)
        own = [node for segment in self._by_segment[first:stop] for node in segment]
        chosen = set(own)
        given = set(received)
        pending = [arg for node in own for arg in node.all_input_nodes] + outputs
        while pending:
            value = pending.pop()
            if value in chosen or value in given or not self._is_before(value, first):
                if value.op == "get_attr":
                    chosen.add(value)
                continue
            again = self.made_again(value, first)
            if again is not None:
                chosen.update(again)
            else:
                chosen.add(value)
                pending.extend(value.all_input_nodes)
        self._refuse_torn_aliases(received, chosen)
        nodes = self._alive(sorted(chosen, key=flow.order.__getitem__), received, outputs)
        return self._build(nodes, received, outputs, last)

    def _alive(
        self, nodes: list[fx.Node], received: tuple[fx.Node, ...], outputs: list[fx.Node]
    ) -> list[fx.Node]:
        """Without what only other stages need: they make it again."""
        roots = {self.flow.root[value] for value in (*received, *outputs)} | self._state
        needed = set(outputs)
        kept: list[fx.Node] = []
        for node in reversed(nodes):
            if node in needed or any(root in roots for root in self.flow.writes[node]):
                kept.append(node)
                needed.update(node.all_input_nodes)
                roots.update(self.flow.root[arg] for arg in node.all_input_nodes)
        return kept[::-1]

    def _refuse_torn_aliases(self, received: tuple[fx.Node, ...], chosen: set[fx.Node]) -> None:
        """Two views of one memory arrive as two tensors: a change of one would not be seen in the other."""
        changed = {root for node in chosen for root in self.flow.writes[node]}
        for root in changed:
            views = [value for value in received if self.flow.root[value] is root]
            if len(views) > 1:
                raise CaptureError(
                    f"{', '.join(view.name for view in views)} share memory, cross a cut, and are "
                    "changed in place "
                    "after it (put the CutPoint elsewhere, or change a copy)"
                )

    def _build(
        self, nodes: list[fx.Node], received: tuple[fx.Node, ...], outputs: list[fx.Node], last: bool
    ) -> SpanProgram:
        flat, flow = self.flat, self.flow
        used = {arg for node in nodes for arg in node.all_input_nodes} | set(outputs)
        state = [(name, node) for name, node in flat.state.items() if node in used]
        inputs = [(name, node) for name, node in flat.inputs.items() if node in used]
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in [node for _, node in state] + list(received) + [node for _, node in inputs]:
            copies[node] = graph.placeholder(node.name)
        random = flat.work is not None and flat.work in used
        if random:
            assert flat.work is not None
            copies[flat.work] = graph.placeholder("work")
        changed = {root for node in nodes for root in flow.writes[node]}
        passed_on = {value: copies[value] for value in received if flow.root[value] not in changed}
        for value in received:
            order = layout_of(value.meta["val"])
            if order is not None:
                copies[value] = graph.call_function(laid_out, (copies[value], order))
            if value not in passed_on:
                copies[value] = graph.call_function(torch.ops.aten.clone.default, (copies[value],))
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            self._in_its_precision(copies[node], node)
        graph.output(tuple(passed_on.get(value, copies[value]) for value in outputs))
        attributes = {
            str(node.target): flat.attributes[str(node.target)]
            for node in nodes
            if node.op in ("get_attr", "call_module")
        }
        return SpanProgram(
            graph_module=build(graph, attributes),
            state=tuple(name for name, _ in state),
            received=tuple(map(self.spec, received)),
            sent=() if last else tuple(map(self.spec, outputs)),
            mutated=tuple(name for name, node in state if node in changed),
            inputs=tuple(name for name, _ in inputs),
            random=random,
            leaves=_leaves(attributes),
            precision=self.precision,
            device=self.device,
        )

    def _in_its_precision(self, copy: fx.Node, node: fx.Node) -> None:
        autocast = node.meta.get("autocast")
        if (
            autocast is None
            or node.op != "call_function"
            or not isinstance(node.meta.get("val"), Tensor | tuple | list)
        ):
            return
        device_type, dtype, enabled = autocast
        if not enabled and self.precision == "fp32":
            return
        target: Any = copy.target
        copy.args = (target, device_type, dtype, enabled, *copy.args)
        copy.target = under_autocast


def _leaves(attributes: Mapping[str, Any]) -> dict[str, nn.Module]:
    return {leaf.name: leaf.module for leaf in attributes.values() if isinstance(leaf, OpaqueLeaf)}
