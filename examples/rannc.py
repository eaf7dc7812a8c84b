"""A plain model, trained over all ranks: no CutPoint, no stage, nothing of it is changed.

torchrun --nproc_per_node 2 examples/rannc.py
RANNC_PARTITION_NUM=2 RANNC_PIPELINE_NUM=4 torchrun --nproc_per_node 2 examples/rannc.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyrannc


class Net(nn.Module):
    def __init__(self, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        scores: Tensor = self.head(x)
        return scores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--device", default=-1)
    options = parser.parse_args()

    torch.manual_seed(0)
    model: nn.Module = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model = pyrannc.RaNNCModule(model, optimizer, device=options.device)

    generator = torch.Generator().manual_seed(pyrannc.get_rank())  # each rank has samples of its own
    for step in range(options.steps):
        x = torch.randn(options.batch_size, 32, generator=generator)
        y = x[:, :10].argmax(1)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if pyrannc.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss of rank 0's samples {loss.item():.4f}")

    state = model.state_dict()  # of the whole model, on every rank
    Net().load_state_dict(state)


if __name__ == "__main__":
    main()
