"""Models of other families for the benchmark of a GPU: `python -m benchmarks.gpu one-process --model t5`.

They have no dropout, so that both sides compute the same. They are made on the card, as scripts make them.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from benchmarks.gpu import Size

IMAGE = 224
CLASSES = 1000


def make_t5(size: "Size") -> nn.Module:
    return _made(
        "T5",
        "ForConditionalGeneration",
        d_model=size.width,
        num_layers=size.layers,
        num_heads=size.heads,
        d_kv=size.width // size.heads,
        d_ff=4 * size.width,
        dropout_rate=0.0,
        vocab_size=size.vocab,
        decoder_start_token_id=0,
    )


def make_bert(size: "Size") -> nn.Module:
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _made("Bert", "ForMaskedLM", **_stack(size), **_words(size), **quiet)


def make_vit(size: "Size") -> nn.Module:
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _made(
        "ViT", "ForImageClassification", **_stack(size), **quiet, num_labels=CLASSES, image_size=IMAGE
    )


def make_resnet(size: "Size") -> nn.Module:
    """`layers` are those of the third stage, as in ResNet-50 (6) and ResNet-152 (36)."""
    return _made("ResNet", "ForImageClassification", depths=[3, 8, size.layers, 3], num_labels=CLASSES)


def make_qwen(size: "Size") -> nn.Module:
    return _made("Qwen2", "ForCausalLM", **_stack(size), **_words(size), num_key_value_heads=size.heads)


def make_mixtral(size: "Size") -> nn.Module:
    return _made("Mixtral", "ForCausalLM", **_stack(size), **_words(size), num_key_value_heads=size.heads)


def make_mamba(size: "Size") -> nn.Module:
    return _made(
        "Mamba",
        "ForCausalLM",
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        vocab_size=size.vocab,
    )


def _stack(size: "Size") -> dict[str, Any]:
    return {
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": 4 * size.width,
    }


def _words(size: "Size") -> dict[str, Any]:
    return {"max_position_embeddings": size.tokens, "vocab_size": size.vocab}


def _made(family: str, head: str, **config: Any) -> nn.Module:
    transformers: Any = __import__("transformers")
    known = getattr(transformers, f"{family}Config")()
    ends = {name: 0 for name in ("bos_token_id", "eos_token_id", "pad_token_id") if hasattr(known, name)}
    made: nn.Module = getattr(transformers, f"{family}{head}")(type(known)(**{**ends, **config}))
    return made


def make_images(samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "pixel_values": torch.randn(samples, 3, IMAGE, IMAGE, generator=generator),
        "labels": torch.randint(CLASSES, (samples,), generator=generator),
    }


FAMILIES = {
    "t5": make_t5,
    "bert": make_bert,
    "vit": make_vit,
    "resnet": make_resnet,
    "qwen": make_qwen,
    "mixtral": make_mixtral,
    "mamba": make_mamba,
}
OF_IMAGES = ("vit", "resnet")
