"""Checkpoint folders of VarunaTrainer: Hugging Face files, trainer_state.json, and a store of Varuna.

checkpoint-N/model.safetensors, config.json, ...   as transformers writes them, by all stages
checkpoint-N/trainer_state.json, scheduler.pt      as transformers writes them
checkpoint-N/varuna/varuna_ckpt_N                  weights and optimizer state, for any layout
checkpoint-N/varuna_job.json                       the job of `varuna run` that wrote the folder
"""

import json
import logging
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from varuna.checkpoint.store.store import open_store
from varuna.codec import decode, encode
from varuna.environment import VarunaEnvironment
from varuna.errors import CheckpointError
from varuna.execute.comm.collective import RankFailure
from varuna.files import write_atomic
from varuna.hf.adapters import lacks_weights, load_adapter, save_adapter
from varuna.hf.save import save_pretrained
from varuna.hf.trainer.pipeline import TrainerPipeline
from varuna.hf.weights import hf_weights
from varuna.hf.wrapped import wrapped_parts

log = logging.getLogger("varuna")

STORE = "varuna"
"""Folder of Varuna's store in a checkpoint folder."""
TRAINER_STATE = "trainer_state.json"
OWNER = "varuna_job.json"


class FolderOwner(msgspec.Struct, frozen=True):
    """The call of `train()` that wrote a checkpoint folder; the same in all generations of a job."""

    job: str
    call: int  # counts the calls of one generation for one output folder, from 1


_calls: Counter[tuple[int | None, str]] = Counter()
"""Calls of `train()` in this process, by generation and output folder."""


def next_owner(environment: VarunaEnvironment, output_dir: str) -> FolderOwner | None:
    """Count a call of `train()`, and return the owner of its folders; None outside of a managed job."""
    if environment.job_id is None:
        return None
    key = environment.generation, os.path.abspath(output_dir)
    _calls[key] += 1
    return FolderOwner(environment.job_id, _calls[key])


def find_folder(
    output_dir: str,
    given: str | bool | None,
    owner: FolderOwner | None,
    resume_step: int | None,
) -> str | None:
    """Return the folder to resume from. Folders of this job come first, then the script's choice.

    `given` is the script's `resume_from_checkpoint`. Without it, `resume_step` is the step at which a
    job of `varuna run --resume` continues an earlier job. Folders of other jobs are not used.
    """
    if owner is not None and (own := newest_folder(output_dir, owner)) is not None:
        return own
    if given:
        return newest_folder(output_dir) if given is True else given
    if owner is None or resume_step is None:
        return None
    continued = Path(output_dir) / f"checkpoint-{resume_step}"
    before = owner_of(continued)
    if not is_complete(continued) or (1 if before is None else before.call) != owner.call:
        log.warning(
            "the job continues at step %d, but %s is no complete checkpoint of this training, which starts "
            "at step 0 (pass resume_from_checkpoint= to choose a folder)",
            resume_step,
            continued,
        )
        return None
    write_atomic(continued / OWNER, encode(owner))  # later generations find it
    return str(continued)


def newest_folder(output_dir: str, owner: FolderOwner | None = None) -> str | None:
    """Return the newest complete checkpoint folder: of any run, or of one owner."""
    found = {
        int(match[1]): path
        for path in Path(output_dir).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
        and is_complete(path)
        and owner in (None, owner_of(path))
    }
    return str(found[max(found)]) if found else None


def is_complete(folder: Path) -> bool:
    """Return whether a save has finished: it writes trainer_state.json last."""
    try:
        json.loads((folder / TRAINER_STATE).read_bytes())
    except (OSError, ValueError):
        return False
    return True


def position_in_stream(folder: str, accumulated: int) -> tuple[int, int]:
    """Return how many times a stream was read to its end, and how many batches were read since.

    The Trainer counts a pass over a stream as the part of `max_steps` updates that it had.
    """
    if not is_complete(Path(folder)):
        return 0, 0
    state = json.loads((Path(folder) / TRAINER_STATE).read_bytes())
    epoch = state["epoch"] or 0.0
    passes = max(0, math.ceil(epoch) - 1)  # a whole number is a pass that has not ended
    return passes, round((epoch - passes) * state["max_steps"] * accumulated)


def owner_of(folder: Path) -> FolderOwner | None:
    try:
        data = (folder / OWNER).read_bytes()
    except OSError:
        return None
    return decode(data, FolderOwner, str(folder / OWNER))


def begin_folder(pipeline: TrainerPipeline, folder: str, owner: FolderOwner | None) -> None:
    """Make a folder incomplete before a save, and name its owner. All ranks call this.

    An earlier run may have written a folder of the same name.
    """

    def begin() -> None:
        if pipeline.collective.rank != pipeline.collective.ranks[0]:
            return
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        (place / TRAINER_STATE).unlink(missing_ok=True)
        (place / OWNER).unlink(missing_ok=True)
        if has_store(place):
            shutil.rmtree(place / STORE)
        if owner is not None:
            write_atomic(place / OWNER, encode(owner))

    def failure(failures: Sequence[RankFailure], own: Exception | None) -> Exception:
        return CheckpointError(f"{folder} cannot be written: {failures[0].message}")

    pipeline.collective.agree(begin, failure, None)


def has_store(folder: str | os.PathLike[str]) -> bool:
    return (Path(folder) / STORE).is_dir()


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


@torch.no_grad()
def load_weights(pipeline: TrainerPipeline, folder: str) -> None:
    """Load this stage's weights from the Hugging Face files of a folder. All ranks call this."""
    if hasattr(pipeline.source, "peft_config"):
        if lacks_weights(pipeline.source):
            load_training_state(pipeline, folder)
        else:
            load_adapter(pipeline.wrapped, folder)
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
