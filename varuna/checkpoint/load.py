"""Find checkpoints and read the requested tensors, each checked against its hash."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from varuna.checkpoint.format.manifest import (
    FOLDER,
    MANIFEST,
    PLAIN_NAME,
    Manifest,
    PartManifest,
    TensorEntry,
    decode_manifest,
    decode_part,
    folder_of,
    hash_of,
    merge,
)
from varuna.checkpoint.store.store import Store
from varuna.errors import CheckpointError

BATCH_BYTES = 16 << 20
"""Bytes to read in one batch: many small tensors together, a large one alone."""

Item = TypeVar("Item")


class CheckpointStatus(msgspec.Struct, frozen=True):
    """The state of a checkpoint's folder. It is complete if `problem` is empty."""

    step: int
    manifest: Manifest | None
    problem: str = ""
    interrupted: bool = False  # the save was never committed
    missing: tuple[str, ...] = ()  # files that are missing or have the wrong size


def all_checkpoints(store: Store) -> list[CheckpointStatus]:
    """Return the status of all checkpoints, lowest step first."""
    return [status_of(store, step) for step in sorted(steps_in(store))]


def steps_in(store: Store) -> list[int]:
    matches = (FOLDER.fullmatch(entry.name) for entry in store.list() if entry.is_folder)
    return [int(match[1]) for match in matches if match and folder_of(int(match[1])) == match[0]]


def newest_complete(store: Store, *, besides: int | None = None) -> int | None:
    """Return the step of the newest complete checkpoint, other than `besides`."""
    steps = sorted({*steps_in(store)} - {besides}, reverse=True)
    return next((step for step in steps if not status_of(store, step).problem), None)


def status_of(store: Store, step: int) -> CheckpointStatus:
    """Read the manifest and compare the size of each file with it; do not read tensors."""
    folder = folder_of(step)
    where = f"{store.url}/{folder}/{MANIFEST}"
    sizes = {entry.name: entry.size for entry in store.list(folder)}
    if MANIFEST not in sizes:
        what = "its save was interrupted: it has no manifest" if sizes else "it does not exist"
        return CheckpointStatus(step, None, what, interrupted=True)
    try:
        manifest = decode_manifest(store.read(f"{folder}/{MANIFEST}"), where)
    except FileNotFoundError:  # removed after the listing
        return CheckpointStatus(step, None, "it does not exist", interrupted=True)
    except CheckpointError as error:
        return CheckpointStatus(step, None, str(error))
    if manifest.facts.step != step:
        return CheckpointStatus(step, None, f"{where} belongs to step {manifest.facts.step}, not {step}")
    problems = {
        name: f"{name} is missing"
        if name not in sizes
        else f"{name} has {sizes[name]} bytes instead of {file.size}"
        for name, file in manifest.files.items()
        if sizes.get(name) != file.size
    }
    return CheckpointStatus(step, manifest, "; ".join(problems.values()), missing=tuple(problems))


