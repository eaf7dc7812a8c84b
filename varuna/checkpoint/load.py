"""Finds checkpoints and reads from them just the bytes that are asked for, each checked by its hash."""

import logging
from collections.abc import Callable, Iterable, Iterator

import msgspec

from varuna.checkpoint.format.manifest import (
    FOLDER,
    MANIFEST,
    PLAIN_NAME,
    Manifest,
    Part,
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
"""Read together where all is read: many small tensors at once, large ones by themselves."""

log = logging.getLogger("varuna")


class Found(msgspec.Struct, frozen=True):
    """A checkpoint's folder, as it stands. Complete where there is no `problem`."""

    step: int
    manifest: Manifest | None
    problem: str = ""
    interrupted: bool = False  # a save that was never committed
    missing: tuple[str, ...] = ()  # files that are gone or of the wrong size


def find(store: Store) -> list[Found]:
    """All there are, oldest first."""
    return [look(store, step) for step in sorted(steps_in(store))]


def steps_in(store: Store) -> list[int]:
    matches = (FOLDER.fullmatch(entry.name) for entry in store.list() if entry.is_folder)
    return [int(match[1]) for match in matches if match and folder_of(int(match[1])) == match[0]]


def newest(store: Store, *, besides: int | None = None) -> int | None:
    """The newest complete one."""
    steps = sorted({*steps_in(store)} - {besides}, reverse=True)
    return next((step for step in steps if not look(store, step).problem), None)


def look(store: Store, step: int) -> Found:
    """Reads the manifest and compares the sizes of all files with it; the tensors stay unread."""
    folder = folder_of(step)
    where = f"{store.url}/{folder}/{MANIFEST}"
    sizes = {entry.name: entry.size for entry in store.list(folder)}
    if MANIFEST not in sizes:
        what = "its save was interrupted: it has no manifest" if sizes else "there is no such checkpoint"
        return Found(step, None, what, interrupted=True)
    try:
        manifest = decode_manifest(store.read(f"{folder}/{MANIFEST}"), where)
    except FileNotFoundError:  # removed since it was listed
        return Found(step, None, "there is no such checkpoint", interrupted=True)
    except CheckpointError as error:
        return Found(step, None, str(error))
    if manifest.facts.step != step:
        return Found(step, None, f"{where} is of step {manifest.facts.step}, not {step}: a foreign manifest")
    problems = {
        name: f"{name} is missing"
        if name not in sizes
        else f"{name} has {sizes[name]} bytes instead of {file.size}"
        for name, file in manifest.files.items()
        if sizes.get(name) != file.size
    }
    return Found(step, manifest, "; ".join(problems.values()), missing=tuple(problems))


class Checkpoint:
    """A checkpoint that is open for reading."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest

    def read(self, keys: Iterable[str]) -> dict[str, memoryview]:
        """The bytes of these tensors, each compared with its hash; nothing else is read."""
        found: dict[str, memoryview] = {}
        for key, data in self.inspect(keys):
            if isinstance(data, str):
                raise self.broken(data)
            found[key] = data
        return found

    def inspect(self, keys: Iterable[str]) -> Iterator[tuple[str, memoryview | str]]:
        """Each tensor's bytes, or what is wrong with them; nothing else is read."""
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

    def batches(self, keys: Iterable[str]) -> Iterator[list[str]]:
        """The keys in turn, as many at a time as are read together."""
        batch: list[str] = []
        num_bytes = 0
        for key in keys:
            entry = self.manifest.tensors[key]
            if batch and num_bytes + entry.stop - entry.first > BATCH_BYTES:
                yield batch
                batch, num_bytes = [], 0
            batch.append(key)
            num_bytes += entry.stop - entry.first
        if batch:
            yield batch

    def broken(self, what: str) -> CheckpointError:
        return _refusal(self.store, self.manifest.facts.step, what)


def open_checkpoint(store: Store, step: int | None, *, check_complete: bool = True) -> Checkpoint:
    """The checkpoint of a step, or the newest complete one.

    With `check_complete=False` one that was interrupted or has lost files opens too, and holds what is
    there; what is there is checked all the same when it is read.
    """
    if step is None:
        step = newest(store)
        if step is None:
            raise CheckpointError(f"{store.url} holds no complete checkpoint")
    found = look(store, step)
    if not found.problem:
        assert found.manifest is not None
        return Checkpoint(store, found.manifest)
    if check_complete:
        raise _refusal(store, step, found.problem)
    if found.manifest is not None:
        return Checkpoint(store, _without(found.manifest, found.missing))
    if not found.interrupted:
        raise _refusal(store, step, found.problem)
    return Checkpoint(store, _salvage(store, step))


def verify(
    checkpoint: Checkpoint, *, on_bytes: Callable[[int], object] = lambda num_bytes: None
) -> list[str]:
    """Reads every byte; what is wrong, in words, and nothing where all is well."""
    problems: dict[str, None] = {}  # in order, each once
    folder = folder_of(checkpoint.manifest.facts.step)
    tensors = checkpoint.manifest.tensors
    for name, file in checkpoint.manifest.files.items():
        first = min((entry.first for entry in tensors.values() if entry.file == name), default=file.size)
        try:
            header = checkpoint.store.read_spans(f"{folder}/{name}", [(0, first)])[0]
            if hash_of(header) != file.header_hash:
                problems[f"{name}: its header is damaged"] = None
        except (OSError, EOFError) as error:
            problems[f"{name} cannot be read: {error}"] = None
        on_bytes(first)
    for batch in checkpoint.batches(sorted(tensors, key=lambda key: (tensors[key].file, tensors[key].first))):
        for key, data in checkpoint.inspect(batch):
            if isinstance(data, str):
                problems[data] = None
            on_bytes(tensors[key].stop - tensors[key].first)
    return list(problems)


def _without(manifest: Manifest, missing: tuple[str, ...]) -> Manifest:
    return msgspec.structs.replace(
        manifest,
        files={name: file for name, file in manifest.files.items() if name not in missing},
        tensors={key: entry for key, entry in manifest.tensors.items() if entry.file not in missing},
    )


def _salvage(store: Store, step: int) -> Manifest:
    """What the parts of an interrupted save hold, of the attempt that got farthest."""
    folder = folder_of(step)
    attempts: dict[str, list[Part]] = {}
    sizes = {entry.name: entry.size for entry in store.list(folder)}
    for name in sizes:
        if name.endswith(".json") and PLAIN_NAME.fullmatch(name):
            part = decode_part(store.read(f"{folder}/{name}"), f"{store.url}/{folder}/{name}")
            if all(sizes.get(file) == entry.size for file, entry in part.files.items()):
                attempts.setdefault(part.facts.attempt, []).append(part)
    if not attempts:
        raise _refusal(store, step, "nothing of it was written to its end")
    return merge(max(attempts.values(), key=len))


def _refusal(store: Store, step: int, what: str) -> CheckpointError:
    """The problem, and where to go from here."""
    try:
        other = newest(store, besides=step)
    except OSError:
        other = None
    way = f"the newest complete one is of step {other}" if other is not None else "there is no complete one"
    return CheckpointError(f"checkpoint {step} in {store.url}: {what} ({way})")
