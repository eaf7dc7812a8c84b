"""A capture of a tiny model, in a process that forks workers.

The first capture of a process imports modules and fills caches of torch and sympy, which takes longer than
the capture of a small model itself. Workers that are forked after it inherit them.
"""

import logging
import os

import torch
from torch import Tensor, nn

from varuna.capture.model.source import Source
from varuna.capture.trace.cutpoint import CutPoint

log = logging.getLogger("varuna")

CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With this variable torch looks for GPUs without initialising CUDA, which forked processes could not use."""


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(4, 4), nn.LayerNorm(4)
        self.first, self.cut, self.last = nn.Linear(4, 4), CutPoint(), nn.Linear(4, 4)

    def forward(self, tokens: Tensor, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.cut(torch.tanh(self.first(self.norm(self.embedding(tokens) + x[:, None]))))
        attended = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden)
        logits = self.last(nn.functional.dropout(attended).transpose(1, 2).reshape(len(x), -1, 4))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + (x - y).square().mean()


def can_look_for_gpus() -> bool:
    """Return whether torch can tell that there are GPUs without initialising CUDA."""
    if torch.version.hip is not None:
        return False
    return torch.version.cuda is None or torch.cuda._device_count_nvml() >= 0


def rehearse() -> None:
    """Capture the tiny model. It starts no thread and uses no GPU; a failure changes nothing."""
    if not can_look_for_gpus():
        return
    before = os.environ.get(CUDA_CHECK)
    os.environ[CUDA_CHECK] = "1"
    try:
        with torch.device("meta"):
            model = TinyModel()
            inputs = {
                "tokens": torch.zeros(2, 3, dtype=torch.long),
                "x": torch.ones(2, 4),
                "y": torch.ones(2, 4),
            }
        Source(model).capture(inputs, training=True)
    except Exception as error:  # the capture of the user's model will show it, if it matters
        log.debug("the rehearsal of a capture failed: %r", error)
    finally:
        if before is None:
            del os.environ[CUDA_CHECK]
        else:
            os.environ[CUDA_CHECK] = before
