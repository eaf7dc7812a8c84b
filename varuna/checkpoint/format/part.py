"""Files of tensors in the safetensors format: a length, a JSON header, then the bytes.

This module writes the header itself, so that tensors are written without a copy and read one by one.
The safetensors library can read the files.
"""

import math
from collections.abc import Iterable, Mapping

import msgspec

from varuna.codec import UNDECODABLE
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
"""torch's name: (safetensors' name, bytes per element)."""
NAMES = {theirs: ours for ours, (theirs, _) in DTYPES.items()}


class FileTensor(msgspec.Struct, frozen=True):
    """Key, dtype and shape of a tensor in a file."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


class PartLayout(msgspec.Struct, frozen=True):
    """The header of a file and the place of each tensor."""

    header: bytes  # the bytes before the first tensor
    spans: dict[str, tuple[int, int]]  # [first, stop) in the file, in file order
    size: int


def lay_out(specs: Iterable[FileTensor], *, metadata: Mapping[str, str]) -> PartLayout:
    """Place the tensors, wide elements first, so that each tensor is aligned without gaps."""
    for spec in (specs := list(specs)):
        if spec.dtype not in DTYPES:
            raise CheckpointError(
                f"{spec.key} has dtype {spec.dtype}, which safetensors does not support "
                f"(supported: {', '.join(DTYPES)})"
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
    return PartLayout(header, spans, len(header) + ends[-1])


def read_header(head: bytes | memoryview, where: str) -> dict[str, tuple[FileTensor, int, int]]:
    """Return (spec, first byte, stop byte) of each tensor in a safetensors file that starts with `head`."""
    try:
        length = int.from_bytes(head[:8], "little")
        fields = msgspec.json.decode(bytes(head[8 : 8 + length]))
        fields.pop("__metadata__", None)
        return {
            key: (
                FileTensor(key, NAMES[field["dtype"]], tuple(field["shape"])),
                8 + length + field["data_offsets"][0],
                8 + length + field["data_offsets"][1],
            )
            for key, field in fields.items()
        }
    except (*UNDECODABLE, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{where} is not a safetensors file: {error!r}") from None
