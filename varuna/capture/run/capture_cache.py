"""The captures of one model, by the form of its inputs: first with fixed sizes, then with sizes that vary.

    sizes of the sample           → a capture with these sizes
    any other sizes               → a capture in which the sizes that differ are symbols, for all lengths
    sizes that break its guards   → another one: the model branches by length, or fixes it

A capture with symbols must be the capture with fixed sizes, operation by operation, if the symbols get these
sizes. Otherwise every length is captured on its own.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cached_property

from varuna.capture.graph.attention_masks import Meaning, mask_meanings
from varuna.capture.graph.flat_graph import FlatGraph
from varuna.capture.graph.sizes import compute_sizes_from_inputs
from varuna.capture.model.batch import input_kind, input_signature
from varuna.capture.model.lengths import (
    DynamicDims,
    LengthGroup,
    SeenSizes,
    Sizes,
    distinct,
    named_places,
    sizes_of,
)
from varuna.capture.run.captured import Captured
from varuna.capture.run.same_graph import first_difference
from varuna.capture.trace.patches import without_collections
from varuna.capture.trace.size_guards import SizeGuards
from varuna.capture.trace.trace import TraceRequest
from varuna.errors import CaptureError

log = logging.getLogger("varuna")

MAX_TRACES = 32
"""Traces of one kind of inputs that are kept: a model that fixes its lengths is captured for each of them."""

Kind = tuple[Hashable, Hashable]
"""Inputs without their sizes, and the mode: training, calling convention, precision."""


class TracedModel:
    """One trace, and the captures made of it: attention masks may mean other things at other lengths."""

    def __init__(
        self,
        guards: SizeGuards,
        flatten: Callable[[], FlatGraph],
        build: Callable[[FlatGraph, tuple[Meaning | None, ...] | None], Captured],
        request: TraceRequest,
    ) -> None:
        self.guards = guards
        self._flatten: Callable[[], FlatGraph] | None = flatten  # holds the graph of torch.export
        self._build, self._request = build, request
        self._captures: dict[object, Captured] = {}

    def at(self, sizes: Sizes) -> Captured:
        """Return the capture for inputs of these sizes, which keep the guards."""
        masks = mask_meanings(self._flat, self.guards.values(sizes)) if self.guards.symbols else None
        if masks not in self._captures:
            assert self._flatten is not None
            self._captures[masks] = self._build(self._flatten(), masks)
            if not self.guards.symbols:  # no other capture will be made of it
                self._flatten = None
        return self._captures[masks]

    @cached_property
    def _flat(self) -> FlatGraph:
        assert self._flatten is not None
        flat = self._flatten()
        compute_sizes_from_inputs(flat, self._request.batch.dims, self.guards.graph_symbols)
        return flat


class CaptureCache:
    """Finds the capture for inputs, and traces the model if there is none."""

    def __init__(
        self,
        trace: Callable[[TraceRequest, bool], TracedModel],
        taken_sizes: Callable[[], set[int]],
        dynamic_dims: DynamicDims,
    ) -> None:
        self._trace = trace
        self._taken_sizes = taken_sizes  # sizes of the model's weights
        self._dynamic_dims = dynamic_dims
        self._captured: dict[Kind, Captured] = {}  # by signature with all sizes
        self._traces: dict[Kind, list[TracedModel]] = {}  # by kind of inputs, the most recent last
        self._seen: dict[Hashable, SeenSizes] = {}
        self._fixed: set[Kind] = set()  # kinds of inputs of which each length is captured on its own
        self._fixing_lines: dict[tuple[Kind, str], int] = {}
        self._warned: set[str] = set()

    def get(self, request: TraceRequest, training: bool) -> Captured:
        mode = (training, request.convention.key, request.precision)
        key = (input_signature(request.inputs, request.batch), mode)
        if key not in self._captured:
            kind = (input_kind(request.inputs, request.batch), mode)
            if len(self._captured) > 64 * MAX_TRACES:
                self._captured.clear()
            with without_collections():
                self._captured[key] = self._find(kind, request, training)
        return self._captured[key]

    def _find(self, kind: Kind, request: TraceRequest, training: bool) -> Captured:
        sizes = sizes_of(request.inputs, request.batch)
        traces = self._traces.setdefault(kind, [])
        found = next((traced for traced in traces if traced.guards.broken(sizes) is None), None)
        if found is None:
            found = self._new_trace(kind, request, training, sizes)
            if len(traces) >= MAX_TRACES:  # the first one is of the sample
                traces.pop(1)
                self._captured = {key: own for key, own in self._captured.items() if key[1] != kind[1]}
            traces.append(found)
        return found.at(sizes)

    def _new_trace(self, kind: Kind, request: TraceRequest, training: bool, sizes: Sizes) -> TracedModel:
        seen = self._seen_sizes(request)
        # Each mode starts with fixed sizes: the capture with symbols is compared with this one.
        groups = seen.groups(sizes) if self._traces[kind] and kind not in self._fixed else ()
        seen.add(sizes)
        if groups:
            other = distinct(groups, self._taken_sizes() | _fixed_sizes(sizes, groups))
            reason = ""
            for attempt in (other, groups) if other != groups else (groups,):
                found = self._attempt(kind, replace(request, lengths=attempt), training, sizes)
                if isinstance(found, TracedModel):
                    self._watch_fixed_sizes(kind, found)
                    return found
                reason = found
            fixed = self._trace(request, training)  # raises if these sizes are too large for the model
            self._fixed.add(kind)
            self._warn(reason)
            return fixed
        return self._trace(request, training)

    def _seen_sizes(self, request: TraceRequest) -> SeenSizes:
        kind = input_kind(request.inputs, replace(request.batch, size=2))
        if kind not in self._seen:
            named = named_places(self._dynamic_dims, request.inputs, request.batch)
            self._seen[kind] = SeenSizes(named)
        return self._seen[kind]

    def _attempt(self, kind: Kind, request: TraceRequest, training: bool, sizes: Sizes) -> TracedModel | str:
        """Trace with symbolic sizes; return the reason if the model cannot be traced so."""
        try:
            traced = self._trace(request, training)
            if traced.guards.broken(sizes) is None:
                traced.at(sizes)
        except CaptureError as error:
            return f"the model cannot be captured for all lengths at once: {error}"
        reason = traced.guards.broken(sizes)
        if reason is not None:
            return f"the model runs other operations at other lengths: {reason}"
        if not traced.guards.varies:
            return traced
        fixed = [earlier for earlier in self._traces[kind] if not earlier.guards.symbols]
        served = [earlier for earlier in fixed if traced.guards.broken(earlier.guards.fixed) is None]
        if not served:  # the first one at this branch of the model
            served = [self._trace(replace(request, lengths=()), training)]
            self._traces[kind].extend(served)
        for earlier in served:
            known = earlier.guards.fixed
            reason = first_difference(traced.at(known), earlier.at(known), known)
            if reason is not None:
                return f"the model runs other operations at other lengths: {reason}"
        return traced

    def _watch_fixed_sizes(self, kind: Kind, traced: TracedModel) -> None:
        """Warn of a line that fixes lengths; a single length may be a special case of the model."""
        for line in traced.guards.fixing_lines.values():
            earlier = self._fixing_lines.setdefault((kind, line), 0)
            self._fixing_lines[kind, line] = earlier + 1
            if earlier:
                self._warn(f"a line of the model fixes a length of the inputs: {line or 'unknown'}")

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            log.warning(
                "%s. Each length of the inputs is captured on its own, which takes as long as wrapping the "
                "model (read sizes as x.shape[i] and keep them out of int(), float() and range(), or pad the "
                "inputs to a few lengths)",
                reason.removesuffix("."),
            )


def _fixed_sizes(sizes: Sizes, groups: Sequence[LengthGroup]) -> set[int]:
    varying = {place for group in groups for place in group.places}
    return {size for place, size in sizes.items() if place not in varying}
