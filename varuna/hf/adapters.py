"""Saves and loads the adapters of a wrapped model in peft's files: no rank gets the frozen base."""

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from varuna.capture.model.adapters import base_names
from varuna.capture.model.copies import copy_with_values
from varuna.capture.model.source import Source
from varuna.capture.model.tied_weights import named_tensors
from varuna.errors import CaptureError, CheckpointError, list_some
from varuna.execute.comm.collective import RankFailure
from varuna.hf.folder import TensorPlace, find_tensors
from varuna.hf.wrapped import LONG_WAIT_FACTOR, own_tensors, wrapped_parts

WEIGHTS = "adapter_model.safetensors"
FIRST_ADAPTER = "default"
"""Name of the adapter whose files peft writes into the folder itself; others have a folder in it."""


def save_adapter(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    adapters: Sequence[str] | None = None,
    save_embedding_layers: bool | str = "auto",
    overwrite: bool = False,
) -> None:
    """Write the adapters of a `Varuna` or `RaNNCModule` as a folder that peft loads. All ranks call this.

    The folder has adapter_model.safetensors and adapter_config.json, for `PeftModel.from_pretrained`. The
    first rank writes it, with peft's own `save_pretrained`. `adapters` are the names of those to save, by
    default all. If a rank fails, all ranks raise the same error, and the folder is as before.
    """
    session, state, source = wrapped_parts(model, "save_adapter")
    if not hasattr(source.meta_model, "peft_config"):
        raise TypeError(
            f"save_adapter takes a model with adapters, but {type(source.meta_model).__name__} has none that "
            "peft can save (wrap what peft.get_peft_model returns; save_pretrained writes whole models)"
        )
    options: dict[str, Any] = {"save_embedding_layers": save_embedding_layers}
    place, is_first = Path(folder), session.rank == session.ranks[0]
    calls: AbstractContextManager[Any] = session.call("save_adapter")
    with calls, session.patient(LONG_WAIT_FACTOR):
        wanted = _names_to_save(source.meta_model, adapters, options)
        own = {name: value.cpu() for name, value in own_tensors(session, state).items() if name in wanted}
        parts = session.gather(own, dict[str, Tensor])
        values = {name: value for part in parts for name, value in part.items()}

        def write() -> None:
            if is_first:
                if adapters is not None:
                    options["selected_adapters"] = list(adapters)
                _write(_with_values(source, values, wanted), place, options, overwrite=overwrite)

        session.agree(write, _failure, None)


@torch.no_grad()
def load_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Load the adapters of a folder that `save_adapter` or peft has written. All ranks call this.

    If a rank fails, all ranks raise the same error, and no adapter has changed.
    """
    session, state, source = wrapped_parts(model, "load_adapter")
    calls: AbstractContextManager[Any] = session.call("load_checkpoint")
    with calls, session.patient(LONG_WAIT_FACTOR):
        values: dict[str, Tensor] = {}

        def read() -> None:
            for adapter, entries in _entries_in_files(source.meta_model).items():
                place = Path(folder) if adapter == FIRST_ADAPTER else Path(folder) / adapter
                found = find_tensors(place / WEIGHTS)
                for key, (name, constant) in entries.items():
                    if name is None:
                        _check_constant(constant, key, found, place / WEIGHTS)
                        continue
                    canonical = source.canonical.get(name, name)
                    if canonical not in state.canonical:
                        continue
                    if key not in found:
                        raise CheckpointError(f"{place / WEIGHTS} has no {key!r} (is it of this model?)")
                    own = state.tensor(canonical)
                    values[canonical] = found[key].read(own.dtype, own.device)
                    if values[canonical].shape != own.shape:
                        raise CheckpointError(
                            f"{key!r} of {place / WEIGHTS} has another shape than the model"
                        )

        session.agree(read, _load_failure, None)
        for name, value in values.items():
            state.tensor(name).copy_(value)


def lacks_weights(model: Any) -> bool:
    """Return whether peft's files lack trained weights: those that make prompts, or VB-LoRA's logits."""
    configs = model.peft_config.values()
    return any(one.is_prompt_learning or getattr(one, "save_only_topk_weights", False) for one in configs)


class AdapterEntry(NamedTuple):
    """An entry of peft's file: a tensor of the model by its name, or a constant that the model has, too."""

    name: str | None
    constant: Tensor


