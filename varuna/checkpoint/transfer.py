"""Checkpoints out to files that other programs read, and such files in, as a checkpoint to start from.

Both ways go tensor by tensor, so that a model larger than memory passes. What comes out is written
aside and moved to its place when it is whole.
"""

import mmap
import os
import re
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import torch
from torch import Tensor

from varuna.checkpoint.format.manifest import PLAIN_NAME, Facts, Manifest, Part, TensorEntry
from varuna.checkpoint.format.part import Spec, lay_out, read_header
from varuna.checkpoint.format.tensors import as_plain, memory_of, spec_of, tensor_from
from varuna.checkpoint.format.tree import tensors_in, unpack
from varuna.checkpoint.load import Checkpoint, look
from varuna.checkpoint.save import abandon, clean, commit, write_part
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
"""Where training scripts keep the model in a file that holds more."""
MODEL = "model/"

T = TypeVar("T")
Form = Literal["state_dict", "safetensors", "folder"]
Progress = Callable[[int], object]
"""Told of every few bytes that are done."""


class Index(msgspec.Struct, frozen=True):
    """Which file of several holds a tensor."""

    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


# ---------------------------------------------------------------- out


class Outgoing(msgspec.Struct, frozen=True):
    """A tensor on its way out: where it comes from, and as what it will stand there."""

    key: str
    entry: TensorEntry
    spec: Spec


def form_of(path: Path) -> Form:
    if path.suffix in PICKLED:
        return "state_dict"
    return "safetensors" if path.suffix == ".safetensors" else "folder"


def export(
    checkpoint: Checkpoint,
    out: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    config: Path | None = None,
    with_optimizer: bool = False,
    overwrite: bool = False,
    on_bytes: Progress = lambda num_bytes: None,
) -> list[Path]:
    """Writes the model to `out`, in the form that its name asks for; returns the files.

    .pt, .pth, .bin: a state_dict by torch.save; .safetensors: one file; else a folder for Hugging Face.
    """
    form = form_of(out)
    if config is not None and form != "folder":
        raise ValueError(f"a config goes beside a model in a folder, and {out} is a file (name a folder)")
    if with_optimizer and form != "state_dict":
        raise ValueError(f"only a state_dict can hold the optimizer's state (name a .pt file, not {out})")
    rivals = in_the_way(out, form, with_config=config is not None)
    if rivals and not overwrite:
        raise FileExistsError(f"{rivals[0]} is already there (choose another name, or say --overwrite)")
    names = {key: key.removeprefix(MODEL) for key in model_keys(checkpoint.manifest)}
    with staging_in(out if form == "folder" else out.parent) as staging:
        if form == "state_dict":
            write_state_dict(
                staging / out.name, checkpoint, list(names), dtype, on_bytes, with_optimizer=with_optimizer
            )
        elif form == "safetensors":
            write_tensors(staging / out.name, checkpoint, outgoing(checkpoint, names, dtype), on_bytes)
        else:
            if config is not None:
                shutil.copyfile(config, staging / CONFIG)
            write_folder(staging, checkpoint, outgoing(checkpoint, names, dtype), max_shard_bytes, on_bytes)
        return move_into_place(staging, out if form == "folder" else out.parent, rivals)


def bytes_to_export(manifest: Manifest, *, with_optimizer: bool) -> int:
    keys = model_keys(manifest) + (optimizer_keys(manifest) if with_optimizer else [])
    return sum(manifest.tensors[key].stop - manifest.tensors[key].first for key in keys)


def model_keys(manifest: Manifest) -> list[str]:
    keys = [key for key in manifest.tensors if key.startswith(MODEL)]
    if not keys:
        raise CheckpointError(f"checkpoint {manifest.facts.step} holds no model")
    return keys


