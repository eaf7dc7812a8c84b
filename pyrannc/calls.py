"""Agreement of all ranks on a call: how the model is called, and with how many samples.

Each rank describes its own call. The first time, ranks exchange the full descriptions; later, numbers. A
tensor is batched if its sizes are those of the batch on all ranks. A tensor whose size is 1 on all ranks,
while others are larger, is shared by all samples. Other sizes, such as lengths, may differ from call to call.
If the model is one stage, they may differ from rank to rank, too.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from varuna.capture import Captured, Source
from varuna.capture.model.batch import Batch
from varuna.capture.model.call_convention import StructuredCall
from varuna.capture.model.lengths import Place, sizes_of
from varuna.errors import CaptureError
from varuna.execute.comm.frames import TensorMeta, meta_of
from varuna.execute.comm.session import Session
from varuna.execute.comm.values import PlainValue
from varuna.execute.step.same_data import find_equal_replicas, hash_batch
from varuna.types import PrecisionName

log = logging.getLogger("pyrannc")


class TensorInput(NamedTuple):
    """A tensor among the inputs, without its size along the batch."""

    name: str
    dtype: str
    dim: int | None  # the batch dimension, if it has one
    shape: tuple[int, ...]  # without the batch dimension
    has_gradient: bool

    def meta(self, size: int) -> TensorMeta:
        """Return dtype and shape with `size` samples."""
        shape = list(self.shape)
        if self.dim is not None:
            shape.insert(self.dim, size)
        return meta_of(getattr(torch, self.dtype), tuple(shape))

    def __str__(self) -> str:
        shape: list[Any] = list(self.shape)
        if self.dim is not None:
            shape.insert(self.dim, "b")
        return f"{self.dtype}{shape}" + (" with gradient" if self.has_gradient else "")


Constant = None | bool | int | float | str
"""An argument that is not a tensor."""


class CallSignature(NamedTuple):
    """The properties of a call that must be equal on all ranks."""

    nesting: str
    tensors: tuple[TensorInput, ...]
    constants: tuple[tuple[str, str, Constant], ...]
    training: bool
    grad_enabled: bool
    precision: PrecisionName

    @property
    def kind(self) -> "CallSignature":
        """The signature without sizes."""
        tensors = [tensor._replace(shape=(len(tensor.shape),)) for tensor in self.tensors]
        return self._replace(tensors=tuple(tensors))

    @property
    def form(self) -> int:
        """A number that differs for other sizes; as a float64 it is exact."""
        shapes = repr([tensor.shape for tensor in self.tensors]).encode()
        return int.from_bytes(hashlib.blake2b(shapes, digest_size=6).digest(), "little")


Sizes = Mapping[str, int]
"""Size of each tensor along its batch dimension."""


class AgreedCall(NamedTuple):
    """A call that all ranks make, and which of its tensors are batched."""

    signature: CallSignature
    batched: tuple[str, ...]
    shared: tuple[tuple[str, int], ...]  # tensors that all samples share, and their size
    convention: StructuredCall

    @property
    def dims(self) -> dict[str, int]:
        """Batch dimension of each batched tensor."""
        dims = {tensor.name: tensor.dim for tensor in self.signature.tensors}
        return {name: dim for name in self.batched if (dim := dims[name]) is not None}

    def num_samples(self, signature: CallSignature, sizes: Sizes) -> int | None:
        """Return the number of samples of a call; None if it is not this kind of call."""
        if signature.kind != self.signature.kind or any(sizes[n] != size for n, size in self.shared):
            return None
        counts = {sizes[name] for name in self.batched}
        return counts.pop() if len(counts) == 1 else None

    def meta_inputs(self, size: int) -> tuple[dict[str, Any], Batch]:
        """Return inputs of `size` samples without values, for a capture."""
        shared = dict(self.shared)
        inputs: dict[str, Any] = {}
        for tensor in self.signature.tensors:
            meta = tensor.meta(size if tensor.name in self.batched else shared.get(tensor.name, 1))
            inputs[tensor.name] = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
        inputs.update({name: value for name, _, value in self.signature.constants})
        return inputs, Batch(size, self.dims)

    @property
    def other_sizes(self) -> dict[Place, int]:
        """The sizes of the inputs, except along the batch."""
        return sizes_of(*self.meta_inputs(2))

    @property
    def sample_bytes(self) -> int:
        """Bytes of the batched inputs of one sample."""
        inputs, _ = self.meta_inputs(1)
        return sum(inputs[name].nbytes for name in self.dims)

    def capture(self, source: Source, *, training: bool | None = None, size: int = 2) -> Captured:
        """Capture the model for micro-batches of `size` samples; `training=None`: in the mode of the call."""
        inputs, batch = self.meta_inputs(size)
        return source.capture(
            {name: inputs[name] for name in self.convention.names},
            training=self.signature.training if training is None else training,
            batch=batch,
            convention=self.convention,
            precision=self.signature.precision,
        )


class SentCall(NamedTuple):
    """The form of rank 0's call, for ranks that call without arguments."""

    names: tuple[str, ...]
    nesting: PlainValue
    gradients: frozenset[str]

    @classmethod
    def of(cls, call: StructuredCall) -> "SentCall":
        return cls(call.names, PlainValue(call.nesting), call.gradients)

    @property
    def call(self) -> StructuredCall:
        return StructuredCall.from_nesting(self.names, self.nesting.value, self.gradients)


