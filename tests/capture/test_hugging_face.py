"""Hugging Face models as they are: from a config, with their own dropout, cut after their layers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.comparison import assert_same
from varuna.capture import Source, check_capture, cut_after, stage_state
from varuna.types import Work

transformers: Any = pytest.importorskip("transformers")

IDS = torch.randint(5, 60, (4, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(4, 12, dtype=torch.long)
MASK[1, 8:] = 0
PIXELS = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
TEXT = {"input_ids": IDS, "labels": IDS, "attention_mask": MASK}
PAIR = {"input_ids": IDS, "labels": IDS[:, :7].contiguous()}
IMAGE = {"pixel_values": PIXELS, "labels": torch.tensor([0, 1, 2, 3])}
SMALL = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
LLAMA = {**SMALL, "num_key_value_heads": 1, "max_position_embeddings": 32}
BART = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "d_model": 16,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], dict[str, Tensor]]] = {
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=3, n_head=2, n_embd=16, vocab_size=64, n_positions=32)
        ),
        ("transformer.h.*",),
        TEXT,
    ),
    "bert": (
        lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(num_hidden_layers=3, max_position_embeddings=32, **SMALL)
        ),
        ("bert.encoder.layer.*",),
        TEXT,
    ),
    "llama": (
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(num_hidden_layers=3, attention_dropout=0.1, **LLAMA)
        ),
        ("model.layers.*",),
        TEXT,
    ),
    "mixtral": (
        lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(num_hidden_layers=2, num_local_experts=4, **LLAMA)
        ),
        ("model.layers.*",),
        TEXT,
    ),
    "t5": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                num_layers=2,
                num_heads=2,
                d_model=16,
                d_kv=8,
                d_ff=32,
                vocab_size=64,
                decoder_start_token_id=0,
            )
        ),
        ("encoder.block.*", "decoder.block.*"),
        PAIR,
    ),
    "opt": (
        lambda: transformers.OPTForCausalLM(
            transformers.OPTConfig(
                num_hidden_layers=3,
                num_attention_heads=2,
                hidden_size=16,
                ffn_dim=32,
                vocab_size=64,
                max_position_embeddings=32,
                word_embed_proj_dim=16,
            )
        ),
        ("model.decoder.layers.*",),
        TEXT,
    ),
    "bart": (
        lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)),
        ("model.encoder.layers.*", "model.decoder.layers.*"),
        PAIR,
    ),
    "vit": (
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(
                num_hidden_layers=3,
                num_attention_heads=2,
                hidden_size=16,
                intermediate_size=32,
                image_size=32,
                patch_size=8,
                hidden_dropout_prob=0.1,
                num_labels=5,
            )
        ),
        ("vit.*.layer.*|vit.layers.*",),
        IMAGE,
    ),
    "resnet": (
        lambda: transformers.ResNetForImageClassification(
            transformers.ResNetConfig(
                embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=5
            )
        ),
        ("resnet.encoder.stages.*",),
        IMAGE,
    ),
}


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    make, patterns, inputs = MODELS[name]
    model = make().train()
    names = {module for module, _ in model.named_modules()}
    for pattern in patterns:
        # Versions of the library name ViT's layers differently.
        choices = pattern.split("|")
        cut_after(model, next((c for c in choices if c.replace("*", "0") in names), choices[0]))
    return model, inputs


@pytest.mark.parametrize("name", MODELS)
def test_a_hugging_face_model_is_cut_as_it_is(name: str) -> None:
    """B8"""
    model, inputs = build(name)
    source = Source(model)
    n = source.capture(inputs, training=True).num_segments
    layouts = [[0, n], list(range(n + 1))]
    assert_same(model, inputs, batch=4, source=source, layouts=layouts, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_batch_of_one_sample_is_cut_too(name: str) -> None:
    """B8"""
    model, inputs = build(name)
    one = {key: value[1:2] for key, value in inputs.items()}
    assert_same(model, one, batch=1, rtol=1e-4, atol=1e-6)


def test_rope_and_masks_are_recomputed_on_every_stage() -> None:
    """V3, B8"""
    model, inputs = build("llama")
    captured = Source(model).capture(inputs, training=True)
    for cut in (1, 2, 3):
        assert [spec.needs_grad for spec in captured.carve(cut, 4).received] == [True]


def test_a_hugging_face_model_on_meta_is_initialized_by_its_own_code() -> None:
    """V5"""
    for name in ("gpt2", "llama", "t5"):
        torch.manual_seed(0)
        make, patterns, inputs = MODELS[name]
        with torch.device("meta"):
            model = make().train()
        cut_after(model, *patterns)
        source = Source(model)
        captured = source.capture(inputs, training=True)
        losses = []
        for cuts in ([0, captured.num_segments], [0, 1, captured.num_segments]):
            values: tuple[Tensor, ...] = ()
            for first, stop in pairwise(cuts):
                program = captured.carve(first, stop)
                state = stage_state(source, captured, first, stop, device="cpu", seed=3)
                values = program([state.tensor(n) for n in program.state], values, inputs, Work(0, 0, 0))
            losses.append(values[0])
        assert torch.equal(*losses)
        assert 3.5 < float(losses[0]) < 60  # near the logarithm of the vocabulary; T5 starts far above it


def test_verification_leaves_the_model_unchanged() -> None:
    model, inputs = build("gpt2")
    captured = Source(model).capture(inputs, training=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    check_capture(model, captured, inputs)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert model.config.use_cache
