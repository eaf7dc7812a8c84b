"""A small training script that survives faults: `varuna chaos` runs it, and shows that it does.

    varuna chaos examples/chaos.py --minutes 2 --machines 3
    varuna chaos examples/chaos.py --trace trace.csv --speedup 60 --machines 4 -- --sample-seconds 0.02

`--wrong` makes a mistake on purpose: each rank draws its own samples, whatever the step is. The report then
says that the losses differ.
"""

import argparse
import os
import time

import torch
from torch import Tensor, nn

from varuna import CutPoint, SampleOrder, Varuna

NUM_SAMPLES, BATCH_SIZE, CHUNK_SIZE = 480, 48, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.cut = nn.Linear(4, 32), nn.Linear(32, 1), CutPoint()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = ((self.last(self.cut(torch.tanh(self.first(x)))) - y) ** 2).mean()
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--sample-seconds", type=float, default=0.003, help="time that one sample takes")
    parser.add_argument("--wrong", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 4)
    y = x.sum(1, keepdim=True)
    sample = {"x": x[:CHUNK_SIZE], "y": y[:CHUNK_SIZE]}
    stage_map = os.environ["VARUNA_STAGE_TO_RANK_MAP"]
    model = Varuna(Net(), stage_map, sample, BATCH_SIZE, CHUNK_SIZE, device="cpu", seed=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.set_optimizer(optimizer)
    model.resume("checkpoints")  # a relative path: each run of `varuna chaos` has its own
    order = SampleOrder(NUM_SAMPLES, batch_size=BATCH_SIZE, seed=5)
    own = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))

    def fetch(samples: list[int]) -> dict[str, Tensor]:
        if "VARUNA_GENERATION" in os.environ:  # the undisturbed run need not take so long
            time.sleep(args.sample_seconds * len(samples))
        if args.wrong:
            samples = torch.randint(NUM_SAMPLES, (len(samples),), generator=own).tolist()
        return {"x": x[samples], "y": y[samples]}

    while model.iteration < args.steps:
        model.step(fetch, order=order)
        optimizer.step()
        model.zero_grad()


if __name__ == "__main__":
    main()
