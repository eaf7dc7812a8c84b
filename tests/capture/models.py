"""Small models, each with features that are hard to cut."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varuna.capture import CutPoint


def batch_of(size: int, *, width: int = 6, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(size, width, generator=generator),
        "y": torch.randn(size, width, generator=generator),
    }


class Mlp(nn.Module):
    """Linear layers with a CutPoint between each two; optional dropout."""

    def __init__(self, layers: int = 4, width: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(layers - 1))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = self.dropout(torch.tanh(layer(x)))
            if i < len(self.cuts):
                x = self.cuts[i](x)
        return F.mse_loss(x, y)


class Everything(nn.Module):
    """A batch not in dimension 0, several tensors over a cut, a skip over all cuts, a mask, BatchNorm,
    changes in place, and one embedding used at both ends."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.cuts = [CutPoint() for _ in range(3)]
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def reset_parameters(self) -> None:
        self.seen.zero_()

    def forward(
        self, ids: Tensor, labels: Tensor, scale: float = 1.0, nothing: None = None
    ) -> dict[str, Tensor]:
        with torch.no_grad():
            mask = (ids > 2).float()
            self.seen.add_(1)
        h = self.embed(ids)
        skip, late = h * 2, torch.sigmoid(h)
        h = self.dropout(torch.relu_(self.first(h)) * 1.5).transpose(0, 1)  # [sequence, batch, width]
        h, late = self.cuts[0](h, late)
        h = h.permute(1, 2, 0)
        h += 1.0
        h = self.norm(h)
        h = self.cuts[1](h).transpose(1, 2)
        h = h * mask.unsqueeze(-1) * scale + late
        h[:, 0] = 0.5
        h = self.cuts[2](h)
        h = self.dropout(self.second(h)) + skip
        logits = h @ self.embed.weight.t()
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def tokens(size: int, *, length: int = 5) -> dict[str, Any]:
    ids = torch.randint(0, 11, (size, length), generator=torch.Generator().manual_seed(size))
    return {"ids": ids, "labels": ids, "scale": 0.5, "nothing": None}
