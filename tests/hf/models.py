"""Small models of transformers, built from configs, their folders and batches."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, TOKENS = 96, 8
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
DRY: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def make_model(name: str, **changes: Any) -> Any:
    import transformers as hf

    if name == "gpt2":
        own = {"n_embd": 32, "n_layer": 4, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
        dry = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
        sizes = {"vocab_size": VOCABULARY, "n_positions": TOKENS}
        config: Any = hf.GPT2Config(**{**sizes, **own, **dry, **changes})
        kind: Any = hf.GPT2LMHeadModel
    elif name == "llama":
        own = {**SIZES, "max_position_embeddings": TOKENS, "intermediate_size": 48, "num_key_value_heads": 2}
        config = hf.LlamaConfig(vocab_size=VOCABULARY, **{**own, **changes})
        kind = hf.LlamaForCausalLM
    else:
        own = {**SIZES, "max_position_embeddings": TOKENS, "intermediate_size": 48, **DRY}
        config = hf.BertConfig(vocab_size=VOCABULARY, **{**own, **changes})
        kind = {"bert": hf.BertModel, "bert-mlm": hf.BertForMaskedLM}.get(
            name, hf.BertForSequenceClassification
        )
    torch.manual_seed(5)
    return kind(config)


def make_batch(name: str, count: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (count, TOKENS), generator=generator)
    labels = torch.randint(3, (count,), generator=generator) if name == "bert-head" else tokens
    return {"input_ids": tokens, "labels": labels}


def write_folder(path: Path, name: str, *, shards: int = 1, dtype: torch.dtype | None = None) -> nn.Module:
    """Save a model with random weights as transformers does; return it."""
    model = make_model(name)
    with torch.no_grad():  # zeros and ones would hide a mistake
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
    model = model.to(dtype) if dtype is not None else model
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(path, max_shard_size=f"{total // shards // 1000 + 1}KB" if shards > 1 else "5GB")
    assert isinstance(model, nn.Module)
    return model
