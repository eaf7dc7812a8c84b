"""The model that all benchmarks train, and the same model in pieces for tools that cannot cut one."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varuna import CutPoint

SEED = 3


@dataclass(frozen=True)
class Size:
    """A model, and the micro-batches it is given."""

    name: str
    kind: Literal["transformer", "chain"] = "transformer"
    blocks: int = 4
    width: int = 32
    tokens: int = 16
    vocab: int = 64
    microbatch: int = 2


TINY = Size("tiny")
MEDIUM = Size("medium", width=128, tokens=64, vocab=512, microbatch=4)


def chain(blocks: int) -> Size:
    """As many equal, very small segments as asked for: what is left to measure is overhead."""
    return Size("chain", kind="chain", blocks=blocks)


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class GPT(nn.Module):
    """A small transformer with a CutPoint between any two blocks: as many segments as blocks."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)
        self.cuts = nn.ModuleList(CutPoint() for _ in range(size.blocks - 1))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x if i == 0 else self.cuts[i - 1](x))
        return loss_of(self.head(self.norm(x)), labels)


class Chain(nn.Module):
    """One small layer for each segment, all alike."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(size.width, size.width) for _ in range(size.blocks))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(size.blocks - 1))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = tokens
        for i, block in enumerate(self.blocks):
            x = torch.tanh(block(x if i == 0 else self.cuts[i - 1](x)))
        return F.mse_loss(x, labels)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_model(size: Size) -> nn.Module:
    torch.manual_seed(SEED)
    return GPT(size) if size.kind == "transformer" else Chain(size)


def make_piece(size: Size, first: int, stop: int) -> nn.Sequential:
    """The segments `first` to `stop - 1` as plain modules; from tokens or to logits at the model's ends."""
    model = make_model(size)
    assert isinstance(model, GPT)
    parts: list[nn.Module] = list(model.blocks[first:stop])
    if first == 0:
        parts.insert(0, model.embed)
    if stop == size.blocks:
        parts += [model.norm, model.head]
    return nn.Sequential(*parts)


def make_batch(size: Size, samples: int, *, seed: int = SEED) -> tuple[Tensor, Tensor]:
    """Tokens and labels; for a chain, vectors and what they should become."""
    generator = torch.Generator().manual_seed(seed)
    if size.kind == "chain":
        vectors = torch.randn(2, samples, size.width, generator=generator)
        return vectors[0], vectors[1]
    drawn = torch.randint(size.vocab, (2, samples, size.tokens), generator=generator)
    return drawn[0], drawn[1]


def spans(size: Size, depth: int) -> list[tuple[int, int]]:
    """The cut that both sides use: equal runs of blocks."""
    bounds = [size.blocks * stage // depth for stage in range(depth + 1)]
    return list(pairwise(bounds))
