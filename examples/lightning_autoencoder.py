"""The autoencoder of Lightning's documentation, trained by its Trainer over all processes.

python examples/lightning_autoencoder.py --devices 2
torchrun --nproc_per_node 2 examples/lightning_autoencoder.py --devices 2 --stages 2
"""

import argparse
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import varuna.lightning


class LitAutoEncoder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3)
        )
        self.decoder = nn.Sequential(
            nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 64)
        )

    def forward(self, x: Tensor) -> Tensor:
        embedding: Tensor = self.encoder(x)
        return embedding

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        x = x.view(x.size(0), -1)
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss, sync_dist=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class PrintLoss(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            print(f"step {trainer.global_step}: loss {float(trainer.callback_metrics['train_loss']):.7f}")


def images(count: int = 256) -> TensorDataset:
    """Pictures of 8 x 8 with one bright stripe."""
    generator = torch.Generator().manual_seed(0)
    stripes = torch.randint(8, (count,), generator=generator)
    pictures = torch.rand(count, 8, 8, generator=generator) * 0.1
    pictures[torch.arange(count), stripes] += 1
    return TensorDataset(pictures)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1, help="processes on this machine")
    parser.add_argument("--stages", type=int, default=0, help="0: chosen automatically")
    parser.add_argument("--batch-size", type=int, default=32, help="of all processes together")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    L.seed_everything(1)
    loader = DataLoader(images(), batch_size=options.batch_size // options.devices, shuffle=True)
    trainer = L.Trainer(
        strategy=varuna.lightning.VarunaStrategy(partition_num=options.stages),
        accelerator="cpu",
        devices=options.devices,
        max_steps=options.steps,
        callbacks=[PrintLoss()],
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )
    model = LitAutoEncoder()
    trainer.fit(model, loader)
    print("embedding of the first picture:", model(images()[0][0].view(1, -1)).detach().numpy())


if __name__ == "__main__":
    main()
