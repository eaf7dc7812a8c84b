"""A loop of Lightning Fabric, trained over all processes.

python examples/fabric_classifier.py --devices 2
torchrun --nproc_per_node 2 examples/fabric_classifier.py --devices 2 --stages 2
"""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import varuna.lightning


def points(count: int = 256) -> TensorDataset:
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :4].argmax(1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1, help="processes on this machine")
    parser.add_argument("--stages", type=int, default=0, help="0: chosen automatically")
    parser.add_argument("--batch-size", type=int, default=32, help="of all processes together")
    options = parser.parse_args()

    strategy = varuna.lightning.VarunaFabricStrategy(partition_num=options.stages)
    fabric = L.Fabric(accelerator="cpu", devices=options.devices, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(1)
    model: nn.Module = nn.Sequential(
        nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
    )
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(points(), batch_size=options.batch_size // options.devices))
    for step, (x, y) in enumerate(loader, 1):
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        fabric.print(f"step {step}: loss {float(fabric.all_reduce(loss.detach())):.7f}")


if __name__ == "__main__":
    main()
