"""Models on `meta`, built from the config of a Hugging Face folder."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from varuna.hf.save import GENERATION_CONFIG, has_generation_config
from varuna.hf.weights import hf_weights
from varuna.train.varuna import Varuna


def empty_model(
    folder: str | os.PathLike[str],
    model_class: Any = None,
    *,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> nn.Module:
    """Build the model of a folder's config.json and generation_config.json on `meta`, without its weights.

    `model_class` is a class of transformers, such as BertForSequenceClassification or AutoModelForCausalLM;
    None takes the class in the config. Further arguments change the config: `num_labels=3`.
    """
    import transformers

    found = transformers.AutoConfig.from_pretrained(os.fspath(folder), **config)
    if model_class is None:
        names = [name for name in found.architectures or () if hasattr(transformers, name)]
        if not names:
            raise ValueError(
                f"the config of {os.fspath(folder)} names no class of transformers (pass model_class=, for "
                "example AutoModelForCausalLM)"
            )
        model_class = getattr(transformers, names[0])
    build = getattr(model_class, "from_config", None) or model_class._from_config
    with torch.device("meta"):
        model = build(found, dtype=dtype)
    assert isinstance(model, nn.Module)
    if has_generation_config(model) and os.path.exists(os.path.join(folder, GENERATION_CONFIG)):
        generating: Any = model
        generating.generation_config = type(generating.generation_config).from_pretrained(os.fspath(folder))
    return model.train()


def from_pretrained(
    folder: str | os.PathLike[str],
    stage_to_rank_map: str,
    dummy_inputs: Mapping[str, object] | Callable[..., Mapping[str, object]],
    batch_size: int,
    chunk_size: int,
    *,
    model_class: Any = None,
    dtype: torch.dtype = torch.float32,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> Varuna:
    """Wrap the model of a Hugging Face folder; each rank reads the weights of its own stage only.

    `config` changes the model's config. The other arguments are those of `Varuna`.
    """
    return Varuna(
        empty_model(folder, model_class, dtype=dtype, **(config or {})),
        stage_to_rank_map,
        dummy_inputs,
        batch_size,
        chunk_size,
        initialize=options.pop("initialize", None) or hf_weights(folder),
        **options,
    )
