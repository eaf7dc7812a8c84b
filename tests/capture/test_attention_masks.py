"""Attention keeps its fused kernels: a mask that only means "causal" becomes the flag."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varuna.capture import Source
from varuna.capture.graph.attention_masks import ATTENTION, meaning_of
from varuna.capture.graph.randomness import bound, draw
from varuna.types import Work

Mask = Callable[[Tensor], Tensor]
TOKENS = 6


def causal(x: Tensor) -> Tensor:
    positions = torch.arange(TOKENS, device=x.device)
    return (positions[None, :] <= positions[:, None]).expand(x.shape[0], 1, TOKENS, TOKENS)


def added(x: Tensor) -> Tensor:
    return torch.zeros(TOKENS, TOKENS).masked_fill_(~causal(x)[0, 0], torch.finfo(torch.float32).min)


def window(x: Tensor) -> Tensor:
    positions = torch.arange(TOKENS)
    return causal(x) & (positions[None, :] > positions[:, None] - 3)


def padding(x: Tensor) -> Tensor:
    return (x[:, :, 0] > -100.0)[:, None, None, :] & causal(x)


class Attends(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask, self.qkv = mask, nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(x.shape[0], TOKENS, 3, 2, 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x))
        return y.square().mean()


def attention_of(mask: Mask) -> tuple[str, Tensor, Tensor]:
    """Return the kind of mask of the captured attention, the captured loss, and the model's loss."""
    model, x = Attends(mask), torch.randn(5, TOKENS, 4)
    program = Source(model).capture({"x": x}, training=True).carve(0, 1)
    (node,) = [node for node in program.graph_module.graph.nodes if node.target is ATTENTION]
    kept = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None) is not None
    name = "mask" if kept else "causal" if node.kwargs.get("is_causal") else "nothing"
    state = [model.get_parameter(name) for name in program.state]
    (loss,) = program(state, [], {"x": x}, Work(0, 0, 0))
    return name, loss, model(x)


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        (causal, "causal"),
        (added, "causal"),
        (lambda x: causal(x) | True, "nothing"),
        (window, "mask"),
        (padding, "mask"),
    ],
)
def test_a_mask_that_depends_on_sizes_alone_becomes_a_flag(mask: Mask, name: str) -> None:
    found, ours, theirs = attention_of(mask)
    assert found == name
    torch.testing.assert_close(ours, theirs)


class Drops(Attends):
    def forward(self, x: Tensor) -> Tensor:
        q = self.qkv(x)[:, None]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=self.mask(x), dropout_p=0.1).square().mean()


@pytest.mark.parametrize(("mask", "kept"), [(causal, False), (added, True)])
def test_a_mask_of_numbers_stays_where_dropout_draws(mask: Mask, kept: bool) -> None:
    """V16: on CUDA a kernel without the mask would draw other numbers than the plain model's kernel."""
    program = Source(Drops(mask)).capture({"x": torch.randn(5, TOKENS, 4)}, training=True).carve(0, 1)
    (node,) = [node for node in program.graph_module.graph.nodes if node.target is draw]
    given = bound(ATTENTION, node.args[1], node.args[2])
    assert (given["attn_mask"] is not None, bool(given["is_causal"])) == (kept, not kept)


def test_only_masks_of_zeros_and_minimum_values_have_a_meaning() -> None:
    assert meaning_of(torch.zeros(3, 3)) == "nothing"
    assert (
        meaning_of(torch.full((3, 3), float("-inf")).triu(1).nan_to_num(0.0, neginf=-torch.inf)) == "causal"
    )
    assert meaning_of(torch.eye(3)) is None
    assert meaning_of(torch.ones(2, 3, dtype=torch.bool).tril()) is None


def test_gpt2_of_hugging_face_runs_with_the_causal_flag() -> None:
    """It passes a mask only while it is traced."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, n_positions=16, vocab_size=16)
    tokens = torch.randint(16, (3, 16))
    model = transformers.GPT2LMHeadModel(config)
    captured = Source(model).capture({"input_ids": tokens, "labels": tokens}, training=False)
    nodes = captured.carve(0, 1).graph_module.graph.nodes
    calls = [node for node in nodes if node.target is ATTENTION]
    assert len(calls) == 2 and all(node.kwargs["is_causal"] for node in calls)
