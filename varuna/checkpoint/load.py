"""Find checkpoints and read the requested tensors, each checked against its hash.

A broken checkpoint is set aside: a file `broken-<hash of its manifest>.txt` in its folder says why, and
the checkpoint is never taken for complete again. Saving the same step again replaces both.
"""

import errno
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
from varuna.checkpoint.store.store import Store, local_folder
from varuna.errors import BrokenCheckpoint, CheckpointError, list_some

log = logging.getLogger("varuna")

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
    set_aside: bool = False  # a file in its folder says that it is broken

    @property
    def broken(self) -> bool:
        """True if the checkpoint was committed once and is damaged now."""
        return bool(self.problem) and not self.interrupted


class TensorProblem(msgspec.Struct, frozen=True):
    """The reason why a tensor cannot be read."""

    text: str
    damaged: bool  # False: the store did not answer, so the checkpoint may be whole


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
        data = store.read(f"{folder}/{MANIFEST}")
        marked = marker_of(data) in sizes
        reason = store.read(f"{folder}/{marker_of(data)}").decode(errors="replace") if marked else ""
    except FileNotFoundError:  # removed after the listing
        return CheckpointStatus(step, None, "it does not exist", interrupted=True)
    try:
        manifest = decode_manifest(data, where)
    except CheckpointError as error:
        return CheckpointStatus(step, None, str(error), set_aside=marked)
    if manifest.facts.step != step:
        problem = f"{where} belongs to step {manifest.facts.step}, not {step}"
        return CheckpointStatus(step, None, problem, set_aside=marked)
    problems = {
        name: f"{name} is missing"
        if name not in sizes
        else f"{name} has {sizes[name]} bytes instead of {file.size}"
        for name, file in manifest.files.items()
        if sizes.get(name) != file.size
    }
    missing = tuple(problems)
    if marked:
        problems[""] = f"it was set aside as broken ({marker_of(data)}): {reason}"
    return CheckpointStatus(step, manifest, "; ".join(problems.values()), missing=missing, set_aside=marked)


def marker_of(manifest: bytes) -> str:
    """Return the name of the file that sets a checkpoint aside. A later save has another manifest."""
    return f"broken-{hash_of(manifest)[:16]}.txt"


def set_aside(store: Store, step: int, problem: str, manifest: Manifest | None = None) -> bool:
    """Mark a broken checkpoint, so that nothing takes it again.

    Returns False if the checkpoint was removed or saved again since `manifest` was read. Only logs a
    warning if the store cannot be written.
    """
    folder = folder_of(step)
    try:
        data = store.read(f"{folder}/{MANIFEST}")
    except FileNotFoundError:
        return False
    if manifest is not None and manifest.checksum.encode() not in data:
        return False
    try:
        store.replace(f"{folder}/{marker_of(data)}", problem.encode())
    except OSError as error:
        log.warning("checkpoint %d in %s is broken, but could not be marked: %s", step, store.url, error)
    return True


def newest_whole(
    store: Store, *, skip: Collection[int] = ()
) -> tuple[Manifest | None, list[CheckpointStatus]]:
    """Return the newest complete checkpoint, and the status of all newer ones.

    The steps in `skip` are known to be broken.
    """
    newer: list[CheckpointStatus] = []
    for step in sorted(steps_in(store), reverse=True):
        found = status_of(store, step)
        if found.manifest is not None and not found.problem and step not in skip:
            return found.manifest, newer
        newer.append(found)
    return None, newer


def none_left(
    store: Store, found: Iterable[CheckpointStatus], problems: Mapping[int, str] | None = None
) -> CheckpointError:
    """Return the error for a store without a complete checkpoint. It lists all that were found.

    `problems` has those of checkpoints that look complete.
    """
    listed = [f"checkpoint {one.step}: {one.problem or (problems or {}).get(one.step)}" for one in found]
    if not listed:
        return CheckpointError(f"{store.url} has no complete checkpoint")
    return BrokenCheckpoint(
        f"{store.url} has no complete checkpoint: {list_some(listed, 10)} "
        "(repair or remove the broken ones, or use another store)"
    )


class Checkpoint:
    """A checkpoint to read from."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest

    def read(self, keys: Iterable[str]) -> dict[str, memoryview]:
        """Return the bytes of these tensors, each checked against its hash."""
        found: dict[str, memoryview] = {}
        for key, data in self.read_each(keys):
            if isinstance(data, TensorProblem):
                raise load_error(self.store, self.manifest.facts.step, data.text, broken=data.damaged)
            found[key] = data
        return found

    def read_each(self, keys: Iterable[str]) -> Iterator[tuple[str, memoryview | TensorProblem]]:
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
                problem = TensorProblem(f"{file} cannot be read: {error}", self._is_damage(error))
                yield from ((key, problem) for key, _ in wanted)
                continue
            for (key, entry), view in zip(wanted, views, strict=True):
                yield key, view if hash_of(view) == entry.hash else self._read_again(path, key, entry)

    def _read_again(self, path: str, key: str, entry: TensorEntry) -> memoryview | TensorProblem:
        """Read a damaged tensor once more, because a bit may also flip on its way from the store."""
        try:
            (view,) = self.store.read_spans(path, [(entry.first, entry.stop)])
        except (OSError, EOFError) as error:
            return TensorProblem(f"{entry.file} cannot be read: {error}", self._is_damage(error))
        if hash_of(view) == entry.hash:
            return view
        text = f"{key!r} in {entry.file} is damaged: its bytes do not match their hash"
        return TensorProblem(text, damaged=True)

    def _is_damage(self, error: OSError | EOFError) -> bool:
        """Return whether bytes are gone, rather than a store that does not answer."""
        if isinstance(error, EOFError | FileNotFoundError):
            return True
        return error.errno == errno.EIO and local_folder(self.store.url) is not None  # a bad sector

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
            raise none_left(store, all_checkpoints(store))
    found = status_of(store, step)
    if found.problem and (check_complete or not (found.manifest or found.interrupted)):
        raise load_error(store, step, found.problem, broken=found.broken)
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
            if isinstance(data, TensorProblem):
                problems[data.text] = None
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
        raise load_error(store, step, "it has no complete part")
    return merge(max(attempts.values(), key=len))


def load_error(store: Store, step: int, problem: str, *, broken: bool = False) -> CheckpointError:
    try:
        other = newest_complete(store, besides=step)
    except OSError:
        other = None
    advice = "there is no complete checkpoint" if other is None else f"the newest complete step is {other}"
    kind = BrokenCheckpoint if broken else CheckpointError
    return kind(f"checkpoint {step} in {store.url}: {problem} ({advice})")
