"""Attention with dropout on the CPU, where no fused kernel does it: one pass for the whole micro-batch."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    drop: Callable[[Tensor], Tensor],
) -> Tensor:
    """Compute scaled_dot_product_attention as torch documents it, with `drop` applied to the weights."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = (query * (scale or 1 / math.sqrt(query.shape[-1]))) @ key.transpose(-2, -1)
    if scores.dtype in (torch.bfloat16, torch.float16):
        scores = scores.float()
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    # Rows that are masked completely give 0, where a plain softmax would give NaN.
    weights = torch._safe_softmax(scores, -1)
    return drop(weights).to(value.dtype) @ value
