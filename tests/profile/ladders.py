"""Models to profile: equal steps, and operations that count their calls or run out of memory."""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varuna import CutPoint
from varuna.measure.stopwatch import Effort

WIDTH = 16
BRIEF = Effort(seconds=0.0, fewest=2, most=2, warmups=1)
MESSAGES = (4 << 10, 256 << 10)

ran: Counter[str] = Counter()
largest = 1 << 30  # the most samples for which there is "memory"


@torch.library.custom_op("varuna_tests::tick", mutates_args=())
def tick(x: Tensor) -> Tensor:
    ran["tick"] += 1
    if x.shape[0] > largest:
        raise torch.OutOfMemoryError(f"no room for {x.shape[0]} samples")
    return x.clone()


tick.register_fake(lambda x: torch.empty_like(x))
tick.register_autograd(lambda _context, gradient: gradient)


class Ladder(nn.Module):
    """Linear and GELU, again and again, with a CutPoint between any two."""

    def __init__(self, steps: int = 5, width: int = WIDTH, ticks: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps = nn.ModuleList(nn.Linear(width, width) for _ in range(steps))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(steps - 1))
        self.dropout = nn.Dropout(dropout)
        self.ticks = ticks

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for i, step in enumerate(self.steps):
            x = self.dropout(F.gelu(step(x)))
            x = tick(x) if self.ticks else x
            x = self.cuts[i](x) if i < len(self.cuts) else x
        return F.mse_loss(x, y)


def get_batch(size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {
        "x": torch.randn(size, WIDTH, generator=generator),
        "y": torch.randn(size, WIDTH, generator=generator),
    }
