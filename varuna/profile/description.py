"""Facts of a model that need no measurement: kinds of segments, bytes over cuts, ties, shapes of weights."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from varuna.capture import Captured, Source
from varuna.capture.cuts.segment_kinds import find_kinds, is_trained, trains_before
from varuna.capture.model.batch import Batch
from varuna.execute.device.facts import device_memory_bytes, device_name
from varuna.measure.draft import ProfileSubject, SegmentKind
from varuna.measure.optimizer import WeightShape
from varuna.types import CutCost, Dim, TensorSpec, TieCost

GetBatch = Callable[..., Mapping[str, object]]


class ProfileBatches:
    """Batches from the user's `get_batch`, checked for their number of samples."""

    def __init__(self, get_batch: GetBatch, source: Source) -> None:
        self._get_batch = get_batch
        self._takes_device = "device" in inspect.signature(get_batch).parameters
        self.sample = self._call(2)  # with one sample, any leading 1 could be the batch dimension
        self._dims = source.batch(self.sample).dims
        self._check(self.sample, 2)

    def of(self, size: int) -> tuple[Mapping[str, object], Batch]:
        inputs = self._call(size)
        self._check(inputs, size)
        return inputs, Batch(size, dict(self._dims))

    @property
    def sample_bytes(self) -> int:
        """Bytes of the inputs of one sample."""
        tensors = (value for name, value in self.sample.items() if name in self._dims)
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor)) // 2

    def _call(self, size: int) -> Mapping[str, object]:
        inputs = self._get_batch(size, device="cpu") if self._takes_device else self._get_batch(size)
        if not isinstance(inputs, Mapping):
            raise TypeError(
                f"get_batch({size}) must return a dict of the model's keyword arguments, not "
                f"{type(inputs).__name__} (return {{'x': x, 'y': y}} for a model called as model(x=x, y=y))"
            )
        return inputs

    def _check(self, inputs: Mapping[str, object], size: int) -> None:
        counts = {
            name: value.shape[self._dims[name]]
            for name, value in inputs.items()
            if isinstance(value, Tensor) and name in self._dims
        }
        wrong = {name: number for name, number in counts.items() if number != size}
        if wrong or not counts:
            found = ", ".join(f"{number} in {name!r}" for name, number in wrong.items()) or "none"
            raise ValueError(
                f"get_batch({size}) must return {size} samples, but returned {found} "
                "(return as many samples as its argument says)"
            )


def describe(
    source: Source,
    captured: Captured,
    *,
    sample_bytes: int,
    device: torch.device,
    devices_per_machine: int,
) -> ProfileSubject:
    kinds = find_kinds(source, captured)
    return ProfileSubject(
        fingerprint=captured.graph.fingerprint,
        device=device_name(device),
        device_memory_bytes=device_memory_bytes(device)
        // (devices_per_machine if device.type == "cpu" else 1),
        precision=source.precision,
        kinds=tuple(_describe_kind(source, captured, kinds.index(kind)) for kind in range(max(kinds) + 1)),
        segments=tuple(kinds),
        cuts=tuple(
            _cut_cost(
                captured.carve(index, index + 1).sent,
                index,
                returns=trains_before(source, captured, index + 1),
            )
            for index in range(captured.num_segments - 1)
        ),
        ties=_tie_costs(source, captured),
        sample_bytes=sample_bytes,
    )


def _describe_kind(source: Source, captured: Captured, segment: int) -> SegmentKind:
    """Describe the state of a stage that consists of this segment alone."""
    program = captured.carve(segment, segment + 1)
    graph = captured.graph.segments[segment]
    names = {*graph.parameters, *graph.buffers, *program.state}
    trained = [name for name in program.state if is_trained(source, name)]
    return SegmentKind(
        parameter_bytes=sum(_num_bytes(source, name) for name in names),
        gradient_bytes=sum(_num_bytes(source, name) for name in trained),
        num_trained=sum(math.prod(source.shape(name)) for name in trained),
    )


def _num_bytes(source: Source, name: str) -> int:
    return math.prod(source.shape(name)) * source.dtype(name).itemsize


def _cut_cost(sent: Sequence[TensorSpec], cut: int, *, returns: bool = True) -> CutCost:
    """`returns`: something before the cut trains, so that gradients come back."""
    with_gradient = [spec for spec in sent if spec.needs_grad and returns]
    return CutCost(sent=_bytes_by_batch(sent, cut), returned=_bytes_by_batch(with_gradient, cut))


def _bytes_by_batch(specs: Sequence[TensorSpec], cut: int) -> Dim:
    per_sample = fixed = 0
    for spec in specs:
        if None in spec.dims:
            raise ValueError(
                f"the size of {spec}, which crosses the cut after segment {cut}, depends on its values, so "
                "its cost cannot be predicted (move the CutPoint to where all sizes follow from the batch)"
            )
        itemsize = getattr(torch, spec.dtype).itemsize
        dims = [dim for dim in spec.dims if dim is not None]
        # The size is linear in the batch, since only one dimension may depend on it: two points are enough.
        one, two = (math.prod(dim.size(batch) for dim in dims) * itemsize for batch in (1, 2))
        per_sample += two - one
        fixed += 2 * one - two
    return Dim(per_sample, fixed)


def _tie_costs(source: Source, captured: Captured) -> tuple[TieCost, ...]:
    users: dict[str, list[int]] = {}
    for segment in captured.graph.segments:
        for name in segment.parameters:
            users.setdefault(name, []).append(segment.index)
    return tuple(
        TieCost(tuple(segments), _num_bytes(source, name), math.prod(source.shape(name)))
        for name, segments in users.items()
        if len(segments) > 1 and is_trained(source, name)
    )


def trained_shapes(source: Source, captured: Captured) -> list[WeightShape]:
    """Return the shapes of the trained weights, each once, in the order of the segments."""
    names = {
        name: None
        for segment in range(captured.num_segments)
        for name in captured.carve(segment, segment + 1).state
        if is_trained(source, name)
    }
    return [WeightShape(source.shape(name), source.dtype(name)) for name in names]
