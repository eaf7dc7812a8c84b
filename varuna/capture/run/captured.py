"""A captured model: one graph, cut into segments, from which any span of segments can be carved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Protocol, Self, TypeVar

import sympy
from torch import fx

from varuna.capture.cuts import automatic
from varuna.capture.cuts.carver import Carver
from varuna.capture.cuts.separability import Separability
from varuna.capture.cuts.step_flops import step_flops
from varuna.capture.cuts.summary import listing, summarize
from varuna.capture.graph import checks, passes
from varuna.capture.graph.attention_masks import Meaning, mask_meanings, replace_masks
from varuna.capture.graph.flat_graph import FlatGraph
from varuna.capture.graph.flow import Flow
from varuna.capture.graph.loss_kinds import LossForm, find_form
from varuna.capture.graph.loss_totals import LossEdits, TotalsProgram
from varuna.capture.graph.sizes import compute_sizes_from_inputs, drop_needless_slices
from varuna.capture.model.call_convention import OutputStructure
from varuna.capture.model.lengths import Place, Sizes
from varuna.capture.run.program import SpanProgram
from varuna.capture.trace.patches import without_collections
from varuna.capture.trace.size_guards import SizeGuards
from varuna.capture.trace.trace import TraceRequest
from varuna.errors import CaptureError, list_some
from varuna.types import LOSS_TOTALS, ModelGraph, Partition, PrecisionName, TensorSpec


class ProgramWithSpecs(Protocol):
    """A program of one or several segments."""

    @property
    def received(self) -> tuple[TensorSpec, ...]: ...
    @property
    def sent(self) -> tuple[TensorSpec, ...]: ...
    def with_specs(self, received: tuple[TensorSpec, ...], sent: tuple[TensorSpec, ...]) -> Self: ...


ProgramT = TypeVar("ProgramT", bound=ProgramWithSpecs)


class Captured:
    graph: ModelGraph
    loss: LossForm  # how the loss of a batch follows from those of its micro-batches
    _flat: FlatGraph

    def __init__(
        self,
        flat: FlatGraph,
        request: TraceRequest,
        *,
        ties: Sequence[tuple[str, ...]],
        shared_draws: frozenset[int],
        momentum: Mapping[str, float | None],
        structure: OutputStructure,
        guards: SizeGuards,
        masks: tuple[Meaning | None, ...] | None = None,
        partition: Partition | None = None,
        cut_like: Captured | None = None,
        doubled: Captured | None = None,
    ) -> None:
        """Cut the graph by its CutPoints, by `partition`, or like an earlier capture cut by the partition.

        `masks` says what each attention mask means; None: found at the lengths of the trace.
        The graph of a batch of one sample does not show the batch. `doubled` is that of two samples.
        """
        self.batch_dims = dict(request.batch.dims)
        self.precision: PrecisionName = request.precision
        self.device = request.device
        self.guards = guards
        nodes_of_sizes = compute_sizes_from_inputs(flat, self.batch_dims, guards.graph_symbols)
        drop_needless_slices(flat)
        self.masks = mask_meanings(flat, guards.traced) if masks is None else masks
        replace_masks(flat, self.masks)
        self.draws = passes.bind_randomness(flat, shared_draws, nodes_of_sizes)  # by ordinal
        passes.normalize(flat)
        flow = Flow(flat)
        checks.refuse_unsupported(flow)
        self._places = dict(automatic.nodes_by_place(flat))
        self.loss = find_form(flat, flow, self.batch_dims) if doubled is None else doubled.loss
        self.misplaced: list[automatic.MisplacedState] = []
        if cut_like is not None:
            self.misplaced = automatic.cut_like(flow, cut_like._flat, cut_like.graph.segments)
            flow = Flow(flat)
        elif partition is not None:
            automatic.cut(flow, partition)
            flow = Flow(flat)
        checks.refuse_divided_buffers(flow)
        self.graph = summarize(flow, ties)
        self.num_segments = flat.num_segments
        self.cut_automatically = partition is not None  # not by CutPoints
        self._flat = flat
        self.random = flat.work is not None and bool(flat.work.users)
        # Of BatchNorm's statistics, per run; None: cumulative average.
        self.momentum: Mapping[str, float | None] = {**momentum, **flow.momentum(momentum)}
        self.structure = structure
        self._totals: TotalsProgram | None = None
        self.num_totals = 0  # numbers of the whole batch that its micro-batches need
        if self.loss.edits or any(self.loss.sums):
            self._edit_loss(doubled)
            flow = Flow(flat)
        self._carver = Carver(flow, self.precision, self.device)
        self._programs: dict[tuple[int, int], SpanProgram] = {}

    def carve(self, first: int, stop: int) -> SpanProgram:
        """Return the segments `first..stop-1` as a pure function."""
        misplaced = [state for state in self.misplaced if state.is_missing_in(first, stop)]
        if misplaced:
            names = [state.name for state in misplaced if state.reason == misplaced[0].reason]
            raise CaptureError(f"{list_some(names)} {misplaced[0].reason}")
        if (first, stop) not in self._programs:
            with without_collections():
                program = self._carver.carve(first, stop)
            if LOSS_TOTALS in program.inputs:
                program = replace(program, totals=self._totals)
            self._programs[first, stop] = program
        return self._programs[first, stop]

    def _edit_loss(self, doubled: Captured | None) -> None:
        """Let the loss of a micro-batch use totals of the whole batch."""
        counterpart, lengths = self._counterparts(doubled), self._lengths(doubled)
        edits = LossEdits(self._flat, self.loss.edits, counterpart, self.batch_dims, lengths)
        self._totals, self.num_totals = edits.program(), edits.num_totals
        passes.drop_dead_nodes(self._flat)

    @property
    def shared_draws(self) -> frozenset[int]:
        """Ordinals of the random operations whose draw all samples share."""
        return frozenset(ordinal for ordinal, dims in self.draws.items() if dims.is_shared)

    def carve_tail(self) -> SpanProgram:
        """Return what follows the values of which each sample has a row, without doubt, as a function."""
        program = self._carver.carve_after(self.loss.rows)
        return replace(program, totals=self._totals) if LOSS_TOTALS in program.inputs else program

    def _counterparts(self, other: Captured | None) -> Callable[[fx.Node], fx.Node]:
        """Return a function that finds a node of another capture here, by its place in the program."""
        if other is None:
            return lambda node: node
        place_of = {node: place for place, node in other._places.items()}
        given = {node: name for name, node in other._flat.inputs.items()}
        output = other._flat.graph.output_node()

        def counterpart(node: fx.Node) -> fx.Node:
            if node is output:
                return self._flat.graph.output_node()
            if node in given:
                return self._flat.inputs[given[node]]
            found = self._places.get(place_of[node])
            if found is None:
                raise CaptureError(
                    f"{checks.where(node)}: with one sample, the model computes its loss by other operations "
                    "than with two, so micro-batches of one sample cannot be weighed. Use larger ones."
                )
            return found

        return counterpart

    def _lengths(self, other: Captured | None) -> dict[sympy.Symbol, Place | int]:
        """Return where this capture finds the lengths of another one: in its inputs, or fixed."""
        symbols = (self if other is None else other).guards.graph_symbols
        own, fixed = self.guards.graph_symbols, self.guards.fixed
        return {symbol: place if place in own else fixed[place] for place, symbol in symbols.items()}

    def at_sizes(self, program: ProgramT, first: int, stop: int, sizes: Sizes) -> ProgramT:
        """Return a program of this span with specs for inputs of these sizes, where sizes vary."""
        if not self.guards.symbols:
            return program
        spec = partial(self._carver.spec, lengths=self.guards.values(sizes))
        received, sent = (tuple(map(spec, self._carver.crossing(cut))) for cut in (first, stop))
        same = (received, sent) == (program.received, program.sent)
        return program if same else program.with_specs(received, sent)

    def results_at(self, sizes: Sizes) -> tuple[TensorSpec, ...]:
        """Return the outputs of the last stage for inputs of these sizes."""
        spec = partial(self._carver.spec, lengths=self.guards.values(sizes))
        return tuple(map(spec, self._flat.results))

    def inseparable(self, cut: int) -> list[str]:
        """Return why values over the cut before a segment cannot be divided by sample; [] if they can."""
        reasons = (self._separability.why_not_over_a_cut(value) for value in self._carver.crossing(cut))
        return [reason for reason in reasons if reason]

    @property
    def disordered(self) -> tuple[str, ...]:
        """The results that have a batch but not the samples in order, with the reason."""
        specs = zip(self._flat.results, self.results, strict=True)
        batched = [node for node, spec in specs if any(dim is None or dim.per_sample for dim in spec.dims)]
        return tuple(reason for reason in map(self._separability.why_not, batched) if reason)

    @cached_property
    def _separability(self) -> Separability:
        return Separability(self._flat, self.batch_dims)

    @property
    def changes_buffers(self) -> bool:
        return bool(self.carve(0, self.num_segments).mutated)

    @cached_property
    def crossing_bytes(self) -> list[int]:
        """Bytes per sample over the cut after each segment but the last, forward and backward."""
        return [self._carver.crossing_bytes(cut) for cut in range(1, self.num_segments)]

    @cached_property
    def results(self) -> tuple[TensorSpec, ...]:
        """The outputs of the last stage: the loss, or all tensors of the `structure`."""
        return tuple(map(self._carver.spec, self._flat.results))

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self._flat.parameters)

    def step_flops(self, trained: Collection[str]) -> float:
        """Return the operations of forward and backward of one sample, if these parameters are trained."""
        return step_flops(self._carver.flow, trained)

    def untouched(self, wanted: Sequence[bool] | None = None) -> frozenset[str]:
        """Return the parameters that get no gradient if only the wanted results get one; None: all do."""
        results = list(self._flat.results)
        if wanted is not None:
            results = [result for result, is_wanted in zip(results, wanted, strict=True) if is_wanted]
        reached = self._carver.flow.leading_to(results)
        return frozenset(name for name in self._flat.parameters if self._flat.state[name] not in reached)

    @property
    def leaf_names(self) -> list[str]:
        """The paths of the opaque modules, and the names of functions that stay eager."""
        return [node.meta["leaf"].name for node in self._flat.nodes if "leaf" in node.meta]

    @property
    def held_by_leaves(self) -> frozenset[str]:
        """The state of opaque modules."""
        leaves = [node for node in self._flat.nodes if node.op == "call_module"]
        given = {arg for node in leaves for arg in node.all_input_nodes}
        return frozenset(name for name, node in self._flat.state.items() if node in given)

    @property
    def listing(self) -> list[str]:
        """The model line by line, to find out why two fingerprints differ."""
        return listing(self._flat, self.graph.ties)