class CallDescription(NamedTuple):
    """A rank's call, as all ranks compare it."""

    signature: CallSignature | None  # None: this rank calls without arguments
    sizes: dict[str, int]
    sent: SentCall | None
    hashes: dict[str, list[bytes]]


class CurrentCall(NamedTuple):
    """One call of the model on this rank."""

    number: int  # of the call with this rank's sizes
    kind: int  # number of the first call of this kind, with sizes that all ranks know
    leaves: dict[str, Any]  # this rank's inputs by flat name
    counts: list[int]  # samples of each rank
    changed: bool  # the script has changed attributes of the model, on some rank
    forms: list[int]  # of each calling rank: equal for equal sizes

    @property
    def ragged(self) -> bool:
        """True if sizes other than the batch differ between ranks."""
        with_samples = {form for form, count in zip(self.forms, self.counts, strict=False) if count}
        return len(with_samples) > 1

    @property
    def donor(self) -> int:
        """The first rank with the most samples."""
        return max(range(len(self.counts)), key=self.counts.__getitem__)


@dataclass
class AgreedCalls:
    """All calls that the ranks have agreed on so far, by number."""

    model: nn.Module
    batch_dims: Mapping[str, int | None]
    gather_inputs: bool
    calls: list[AgreedCall] = field(default_factory=list)
    _kinds: list[int] = field(default_factory=list)  # numbers of the calls on which all ranks agreed
    _numbers: dict[tuple[int, CallSignature], int] = field(default_factory=dict)  # by kind and signature

    def agree(
        self,
        session: Session,
        args: Any,
        kwargs: Any,
        *,
        training: bool,
        precision: PrecisionName,
        changed: bool = False,
    ) -> CurrentCall:
        """Agree on this call with all ranks, which call it at the same time.

        `changed`: the script has changed attributes of the model on this rank.
        """
        signature: CallSignature | None = None
        sizes: dict[str, int] = {}
        leaves: dict[str, Any] = {}
        convention: StructuredCall | None = None
        kind, count, form = -1, 0, 0
        if self.gather_inputs or session.rank == 0:
            grad_enabled = torch.is_grad_enabled()
            convention, leaves = StructuredCall.of(self.model, args, kwargs, grad_enabled=grad_enabled)
            signature, sizes = describe_call(
                leaves, convention, batch_dims=self.batch_dims, training=training, precision=precision
            )
            form = signature.form
            for index in self._kinds:
                known = self.calls[index].num_samples(signature, sizes)
                if known is not None:
                    kind, count = index, known
        # Three numbers, as announcements of other calls have: gloo needs equal lengths.
        numbers = session.gather_numbers([kind, count, 2 * form + changed])
        session.check_calls(numbers, session.ranks)
        callers = numbers if self.gather_inputs else numbers[:1]
        forms = [int(theirs[2]) // 2 for theirs in callers]
        if all(theirs[0] == callers[0][0] >= 0 for theirs in callers):
            kind, counts = int(callers[0][0]), [int(theirs[1]) for theirs in callers]
            if not self.gather_inputs:
                signature = self._signature_of_rank_0(session, kind, forms[0], signature)
        else:
            kind, counts, signature = self._agree_on_new(
                session, signature, sizes, convention, leaves, training
            )
        assert signature is not None
        number = self._number(kind, signature)
        counts += [0] * (len(numbers) - len(counts))
        any_changed = any(theirs[2] % 2 for theirs in numbers)
        return CurrentCall(number, kind, leaves, counts, any_changed, forms)

    def _signature_of_rank_0(
        self, session: Session, kind: int, form: int, own: CallSignature | None
    ) -> CallSignature:
        """Return the signature of rank 0's call, which is sent once for each form."""
        for known, signature in self._numbers:
            if known == kind and signature.form == form:
                return signature
        sent = session.broadcast(own, 0, CallSignature | None)
        assert sent is not None
        return sent

    def _number(self, kind: int, signature: CallSignature) -> int:
        """Return the number of the call of this kind with this rank's sizes."""
        key = kind, signature
        if key not in self._numbers:
            self._numbers[key] = kind
            if signature != self.calls[kind].signature:
                self._numbers[key] = len(self.calls)
                self.calls.append(self.calls[kind]._replace(signature=signature))
        return self._numbers[key]

    def _agree_on_new(
        self,
        session: Session,
        signature: CallSignature | None,
        sizes: dict[str, int],
        convention: StructuredCall | None,
        leaves: Mapping[str, Any],
        training: bool,
    ) -> tuple[int, list[int], CallSignature]:
        """Exchange full descriptions; return the new kind, the samples of each calling rank, and the call."""
        # Only in the first call: a script that gives all ranks the same data does so from the start.
        compares = self.gather_inputs and training and not self.calls
        hashes = hash_batch(leaves) if compares else {}
        sent = None if self.gather_inputs or convention is None else SentCall.of(convention)
        everyone = session.gather(CallDescription(signature, sizes, sent, hashes), CallDescription)
        equal = find_equal_replicas([theirs.hashes for theirs in everyone])
        if equal is not None and session.rank == 0:
            log.warning(
                "ranks %d and %d called the model with the same samples, so each sample counts twice (give "
                "each rank its own samples, for example with torch's DistributedSampler; or pass "
                "gather_inputs=False if rank 0 has all samples)",
                *equal,
            )
        callers = everyone if self.gather_inputs else everyone[:1]
        calls = [(theirs.signature, theirs.sizes) for theirs in callers if theirs.signature is not None]
        if convention is None:
            assert everyone[0].sent is not None, "rank 0 calls with arguments"
            convention = everyone[0].sent.call
        signatures, all_sizes = zip(*calls, strict=True)
        call = agree_on_call(signatures, all_sizes, self.batch_dims, convention)
        counts = [call.num_samples(theirs, its) or 0 for theirs, its in calls]
        donor = signatures[max(range(len(counts)), key=counts.__getitem__)]
        self._kinds.append(len(self.calls))
        self.calls.append(call._replace(signature=donor))
        return self._kinds[-1], counts, signature or signatures[0]


def describe_call(
    leaves: Mapping[str, Any],
    convention: StructuredCall,
    *,
    batch_dims: Mapping[str, int | None],
    training: bool,
    precision: PrecisionName,
) -> tuple[CallSignature, dict[str, int]]:
    """Return the signature of a call, and the size of each tensor along its batch dimension."""
    tensors: list[TensorInput] = []
    constants: list[tuple[str, str, Any]] = []
    sizes: dict[str, int] = {}
    for name, value in leaves.items():
        if isinstance(value, Tensor):
            dim = batch_dims.get(name, 0) if value.dim() else None
            shape = list(value.shape)
            if dim is not None:
                if not -value.dim() <= dim < value.dim():
                    raise CaptureError(
                        f"batch_dims names dimension {dim} of the input {name!r}, but its shape is "
                        f"{tuple(shape)} (name one of its dimensions, or None if it has no batch)"
                    )
                dim %= value.dim()
                sizes[name] = shape.pop(dim)
            dtype = str(value.dtype).removeprefix("torch.")
            tensors.append(TensorInput(name, dtype, dim, tuple(shape), name in convention.gradients))
        elif value is None or isinstance(value, bool | int | float | str):
            constants.append((name, type(value).__name__, value))
        else:
            raise TypeError(
                f"the input {name!r} is a {type(value).__name__}; expected tensors and constants (None, "
                "bool, int, float, str), in tuples, lists and dicts"
            )
    nesting, grad_enabled = str(convention.key), torch.is_grad_enabled()
    signature = CallSignature(nesting, tuple(tensors), tuple(constants), training, grad_enabled, precision)
    return signature, sizes


def agree_on_call(
    signatures: Sequence[CallSignature],
    sizes: Sequence[Sizes],
    batch_dims: Mapping[str, int | None],
    convention: StructuredCall,
) -> AgreedCall:
    """Return the call that all ranks make; raise ValueError with the first difference."""
    first = signatures[0]
    for rank, signature in enumerate(signatures):
        if signature.kind != first.kind:
            raise ValueError(
                f"rank {rank} calls the model differently than rank 0: {_difference(signature, first)} "
                "(make the same call on all ranks; only the number of samples may differ)"
            )
    names = sorted(sizes[0], key=lambda name: batch_dims.get(name) is None)
    columns = {name: [own[name] for own in sizes] for name in names}
    varied = [name for name in names if set(columns[name]) != {1}]
    if not names:
        inputs = ", ".join(tensor.name for tensor in first.tensors) or "no tensor"
        raise CaptureError(
            f"no input has a batch dimension: found {inputs} (pass a tensor whose leading dimension is the "
            "batch)"
        )
    leading = varied[0] if varied else names[0]
    batched = tuple(name for name in names if columns[name] == columns[leading])
    for name in names:
        if name in batched or (set(columns[name]) == {1} and batch_dims.get(name) is None):
            continue
        raise CaptureError(
            f"the input {name!r} has {_sizes_text(columns[name])} samples, but the batch, by {leading!r}, "
            f"has {_sizes_text(columns[leading])}; expected the same number, or 1 for an input that all "
            f"samples share (name its batch dimension, or None: batch_dims={{{name!r}: ...}})"
        )
    shared = tuple((name, 1) for name in names if name not in batched)
    for tensor in first.tensors:
        if tensor.has_gradient and tensor.name not in batched:
            raise CaptureError(
                f"the input {tensor.name!r} needs a gradient, but samples on several ranks share it (give "
                "it a batch dimension, or make it a parameter of the model)"
            )
    return AgreedCall(first, tuple(sorted(batched)), shared, convention)


def refuse_ragged(session: Session, signature: CallSignature) -> None:
    """Raise ValueError with the sizes that differ between ranks. All ranks call it."""
    everyone = session.gather(signature, CallSignature)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ValueError(
                f"rank {rank} calls the model differently than rank 0: {_difference(theirs, everyone[0])} "
                "(the model has several stages, so samples of all ranks become one batch: pad them to the "
                "same length on all ranks; only with partition_num=1 the lengths of ranks may differ)"
            )


def _sizes_text(column: Sequence[int]) -> str:
    return str(column[0]) if len(set(column)) == 1 else f"{', '.join(map(str, column))} (by rank)"


def _difference(found: CallSignature, expected: CallSignature) -> str:
    for own, other in zip(found.tensors, expected.tensors, strict=False):
        if own != other:
            return f"{own.name!r} is {own}, on rank 0 {other.name!r} is {other}"
    for constant, elsewhere in zip(found.constants, expected.constants, strict=False):
        if constant != elsewhere:
            return f"{constant[0]!r} is {constant[2]!r}, on rank 0 {elsewhere[0]!r} is {elsewhere[2]!r}"
    if found.training != expected.training:
        return f"it is in {'train' if found.training else 'eval'} mode, on rank 0 it is not"
    if found.precision != expected.precision:
        return f"it runs in {found.precision}, on rank 0 in {expected.precision}"
    if found.grad_enabled != expected.grad_enabled:
        return f"gradients are {'on' if found.grad_enabled else 'off'}, on rank 0 they are not"
    return f"its arguments are nested as {found.nesting}, on rank 0 as {expected.nesting}"
