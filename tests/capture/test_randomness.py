"""Random numbers depend on the sample, not on depth, micro-batch or process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.comparison import assert_same, chained, eager
from tests.capture.models import Everything, Mlp, batch_of, tokens
from varuna.capture import CutPoint, Source, check_capture, opaque, plain_randomness
from varuna.capture.graph.randomness import attention, draw
from varuna.capture.model.tied_weights import named_tensors
from varuna.types import Work


class Draws(nn.Module):
    """Uses every kind of random operation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.4, batch_first=True)
        self.cut = CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        h = F.scaled_dot_product_attention(h, h, h, dropout_p=0.2)
        h = h + torch.rand_like(h) + torch.randn(h.shape[0], 1, 8) + torch.rand(8)
        h = self.cut(F.dropout2d(h, 0.5))
        h = self.attention(h, h, h)[0]
        h = F.alpha_dropout(h, 0.1, training=True)
        h = self.lstm(h)[0]
        h = F.dropout(h.flatten(0, 1), 0.5, inplace=True)
        noise = torch.empty_like(h).uniform_(-1, 1)
        h = F.rrelu(h + noise, training=True) * torch.bernoulli(torch.full_like(h, 0.7))
        return F.dropout(h, 1.0).sum() + F.dropout(h, 0.0).square().mean()


def test_plain_randomness_draws_the_same_as_the_pipeline() -> None:
    """V16: bit for bit, in every layout."""
    torch.manual_seed(0)
    model = Draws()
    inputs = {"x": torch.randn(3, 5, 8)}
    assert_same(model, inputs, batch=3, rtol=0, atol=0)


