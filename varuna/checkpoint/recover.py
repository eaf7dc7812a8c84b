"""Finds the checkpoint to load: of one step, or the newest whole one; sets broken ones aside."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from varuna.checkpoint.format.manifest import Facts, Manifest, seal
from varuna.checkpoint.load import load_error, newest_whole, none_left, open_checkpoint, set_aside
from varuna.checkpoint.store.store import Store


@dataclass
class LoadRequest:
    """A checkpoint to load: of one step, or the newest that verifies."""

    step: int | None
    check_complete: bool = True
    strict: bool = True
    cast: bool = False
    required: bool = True  # False: a store without checkpoints is no error
    set_aside: dict[int, str] = field(default_factory=dict)  # broken steps and their problems, newest first


def find_checkpoint(store: Store, request: LoadRequest) -> Manifest | None:
    """Return the requested checkpoint. Set aside the broken ones that are newer."""
    if request.step is not None:
        return open_checkpoint(store, request.step, check_complete=request.check_complete).manifest
    manifest, newer = newest_whole(store, skip=request.set_aside)
    for one in newer:
        if one.broken and not one.set_aside and set_aside(store, one.step, one.problem, one.manifest):
            request.set_aside[one.step] = one.problem
    if manifest is None and (request.required or any(one.broken for one in newer) or request.set_aside):
        raise none_left(store, newer, request.set_aside)
    return manifest


def find_document(store: Store, request: LoadRequest) -> bytes | None:
    """Return the requested checkpoint as a document, for other ranks: JSON keeps ints of any size."""
    manifest = find_checkpoint(store, request)
    return None if manifest is None else msgspec.json.encode(seal(manifest))


def give_up(store: Store, manifest: Manifest, problem: str, request: LoadRequest) -> None:
    """Set a broken checkpoint aside. Raises an error if the user requested this step."""
    step = manifest.facts.step
    marked = request.check_complete and set_aside(store, step, problem, manifest)
    if request.step is not None:
        raise load_error(store, step, problem, broken=True)
    if marked:
        request.set_aside[step] = problem


def describe_recovery(set_aside: Mapping[int, str], loaded: Facts) -> str:
    """Name the broken checkpoints and the steps that are lost; "" if none is broken."""
    if not set_aside:
        return ""
    broken = "; ".join(
        f"checkpoint {step} is broken and was set aside: {problem}" for step, problem in set_aside.items()
    )
    lost = max(set_aside) - loaded.step
    return f"{broken}; checkpoint {loaded.step} was loaded instead: {lost} steps are lost and trained again"
