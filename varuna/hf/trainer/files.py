"""Checkpoint folders of VarunaTrainer: Hugging Face files, trainer_state.json, and a store of Varuna.

checkpoint-N/model.safetensors, config.json, ...   as transformers writes them, by all stages
checkpoint-N/trainer_state.json, scheduler.pt      as transformers writes them
checkpoint-N/varuna/varuna_ckpt_N                  weights and optimizer state, for any layout
"""

import os
import re
from pathlib import Path
from typing import Any

import torch

from varuna.checkpoint.store.store import open_store
from varuna.hf.adapters import save_adapter
from varuna.hf.save import save_pretrained
from varuna.hf.trainer.pipeline import TrainerPipeline
from varuna.hf.weights import hf_weights
from varuna.hf.wrapped import wrapped_parts
from varuna.train.saving.checkpoints import newest_checkpoint

STORE = "varuna"
"""Folder of Varuna's store in a checkpoint folder."""
TRAINER_STATE = "trainer_state.json"


def has_store(folder: str | os.PathLike[str]) -> bool:
    return (Path(folder) / STORE).is_dir()


def newest_folder(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint folder: trainer_state.json is written last."""
    found = {
        int(match[1]): path
        for path in Path(output_dir).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and (path / TRAINER_STATE).is_file()
    }
    return str(found[max(found)]) if found else None


def save_training_state(pipeline: TrainerPipeline, folder: str, step: int) -> None:
    """Save weights and optimizer state to the store in a checkpoint folder. All ranks call this."""
    model, url = pipeline.wrapped, os.path.join(folder, STORE)
    model.checkpoint(url, step=step)
    # This store gets no other checkpoint, and save_total_limit may remove it.
    if (claim := model._checkpoints.resources.claims.pop(open_store(url).url, None)) is not None:
        claim.release()


def load_training_state(pipeline: TrainerPipeline, folder: str) -> None:
    """Load the store of a checkpoint folder. All ranks call this, after the optimizer is set."""
    pipeline.wrapped.load_checkpoint(os.path.join(folder, STORE))
    pipeline.wrapped.zero_grad()


def stored_step(folder: str) -> int | None:
    return newest_checkpoint(os.path.join(folder, STORE))


@torch.no_grad()
def load_weights(pipeline: TrainerPipeline, folder: str) -> None:
    """Load this stage's weights from the Hugging Face files of a folder. All ranks call this."""
    if hasattr(pipeline.source, "peft_config"):  # its files have the adapters only, by other names
        load_training_state(pipeline, folder)
        return
    _, state, source = wrapped_parts(pipeline.wrapped, "load_weights")
    with pipeline.wrapped._report_errors("loading weights"):
        weights = hf_weights(folder)
        weights.bind(source.meta_model, source.ties)
        for name in state.canonical:
            if name in weights:
                own = state.tensor(name)
                own.copy_(weights.read(name, own.dtype, own.device))


def save_model(pipeline: TrainerPipeline, model: Any, folder: str) -> None:
    """Save the wrapped model as a Hugging Face folder. All ranks call this."""
    os.makedirs(folder, exist_ok=True)
    if hasattr(model, "peft_config"):
        save_adapter(pipeline.wrapped, folder, overwrite=True)
        return
    save_pretrained(pipeline.wrapped, folder, overwrite=True)
    is_first = pipeline.collective.rank == pipeline.collective.ranks[0]
    if is_first and getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(folder)