class PermutedBias(nn.Module):
    """Adds a bias, as T5 does: its innermost dimension in memory is not the last, and it crosses a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(6, 2)
        self.cut = CutPoint()

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        bias = self.bias(torch.arange(20).remainder(6).view(4, 5)).permute(2, 0, 1).unsqueeze(0)
        wide = torch.cat([x, x], 3).transpose(1, 2)[:, :, :, :5]  # with gaps in memory
        bias, wide = self.cut(bias, wide)
        masked = torch.where(visible, bias, -1.0)
        return (masked * torch.rand_like(masked) + wide.sin() * torch.rand_like(wide)).sum()


def test_numbers_do_not_depend_on_the_memory_order_of_a_received_value() -> None:
    """EXA-7: random numbers fill memory in its order, which a cut must keep."""
    torch.manual_seed(0)
    inputs = {"x": torch.randn(3, 4, 2, 4), "visible": torch.rand(3, 1, 4, 5) > 0.3}
    assert_same(PermutedBias(), inputs, batch=3, rtol=0, atol=0)


def test_fused_attention_takes_one_kernel_for_every_memory_order() -> None:
    """EXA-7: kernels draw other masks, and CUDA's is chosen by strides and by the mask's gradient."""
    seen = []

    def scaled_dot_product_attention(*args: Tensor | None, **_: Any) -> Tensor:
        strides = [arg.stride(-1) for arg in args if arg is not None]
        seen.append((strides, torch.backends.cuda.cudnn_sdp_enabled()))
        assert args[0] is not None
        return args[0]

    query, bias = torch.empty(2, 4, 8, 5, device="meta").mT, torch.empty(1, 5, 5, 4, device="meta")
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    for mask in (bias.permute(0, 3, 1, 2), torch.empty(5, 1, device="meta").expand(5, 5), None):
        parts: list[Any] = [(0, 1), (0, 1), (0, 1), *([] if mask is None else [None])]
        given = (query, query, query, mask)[: len(parts)]
        draw(
            scaled_dot_product_attention,
            given,
            {},
            Work(0, 0, 0),
            0,
            parts=parts,
            results=[(0, 1)],
            num_samples=2,
        )
    assert all(set(strides) == {1} for strides, _ in seen)
    assert [enabled for _, enabled in seen] == [False] * 4 + [was_enabled] * 2
    assert torch.backends.cuda.cudnn_sdp_enabled() == was_enabled


@pytest.mark.parametrize("size", [1, 2, 4])
def test_masks_do_not_depend_on_the_microbatch_size(size: int) -> None:
    """V16"""
    source = Source(model := Mlp(dropout=0.5))
    inputs = batch_of(8)
    loss, grads = eager(model, inputs, 8)
    losses, sums = [], dict[str, Tensor]()
    for first in range(0, 8, size):
        part = {name: value[first : first + size] for name, value in inputs.items()}
        captured = source.capture(part, training=True)
        ours, found = chained(source, captured, [0, 2, 4], part, first_sample=first)
        losses.append(ours)
        for name, grad in found.items():
            sums[name] = sums.get(name, torch.zeros_like(grad)) + grad * size / 8
    torch.testing.assert_close(torch.stack(losses).mean(), loss)
    for name, grad in grads.items():
        torch.testing.assert_close(sums[name], grad)


def run(model: nn.Module, inputs: dict[str, Any], work: Work) -> Tensor:
    program = Source(model).capture(inputs, training=True).carve(0, 4)
    state = dict(model.named_parameters())
    return program([state[name] for name in program.state], (), inputs, work)[0]


def test_masks_differ_between_steps_samples_and_seeds() -> None:
    """V16"""
    model, inputs = Mlp(dropout=0.5), batch_of(4)
    works = [Work(0, 0, 0), Work(0, 1, 0), Work(0, 0, 4), Work(1, 0, 0)]
    assert len({float(run(model, inputs, work)) for work in works}) == 4
    assert float(run(model, inputs, works[0])) == float(run(model, inputs, works[0]))


def test_the_default_generator_is_unchanged() -> None:
    inputs = {"x": torch.randn(3, 5, 8)}
    model = Draws()
    program = Source(model).capture(inputs, training=True).carve(0, 2)
    before = torch.get_rng_state()
    program([dict(model.named_parameters())[name] for name in program.state], (), inputs, Work(0, 0, 0))
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_drops_the_right_share_and_keeps_the_mean() -> None:
    with plain_randomness(seed=0, step=0, batch_size=4):
        y = F.dropout(torch.ones(4, 10000), 0.25)
    assert abs(float((y == 0).float().mean()) - 0.25) < 0.01
    assert torch.equal(y.unique(), torch.tensor([0.0, 1 / 0.75]))
    assert not torch.equal(y[0], y[1])


def test_an_opaque_module_draws_by_sample() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 1e9:
                return x
            return F.dropout(x, 0.5, self.training)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.inner = opaque(Inner())
            self.cut = CutPoint()
            self.last = nn.Dropout(0.5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.cut(self.inner(self.first(x)))
            return F.mse_loss(self.last(h), y)

    torch.manual_seed(0)
    assert_same(Outer(), batch_of(4), batch=4)
    everything = Everything(dropout=0.3)
    assert_same(everything, tokens(4), batch=4)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"is_causal": True},
        {"attn_mask": torch.rand(3, 1, 5, 5) > 0.5},
        {"attn_mask": torch.randn(5, 5)},
        {"scale": 0.3},
    ],
)
def test_attention_without_dropout_equals_torch(how: dict[str, Any]) -> None:
    query, key, value = (torch.randn(3, 2, 5, 4) for _ in range(3))
    options = {"attn_mask": None, "is_causal": False, "scale": None, "enable_gqa": False, **how}
    ours = attention(query, key, value, **options, drop=lambda weights: weights)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(query, key, value, **how))


def test_attention_of_mixed_precisions_is_drawn_under_autocast() -> None:
    """EXA-7: rotary embeddings make query and key fp32, the value stays bf16."""
    query, value = torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 4, dtype=torch.bfloat16)
    with plain_randomness(seed=0, step=0, batch_size=3), torch.autocast("cpu", torch.bfloat16):
        drawn = F.scaled_dot_product_attention(query, query, value, dropout_p=0.5)
    assert drawn.shape == value.shape and bool(drawn.isfinite().all())


class Patches(nn.Module):
    """Draws for four patches of each sample in rows of four values: sizes do not show the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.cut = CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.cut(self.layer(x)).flatten(0, 1)
        return F.dropout(rows, 0.5).square().mean()


