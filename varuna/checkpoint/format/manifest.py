"""What a checkpoint is: one JSON document that names every file, tensor and hash in it.

It is written last and replaced atomically, so where it is, all is. A save that was interrupted has
left parts, each with a document of its own (`Part`), and no manifest.

    varuna_ckpt_<step>/
        manifest.json                            the whole
        stage-0-replica-0-<attempt>.safetensors  tensors that one rank wrote
        stage-0-replica-0-<attempt>.json         their Part
"""

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import xxhash

from varuna.errors import CheckpointError
from varuna.types import Plan

FORMAT = "varuna-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
FOLDER = re.compile(r"varuna_ckpt_(\d+)")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")

Noun = TypeVar("Noun")
Json = Any
"""What JSON can hold; state without tensors."""


def folder_of(step: int) -> str:
    return f"varuna_ckpt_{step}"


def hash_of(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


class FileEntry(msgspec.Struct, frozen=True):
    size: int
    header_hash: str  # of what stands before the first tensor


class TensorEntry(msgspec.Struct, frozen=True):
    """Where a tensor's bytes are. Its dtype is as torch prints it, without "torch."."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    stop: int
    hash: str


class Facts(msgspec.Struct, frozen=True):
    """What is known of a checkpoint before anything of it is written."""

    step: int  # its name
    iteration: int  # steps trained
    attempt: str  # one try at saving it: files of another are not mixed in
    job: str
    fingerprint: str = ""  # of the model as captured; empty for one that was imported
    plan: Plan | None = None
    seed: int | None = None
    ties: tuple[tuple[str, ...], ...] = ()
    created: str = ""  # UTC
    versions: dict[str, str] = {}
    by_itself: bool = False  # nobody asked for it, so it may go when newer ones are there


class Part(msgspec.Struct, frozen=True):
    """What one rank wrote."""

    facts: Facts
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]  # by kind and name: "model/blocks.0.weight", "optimizer/.../exp_avg"
    trees: dict[str, Json]  # state without tensors: "optimizer/blocks.0.weight", "groups", ...


class Manifest(msgspec.Struct, frozen=True):
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
    """All that a document of any version has."""

    format: str
    version: int


def merge(parts: Sequence[Part]) -> Manifest:
    """The whole of what all ranks wrote; the trees that several wrote alike stand once."""
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    trees: dict[str, Json] = {}
    facts = parts[0].facts
    for part in parts:
        assert part.facts == facts, "a part of another save"
        assert not tensors.keys() & part.tensors.keys(), "two ranks wrote the same tensor"
        files |= part.files
        tensors |= part.tensors
        trees |= part.trees
    return seal(Manifest(FORMAT, VERSION, "", facts, files, tensors, trees))


def seal(manifest: Manifest) -> Manifest:
    blank = msgspec.structs.replace(manifest, checksum="")
    return msgspec.structs.replace(manifest, checksum=hash_of(msgspec.json.encode(blank)))


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest)


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Refuses what is damaged, newer, or would reach outside its folder; `where` names the document."""
    head = _decode(data, _Head, where)
    if head.format != FORMAT:
        raise CheckpointError(f"{where} is no varuna checkpoint: its format is {head.format!r}")
    if head.version > VERSION:
        raise CheckpointError(
            f"{where} has version {head.version}, this varuna reads up to {VERSION} (install a newer one)"
        )
    manifest = _decode(data, Manifest, where)
    # Of the text, not of what it means: a damaged name would only be skipped as unknown.
    blank = data.replace(b'"checksum":"%s"' % manifest.checksum.encode(), b'"checksum":""', 1)
    if hash_of(blank) != manifest.checksum:
        raise CheckpointError(f"{where} is damaged: its content does not match its checksum")
    check_places(manifest.files, manifest.tensors, where)
    return manifest


def encode_part(part: Part) -> bytes:
    return msgspec.json.encode(part)


def decode_part(data: bytes, where: str) -> Part:
    part = _decode(data, Part, where)
    check_places(part.files, part.tensors, where)
    return part


def check_places(files: dict[str, FileEntry], tensors: dict[str, TensorEntry], where: str) -> None:
    """Every file is a plain name in the checkpoint's own folder, every tensor lies within its file."""
    for name in files:
        if not PLAIN_NAME.fullmatch(name):
            raise CheckpointError(f"{where} names the file {name!r}, which is no plain name: refused")
    for key, entry in tensors.items():
        if entry.file not in files or not 0 <= entry.first <= entry.stop <= files[entry.file].size:
            raise CheckpointError(
                f"{where} places {key!r} at {entry.first} to {entry.stop} of {entry.file!r}, "
                "where no such bytes are"
            )


def _decode(data: bytes, kind: type[Noun], where: str) -> Noun:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{where} is damaged: {error}") from None
