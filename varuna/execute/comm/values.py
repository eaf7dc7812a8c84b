"""Values as bytes, for messages between ranks: typed msgpack, with the memory of tensors behind it.

A receiver decodes a message with the type that it expects, and refuses everything else. Decoding builds plain
values and tensors only; unlike pickle it cannot run code.

    length of the head (8 bytes) | head: msgpack | memory of each tensor, each at a multiple of 16 bytes

In the head a tensor is its dtype, shape and place. Tensors arrive on the CPU.
"""

import functools
import math
import struct
import threading
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from varuna.execute.comm.frames import DTYPE_CODES, DTYPE_NAMES, memory_of

ALIGNMENT = 16
MAX_DEPTH = 100
"""Limit for containers within containers of a `PlainValue`."""
NUMPY_KINDS = "biufc"
"""Kinds of numpy's dtypes that are numbers. Others may hold Python objects."""
WAY_OUT = (
    "send plain values: None, bool, int, float, complex, str, bytes, tensors and numpy's numbers, "
    "in tuples, lists, dicts and sets"
)

_LENGTH = struct.Struct("<Q")
_SCALARS = type(None), bool, int, float, str, bytes
_reading = threading.local()  # `tensors`: the memory behind the head that is being decoded


class PlainValue:
    """A value whose type only the script knows, such as its optimizer's state; also the type of its message.

    It may hold None, bool, int, float, complex, str, bytes, tensors, dtypes, devices, sizes, and numpy's
    numbers and arrays, in tuples, lists, dicts and sets.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PlainValue({self.value!r})"


class _Packer:
    """Describes tensors by their places, and collects them."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.num_bytes = 0

    def replace(self, value: Any) -> Any:
        """Return a substitute for a value that msgpack does not have."""
        if isinstance(value, PlainValue):
            return self.pack(value.value, ())
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, torch.dtype):
            return _name(value)
        if isinstance(value, torch.device):
            return str(value)
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return value.item()
        plain: Any
        for plain in (str, int, float, bytes):
            if isinstance(value, plain):  # a subclass
                return plain(value)
        raise TypeError(f"{_shown(value)} cannot be sent to other ranks ({WAY_OUT})")

    def pack(self, value: Any, path: tuple[object, ...]) -> Any:
        """Return a tree in which every container and tensor is a list that begins with its kind."""
        if type(value) in _SCALARS and (type(value) is not int or value.bit_length() < 64):
            return value
        if len(path) > MAX_DEPTH:
            raise ValueError(f"a value with more than {MAX_DEPTH} levels cannot be sent to other ranks")
        if type(value) is int:
            return ["int", hex(value)]
        if isinstance(value, Tensor):
            return ["tensor", *self._tensor(value)]
        if isinstance(value, torch.dtype):
            return ["dtype", _name(value)]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in NUMPY_KINDS:
            kind = "array" if isinstance(value, np.ndarray) else "number"
            return [kind, value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, dict):
            items = value.items()
            return ["dict", *([self.pack(key, path), self.pack(one, (*path, key))] for key, one in items)]
        for name, kind in _SEQUENCES.items():
            if type(value) is kind:
                return [name, *(self.pack(one, (*path, place)) for place, one in enumerate(value))]
        where = "".join(f"[{key!r}]" for key in path)
        raise TypeError(
            f"{_shown(value)}{where and ' at ' + where} cannot be sent to other ranks ({WAY_OUT})"
        )

    def _tensor(self, tensor: Tensor) -> tuple[str, tuple[int, ...], int]:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise TypeError(
                f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} cannot be sent to other "
                "ranks (make it dense, with memory of its own)"
            )
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        self.tensors.append(plain)
        place = self.num_bytes
        self.num_bytes += _aligned(plain.nbytes)
        return _name(tensor.dtype), tuple(tensor.shape), place


_SEQUENCES: dict[str, Any] = {
    "tuple": tuple,
    "list": list,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}


