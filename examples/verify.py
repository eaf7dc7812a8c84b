"""Verifies that a small GPT trains at every layout as in one plain process.

varuna verify examples/verify.py:make
python examples/verify.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varuna

WIDTH, WORDS, LENGTH = 32, 64, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight  # tied: the first and the last stage share it

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        scores = self.head(self.blocks(x))
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def get_batch(size: int) -> dict[str, Tensor]:
    return {"tokens": torch.randint(WORDS, (size, LENGTH))}


def make() -> tuple[nn.Module, object, object]:
    torch.manual_seed(0)
    return GPT(), get_batch, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)


if __name__ == "__main__":
    model, sample, optimizer = make()
    report = varuna.verify(model, sample, optimizer=optimizer, layouts="2x1,1x2:shard,2+1")  # type: ignore[arg-type]
    print(report)
    raise SystemExit(report.exit_code)