@pytest.mark.parametrize("batch", [4, 8])
def test_the_check_is_not_misled_by_sizes(batch: int) -> None:
    """EXA-7: a dimension of the size of the checked batch is not taken for the samples."""
    model = Patches()
    inputs = {"x": torch.randn(batch, 4, 4)}
    captured = Source(model).capture(inputs, training=True)
    check_capture(model, captured, inputs)


class Ambiguous(nn.Module):
    """Draws in tensors whose batch is in any dimension, also beside others of its size."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix = nn.Linear(width, width)
        self.recurrent = nn.LSTM(width, width, num_layers=2, dropout=0.3)  # [length, batch, width]
        self.maps = nn.Dropout2d(0.3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.dropout(self.mix(x), 0.2).transpose(0, 1)  # [length, batch, width]
        h = h + F.dropout(h, 0.2) + self.recurrent(h)[0]
        heads = h.unsqueeze(0).repeat(self.heads, 1, 1, 1)  # [heads, length, batch, width]
        h = h + F.dropout(heads, 0.2).sum(0) + torch.rand(h.shape[0], 1, h.shape[2])
        h = h + torch.rand_like(h) * torch.bernoulli(torch.full_like(h, 0.5))
        q = heads.permute(2, 0, 1, 3)  # [batch, heads, length, width]
        h = h + F.scaled_dot_product_attention(q, q, value=q, dropout_p=0.3).sum(1).transpose(0, 1)
        h = h + self.maps(h.transpose(0, 1).unsqueeze(2)).squeeze(2).transpose(0, 1)
        return F.mse_loss(F.gumbel_softmax(h, dim=-1).transpose(0, 1), y)


@pytest.mark.parametrize("sizes", [(3, 3, 3, 3), (4, 2, 4, 8)])
def test_sizes_that_equal_the_batch_by_chance_are_not_taken_for_it(sizes: tuple[int, int, int, int]) -> None:
    """EXA-7: batch, length, heads and width; the check accepts the model, and micro-batches add up to it."""
    batch, length, heads, width = sizes
    torch.manual_seed(0)
    model = Ambiguous(width, heads)
    inputs = {name: torch.randn(batch, length, width) for name in ("x", "y")}
    captured = Source(model).capture(inputs, training=True)
    check_capture(model, captured, inputs)
    program = captured.carve(0, captured.num_segments)
    state = [named_tensors(model)[name] for name in program.state]
    (whole,) = program(state, (), inputs, Work(1, 0, 0))
    parts = [
        program(state, (), {n: v[i : i + 1] for n, v in inputs.items()}, Work(1, 0, i))[0]
        for i in range(batch)
    ]
    torch.testing.assert_close(sum(parts) / batch, whole)


def test_a_value_of_one_row_is_for_all_samples() -> None:
    """EXA-7: T5 has one bias of attention for all samples; on a GPU, its capture expands it."""
    mode = plain_randomness.of(Work(1, 0, 0), batch_size=3)
    assert mode._at((0, 0, 1, None), [(3, 2), (1, 2), (2, 6), (5,)]) == [(0, 1), None, (1, 2), None]


def test_categories_of_a_multinomial_are_no_samples() -> None:
    """EXA-7: ViLT chooses patches by a multinomial; the number of weights may be a multiple of the batch."""
    drawn = []
    for rows in ((6,), (6,), (3, 6)):
        with plain_randomness(seed=0, step=0, batch_size=3):
            drawn.append(torch.multinomial(torch.ones(rows), 3))
    assert torch.equal(*drawn[:2]) and drawn[2].shape == (3, 3)
