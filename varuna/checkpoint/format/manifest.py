"""The manifest of a checkpoint: one JSON document that lists every file, tensor and hash.

It is written last and atomically, so a checkpoint with a manifest is complete. An interrupted save
leaves parts, each with its own document (`PartManifest`), and no manifest.

    varuna_ckpt_<step>/
        manifest.json                            the manifest
        stage-0-replica-0-<attempt>.safetensors  the tensors that one rank wrote
        stage-0-replica-0-<attempt>.json         their PartManifest
"""

import math
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import xxhash

from varuna.checkpoint.format.part import DTYPES
from varuna.codec import UNDECODABLE
from varuna.errors import CheckpointError
from varuna.types import Plan

FORMAT = "varuna-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
FOLDER = re.compile(r"varuna_ckpt_(\d+)")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")

Document = TypeVar("Document")
Json = Any
"""A value that JSON can hold: state without tensors."""


def folder_of(step: int) -> str:
    return f"varuna_ckpt_{step}"


def hash_of(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


class FileEntry(msgspec.Struct, frozen=True):
    size: int
    header_hash: str  # of the bytes before the first tensor


class TensorEntry(msgspec.Struct, frozen=True):
    """The place of a tensor's bytes. Its dtype is torch's name without "torch."."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    stop: int
    hash: str


class Facts(msgspec.Struct, frozen=True):
    """The facts about a checkpoint that are known before it is written."""

    step: int  # the number in its name
    iteration: int  # finished training steps
    attempt: str  # unique to one save, so that files of different saves do not mix
    job: str
    fingerprint: str = ""  # of the captured model; empty for an imported checkpoint
    plan: Plan | None = None
    seed: int | None = None
    ties: tuple[tuple[str, ...], ...] = ()
    created: str = ""  # UTC
    versions: dict[str, str] = {}
    by_itself: bool = False  # an autosave, removed when newer ones exist


class PartManifest(msgspec.Struct, frozen=True):
    """The files, tensors and trees that one rank wrote."""

    facts: Facts
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]  # keys: "model/blocks.0.weight", "optimizer/.../exp_avg"
    trees: dict[str, Json]  # state without tensors: "optimizer/blocks.0.weight", "groups", ...


class Manifest(msgspec.Struct, frozen=True):
    """A complete checkpoint."""

    format: str
    version: int
    checksum: str  # of this document with an empty checksum
    facts: Facts
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    trees: dict[str, Json]

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files.values())


class _Head(msgspec.Struct):
    """The fields that documents of all versions have."""

    format: str
    version: int


def merge(parts: Sequence[PartManifest]) -> Manifest:
    """Merge the parts of all ranks."""
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    trees: dict[str, Json] = {}
    facts = parts[0].facts
    for part in parts:
        assert part.facts == facts, "parts of different saves"
        assert not tensors.keys() & part.tensors.keys(), "two ranks wrote the same tensor"
        files |= part.files
        tensors |= part.tensors
        trees |= part.trees
    return seal(Manifest(FORMAT, VERSION, "", facts, files, tensors, trees))


def seal(manifest: Manifest) -> Manifest:
    blank = msgspec.structs.replace(manifest, checksum="")
    return msgspec.structs.replace(manifest, checksum=hash_of(msgspec.json.encode(blank)))


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Decode a manifest. Refuses a damaged or newer one, and paths outside of its folder.

    Errors call the document `where`.
    """
    head = _decode(data, _Head, where)
    if head.format != FORMAT:
        raise CheckpointError(f"{where} is not a varuna checkpoint: its format is {head.format!r}")
    if head.version > VERSION:
        raise CheckpointError(
            f"{where} has version {head.version}, this varuna reads up to {VERSION} (install a newer varuna)"
        )
    manifest = _decode(data, Manifest, where)
    # The hash is of the text: decoding would skip a damaged field name as unknown.
    blank = data.replace(b'"checksum":"%s"' % manifest.checksum.encode(), b'"checksum":""', 1)
    if hash_of(blank) != manifest.checksum:
        raise CheckpointError(f"{where} is damaged: its content does not match its checksum")
    check_places(manifest.files, manifest.tensors, where)
    return manifest


def decode_part(data: bytes, where: str) -> PartManifest:
    part = _decode(data, PartManifest, where)
    check_places(part.files, part.tensors, where)
    return part


def check_places(files: dict[str, FileEntry], tensors: dict[str, TensorEntry], where: str) -> None:
    """Check that each file has a plain name, and each tensor lies within its file and has its size."""
    for name in files:
        if not PLAIN_NAME.fullmatch(name):
            raise CheckpointError(f"{where} names the file {name!r}, which is not a plain file name: refused")
    for key, entry in tensors.items():
        if entry.file not in files or not 0 <= entry.first <= entry.stop <= files[entry.file].size:
            raise CheckpointError(
                f"{where} places {key!r} at {entry.first} to {entry.stop} of {entry.file!r}, "
                "which are outside of that file"
            )
        _, item_bytes = DTYPES.get(entry.dtype, ("", 0))
        sized = item_bytes * math.prod(entry.shape) == entry.stop - entry.first
        if not item_bytes or not sized or any(length < 0 for length in entry.shape):
            raise CheckpointError(
                f"{where} gives {key!r} {entry.stop - entry.first} bytes, which is not the size of "
                f"{entry.dtype} {list(entry.shape)}"
            )


def _decode(data: bytes, kind: type[Document], where: str) -> Document:
    try:
        return msgspec.json.decode(data, type=kind)
    except UNDECODABLE as error:
        raise CheckpointError(f"{where} is damaged: {error}") from None
