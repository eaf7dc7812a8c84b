"""Write a checkpoint: each rank writes its part, then one rank writes the manifest.

The manifest is the commit: the checkpoint exists once the manifest does. Saving the same step again
replaces the manifest atomically, so the old checkpoint stays valid until the new one is complete.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import xxhash

from varuna.checkpoint.format.manifest import (
    MANIFEST,
    Facts,
    FileEntry,
    Json,
    Manifest,
    PartManifest,
    TensorEntry,
    folder_of,
    hash_of,
    merge,
)
from varuna.checkpoint.format.part import FileTensor, PartLayout
from varuna.checkpoint.load import all_checkpoints
from varuna.checkpoint.store.store import Buffer, Store

AUTOSAVES_KEPT = 2
CHUNK_BYTES = 1 << 20
"""Bytes that are hashed and then written, small enough to stay in the CPU cache."""


def part_name(facts: Facts, writer: str) -> str:
    """Return the name of a part; `writer` is unique within the checkpoint: "stage-0-replica-1"."""
    return f"{writer}-{facts.attempt}"


def write_part(
    store: Store,
    facts: Facts,
    writer: str,
    specs: Sequence[FileTensor],
    layout: PartLayout,
    memory: Callable[[str], memoryview],
    trees: Mapping[str, Json],
    *,
    on_progress: Callable[[int], object] = lambda position: None,
) -> PartManifest:
    """Write one file of tensors, if there are any, then the part's document.

    `memory(key)` returns a tensor's bytes; they must not change until this returns. `on_progress`
    receives the number of bytes passed to the store; its exceptions end the write.
    """
    name = part_name(facts, writer)
    file = f"{name}.safetensors"
    hashes: dict[str, str] = {}

    def chunks() -> Iterable[Buffer]:
        yield layout.header
        for key, (start, _) in layout.spans.items():
            digest = xxhash.xxh3_128()
            data = memory(key)
            for first in range(0, len(data), CHUNK_BYTES):
                on_progress(start + first)
                piece = data[first : first + CHUNK_BYTES]
                digest.update(piece)
                yield piece
            hashes[key] = digest.hexdigest()

    if specs:
        store.write(f"{folder_of(facts.step)}/{file}", chunks)
    part = PartManifest(
        facts,
        {file: FileEntry(layout.size, hash_of(layout.header))} if specs else {},
        {
            spec.key: TensorEntry(file, spec.dtype, spec.shape, *layout.spans[spec.key], hashes[spec.key])
            for spec in specs
        },
        dict(trees),
    )
    store.replace(f"{folder_of(facts.step)}/{name}.json", msgspec.json.encode(part))
    return part


def commit(store: Store, parts: Sequence[PartManifest]) -> Manifest:
    """Write the manifest, which completes the checkpoint.

    If this fails, the manifest may still be in the store, so the parts must stay.
    """
    manifest = merge(parts)
    store.replace(f"{folder_of(manifest.facts.step)}/{MANIFEST}", msgspec.json.encode(manifest))
    return manifest


def remove_other_attempts(store: Store, manifest: Manifest) -> None:
    """Remove the files of earlier saves of the same step."""
    folder = folder_of(manifest.facts.step)
    for entry in store.list(folder):
        if entry.name != MANIFEST and f"-{manifest.facts.attempt}." not in entry.name:
            store.remove(f"{folder}/{entry.name}")


def remove_old(store: Store, manifest: Manifest, *, keep_last: int | None) -> list[int]:
    """Remove interrupted saves and all but the newest `keep_last` checkpoints; return the removed steps.

    Autosaves do not count for `keep_last`: the newest two stay while they are newer than the oldest kept
    checkpoint. Call this right after a commit, when the only job that writes here saves nothing else.
    """
    remove_other_attempts(store, manifest)
    newest = manifest.facts.step
    found = all_checkpoints(store)
    complete = [one.manifest.facts for one in found if one.manifest is not None and not one.problem]
    autosaves = [facts.step for facts in complete if facts.by_itself]
    explicit = [facts.step for facts in complete if not facts.by_itself]
    surplus = _surplus(autosaves, AUTOSAVES_KEPT, newest)
    if keep_last is not None:
        surplus += _surplus(explicit, keep_last, newest)
        kept = [step for step in explicit if step not in surplus]
        surplus += [step for step in autosaves if len(kept) >= keep_last and step < min(kept)]
    interrupted = [one.step for one in found if one.interrupted]
    removed = sorted({*surplus, *interrupted} - {newest})
    for step in removed:
        store.remove(folder_of(step))
    return removed


def _surplus(steps: Sequence[int], kept: int, newest: int) -> list[int]:
    """Return the steps to remove. `newest`, the checkpoint just written, stays even with a lower number."""
    older = [step for step in steps if step != newest]
    return older[: max(0, len(steps) - kept)]


def remove_part(store: Store, facts: Facts, writer: str) -> None:
    """Remove the files that this rank wrote for a failed save."""
    folder, name = folder_of(facts.step), part_name(facts, writer)
    for file in (f"{name}.json", f"{name}.safetensors"):
        store.remove(f"{folder}/{file}")
    if not store.list(folder):
        store.remove(folder)
