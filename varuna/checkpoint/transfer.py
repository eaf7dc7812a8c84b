"""Export checkpoints to files of other programs, and import such files as a checkpoint.

Both work tensor by tensor, so the model may be larger than memory. An export is written to a hidden
folder and moved to its place when it is complete.
"""

import mmap
import os
import re
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from varuna.checkpoint.format.manifest import PLAIN_NAME, Facts, Manifest, PartManifest
from varuna.checkpoint.format.part import FileTensor, lay_out, read_header
from varuna.checkpoint.format.tensors import as_plain, memory_of, spec_of, tensor_from
from varuna.checkpoint.format.tree import tensors_in, unpack
from varuna.checkpoint.load import Checkpoint, split, status_of
from varuna.checkpoint.save import commit, remove_other_attempts, remove_part, write_part
from varuna.checkpoint.select import FROZEN
from varuna.checkpoint.store.store import Owner, Store
from varuna.codec import decode, encode
from varuna.errors import CheckpointError

SHARD_BYTES = 5 * 10**9
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\..+)")
PICKLED = (".pt", ".pth", ".bin")
NESTED = ("state_dict", "model", "model_state_dict")
"""Keys under which training scripts store the model in a larger dict."""
MODEL = "model/"

ExportForm = Literal["state_dict", "safetensors", "folder"]
OnBytes = Callable[[int], object]
"""Receives the number of bytes after each tensor."""


class ShardIndex(msgspec.Struct, frozen=True):
    """The file of each tensor in a sharded model."""

    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


# ---------------------------------------------------------------- export


def export(
    checkpoint: Checkpoint,
    out: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    config: Path | None = None,
    with_optimizer: bool = False,
    overwrite: bool = False,
    on_bytes: OnBytes = lambda num_bytes: None,
) -> list[Path]:
    """Write the model to `out` in the form that its suffix selects; return the files.

    .pt, .pth, .bin: a state_dict by torch.save; .safetensors: one file; else a Hugging Face folder.
    """
    form: ExportForm = "safetensors" if out.suffix == ".safetensors" else "folder"
    form = "state_dict" if out.suffix in PICKLED else form
    if config is not None and form != "folder":
        raise ValueError(f"a config needs a folder as output, and {out} is a file (name a folder)")
    if with_optimizer and form != "state_dict":
        raise ValueError(f"only a .pt file can hold the optimizer's state (name a .pt file instead of {out})")
    existing = files_to_replace(out, form, with_config=config is not None)
    if existing and not overwrite:
        raise FileExistsError(f"{existing[0]} already exists (choose another name, or pass --overwrite)")
    if form == "folder" and any(key.startswith(FROZEN) for key in checkpoint.manifest.trees):
        raise CheckpointError(
            f"checkpoint {checkpoint.manifest.facts.step} has adapters, but not their base model, and so no "
            "whole model (load it into the wrapped model and call varuna.hf.save_adapter; a .pt or "
            ".safetensors file can hold the adapters)"
        )
    names = {key: key.removeprefix(MODEL) for key in model_keys(checkpoint.manifest)}
    with staging_in(out if form == "folder" else out.parent) as staging:
        if form == "state_dict":
            write_state_dict(staging / out.name, checkpoint, dtype, on_bytes, with_optimizer=with_optimizer)
        elif form == "safetensors":
            write_tensors(staging / out.name, checkpoint, to_export(checkpoint, names, dtype), on_bytes)
        else:
            if config is not None:
                shutil.copyfile(config, staging / CONFIG)
            write_folder(staging, checkpoint, to_export(checkpoint, names, dtype), max_shard_bytes, on_bytes)
        return move_into_place(staging, out if form == "folder" else out.parent, existing)


def bytes_to_export(manifest: Manifest, *, with_optimizer: bool) -> int:
    keys = model_keys(manifest) + (optimizer_keys(manifest) if with_optimizer else [])
    return sum(manifest.tensors[key].stop - manifest.tensors[key].first for key in keys)


def model_keys(manifest: Manifest) -> list[str]:
    keys = [key for key in manifest.tensors if key.startswith(MODEL)]
    if not keys:
        raise CheckpointError(f"checkpoint {manifest.facts.step} has no model")
    return keys