def encode(value: object) -> Tensor:
    """Return a message as a tensor of bytes. Raise TypeError or ValueError for what cannot be sent."""
    packer = _Packer()
    try:
        head = msgspec.msgpack.encode(value, enc_hook=packer.replace)
    except OverflowError as error:  # an int of more than 64 bits
        raise ValueError(f"{_shown(value)} cannot be sent to other ranks: {error}") from None
    body = _aligned(_LENGTH.size + len(head))
    if not packer.tensors:
        return torch.frombuffer(bytearray(_LENGTH.pack(len(head)) + head), dtype=torch.uint8)
    data = torch.empty(body + packer.num_bytes, dtype=torch.uint8)
    memory_of(data)[: _LENGTH.size + len(head)] = _LENGTH.pack(len(head)) + head
    place = body
    for tensor in packer.tensors:
        if tensor.numel():
            data[place : place + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
        place += _aligned(tensor.nbytes)
    return data


def decode(data: Tensor, kind: Any, source: str) -> Any:
    """Return the value of a message. Raise ValueError, with its source, unless it is a `kind`."""
    memory = memory_of(data)
    try:
        (length,) = _LENGTH.unpack_from(memory)
        stop = _LENGTH.size + length
        if stop > memory.nbytes:
            raise ValueError(f"its head has {length} bytes, but the message has {memory.nbytes}")
        _reading.tensors = data[_aligned(stop) :]
        return _decoder(kind).decode(memory[_LENGTH.size : stop])
    except (ValueError, TypeError, KeyError, RuntimeError, struct.error) as error:
        name = kind.__name__ if isinstance(kind, type) else kind
        raise ValueError(f"{source} is not a valid {name}: {error}") from None
    finally:
        _reading.tensors = None


@functools.lru_cache(maxsize=256)
def _decoder(kind: Any) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(kind, dec_hook=_restore)


def _restore(kind: type, found: Any) -> Any:
    """Return the value that `_Packer.replace` replaced."""
    if kind is PlainValue:
        return PlainValue(_unpack(found))
    if kind is Tensor:
        return _tensor_at(*found)
    if kind is torch.dtype:
        return _dtype(found)
    if kind is torch.device:
        return torch.device(_checked(found, str))
    if kind is torch.Size:
        return torch.Size(_shape(found))
    raise TypeError(f"{kind} is not a type of messages")


def _unpack(found: Any) -> Any:
    if type(found) in _SCALARS:
        return found
    kind, *rest = _checked(found, list)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_unpack(one) for one in rest)
    if kind == "dict":
        return {_unpack(key): _unpack(value) for key, value in rest}
    if kind == "tensor":
        return _tensor_at(*rest)
    if kind == "int":
        return int(_checked(rest[0], str), 16)
    if kind == "dtype":
        return _dtype(*rest)
    if kind == "device":
        return torch.device(_checked(rest[0], str))
    if kind == "complex":
        return complex(*(_checked(one, float) for one in rest))
    if kind in ("array", "number"):
        return _array(kind, *rest)
    raise ValueError(f"{kind!r} is not a kind of value")


def _tensor_at(dtype: Any, shape: Any, place: Any) -> Tensor:
    """Return a copy of a tensor in the message, so that it does not keep the whole message in memory."""
    like, sizes, start = _dtype(dtype), _shape(shape), _checked(place, int)
    num_bytes = math.prod(sizes) * like.itemsize
    memory = _reading.tensors
    if start < 0 or start % ALIGNMENT or start + num_bytes > len(memory):
        raise ValueError(f"a tensor of {num_bytes} bytes at {start} is not in the message")
    copy: Tensor = memory[start : start + num_bytes].clone()
    return copy.view(like).view(sizes)


def _array(kind: str, dtype: Any, shape: Any, data: Any) -> Any:
    like = np.dtype(_checked(dtype, str))
    if like.kind not in NUMPY_KINDS:
        raise ValueError(f"{like} is not a dtype of numbers")
    array = np.frombuffer(_checked(data, bytes), like).reshape(_shape(shape)).copy()
    return array if kind == "array" else array[()]


def _name(dtype: torch.dtype) -> str:
    if dtype not in DTYPE_CODES:
        raise TypeError(f"a tensor of {dtype} cannot be sent to other ranks (supported: {DTYPE_NAMES})")
    return DTYPE_NAMES[DTYPE_CODES[dtype]]


def _dtype(name: Any) -> torch.dtype:
    if name not in DTYPE_NAMES:
        raise ValueError(f"{name!r} is not a dtype")
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _shape(sizes: Any) -> tuple[int, ...]:
    shape = tuple(_checked(size, int) for size in _checked(sizes, list))
    if any(size < 0 for size in shape):
        raise ValueError(f"{shape} is not a shape")
    return shape


def _checked(found: Any, kind: type) -> Any:
    if type(found) is not kind:
        raise ValueError(f"expected {kind.__name__}, found {type(found).__name__}")
    return found


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _shown(value: object) -> str:
    text = repr(value)
    return f"the {type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def printable(text: str) -> str:
    """Return a text that can be sent: a file name may hold bytes that are not UTF-8."""
    return text.encode(errors="backslashreplace").decode()
