"""Hugging Face folders: fill a model on `meta` from them, stage by stage, and save a trained model as one."""

from varuna.hf.adapters import save_adapter
from varuna.hf.models import empty_model, from_pretrained
from varuna.hf.save import save_pretrained
from varuna.hf.weights import HfWeights, hf_weights

__all__ = ["HfWeights", "empty_model", "from_pretrained", "hf_weights", "save_adapter", "save_pretrained"]