def in_the_way(out: Path, form: Form, *, with_config: bool) -> list[Path]:
    """The files that an export would replace, or that would be taken for a part of it; the index first."""
    if form != "folder":
        if out.is_dir():
            raise IsADirectoryError(f"{out} is a folder, and its name asks for a file (choose another name)")
        return [out] if out.exists() else []
    if not out.is_dir():
        if out.exists():
            raise NotADirectoryError(f"{out} is a file, and its name asks for a folder (choose another name)")
        return []
    names = [INDEX, WHOLE, *sorted(name for name in os.listdir(out) if is_shard(name, WHOLE))]
    names += [CONFIG] if with_config else []
    return [out / name for name in names if (out / name).exists()]


def is_shard(name: str, of: str) -> bool:
    match = SHARD.fullmatch(name)
    return match is not None and match[1] + match[4] == of


def outgoing(checkpoint: Checkpoint, names: Mapping[str, str], dtype: str | None) -> list[Outgoing]:
    """The tensors with these keys under other names, in the order in which the store holds them."""
    tensors = checkpoint.manifest.tensors
    ordered = sorted(names, key=lambda key: (tensors[key].file, tensors[key].first))
    return [
        Outgoing(key, entry, Spec(names[key], converted(entry.dtype, dtype), entry.shape))
        for key in ordered
        for entry in [tensors[key]]
    ]


def converted(own: str, wanted: str | None) -> str:
    """Only what has a fraction is converted: a mask stays a mask."""
    return wanted if wanted is not None and getattr(torch, own).is_floating_point else own


def write_tensors(
    path: Path, checkpoint: Checkpoint, tensors: Sequence[Outgoing], on_bytes: Progress
) -> None:
    """One file in safetensors' form."""
    layout = lay_out([tensor.spec for tensor in tensors], metadata={"format": "pt"})
    by_name = {tensor.spec.key: tensor for tensor in tensors}
    with path.open("xb") as file:
        file.write(layout.header)
        for data in read_all(checkpoint, [by_name[name] for name in layout.spans], on_bytes):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_all(checkpoint: Checkpoint, tensors: Sequence[Outgoing], on_bytes: Progress) -> Iterator[memoryview]:
    """The bytes of each in turn, compared with their hash and then converted; use them at once."""
    by_key = {tensor.key: tensor for tensor in tensors}
    for batch in checkpoint.batches(by_key):
        data = checkpoint.read(batch)
        for key in batch:
            entry, spec = by_key[key].entry, by_key[key].spec
            if spec.dtype == entry.dtype:
                yield data.pop(key)
            else:
                tensor = convert(tensor_from(data.pop(key), entry), spec)
                yield memory_of(tensor)  # which lives until the next is asked for
            on_bytes(entry.stop - entry.first)


def convert(tensor: Tensor, spec: Spec) -> Tensor:
    """Refuses to make infinity of what was finite."""
    narrow = tensor.to(getattr(torch, spec.dtype))
    wide = tensor.float() if tensor.itemsize == 1 else tensor  # there is no arithmetic on eight bits
    if not torch.equal(narrow.isfinite(), wide.isfinite()):
        largest = wide[wide.isfinite()].abs().max().item()
        raise CheckpointError(
            f"{spec.key.removeprefix(MODEL)} holds {largest:g}, which is too large for {spec.dtype} "
            "(export as bfloat16 or float32)"
        )
    return narrow


def write_folder(
    folder: Path, checkpoint: Checkpoint, tensors: Sequence[Outgoing], max_bytes: int, on_bytes: Progress
) -> None:
    """What `from_pretrained` reads: one file, or several and an index."""
    shards = split(tensors, max_bytes, size=lambda tensor: tensor.spec.num_bytes)
    if len(shards) == 1:
        write_tensors(folder / WHOLE, checkpoint, shards[0], on_bytes)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_tensors(folder / name, checkpoint, shard, on_bytes)
        places |= {tensor.spec.key: name for tensor in shard}
    total = sum(tensor.spec.num_bytes for tensor in tensors)
    (folder / INDEX).write_text(encode(Index(dict(sorted(places.items())), {"total_size": total})))


def split(items: Iterable[T], max_bytes: int, *, size: Callable[[T], int]) -> list[list[T]]:
    """In order, each shard as full as it may be; what is larger than a shard gets one of its own."""
    shards: list[list[T]] = []
    room = 0
    for item in items:
        if not shards or size(item) > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(item)
        room -= size(item)
    return shards


