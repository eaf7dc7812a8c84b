"""A capture with symbolic lengths: which models it serves, and how it is verified (EXA-8)."""

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from varuna.capture import Source, check_capture
from varuna.capture.model.lengths import SeenSizes, check_dynamic_dims
from varuna.capture.run import capture_cache
from varuna.errors import CaptureError
from varuna.plan.cut.blocks import partition

VOCABULARY = 64
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}

Inputs = dict[str, Any]


def text(length: int, size: int = 3) -> Inputs:
    ids = torch.randint(0, VOCABULARY, (size, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def without_mask(length: int) -> Inputs:
    inputs = text(length)
    inputs.pop("attention_mask")
    return inputs


def translation(length: int) -> Inputs:
    return {"input_ids": text(length)["input_ids"], "labels": text(length // 2 + 3)["input_ids"]}


def packed(length: int) -> Inputs:
    """Return two sequences in each row, with positions and a block mask of their own."""
    inputs, first = text(length), length // 2
    part = (torch.arange(length) >= first).long()
    visible = (part[:, None] == part) & torch.ones(length, length).tril().bool()
    positions = torch.arange(length) - first * part
    inputs["position_ids"] = positions.expand(3, length).clone()
    inputs["attention_mask"] = visible.expand(3, 1, length, length).clone()
    return inputs


def images(size: int) -> Inputs:
    generator = torch.Generator().manual_seed(size)
    return {
        "pixel_values": torch.randn(3, 3, size, size, generator=generator),
        "labels": torch.randint(0, 2, (3,), generator=generator),
        "interpolate_pos_encoding": True,
    }


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Inputs], list[int]]] = {
    "GPT-2": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=1, n_head=2)
        ),
        text,
        [10, 12, 3, 64],
    ),
    "Llama, packed": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
        packed,
        [10, 12, 33],
    ),
    "Mistral with a window of 8": (
        lambda: transformers.MistralForCausalLM(
            transformers.MistralConfig(**SMALL, num_key_value_heads=1, sliding_window=8)
        ),
        without_mask,
        [5, 6, 8, 33],
    ),
    "T5": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=VOCABULARY,
                d_model=32,
                d_kv=16,
                d_ff=48,
                num_layers=1,
                num_heads=2,
                decoder_start_token_id=0,
            )
        ),
        translation,
        [10, 12, 33],
    ),
    "DeBERTa": (
        lambda: transformers.DebertaV2ForMaskedLM(
            transformers.DebertaV2Config(
                **SMALL, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=16
            )
        ),
        text,
        [10, 12, 33],
    ),
    "ViT": (
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(
                num_hidden_layers=1,
                hidden_size=32,
                num_attention_heads=2,
                intermediate_size=48,
                image_size=32,
                patch_size=8,
            )
        ),
        images,
        [40, 48, 24],  # at 32, the model's own size, it takes another branch
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_families_are_captured_twice_for_all_lengths(name: str) -> None:
    """EXA-8: at each length the capture computes what the model itself does."""
    make, inputs, lengths = CASES[name]
    torch.manual_seed(0)
    model = make()
    source = Source(model, partition=partition)
    for length in lengths:
        check_capture(model, source.capture(inputs(length), training=True), inputs(length))
    assert source.num_traces == 2


