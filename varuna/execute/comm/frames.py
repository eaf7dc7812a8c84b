"""Wire format of messages between two ranks.

A frame describes its content, so a mismatch is an error and never wrong data:

    header      magic, kind, number of tensors, descriptor bytes, payload bytes, number (FROZEN: see there)
    descriptor  for each tensor: dtype code, number of dimensions, sizes
    payload     the elements of each tensor, one after the other; empty if they travel by slot or lane
"""

import ctypes
import functools
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MAX_DESCRIPTOR_BYTES = 16 << 20
"""Enough for some hundred thousand tensors; a larger descriptor is not valid."""

HEADER = struct.Struct("<4sB3xIIQq")
MAGIC = b"VRN1"
DATA, BYE, REQUEST_SLOT, OFFER_SLOT, ACCEPT_SLOT, IN_SLOT, RETURN_SLOTS, BY_LANE = range(8)

FROZEN = 1
"""Number in the header of tensors that depend on no trained weight: their sender wants no gradients."""

# A dtype's code is its index here: append new ones at the end.
# fmt: off
DTYPE_NAMES = (
    "float32", "float64", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64",
    "complex64", "complex128", "complex32", "uint16", "uint32", "uint64",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)
# fmt: on
DTYPES: dict[int, torch.dtype] = {
    code: getattr(torch, name) for code, name in enumerate(DTYPE_NAMES) if hasattr(torch, name)
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}

Shape = tuple[int, ...]


class TensorMeta(NamedTuple):
    """Dtype, shape and size of a tensor in a message."""

    dtype: torch.dtype
    shape: Shape
    num_bytes: int


class OutgoingFrame(NamedTuple):
    buffers: list[memoryview]
    tensors: list[Tensor]  # kept alive until their memory has been read
    release_seconds: float  # on the monotonic clock; this frame and later ones are not sent before


class IncomingFrame(NamedTuple):
    tensors: list[Tensor]
    slot: int = -1  # number of the slot that holds the tensors, if one does
    by_lane: bool = False
    metas: tuple[TensorMeta, ...] = ()  # of tensors in a slot or on a lane
    frozen: bool = False  # the sender wants no gradients


class ControlFrame(NamedTuple):
    """A message about slots. The computing thread handles it, because it owns the device."""

    kind: int
    number: int  # of requested bytes, of a slot, or of returned slots
    text: bytes


class InvalidFrame(Exception):
    """The received bytes are not a frame of this version."""


def meta_of(dtype: torch.dtype, shape: Shape) -> TensorMeta:
    return TensorMeta(dtype, shape, math.prod(shape) * dtype.itemsize)


def describe(tensors: Sequence[Tensor]) -> bytes:
    """Return the descriptor of these tensors."""
    return _encode(tuple([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]))


@functools.lru_cache(maxsize=1024)
def _encode(forms: tuple[tuple[torch.dtype, Shape], ...]) -> bytes:
    parts = []
    for dtype, shape in forms:
        if dtype not in DTYPE_CODES:
            names = ", ".join(DTYPE_NAMES)
            raise TypeError(f"a tensor of {dtype} cannot be sent to another stage (supported: {names})")
        parts.append(struct.pack(f"<BB{len(shape)}q", DTYPE_CODES[dtype], len(shape), *shape))
    return b"".join(parts)


@functools.lru_cache(maxsize=1024)
def parse_descriptor(descriptor: bytes, num_tensors: int) -> tuple[TensorMeta, ...]:
    metas, place = [], 0
    try:
        for _ in range(num_tensors):
            code, num_dims = struct.unpack_from("<BB", descriptor, place)
            shape = struct.unpack_from(f"<{num_dims}q", descriptor, place + 2)
            place += 2 + 8 * num_dims
            metas.append(meta_of(DTYPES[code], shape))
    except (struct.error, KeyError) as error:
        raise InvalidFrame(f"the descriptor of {num_tensors} tensors does not parse: {error!r}") from None
    if place != len(descriptor) or any(size < 0 for meta in metas for size in meta.shape):
        raise InvalidFrame(f"the descriptor of {num_tensors} tensors has a wrong length or a negative size")
    return tuple(metas)


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor of any dtype; the caller keeps the tensor alive."""
    num_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")


def to_contiguous(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor with the same elements; the same tensor if it is contiguous."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(
            f"a {tensor.layout} tensor of {tensor.dtype} cannot be sent to another stage "
            "(make it dense before the cut)"
        )
    if tensor.is_conj() or tensor.is_neg():  # lazy views: their memory does not hold their values
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def to_host(tensor: Tensor) -> Tensor:
    """Return a contiguous CPU tensor with the same elements.

    From a device it goes through pinned memory and waits for the copy, and so for the work before it.
    """
    if tensor.device.type == "cpu":
        return to_contiguous(tensor)
    tensor = to_contiguous(tensor.detach())
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor)


def drop_front(buffers: list[memoryview], count: int) -> None:
    """Remove `count` bytes from the front of the buffers."""
    whole = 0
    for buffer in buffers:
        if count < len(buffer):
            break
        count -= len(buffer)
        whole += 1
    del buffers[:whole]
    if count:
        buffers[0] = buffers[0][count:]