def write_state_dict(
    path: Path,
    checkpoint: Checkpoint,
    keys: Sequence[str],
    dtype: str | None,
    on_bytes: Progress,
    *,
    with_optimizer: bool,
) -> None:
    """What `load_state_dict` takes, every name of a shared tensor in it; with the optimizer beside it.

    torch.save wants all tensors at once: they pass through a file that is mapped, not through memory.
    """
    manifest = checkpoint.manifest
    model = outgoing(checkpoint, {key: key for key in keys}, dtype)
    optimizer = optimizer_keys(manifest) if with_optimizer else []
    passage = path.with_name("passage.safetensors")
    write_tensors(
        passage, checkpoint, [*model, *outgoing(checkpoint, {key: key for key in optimizer}, None)], on_bytes
    )
    tensors = map_tensors(passage)
    passage.unlink()
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
        raise CheckpointError(
            f"checkpoint {manifest.facts.step} holds no optimizer's state (export without it)"
        )
    return [key for tree in trees.values() for key in tensors_in(tree["state"])]


def optimizer_state(manifest: Manifest, tensor: Callable[[str], Tensor]) -> dict[str, Any]:
    """By parameter name, as torch.distributed.checkpoint.state_dict.set_optimizer_state_dict takes it."""
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
    """A hidden folder to write in. What is left in it at the end goes; so does `folder`, if made for it."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".varuna-export-", dir=folder))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if made and not any(folder.iterdir()):
            folder.rmdir()


def move_into_place(staging: Path, folder: Path, rivals: Sequence[Path]) -> list[Path]:
    """The old goes before the new comes where there are several files, the index first and last.

    So at no moment does an index, or a whole model, stand beside shards that are not its own.
    """
    new = sorted(os.listdir(staging), key=lambda name: (name == INDEX, name))
    for rival in rivals:
        if rival.name not in new or len(new) > 1:
            rival.unlink()
    for name in new:
        os.replace(staging / name, folder / name)
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return [folder / name for name in new]


# ---------------------------------------------------------------- in


def import_state(
    store: Store,
    state: Mapping[str, Tensor],
    facts: Facts,
    owner: Owner,
    *,
    overwrite: bool = False,
    on_bytes: Progress = lambda num_bytes: None,
) -> Manifest:
    """Writes a checkpoint of just these tensors; those that are one and the same are written once."""
    groups = ties_among(state)
    facts = msgspec.structs.replace(facts, ties=tuple(group for group in groups if len(group) > 1))
    kept = {MODEL + group[0]: state[group[0]] for group in groups}

    def memory(key: str) -> memoryview:
        plain = as_plain(key, kept[key])
        on_bytes(plain.nbytes)
        if plain.data_ptr() == kept[key].data_ptr():
            return memory_of(plain)
        return memoryview(bytes(memory_of(plain)))  # a copy that lives as long as anyone reads it

    specs = [spec_of(key, tensor) for key, tensor in kept.items()]
    shards = split(specs, SHARD_BYTES, size=lambda spec: kept[spec.key].nbytes)
    layouts = [lay_out(shard, metadata={"format": "pt"}) for shard in shards]
    claim = store.claim(owner)
    try:
        refuse_to_replace(store, facts.step, overwrite=overwrite)
        parts: list[Part] = []
        try:
            for number, (shard, layout) in enumerate(zip(shards, layouts, strict=True)):
                parts.append(write_part(store, facts, f"import-{number}", shard, layout, memory, {}))
            claim.check()
        except BaseException:
            for number in range(len(parts) + 1):
                with suppress(OSError):
                    abandon(store, facts, f"import-{number}")
            raise
        manifest = commit(store, parts)
        clean(store, manifest)
        return manifest
    finally:
        claim.release()


def refuse_to_replace(store: Store, step: int, *, overwrite: bool) -> None:
    found = look(store, step)
    if not found.interrupted and not overwrite:
        what = f"though not a whole one: {found.problem}" if found.problem else "a complete one"
        raise CheckpointError(
            f"{store.url} has a checkpoint of step {step} already, {what} "
            "(choose another step, or say --overwrite)"
        )


def ties_among(state: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """The names, those of one tensor together; views of one storage that differ are not one tensor."""
    groups: dict[object, list[str]] = {}
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else name
        groups.setdefault(place, []).append(name)
    return [tuple(group) for group in groups.values()]


def read_source(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, or of a folder as Hugging Face writes it; they stay on disk until used."""
    if not path.is_dir():
        return read_file(path)
    state: dict[str, Tensor] = {}
    for name, expected in files_of_model(path).items():
        tensors = read_file(path / name)
        if missing := sorted(expected - tensors.keys()):
            raise CheckpointError(
                f"{path / name} does not hold {missing[0]!r}, which the index says is there"
            )
        if twice := sorted(state.keys() & tensors.keys()):
            raise CheckpointError(f"{path} holds {twice[0]!r} twice (name the file that you mean)")
        state |= tensors
    return state


