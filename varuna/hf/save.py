"""Saves a wrapped model as a Hugging Face folder: each stage writes its own shards, so no rank holds all."""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from varuna.capture.model.source import Source
from varuna.checkpoint.format.part import lay_out
from varuna.checkpoint.format.tensors import as_plain, memory_of, spec_of
from varuna.checkpoint.load import split
from varuna.checkpoint.transfer import (
    INDEX,
    SHARD_BYTES,
    WHOLE,
    ShardIndex,
    files_to_replace,
    move_into_place,
)
from varuna.codec import encode
from varuna.errors import CheckpointError
from varuna.execute.comm.collective import RankFailure
from varuna.execute.comm.session import Session
from varuna.hf.adapters import save_adapter
from varuna.hf.names import file_names
from varuna.hf.wrapped import LONG_WAIT_FACTOR, own_tensors, wrapped_parts

GENERATION_CONFIG = "generation_config.json"


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Write a `Varuna` or `RaNNCModule` as a folder that `from_pretrained` loads. All ranks call this.

    All ranks must see the folder. Of a model with adapters, only these are written, as by `save_adapter`. The
    weights keep their dtype, or get `dtype`. The configs are the model's.
    If a rank fails, all ranks raise the same error, and the folder is as before.
    """
    session, state, source = wrapped_parts(model, "save_pretrained")
    if hasattr(source.meta_model, "peft_config"):
        if dtype is not None:
            raise ValueError("the adapters of a model keep their dtype (call save_pretrained without dtype=)")
        return save_adapter(model, folder, overwrite=overwrite)
    place = Path(folder)
    calls: AbstractContextManager[Any] = session.call("save_pretrained")
    with calls, session.patient(LONG_WAIT_FACTOR):
        staging = _start(session, place, source, overwrite=overwrite)
        try:
            names_in_files = file_names(source.meta_model)
            own = {
                names_in_files.get(name, name): tensor for name, tensor in own_tensors(session, state).items()
            }
            shards = split(own.items(), max_shard_bytes, size=lambda item: item[1].nbytes) if own else []
            counts = session.gather(len(shards), int)
            before = sum(counts[: session.ranks.index(session.rank)])
            names = _shard_names(sum(counts))[before : before + len(shards)]

            def write() -> dict[str, tuple[str, int]]:
                for name, shard in zip(names, shards, strict=True):
                    _write(staging / name, dict(shard), dtype)
                return {
                    key: (name, _converted(tensor, dtype).nbytes)
                    for name, shard in zip(names, shards, strict=True)
                    for key, tensor in shard
                }

            written = session.agree(write, _failure, dict[str, tuple[str, int]])
            places = {key: entry for part in written for key, entry in part.items()}

            def finish() -> None:
                if session.rank == session.ranks[0]:
                    _finish(staging, place, places, source, dtype)

            session.agree(finish, _failure, None)
        finally:
            if session.rank == session.ranks[0]:
                shutil.rmtree(staging, ignore_errors=True)


def _start(session: Session, place: Path, source: Source, *, overwrite: bool) -> Path:
    """Create a hidden folder for the new files, and return its path on all ranks."""

    def make() -> str:
        if session.rank != session.ranks[0]:
            return ""
        existing = files_to_replace(place, "folder", with_config=_has_config(source))
        if existing and not overwrite:
            raise FileExistsError(f"{existing[0]} already exists (choose another name, or overwrite=True)")
        place.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix=".varuna-export-", dir=place)

    return Path(session.agree(make, _failure, str)[0])


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [WHOLE]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _write(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    """Write one safetensors file, tensor by tensor."""
    kinds = {name: _converted(tensor.to("meta"), dtype) for name, tensor in tensors.items()}
    layout = lay_out([spec_of(name, kind) for name, kind in kinds.items()], metadata={"format": "pt"})
    with path.open("xb") as file:
        file.write(layout.header)
        for name in layout.spans:
            plain = as_plain(name, _converted(tensors[name], dtype))
            file.write(memory_of(plain))
        file.flush()
        os.fsync(file.fileno())


def _finish(
    staging: Path,
    place: Path,
    places: Mapping[str, tuple[str, int]],
    source: Source,
    dtype: torch.dtype | None,
) -> None:
    if {name for name, _ in places.values()} != {WHOLE}:
        total = sum(size for _, size in places.values())
        index = ShardIndex({key: name for key, (name, _) in sorted(places.items())}, {"total_size": total})
        (staging / INDEX).write_text(encode(index))
    absent = [name for name in {name for name, _ in places.values()} if not (staging / name).exists()]
    if absent:
        raise CheckpointError(
            f"{place} is not the same folder on all ranks: {absent[0]} is missing on the first rank (save to "
            "a shared folder, or use model.checkpoint and `varuna checkpoint export`)"
        )
    if _has_config(source):
        _write_config(staging, source, dtype)
    move_into_place(staging, place, files_to_replace(place, "folder", with_config=_has_config(source)))


def _has_config(source: Source) -> bool:
    return hasattr(getattr(source.meta_model, "config", None), "save_pretrained")


def _write_config(staging: Path, source: Source, dtype: torch.dtype | None) -> None:
    """Write the model's config with the class and the dtype that the folder has."""
    config: Any = source.meta_model.config
    kept = config.architectures, config.dtype
    own = next((p.dtype for p in source.meta_model.parameters() if p.is_floating_point()), None)
    config.architectures, config.dtype = [type(source.meta_model).__name__], dtype or own
    try:
        config.save_pretrained(staging)
    finally:
        config.architectures, config.dtype = kept
    model: Any = source.attributes.root  # the script may have changed it since the model was wrapped
    if has_generation_config(model):
        model.generation_config.save_pretrained(staging)


def has_generation_config(model: Any) -> bool:
    return getattr(model, "generation_config", None) is not None and bool(model.can_generate())


def _failure(failures: Sequence[RankFailure], own: Exception | None) -> Exception:
    ranks = ", ".join(f"rank {one.rank}: {one.kind}: {one.message}" for one in failures)
    return CheckpointError(f"the model was not saved: {ranks}")
