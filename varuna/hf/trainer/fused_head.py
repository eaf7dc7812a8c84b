"""Per-token values that trl's SFTTrainer logs, computed from the logits of a whole batch."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor


def fused_outputs(logits: Tensor, labels: Tensor) -> Any:
    """Return log-probabilities, entropy and top-1 hits of the counted labels; zeros elsewhere."""
    labels = labels[:, 1:]
    mask = labels != -100
    log_probs = logits[:, :-1].float().log_softmax(-1)
    chosen = log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    is_top1 = log_probs.argmax(-1) == labels
    return SimpleNamespace(
        log_probs=chosen.masked_fill(~mask, 0),
        entropy=entropy.masked_fill(~mask, 0),
        is_top1=is_top1.masked_fill(~mask, False),
        label_mask=mask,
        aux_loss=None,
        logits=logits,
    )