def files_to_replace(out: Path, form: ExportForm, *, with_config: bool) -> list[Path]:
    """Return existing files that an export replaces or that would look like a part of it; the index first."""
    if form != "folder":
        if out.is_dir():
            raise IsADirectoryError(f"{out} is a folder, but its suffix selects a file (choose another name)")
        return [out] if out.exists() else []
    if not out.is_dir():
        if out.exists():
            raise NotADirectoryError(f"{out} is a file, but the export needs a folder (choose another name)")
        return []
    shards = filter(None, map(SHARD.fullmatch, sorted(os.listdir(out))))
    names = [INDEX, WHOLE, *(shard[0] for shard in shards if shard[1] + shard[4] == WHOLE)]
    names += [CONFIG] if with_config else []
    return [out / name for name in names if (out / name).exists()]


def to_export(checkpoint: Checkpoint, names: Mapping[str, str], dtype: str | None) -> dict[str, FileTensor]:
    """Return, by key, the specs of these tensors in the new file, in the order of the store's files."""
    tensors = checkpoint.manifest.tensors
    ordered = sorted(names, key=lambda key: (tensors[key].file, tensors[key].first))
    return {
        key: FileTensor(names[key], exported_dtype(tensors[key].dtype, dtype), tensors[key].shape)
        for key in ordered
    }


def exported_dtype(own: str, wanted: str | None) -> str:
    """Return the exported dtype: only floating point tensors are converted."""
    return wanted if wanted is not None and getattr(torch, own).is_floating_point else own


def write_tensors(
    path: Path, checkpoint: Checkpoint, tensors: Mapping[str, FileTensor], on_bytes: OnBytes
) -> None:
    """Write one safetensors file."""
    layout = lay_out(tensors.values(), metadata={"format": "pt"})
    by_name = {spec.key: (key, spec) for key, spec in tensors.items()}
    with path.open("xb") as file:
        file.write(layout.header)
        for data in read_all(checkpoint, dict(by_name[name] for name in layout.spans), on_bytes):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_all(
    checkpoint: Checkpoint, tensors: Mapping[str, FileTensor], on_bytes: OnBytes
) -> Iterator[memoryview]:
    """Yield the bytes of each tensor, checked and converted; valid until the next one."""
    for batch in checkpoint.batches(tensors):
        data = checkpoint.read(batch)
        for key in batch:
            entry, spec = checkpoint.manifest.tensors[key], tensors[key]
            if spec.dtype == entry.dtype:
                yield data.pop(key)
            else:
                tensor = convert(tensor_from(data.pop(key), entry), spec)
                yield memory_of(tensor)
            on_bytes(entry.stop - entry.first)


def convert(tensor: Tensor, spec: FileTensor) -> Tensor:
    """Convert a tensor. Refuses to turn a finite value into infinity."""
    narrow = tensor.to(getattr(torch, spec.dtype))
    wide = tensor.float() if tensor.itemsize == 1 else tensor  # torch has no arithmetic on 8-bit floats
    if not torch.equal(narrow.isfinite(), wide.isfinite()):
        largest = wide[wide.isfinite()].abs().max().item()
        raise CheckpointError(
            f"{spec.key.removeprefix(MODEL)} holds {largest:g}, too large for {spec.dtype} "
            "(export as bfloat16 or float32)"
        )
    return narrow


def write_folder(
    folder: Path, checkpoint: Checkpoint, tensors: Mapping[str, FileTensor], max_bytes: int, on_bytes: OnBytes
) -> None:
    """Write what `from_pretrained` reads: one file, or several files and an index."""
    shards = split(tensors.items(), max_bytes, size=lambda item: item[1].num_bytes)
    if len(shards) == 1:
        write_tensors(folder / WHOLE, checkpoint, tensors, on_bytes)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_tensors(folder / name, checkpoint, dict(shard), on_bytes)
        places |= {spec.key: name for _, spec in shard}
    total = sum(spec.num_bytes for spec in tensors.values())
    (folder / INDEX).write_text(encode(ShardIndex(dict(sorted(places.items())), {"total_size": total})))