def _entries_in_files(model: Any) -> dict[str, dict[str, AdapterEntry]]:
    """Return the entries of peft's files, by adapter and by their names there."""
    import peft

    names = {value.untyped_storage()._cdata: name for name, value in named_tensors(model).items()}
    found: dict[str, dict[str, AdapterEntry]] = {}
    for adapter in model.peft_config:
        with warnings.catch_warnings():  # peft gave them when it wrote the files
            warnings.simplefilter("ignore")
            state = peft.get_peft_model_state_dict(model, adapter_name=adapter)
        found[adapter] = {
            key: AdapterEntry(names.get(value.untyped_storage()._cdata), value)
            for key, value in state.items()
        }
    return found


def _check_constant(own: Tensor, key: str, found: Mapping[str, TensorPlace], file: Path) -> None:
    """Refuse a file with other constants than the model's, such as SHiRA's indices of its weights."""
    same = key in found and not own.is_meta and torch.equal(found[key].read(own.dtype, own.device), own)
    if not same:
        raise CheckpointError(
            f"{key!r} of {file} is not that of the model, and it is no weight that could be loaded (make the "
            "adapters as those of the file, for example with the same random_seed)"
        )


def _names_to_save(model: nn.Module, adapters: Sequence[str] | None, options: Mapping[str, Any]) -> set[str]:
    """Return the names of the trained tensors, and of all others that peft writes, such as embeddings."""
    import peft

    config: Any = model.peft_config
    written: set[int] = set()
    for adapter in config if adapters is None else adapters:
        if adapter not in config:
            raise ValueError(f"the model has no adapter {adapter!r} (it has {', '.join(config)})")
        with warnings.catch_warnings():  # peft gives them again when it writes the files
            warnings.simplefilter("ignore")
            state = peft.get_peft_model_state_dict(model, adapter_name=adapter, **options)
        written |= {value.untyped_storage()._cdata for value in state.values() if isinstance(value, Tensor)}
    base, tensors = base_names(model), named_tensors(model)
    return {n for n, value in tensors.items() if n not in base or value.untyped_storage()._cdata in written}


def _with_values(source: Source, values: dict[str, Tensor], wanted: Iterable[str]) -> nn.Module:
    """Return a copy of the model in which the adapters have values and the base stays on `meta`."""
    missing = []
    for name in wanted:
        key = source.canonical.get(name, name)
        if key in values:
            continue
        try:
            values[key] = source.value(name).detach().cpu()  # no stage uses it: another adapter
        except CaptureError:
            missing.append(name)
    missing += [name for name, value in values.items() if value.is_meta]
    if missing:
        raise CheckpointError(
            f"no stage uses {list_some(sorted(missing))}, and the model that had these values is freed or on "
            "`meta` (keep the original model, or name the adapters to save with adapters=)"
        )
    return copy_with_values(
        source.meta_model, {name: values[source.canonical.get(name, name)] for name in wanted}
    )


def _write(model: Any, place: Path, options: dict[str, Any], *, overwrite: bool) -> None:
    existing = [place / WEIGHTS] if (place / WEIGHTS).exists() else []
    if existing and not overwrite:
        raise FileExistsError(f"{existing[0]} already exists (choose another name, or overwrite=True)")
    place.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".varuna-export-", dir=place))
    try:
        model.save_pretrained(staging, **options)
        shutil.copytree(staging, place, dirs_exist_ok=True, copy_function=os.replace)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _load_failure(failures: Sequence[RankFailure], own: Exception | None) -> Exception:
    ranks = ", ".join(f"rank {one.rank}: {one.message}" for one in failures)
    return CheckpointError(f"the adapters were not loaded: {ranks}")


def _failure(failures: Sequence[RankFailure], own: Exception | None) -> Exception:
    ranks = ", ".join(f"rank {one.rank}: {one.kind}: {one.message}" for one in failures)
    return CheckpointError(f"the adapters were not saved: {ranks}")
