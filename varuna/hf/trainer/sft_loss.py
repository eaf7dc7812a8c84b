"""The loss of trl's SFTTrainer, from the logits: its fused head keeps the model from being cut."""

from typing import Any

import transformers
from torch import Tensor
from torch.nn.functional import pad
from transformers.loss.loss_utils import ForCausalLMLoss


def has_plain_loss(trainer: Any) -> bool:
    """Return whether a Trainer computes the loss of transformers, not one of the script or of trl."""
    return getattr(trainer.compute_loss, "__func__", None) is transformers.Trainer.compute_loss


def has_sft_loss(trainer: Any) -> bool:
    """Return whether a Trainer computes the loss of trl, not one of the script."""
    return str(getattr(trainer.compute_loss, "__module__", "")).startswith("trl.")


def load_on_cpu(args: Any) -> None:
    """Let trl load a model, which it gets by name, on the CPU: by default, the GPU gets all of it."""
    if hasattr(args, "model_init_kwargs"):
        args.model_init_kwargs = {"device_map": None, **(args.model_init_kwargs or {})}


def sft_num_items(trainer: Any, inputs: Any, num_items: Any) -> Any:
    """Return the number by which the loss of a batch is divided. Without a counted token it is 1."""
    if _has_other_loss(trainer):
        return num_items
    counted = (inputs["labels"][:, 1:] != -100).sum() if num_items is None else num_items
    return counted.clamp(min=1)


def sft_loss(trainer: Any, model: Any, inputs: dict[str, Any], num_items: Any) -> Tensor:
    """Compute the loss as `SFTTrainer.compute_loss` does; `num_items` is that of `sft_num_items`."""
    labels = inputs.get("labels")
    plain = {name: value for name, value in inputs.items() if name != "labels"}
    outputs = model(**plain, use_cache=False)
    if trainer.compute_loss_func is not None:
        loss: Tensor = trainer.compute_loss_func(outputs, labels, num_items_in_batch=num_items)
        return loss
    if trainer.label_smoother is not None:  # shifts the labels, whatever the model's class
        loss = trainer.label_smoother(outputs, labels, shift_labels=True, num_items_in_batch=num_items)
        return loss
    assert labels is not None, "SFTTrainer requires labels"
    logits = outputs.logits
    if extra := logits.shape[1] - labels.shape[1]:  # tokens of a prompt that is trained
        labels = pad(labels, (extra, 0), value=-100)
    return ForCausalLMLoss(logits, labels, logits.shape[-1], num_items_in_batch=num_items)


def _has_other_loss(trainer: Any) -> bool:
    return trainer.compute_loss_func is not None or trainer.label_smoother is not None
