"""A file of tensors in the form of safetensors: a length, a JSON header, then the bytes.

The header is made here rather than by the safetensors library because the bytes are written from where
they lie, or read from just where they are wanted; the form is theirs, and their library reads it.
"""

import math
from collections.abc import Iterable, Mapping

import msgspec

from varuna.errors import CheckpointError

ALIGNMENT = 64
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "complex64": ("C64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
}
"""torch's name: safetensors' name, bytes of an element."""
NAMES = {theirs: ours for ours, (theirs, _) in DTYPES.items()}


class Spec(msgspec.Struct, frozen=True):
    """A tensor to be placed in a file."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


class Layout(msgspec.Struct, frozen=True):
    """A file before its tensors are in it."""

    header: bytes  # all that stands before the first tensor
    spans: dict[str, tuple[int, int]]  # first and stop byte in the file, in the file's order
    size: int


def lay_out(specs: Iterable[Spec], *, metadata: Mapping[str, str]) -> Layout:
    """Wide elements first, so that every tensor is aligned to its own element without a gap."""
    for spec in (specs := list(specs)):
        if spec.dtype not in DTYPES:
            raise CheckpointError(
                f"{spec.key} is of {spec.dtype}, which safetensors cannot hold (it holds {', '.join(DTYPES)})"
            )
    ordered = sorted(specs, key=lambda spec: -DTYPES[spec.dtype][1])
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    ends: list[int] = [0]
    for spec in ordered:
        ends.append(ends[-1] + spec.num_bytes)
        fields[spec.key] = {
            "dtype": DTYPES[spec.dtype][0],
            "shape": spec.shape,
            "data_offsets": (ends[-2], ends[-1]),
        }
    text = msgspec.json.encode(fields)
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    spans = {
        spec.key: (len(header) + first, len(header) + stop)
        for spec, first, stop in zip(ordered, ends, ends[1:], strict=False)
    }
    return Layout(header, spans, len(header) + ends[-1])


def read_header(head: bytes | memoryview, where: str) -> dict[str, tuple[Spec, int, int]]:
    """The tensors of a safetensors file that begins with `head`: spec, first and stop byte in the file."""
    try:
        length = int.from_bytes(head[:8], "little")
        fields = msgspec.json.decode(bytes(head[8 : 8 + length]))
        fields.pop("__metadata__", None)
        return {
            key: (
                Spec(key, NAMES[field["dtype"]], tuple(field["shape"])),
                8 + length + field["data_offsets"][0],
                8 + length + field["data_offsets"][1],
            )
            for key, field in fields.items()
        }
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{where} is no safetensors file: {error!r}") from None
