"""Sizes of inputs that differ from call to call: which dimensions vary, and which vary together.

A model is first captured with the sizes of its sample. The first inputs with other sizes show which
dimensions vary, and the model is captured once more with these as symbols. Dimensions that were equal in all
inputs so far share a symbol, such as the lengths of `input_ids`, `attention_mask` and `labels`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import NamedTuple

from torch import Tensor

from varuna.capture.model.batch import Batch
from varuna.errors import CaptureError

Place = tuple[str, int]
"""An input and one of its dimensions."""
Sizes = Mapping[Place, int]
"""The sizes of all inputs, except along the batch."""
DynamicDims = Mapping[str, Mapping[int, str]]
"""The user's names of varying dimensions, by input: {"input_ids": {1: "length"}, "labels": {1: "length"}}."""

SMALLEST = 2
"""Sizes 0 and 1 get a capture of their own: a model may treat them in another way, as broadcasting does."""


class LengthGroup(NamedTuple):
    """Dimensions that vary together, and the size with which they are traced."""

    places: tuple[Place, ...]
    size: int


def sizes_of(inputs: Mapping[str, object], batch: Batch) -> dict[Place, int]:
    return {
        (name, dim): size
        for name, value in sorted(inputs.items())
        if isinstance(value, Tensor)
        for dim, size in enumerate(value.shape)
        if dim != batch.dims.get(name)
    }


def check_dynamic_dims(dynamic_dims: object) -> DynamicDims:
    """Return the argument `dynamic_dims`; raise TypeError if it has another form."""
    valid = isinstance(dynamic_dims, Mapping) and all(
        isinstance(dims, Mapping)
        and all(isinstance(dim, int) and isinstance(name, str) for dim, name in dims.items())
        for dims in dynamic_dims.values()
    )
    if not valid:
        raise TypeError(
            "dynamic_dims must map inputs to dimensions and their names, for example "
            f'{{"input_ids": {{1: "length"}}, "labels": {{1: "length"}}}}, not {dynamic_dims!r}'
        )
    assert isinstance(dynamic_dims, Mapping)
    return {name: dict(dims) for name, dims in dynamic_dims.items()}


@dataclass
class SeenSizes:
    """The sizes of all inputs of one kind so far: the same names, dtypes and constants."""

    named: Mapping[Place, str] = field(default_factory=dict)
    sizes: list[dict[Place, int]] = field(default_factory=list)

    def add(self, sizes: Sizes) -> None:
        if sizes not in self.sizes:
            kept = self.sizes[-15:]  # and the first: the sample
            self.sizes = [*(self.sizes[:1] if self.sizes[:1] != kept[:1] else []), *kept, dict(sizes)]

    def groups(self, sizes: Sizes) -> tuple[LengthGroup, ...]:
        """Return the dimensions that vary, with sizes to trace these inputs; () if none varies."""
        seen = [*self.sizes, dict(sizes)]
        varying = [place for place in sizes if place in self.named or len({own[place] for own in seen}) > 1]
        if len(seen) == 1 or all(sizes == own for own in seen):
            return ()
        together: dict[object, list[Place]] = {}
        for place in varying:
            together.setdefault(self.named.get(place, tuple(own[place] for own in seen)), []).append(place)
        groups = []
        for places in together.values():
            values = {sizes[place] for place in places}
            if len(values) > 1:
                found = ", ".join(
                    f"{sizes[place]} in dimension {place[1]} of {place[0]!r}" for place in places
                )
                raise CaptureError(
                    f"dynamic_dims gives dimensions the same name {self.named[places[0]]!r}, but their sizes "
                    f"differ: {found}. Give them different names, or pass equal sizes."
                )
            if min(values) >= SMALLEST:
                groups.append(LengthGroup(tuple(places), values.pop()))
        return tuple(groups)


def distinct(groups: Sequence[LengthGroup], taken: Iterable[int]) -> tuple[LengthGroup, ...]:
    """Return the groups with sizes that no other dimension has, so that no two sizes are equal by chance."""
    used = set(taken)
    found = []
    for group in groups:
        # Smaller ones first: a model may have a largest length.
        candidates = chain(range(group.size, SMALLEST - 1, -1), count(group.size + 1))
        size = next(size for size in candidates if size not in used)
        used.add(size)
        found.append(group._replace(size=size))
    return tuple(found)


def named_places(dynamic_dims: DynamicDims, inputs: Mapping[str, object], batch: Batch) -> dict[Place, str]:
    """Return the names of varying dimensions; raise if an input does not have such a dimension."""
    found: dict[Place, str] = {}
    for name, dims in dynamic_dims.items():
        value = inputs.get(name)
        for dim, label in dims.items():
            if not isinstance(value, Tensor):
                continue  # an optional input that this call does not have
            if not -value.dim() <= dim < value.dim():
                raise CaptureError(
                    f"dynamic_dims names dimension {dim} of the input {name!r}, which has the shape "
                    f"{tuple(value.shape)}. Name one of its dimensions."
                )
            if dim % value.dim() == batch.dims.get(name):
                raise CaptureError(
                    f"dynamic_dims names dimension {dim} of the input {name!r}, which is its batch. The "
                    "batch size may always vary: name other dimensions only."
                )
            found[name, dim % value.dim()] = label
    return found
