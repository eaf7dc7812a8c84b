"""A captured model: one graph, cut into segments, from which any span can be carved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from varuna.capture.cuts import automatic
from varuna.capture.cuts.carver import Carver
from varuna.capture.cuts.separability import Separability
from varuna.capture.cuts.summary import listing, summarize
from varuna.capture.graph import passes
from varuna.capture.graph.attention_masks import name_masks
from varuna.capture.graph.flat_graph import FlatGraph
from varuna.capture.graph.flow import Flow
from varuna.capture.model.batch import Batch
from varuna.capture.model.call_convention import OutputStructure
from varuna.capture.run.program import SpanProgram
from varuna.errors import CaptureError, some
from varuna.types import ModelGraph, Partition, PrecisionName, TensorSpec


class Captured:
    graph: ModelGraph
    num_segments: int
    cut_automatically: bool  # and not by CutPoints
    random: bool  # whether anything in the graph draws
    # Of BatchNorm's running statistics, by name, over one run of the model; None where cumulative.
    momentum: Mapping[str, float | None]
    shared_draws: frozenset[int]  # ordinals of the random operations whose draw all samples share

    def __init__(
        self,
        flat: FlatGraph,
        batch: Batch,
        *,
        ties: Sequence[tuple[str, ...]],
        shared_draws: frozenset[int],
        momentum: Mapping[str, float | None],
        precision: PrecisionName,
        device: torch.device,
        structure: OutputStructure,
        partition: Partition | None = None,
        alike: Captured | None = None,
    ) -> None:
        """Cut by its CutPoints; or by `partition`; or as another capture of the same model was by that."""
        symbol = passes.symbol_of(flat, batch.dims)
        passes.sizes_from_the_batch(flat, batch.dims, symbol)
        name_masks(flat)
        self.shared_draws = passes.bind_randomness(flat, symbol, shared_draws)
        passes.parts_beside_their_whole(flat)
        passes.changes_where_their_values_are(flat)
        passes.drop_needless_detaches(flat, Flow(flat))
        passes.drop_dead(flat, Flow(flat))
        passes.refuse_coupled_samples(flat, symbol)
        passes.refuse_reordered_samples(flat, symbol)
        passes.refuse_sparse_gradients(flat)
        flow = Flow(flat)
        self._strays: list[automatic.Stray] = []
        if alike is not None:
            self._strays = automatic.cut_alike(flat, flow, alike._places, alike._holders, alike._unused)
            flow = Flow(flat)
        elif partition is not None:
            automatic.cut(flat, flow, symbol, partition)
            flow = Flow(flat)
        passes.refuse_torn_buffers(flat, flow)
        self.graph = summarize(flat, flow, ties, symbol)
        self.num_segments = flat.num_segments
        self.cut_automatically = partition is not None
        self._flat = flat
        self._symbol = symbol
        self.random = flat.work is not None and bool(flat.work.users)
        self.momentum = {**momentum, **flow.momentum(momentum)}
        self.precision: PrecisionName = precision
        self.device = device
        self.batch_dims = dict(batch.dims)
        self.structure = structure
        self._carver = Carver(flat, flow, symbol=symbol, precision=precision, device=device)
        self._programs: dict[tuple[int, int], SpanProgram] = {}

    def inseparable(self, cut: int) -> list[str]:
        """What crosses the cut before a segment and cannot be parted by sample, in words."""
        reasons = (self._apart.why_not_over_a_cut(value) for value in self._carver.crossing(cut))
        return [reason for reason in reasons if reason]

    @property
    def disordered(self) -> tuple[str, ...]:
        """Which results have a batch, but not the samples one after the other, in words."""
        specs = zip(self._flat.results, self.results, strict=True)
        batched = [node for node, spec in specs if any(dim is None or dim.per_sample for dim in spec.dims)]
        return tuple(reason for reason in map(self._apart.why_not, batched) if reason)

    @cached_property
    def _apart(self) -> Separability:
        return Separability(self._flat, self.batch_dims, self._symbol)

    @property
    def changes_buffers(self) -> bool:
        """Whether a forward changes any buffer, in whatever segment."""
        return bool(self.carve(0, self.num_segments).mutated)

    @cached_property
    def _places(self) -> dict[automatic.Place, int]:
        return automatic.places(self._flat)

    @property
    def _holders(self) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for segment in self.graph.segments:
            for name in (*segment.parameters, *segment.buffers):
                found.setdefault(name, set()).add(segment.index)
        return found

    @cached_property
    def _unused(self) -> frozenset[str]:
        return frozenset(name for name, node in self._flat.state.items() if not node.users)

    @cached_property
    def crossing_bytes(self) -> list[int]:
        """What goes over the cut after each segment but the last, there and back, for one sample."""
        return [self._carver.crossing_bytes(cut) for cut in range(1, self.num_segments)]

    @cached_property
    def results(self) -> tuple[TensorSpec, ...]:
        """What the last stage gives: the loss, or all tensors of the `structure`."""
        return tuple(map(self._carver.spec, self._flat.results))

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self._flat.parameters)

    def untouched(self, wanted: Sequence[bool] | None = None) -> frozenset[str]:
        """The parameters that get no gradient where only these of the results get one; None: all do."""
        results = list(self._flat.results)
        if wanted is not None:
            results = [result for result, is_wanted in zip(results, wanted, strict=True) if is_wanted]
        reached = self._carver.flow.leading_to(results)
        return frozenset(name for name in self._flat.parameters if self._flat.state[name] not in reached)

    @property
    def held_by_leaves(self) -> frozenset[str]:
        """The state of opaque modules."""
        leaves = [node for node in self._flat.nodes if node.op == "call_module"]
        given = {arg for node in leaves for arg in node.all_input_nodes}
        return frozenset(name for name, node in self._flat.state.items() if node in given)

    @property
    def listing(self) -> list[str]:
        """The model line by line: where two fingerprints differ, these tell why."""
        return listing(self._flat, self.graph.ties, self._symbol)

    def carve(self, first: int, stop: int) -> SpanProgram:
        """The segments `first..stop-1` as a pure function."""
        strays = [stray for stray in self._strays if stray.is_within(first, stop)]
        if strays:
            names = [stray.name for stray in strays if stray.why == strays[0].why]
            raise CaptureError(f"{some(names)} {strays[0].why}")
        if (first, stop) not in self._programs:
            self._programs[first, stop] = self._carver.carve(first, stop)
        return self._programs[first, stop]
