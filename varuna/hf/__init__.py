"""Hugging Face: folders that fill a model stage by stage, and transformers' Trainer over a pipeline."""

from typing import TYPE_CHECKING, Any

from varuna.hf.adapters import save_adapter
from varuna.hf.models import empty_model, from_pretrained
from varuna.hf.save import save_pretrained
from varuna.hf.weights import HfWeights, hf_weights

if TYPE_CHECKING:
    from varuna.hf.trainer.trainer import VarunaTrainer

__all__ = [
    "HfWeights",
    "VarunaTrainer",
    "empty_model",
    "from_pretrained",
    "hf_weights",
    "save_adapter",
    "save_pretrained",
]


def __getattr__(name: str) -> Any:
    """Import the trainer when it is first used: it imports transformers."""
    if name != "VarunaTrainer":
        raise AttributeError(f"module 'varuna.hf' has no attribute {name!r}")
    from varuna.hf.trainer.trainer import VarunaTrainer

    return VarunaTrainer