class Scaled(nn.Module):
    """A model with one line that uses the length."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.tokens, self.head, self.use = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY), use

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.use(self.tokens(input_ids))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def windows(x: Tensor) -> Tensor:
    size, length, width = x.shape
    if length % 4:
        return x * 2
    return (x.view(size, length // 4, 4, width) * torch.arange(1, 5).view(1, 1, 4, 1)).view_as(x)


def long_formula(x: Tensor) -> Tensor:
    number = x.shape[1]
    for divisor in range(2, 9):
        number = number + (number * number) // divisor
    return x * 2 if number > 50 else x


USES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "scale": (lambda x: x / math.sqrt(x.shape[1]) + x.shape[1] ** -0.5, 2),
    "dropout over all tokens": (lambda x: F.dropout(x.flatten(0, 1), 0.2).view_as(x) + torch.rand_like(x), 2),
    "branch": (lambda x: x * 2 if x.shape[1] > 11 else x, 4),  # two for each branch
    "int": (lambda x: x * int(x.shape[1]), 8),
    "list": (lambda x: x * torch.tensor([1.0 + i for i in range(x.shape[1])])[None, :, None], 8),
    "tensor": (lambda x: x * torch.tensor(x.shape[1]), 8),
    "equal to the width": (lambda x: x * 3 if x.shape[1] == x.shape[2] else x, 4),
    "windows": (windows, 4),
    "a formula that is too long for torch": (long_formula, 8),
}


@pytest.mark.parametrize("name", USES)
def test_every_use_of_a_length_is_right_at_all_lengths(name: str) -> None:
    """EXA-8: a branch gets a capture of its own; a model that fixes its length, one for each length."""
    use, most = USES[name]
    torch.manual_seed(0)
    model = Scaled(use)
    source = Source(model)
    for length in (9, 12, 10, 16, 24, 23) if most < 8 else (9, 12, 16, 9):
        check_capture(model, source.capture(text(length), training=True), text(length))
    assert source.num_traces <= most


def test_lengths_of_zero_and_one_have_captures_of_their_own() -> None:
    model = Scaled(lambda x: x + x.mean(1, keepdim=True) if x.shape[1] > 1 else x * 2)
    source = Source(model)
    for length in (9, 1, 12, 1, 10):
        check_capture(model, source.capture(text(length), training=True), text(length))
    assert source.num_traces == 3
    source.capture(text(0), training=True)
    assert source.num_traces == 4


def test_a_length_beyond_a_table_is_refused_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    table = torch.ones(20, 1)
    source = Source(Scaled(lambda x: x * table[: x.shape[1]]))
    for length in (9, 12):
        source.capture(text(length), training=True)
    with pytest.raises(CaptureError, match="must match the size"):
        source.capture(text(25), training=True)
    source.capture(text(19), training=True)
    assert source.num_traces == 2
    assert not [record for record in caplog.records if record.name == "varuna"]


def factor(x: Tensor) -> int:
    return 2 if isinstance(x.shape[1], torch.SymInt) else 3


@pytest.mark.parametrize("use", [lambda x: x * factor(x), lambda x: x * torch.tensor(factor(x))])
def test_a_capture_that_computes_something_else_is_not_used(
    use: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """EXA-8: symbolic sizes are compared with fixed sizes, operation by operation, with their constants."""
    model = Scaled(use)
    source = Source(model)
    with caplog.at_level(logging.WARNING, "varuna"):
        for length in (9, 12, 10):
            check_capture(model, source.capture(text(length), training=True), text(length))
    assert "the model runs other operations at other lengths" in caplog.text


def test_few_traces_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_cache, "MAX_TRACES", 3)
    model = Scaled(lambda x: x * int(x.shape[1]))
    source = Source(model)
    for length in (5, 6, 7, 8, 9, 5):
        check_capture(model, source.capture(text(length), training=True), text(length))
    assert all(len(traces) <= 3 for traces in source._cache._traces.values())


def test_names_of_dimensions_are_checked() -> None:
    with pytest.raises(TypeError, match="dynamic_dims must map inputs to dimensions and their names"):
        check_dynamic_dims({"input_ids": 1})
    model = Scaled(lambda x: x)
    with pytest.raises(CaptureError, match=r"dynamic_dims names dimension 0 .* its batch"):
        Source(model, dynamic_dims={"input_ids": {0: "length"}}).capture(text(9), training=True)
    seen = SeenSizes({("a", 1): "length", ("b", 1): "length"}, [{("a", 1): 3, ("b", 1): 3}])
    with pytest.raises(CaptureError, match="the same name 'length', but their sizes differ"):
        seen.groups({("a", 1): 4, ("b", 1): 5})
