"""The model that planned jobs train; run as a script, one worker's part of the training."""

import os

import torch
from torch import Tensor, nn

from varuna import CutPoint, Varuna
from varuna.types import spread_evenly

STEPS = 11
BATCH = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer, cut in zip(self.layers, [*self.cuts, nn.Identity()], strict=True):
            x = cut(torch.tanh(layer(x)))
        return ((x - y) ** 2).mean()


def get_batch(size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {name: torch.randn(size, 8, generator=generator) for name in "xy"}


def train_plainly() -> list[float]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        loss = model(**get_batch(BATCH))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main() -> None:
    sizes = (int(os.environ[name]) for name in ("VARUNA_BATCH_SIZE", "VARUNA_CHUNK_SIZE"))
    model = Varuna(Net(), os.environ["VARUNA_STAGE_TO_RANK_MAP"], get_batch(2), *sizes, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_optimizer(optimizer)
    shares = spread_evenly(BATCH, parts=model.data_depth)
    first = sum(shares[: model.rank_within_stage])
    own = {name: value[first : first + model.batch_size] for name, value in get_batch(BATCH).items()}
    for _ in range(STEPS):
        loss, _ = model.step(own)
        print("loss", loss)
        optimizer.step()
        model.zero_grad()
    plan = model.plan
    print("ran", plan.depth, plan.width, plan.microbatch_size, plan.schedule, [s.stop for s in plan.stages])


if __name__ == "__main__":
    main()