class Checkpoint:
    """A checkpoint to read from."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest

    def read(self, keys: Iterable[str]) -> dict[str, memoryview]:
        """Return the bytes of these tensors, each checked against its hash."""
        found: dict[str, memoryview] = {}
        for key, data in self.read_each(keys):
            if isinstance(data, str):
                raise _load_error(self.store, self.manifest.facts.step, data)
            found[key] = data
        return found

    def read_each(self, keys: Iterable[str]) -> Iterator[tuple[str, memoryview | str]]:
        """Yield (key, bytes) of each tensor, or (key, problem) for a tensor that cannot be read."""
        by_file: dict[str, list[tuple[str, TensorEntry]]] = {}
        for key in keys:
            entry = self.manifest.tensors[key]
            by_file.setdefault(entry.file, []).append((key, entry))
        for file, wanted in by_file.items():
            wanted.sort(key=lambda item: item[1].first)
            path = f"{folder_of(self.manifest.facts.step)}/{file}"
            try:
                views = self.store.read_spans(path, [(entry.first, entry.stop) for _, entry in wanted])
            except (OSError, EOFError) as error:
                yield from ((key, f"{file} cannot be read: {error}") for key, _ in wanted)
                continue
            for (key, entry), view in zip(wanted, views, strict=True):
                if hash_of(view) == entry.hash:
                    yield key, view
                else:
                    yield key, f"{key!r} in {file} is damaged: its bytes do not match their hash"

    def batches(self, keys: Iterable[str]) -> list[list[str]]:
        """Return the keys in batches of about BATCH_BYTES."""
        tensors = self.manifest.tensors
        return split(keys, BATCH_BYTES, size=lambda key: tensors[key].stop - tensors[key].first)


def split(items: Iterable[Item], max_bytes: int, *, size: Callable[[Item], int]) -> list[list[Item]]:
    """Fill batches in order; an item larger than `max_bytes` gets its own batch."""
    batches: list[list[Item]] = []
    left = 0
    for item in items:
        if not batches or size(item) > left:
            batches.append([])
            left = max_bytes
        batches[-1].append(item)
        left -= size(item)
    return batches


def open_checkpoint(store: Store, step: int | None, *, check_complete: bool = True) -> Checkpoint:
    """Open the checkpoint of a step, or the newest complete one.

    `check_complete=False` also opens an incomplete checkpoint, with the tensors that exist. Reading
    still checks their hashes.
    """
    if step is None:
        step = newest_complete(store)
        if step is None:
            raise CheckpointError(f"{store.url} has no complete checkpoint")
    found = status_of(store, step)
    if found.problem and (check_complete or not (found.manifest or found.interrupted)):
        raise _load_error(store, step, found.problem)
    if (whole := found.manifest) is not None:
        files = {name: file for name, file in whole.files.items() if name not in found.missing}
        tensors = {key: entry for key, entry in whole.tensors.items() if entry.file in files}
        return Checkpoint(store, msgspec.structs.replace(whole, files=files, tensors=tensors))
    return Checkpoint(store, _salvage(store, step))


def verify(
    checkpoint: Checkpoint, *, on_bytes: Callable[[int], object] = lambda num_bytes: None
) -> list[str]:
    """Read every byte and return the problems found."""
    problems: dict[str, None] = {}  # in order, each once
    folder = folder_of(checkpoint.manifest.facts.step)
    tensors = checkpoint.manifest.tensors
    for name, file in checkpoint.manifest.files.items():
        first = min((entry.first for entry in tensors.values() if entry.file == name), default=file.size)
        try:
            header = checkpoint.store.read_spans(f"{folder}/{name}", [(0, first)])[0]
            if hash_of(header) != file.header_hash:
                problems[f"{name}: the header is damaged"] = None
        except (OSError, EOFError) as error:
            problems[f"{name} cannot be read: {error}"] = None
        on_bytes(first)
    for batch in checkpoint.batches(sorted(tensors, key=lambda key: (tensors[key].file, tensors[key].first))):
        for key, data in checkpoint.read_each(batch):
            if isinstance(data, str):
                problems[data] = None
            on_bytes(tensors[key].stop - tensors[key].first)
    return list(problems)


def _salvage(store: Store, step: int) -> Manifest:
    """Return a manifest of the finished parts of an interrupted save, from the attempt with the most."""
    folder = folder_of(step)
    attempts: dict[str, list[PartManifest]] = {}
    sizes = {entry.name: entry.size for entry in store.list(folder)}
    for name in sizes:
        if name.endswith(".json") and PLAIN_NAME.fullmatch(name):
            part = decode_part(store.read(f"{folder}/{name}"), f"{store.url}/{folder}/{name}")
            if all(sizes.get(file) == entry.size for file, entry in part.files.items()):
                attempts.setdefault(part.facts.attempt, []).append(part)
    if not attempts:
        raise _load_error(store, step, "it has no complete part")
    return merge(max(attempts.values(), key=len))


def _load_error(store: Store, step: int, problem: str) -> CheckpointError:
    try:
        other = newest_complete(store, besides=step)
    except OSError:
        other = None
    advice = "there is no complete checkpoint" if other is None else f"the newest complete step is {other}"
    return CheckpointError(f"checkpoint {step} in {store.url}: {problem} ({advice})")
