"""Writes a checkpoint: every rank its part, then one of them the manifest; then what is old goes.

The manifest is the commit: before it the checkpoint does not exist, after it all of it does. A
checkpoint of the same step is replaced in the same way, so that there is no moment without one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import xxhash

from varuna.checkpoint.format.manifest import (
    MANIFEST,
    Facts,
    FileEntry,
    Json,
    Manifest,
    Part,
    TensorEntry,
    encode_manifest,
    encode_part,
    folder_of,
    hash_of,
    merge,
)
from varuna.checkpoint.format.part import Layout, Spec
from varuna.checkpoint.load import find
from varuna.checkpoint.store.store import Buffer, Store

OWN_KEPT = 2
CHUNK_BYTES = 1 << 20
"""Hashed and then written, so that the second finds it in the processor's cache."""


def part_name(facts: Facts, writer: str) -> str:
    """`writer` is unique among those that write this checkpoint: "stage-0-replica-1"."""
    return f"{writer}-{facts.attempt}"


def write_part(
    store: Store,
    facts: Facts,
    writer: str,
    specs: Sequence[Spec],
    layout: Layout,
    memory: Callable[[str], memoryview],
    trees: Mapping[str, Json],
    *,
    on_progress: Callable[[int], object] = lambda position: None,
) -> Part:
    """One file of tensors, if there are any, and the part's own document after it.

    `memory(key)` is where a tensor's bytes lie; they must not change until this returns. `on_progress`
    is told how many bytes of the file the store has been given; what it raises ends the writing.
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
    part = Part(
        facts,
        {file: FileEntry(layout.size, hash_of(layout.header))} if specs else {},
        {
            spec.key: TensorEntry(file, spec.dtype, spec.shape, *layout.spans[spec.key], hashes[spec.key])
            for spec in specs
        },
        dict(trees),
    )
    store.replace(f"{folder_of(facts.step)}/{name}.json", encode_part(part))
    return part


def commit(store: Store, parts: Sequence[Part]) -> Manifest:
    """From here on the checkpoint is there. Where this fails it may be, so its parts must stay."""
    manifest = merge(parts)
    store.replace(f"{folder_of(manifest.facts.step)}/{MANIFEST}", encode_manifest(manifest))
    return manifest


def clean(store: Store, manifest: Manifest) -> None:
    """Removes what earlier tries at the same step have left."""
    folder = folder_of(manifest.facts.step)
    for entry in store.list(folder):
        if entry.name != MANIFEST and f"-{manifest.facts.attempt}." not in entry.name:
            store.remove(f"{folder}/{entry.name}")


def tidy(store: Store, manifest: Manifest, *, keep_last: int | None) -> list[int]:
    """Removes interrupted saves, and complete ones beyond the newest `keep_last`; returns their steps.

    Those that a job has saved by itself do not count among these: two of them are kept, for as long as
    they are newer than the oldest of these.

    The manifest has just been committed, by the one job that writes here: so nothing else is under way.
    """
    clean(store, manifest)
    newest = manifest.facts.step
    found = find(store)
    complete = [one.manifest.facts for one in found if one.manifest is not None and not one.problem]
    own = [facts.step for facts in complete if facts.by_itself]
    asked = [facts.step for facts in complete if not facts.by_itself]
    surplus = _surplus(own, OWN_KEPT, newest)
    if keep_last is not None:
        surplus += _surplus(asked, keep_last, newest)
        kept = [step for step in asked if step not in surplus]
        surplus += [step for step in own if len(kept) >= keep_last and step < min(kept)]
    interrupted = [one.step for one in found if one.interrupted]
    removed = sorted({*surplus, *interrupted} - {newest})
    for step in removed:
        store.remove(folder_of(step))
    return removed


def _surplus(steps: Sequence[int], kept: int, newest: int) -> list[int]:
    """The newest is the one just written, whatever its number."""
    older = [step for step in steps if step != newest]
    return older[: max(0, len(steps) - kept)]


def abandon(store: Store, facts: Facts, writer: str) -> None:
    """Takes away what this rank wrote of a checkpoint that will not be."""
    folder, name = folder_of(facts.step), part_name(facts, writer)
    for file in (f"{name}.json", f"{name}.safetensors"):
        store.remove(f"{folder}/{file}")
    if not store.list(folder):
        store.remove(folder)
