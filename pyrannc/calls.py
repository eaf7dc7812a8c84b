"""What ranks must agree on before a batch is run: how the model is called, and with how many samples.

Each rank looks at its own call; what they found the first time they tell each other in full, later by a
number. A tensor is batched where its sizes are the batch's on all ranks; one that is 1 long on all
ranks, beside others that are not, is shared by all samples.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varuna.capture.model.batch import Batch
from varuna.errors import CaptureError
from varuna.execute.comm.frames import TensorMeta, meta_of
from varuna.types import PrecisionName


class Leaf(NamedTuple):
    """A tensor among the inputs, but for its size along the batch."""

    name: str
    dtype: str
    dim: int | None  # along which its samples would lie
    shape: tuple[int, ...]  # without that
    has_gradient: bool

    def form(self, size: int) -> TensorMeta:
        """Of a tensor with so many samples."""
        shape = list(self.shape)
        if self.dim is not None:
            shape.insert(self.dim, size)
        return meta_of(getattr(torch, self.dtype), tuple(shape))


class Draft(NamedTuple):
    """A call, as far as all ranks must make it alike."""

    nesting: str
    tensors: tuple[Leaf, ...]
    constants: tuple[tuple[str, str, Any], ...]
    training: bool
    keeps: bool  # what a backward needs
    precision: PrecisionName


Sizes = Mapping[str, int]
"""Of each tensor along its batch."""


class Agreed(NamedTuple):
    """A call that all ranks make, and which of its tensors are batched."""

    draft: Draft
    batched: tuple[str, ...]
    shared: tuple[tuple[str, int], ...]  # others that have the dimension, and their size along it

    @property
    def dims(self) -> dict[str, int]:
        leaves = {leaf.name: leaf.dim for leaf in self.draft.tensors}
        return {name: dim for name in self.batched if (dim := leaves[name]) is not None}

    def num_samples(self, draft: Draft, sizes: Sizes) -> int | None:
        """Of a rank whose call is this one; None where it is another."""
        if draft != self.draft or any(sizes[name] != size for name, size in self.shared):
            return None
        found = {sizes[name] for name in self.batched}
        return found.pop() if len(found) == 1 else None


def look_at(
    leaves: Mapping[str, Any],
    nesting: str,
    *,
    batch_dims: Mapping[str, int | None],
    gradients: frozenset[str],
    training: bool,
    keeps: bool,
    precision: PrecisionName,
) -> tuple[Draft, dict[str, int]]:
    tensors: list[Leaf] = []
    constants: list[tuple[str, str, Any]] = []
    sizes: dict[str, int] = {}
    for name, value in leaves.items():
        if isinstance(value, Tensor):
            dim = batch_dims.get(name, 0) if value.dim() else None
            shape = list(value.shape)
            if dim is not None:
                if not -value.dim() <= dim < value.dim():
                    raise CaptureError(
                        f"batch_dims names dimension {dim} of the input {name!r}, which has the shape "
                        f"{tuple(shape)} (name one of its dimensions, or None where it has no batch)"
                    )
                dim %= value.dim()
                sizes[name] = shape.pop(dim)
            dtype = str(value.dtype).removeprefix("torch.")
            tensors.append(Leaf(name, dtype, dim, tuple(shape), name in gradients))
        elif value is None or isinstance(value, bool | int | float | str):
            constants.append((name, type(value).__name__, value))
        else:
            raise TypeError(
                f"the input {name!r} is a {type(value).__name__}; expected tensors and constants (None, "
                "bool, int, float, str), in tuples, lists and dicts"
            )
    return Draft(nesting, tuple(tensors), tuple(constants), training, keeps, precision), sizes


def agree(drafts: Sequence[Draft], sizes: Sequence[Sizes], batch_dims: Mapping[str, int | None]) -> Agreed:
    """Of what all ranks found; a ValueError names the first difference."""
    for rank, draft in enumerate(drafts):
        if draft != drafts[0]:
            raise ValueError(
                f"rank {rank} calls the model in another way than rank 0: {_difference(draft, drafts[0])} "
                "(call it alike on all ranks; only the number of samples may differ)"
            )
    names = sorted(sizes[0], key=lambda name: batch_dims.get(name) is None)
    columns = {name: [own[name] for own in sizes] for name in names}
    varied = [name for name in names if set(columns[name]) != {1}]
    if not names:
        given = ", ".join(leaf.name for leaf in drafts[0].tensors) or "no tensor"
        raise CaptureError(
            f"no input has a batch: got {given} (give a tensor whose leading dimension is one)"
        )
    first = varied[0] if varied else names[0]
    batched = tuple(name for name in names if columns[name] == columns[first])
    for name in names:
        if name in batched or (set(columns[name]) == {1} and batch_dims.get(name) is None):
            continue
        raise CaptureError(
            f"the input {name!r} has {_sizes(columns[name])}, but the batch is {_sizes(columns[first])}, "
            f"as in {first!r}; expected as many, or 1 for an input that all samples share (name its batch "
            f"dimension, or None: batch_dims={{{name!r}: ...}})"
        )
    shared = tuple((name, 1) for name in names if name not in batched)
    unsure = [leaf.name for leaf in drafts[0].tensors if leaf.has_gradient and leaf.name not in batched]
    if unsure:
        raise CaptureError(
            f"the input {unsure[0]!r} wants a gradient, but all samples share it, and they lie on several "
            "ranks (give it a batch, or make it a parameter of the model)"
        )
    return Agreed(drafts[0], tuple(sorted(batched)), shared)


def _sizes(column: Sequence[int]) -> str:
    if len(set(column)) == 1:
        return str(column[0])
    return f"{', '.join(map(str, column))} by rank"


def _difference(found: Draft, expected: Draft) -> str:
    for own, other in zip(found.tensors, expected.tensors, strict=False):
        if own != other:
            return f"{own.name!r} is {_in_words(own)}, there {other.name!r} is {_in_words(other)}"
    for constant, elsewhere in zip(found.constants, expected.constants, strict=False):
        if constant != elsewhere:
            return f"{constant[0]!r} is {constant[2]!r}, there {elsewhere[0]!r} is {elsewhere[2]!r}"
    if found.training != expected.training:
        return f"it is in {'train' if found.training else 'eval'} mode, there it is not"
    if found.precision != expected.precision:
        return f"it runs in {found.precision}, there in {expected.precision}"
    if found.keeps != expected.keeps:
        return f"gradients are {'on' if found.keeps else 'off'}, there they are not"
    return f"its arguments are nested as {found.nesting}, there as {expected.nesting}"


def _in_words(leaf: Leaf) -> str:
    shape = list(leaf.shape) if leaf.dim is None else [*leaf.shape[: leaf.dim], "b", *leaf.shape[leaf.dim :]]
    return f"{leaf.dtype}{shape}" + (" with gradient" if leaf.has_gradient else "")


def sample_of(
    draft: Draft, dims: Mapping[str, int], shared: Sizes, size: int
) -> tuple[dict[str, Any], Batch]:
    """Inputs of this form without values: what a capture needs."""
    inputs: dict[str, Any] = {}
    for leaf in draft.tensors:
        form = leaf.form(size if leaf.name in dims else shared.get(leaf.name, 1))
        inputs[leaf.name] = torch.empty(form.shape, dtype=form.dtype, device="meta")
    inputs.update({name: value for name, _, value in draft.constants})
    return inputs, Batch(size, dict(dims))