def files_of_model(folder: Path) -> dict[str, set[str]]:
    """Each with the names that it must hold, as far as known: in the order in which from_pretrained looks."""
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
                f"{folder} holds {', '.join(fitting)} and no index that says what belongs to the model "
                "(name the file that you mean, or fetch what is missing)"
            )
    raise CheckpointError(f"{folder} holds no model: nothing ends in .safetensors, {', '.join(PICKLED)}")


def read_index(path: Path) -> dict[str, set[str]]:
    places = decode(path.read_bytes(), Index, str(path)).weight_map
    if strange := [file for file in places.values() if not PLAIN_NAME.fullmatch(file)]:
        raise CheckpointError(f"{path} names the file {strange[0]!r}, which is no plain name: refused")
    files: dict[str, set[str]] = {}
    for name, file in places.items():
        files.setdefault(file, set()).add(name)
    return files


def read_file(path: Path) -> dict[str, Tensor]:
    tensors = map_tensors(path) if path.suffix == ".safetensors" else load_state_dict(path)
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors")
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise CheckpointError(
                f"{name!r} in {path} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}; "
                "only dense tensors with values can be imported"
            )
    return tensors


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors that lie in a safetensors file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise CheckpointError(f"{path} is no safetensors file: it has {size} bytes")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tensors: dict[str, Tensor] = {}
    for name, (spec, first, stop) in read_header(memoryview(data), str(path)).items():
        if not 0 <= first <= stop <= size or stop - first != spec.num_bytes:
            raise CheckpointError(
                f"{path} is truncated or damaged: {name!r} should lie at {first} to {stop} of {size} bytes"
            )
        dtype = getattr(torch, spec.dtype)
        if first == stop:
            tensors[name] = torch.empty(spec.shape, dtype=dtype)
            continue
        with warnings.catch_warnings(action="ignore"):  # that it cannot be written to: it need not
            flat = torch.frombuffer(data, dtype=torch.uint8, offset=first, count=stop - first)
        tensors[name] = flat.view(dtype).view(spec.shape)
    return tensors


def load_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that torch.save wrote; refuses one that would run code."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError:
        raise
    except Exception as error:  # torch.load raises whatever a strange file makes it stumble over
        if code := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise CheckpointError(
                f"{path} is refused: it is a pickle that calls {code[1]}, and loading it could run any code "
                "(save the model's state_dict alone, or as safetensors)"
            ) from error
        reason = next(iter(str(error).splitlines()), "it ends too early")
        raise CheckpointError(f"{path} is no file of torch.save: {reason}") from error
    if isinstance(found, Mapping):
        found = next((found[key] for key in NESTED if isinstance(found.get(key), Mapping)), found)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a state_dict")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path} holds a {type(value).__name__} under {name!r}: a state_dict has only tensors (one "
                f"beside other things is found under {', '.join(map(repr, NESTED))})"
            )
    return {name: value.detach() for name, value in found.items()}