def write_state_dict(
    path: Path, checkpoint: Checkpoint, dtype: str | None, on_bytes: OnBytes, *, with_optimizer: bool
) -> None:
    """Write a state_dict with all names of shared tensors, and optionally the optimizer's state.

    torch.save needs all tensors at once, so they go through a mapped file instead of memory.
    """
    manifest, keys = checkpoint.manifest, model_keys(checkpoint.manifest)
    exported = to_export(checkpoint, {key: key for key in keys}, dtype)
    if with_optimizer:
        exported |= to_export(checkpoint, {key: key for key in optimizer_keys(manifest)}, None)
    mapped = path.with_name("mapped.safetensors")
    write_tensors(mapped, checkpoint, exported, on_bytes)
    tensors = map_tensors(mapped)
    mapped.unlink()
    state: dict[str, Any] = {key.removeprefix(MODEL): tensors[key] for key in keys}
    for group in manifest.facts.ties:
        held = [name for name in group if name in state]
        state |= {name: state[held[0]] for name in group if held and name not in state}
    if with_optimizer:
        state = {
            "model": state,
            "optimizer": optimizer_state(manifest, tensors.__getitem__),
            "iteration": manifest.facts.iteration,
        }
    torch.save(state, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def optimizer_trees(manifest: Manifest) -> dict[str, Any]:
    return {
        key.removeprefix("optimizer/"): tree
        for key, tree in manifest.trees.items()
        if key.startswith("optimizer/")
    }


def optimizer_keys(manifest: Manifest) -> list[str]:
    trees = optimizer_trees(manifest)
    if not trees:
        raise CheckpointError(f"checkpoint {manifest.facts.step} has no optimizer state (export without it)")
    return [key for tree in trees.values() for key in tensors_in(tree["state"])]


def optimizer_state(manifest: Manifest, tensor: Callable[[str], Tensor]) -> dict[str, Any]:
    """Return the state by parameter name, as torch's `set_optimizer_state_dict` expects it."""
    trees = optimizer_trees(manifest)
    return {
        "state": {name: unpack(tree["state"], tensor) for name, tree in trees.items()},
        "param_groups": [
            {
                **unpack(group, tensor),
                "params": [name for name, tree in trees.items() if tree["group"] == index],
            }
            for index, group in enumerate(manifest.trees["groups"])
        ],
    }


@contextmanager
def staging_in(folder: Path) -> Iterator[Path]:
    """Create a hidden folder in `folder`; remove both at the end, `folder` only if it is new and empty."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".varuna-export-", dir=folder))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if made and not any(folder.iterdir()):
            folder.rmdir()


def move_into_place(staging: Path, folder: Path, existing: Sequence[Path]) -> list[Path]:
    """Move the new files into `folder`, the index last; with several files, remove the old ones first.

    So an index or a model.safetensors is never next to shards of another model.
    """
    new = sorted(os.listdir(staging), key=lambda name: (name == INDEX, name))
    for old in existing:
        if old.name not in new or len(new) > 1:
            old.unlink()
    for name in new:
        os.replace(staging / name, folder / name)
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return [folder / name for name in new]


# ---------------------------------------------------------------- import


def import_state(
    store: Store,
    state: Mapping[str, Tensor],
    facts: Facts,
    owner: Owner,
    *,
    overwrite: bool = False,
    on_bytes: OnBytes = lambda num_bytes: None,
) -> Manifest:
    """Write a checkpoint of these tensors; a tensor with several names is written once."""
    groups = ties_among(state)
    facts = msgspec.structs.replace(facts, ties=tuple(group for group in groups if len(group) > 1))
    kept = {MODEL + group[0]: state[group[0]] for group in groups}

    def memory(key: str) -> memoryview:
        plain = as_plain(key, kept[key])
        on_bytes(plain.nbytes)
        if plain.data_ptr() == kept[key].data_ptr():
            return memory_of(plain)
        return memoryview(bytes(memory_of(plain)))  # a copy, kept alive by the view

    specs = [spec_of(key, tensor) for key, tensor in kept.items()]
    shards = split(specs, SHARD_BYTES, size=lambda spec: kept[spec.key].nbytes)
    layouts = [lay_out(shard, metadata={"format": "pt"}) for shard in shards]
    claim = store.claim(owner)
    try:
        found = status_of(store, facts.step)
        if not found.interrupted and not overwrite:
            condition = f"incomplete: {found.problem}" if found.problem else "complete"
            raise CheckpointError(
                f"{store.url} already has a checkpoint of step {facts.step} ({condition}; choose another "
                "step, or pass --overwrite)"
            )
        parts: list[PartManifest] = []
        try:
            for number, (shard, layout) in enumerate(zip(shards, layouts, strict=True)):
                parts.append(write_part(store, facts, f"import-{number}", shard, layout, memory, {}))
            claim.check()
        except BaseException:
            for number in range(len(parts) + 1):
                with suppress(OSError):
                    remove_part(store, facts, f"import-{number}")
            raise
        manifest = commit(store, parts)
        remove_other_attempts(store, manifest)
        return manifest
    finally:
        claim.release()


def ties_among(state: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """Group the names of the same tensor. Different views of one storage are different tensors."""
    groups: dict[object, list[str]] = {}
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else name
        groups.setdefault(place, []).append(name)
    return [tuple(group) for group in groups.values()]


def read_source(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file or a Hugging Face folder; they stay on disk until used."""
    if not path.is_dir():
        return read_file(path)
    state: dict[str, Tensor] = {}
    for name, expected in files_of_model(path).items():
        tensors = read_file(path / name)
        if missing := sorted(expected - tensors.keys()):
            raise CheckpointError(f"{path / name} does not contain {missing[0]!r}, which the index lists")
        if twice := sorted(state.keys() & tensors.keys()):
            raise CheckpointError(f"{path} contains {twice[0]!r} twice (name one file)")
        state |= tensors
    return state


def files_of_model(folder: Path) -> dict[str, set[str]]:
    """Return the model's files, each with the names it must contain, in the order of from_pretrained."""
    names = sorted(os.listdir(folder))
    for whole in (WHOLE, "pytorch_model.bin"):
        if whole in names:
            return {whole: set()}
        if f"{whole}.index.json" in names:
            return read_index(folder / f"{whole}.index.json")
    for suffixes in ((".safetensors",), PICKLED):
        fitting = [name for name in names if name.endswith(suffixes)]
        if len(fitting) == 1 and not SHARD.fullmatch(fitting[0]):
            return {fitting[0]: set()}
        if fitting:
            raise CheckpointError(
                f"{folder} contains {', '.join(fitting)} and no index that lists the model's files "
                "(name one file, or add the missing index)"
            )
    raise CheckpointError(f"{folder} contains no model: no file ends in .safetensors, {', '.join(PICKLED)}")


def read_index(path: Path) -> dict[str, set[str]]:
    places = decode(path.read_bytes(), ShardIndex, str(path)).weight_map
    if strange := [file for file in places.values() if not PLAIN_NAME.fullmatch(file)]:
        raise CheckpointError(
            f"{path} names the file {strange[0]!r}, which is not a plain file name: refused"
        )
    files: dict[str, set[str]] = {}
    for name, file in places.items():
        files.setdefault(file, set()).add(name)
    return files


def read_file(path: Path) -> dict[str, Tensor]:
    tensors = map_tensors(path) if path.suffix == ".safetensors" else load_state_dict(path)
    if not tensors:
        raise CheckpointError(f"{path} contains no tensors")
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise CheckpointError(
                f"{name!r} in {path} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}; "
                "import needs dense tensors on the CPU"
            )
    return tensors


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, mapped into memory."""
    places = tensor_places(path)
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tensors: dict[str, Tensor] = {}
    for name, (spec, first, stop) in places.items():
        dtype = getattr(torch, spec.dtype)
        if first == stop:
            tensors[name] = torch.empty(spec.shape, dtype=dtype)
            continue
        with warnings.catch_warnings(action="ignore"):  # the buffer is read-only
            flat = torch.frombuffer(data, dtype=torch.uint8, offset=first, count=stop - first)
        tensors[name] = flat.view(dtype).view(spec.shape)
    return tensors


def tensor_places(path: Path) -> dict[str, tuple[FileTensor, int, int]]:
    """Return (spec, first byte, stop byte) of each tensor of a safetensors file; read only its header."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise CheckpointError(f"{path} is not a safetensors file: it has {size} bytes")
        length = int.from_bytes(head := file.read(8), "little")
        head += file.read(min(length, size))
    places = read_header(head, str(path))
    for name, (spec, first, stop) in places.items():
        if not 0 <= first <= stop <= size or stop - first != spec.num_bytes:
            raise CheckpointError(
                f"{path} is truncated or damaged: {name!r} should be at {first} to {stop} of {size} bytes"
            )
    return places


def load_state_dict(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of torch.save. Refuses a pickle that runs code."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError:
        raise
    except Exception as error:  # torch.load raises any exception for a broken file
        if code := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise CheckpointError(
                f"{path} is refused: it is a pickle that calls {code[1]}, and loading it could run any code "
                "(save only the model's state_dict, or use safetensors)"
            ) from error
        reason = next(iter(str(error).splitlines()), "it is truncated")
        raise CheckpointError(f"{path} is not a file of torch.save: {reason}") from error
    if isinstance(found, Mapping):
        found = next((found[key] for key in NESTED if isinstance(found.get(key), Mapping)), found)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} contains a {type(found).__name__}, not a state_dict")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path} contains a {type(value).__name__} under {name!r}, but a state_dict has only tensors "
                f"(a state_dict inside of a larger dict must be under {', '.join(map(repr, NESTED))})"
            )
    return {name: value.detach() for name, value in found.items()}
