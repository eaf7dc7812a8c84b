"""LightningModules as people write them, and one process that trains them on the whole batch."""

import itertools
import os
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import varuna.lightning
from varuna import CutPoint

SAMPLES, WIDTH = 48, 12


def data(double: bool = True) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    x = x if double else x.float()
    return TensorDataset(x, (x.sum(1) > 0).long())


def count_labels(batch: Any) -> Tensor:
    return (batch[0][:, 0] < 0).sum()


class Saving(L.Callback):
    """Saves after the third step, as a callback of a script does."""

    def __init__(self, file: str) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.file)


class Logged(L.LightningModule):
    """Collects the losses of the whole batch, and the learning rates."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.validations: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validations.append(float(self.trainer.callback_metrics["val_loss"]))


class AutoEncoder(Logged):
    """The first example of Lightning's documentation: training_step calls two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), CutPoint(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), CutPoint(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        x = x.view(x.size(0), -1)
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss, sync_dist=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        loss = F.mse_loss(self.decoder(self(x)), x)
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


class Classifier(Logged):
    """training_step calls `self`; a parameter is used in the loss alone; logs, metrics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 8))
        self.cut = CutPoint()
        self.head = nn.Linear(8, 2)
        self.seen = torchmetrics.SumMetric()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cut(self.layers(x).tanh()))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        assert isinstance(batch_idx, int) and self.global_step >= 0
        scores = self(x)
        loss = F.cross_entropy(scores, y)
        self.seen.update(len(x))
        self.log_dict({"train_loss": loss, "seen": self.seen.compute()}, sync_dist=True, on_epoch=True)
        return {"loss": loss, "scores": scores}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), sync_dist=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.layers.parameters()}, {"params": self.head.parameters(), "lr": 0.05}]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


class LooseParameter(AutoEncoder):
    """Two learned weights of losses are parameters of the LightningModule itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.unused = nn.Parameter(torch.ones(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        code = self.encoder(x)
        terms = torch.stack([F.mse_loss(self.decoder(code), x), code.square().mean()])
        loss = (terms * self.scale.exp()).sum() - self.scale.sum()
        self.log("train_loss", loss, sync_dist=True)
        return loss


class Adversaries(Logged):
    """Manual optimization of two modules with an optimizer each, as in the example of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), CutPoint(), nn.Linear(8, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), CutPoint(), nn.Linear(8, 1))

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def judge(self, x: Tensor, real: bool) -> Tensor:
        scores = self.discriminator(x)
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        z = x[:, :4]
        self.toggle_optimizer(first)
        generated = self.judge(self(z), True)
        first.zero_grad()
        self.manual_backward(generated)
        self.clip_gradients(first, gradient_clip_val=0.02)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        loss = (self.judge(x, True) + self.judge(self(z).detach(), False)) / 2
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)
        self.log("train_loss", loss + generated, sync_dist=True)

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.generator.parameters(), lr=0.01)
        return [first, torch.optim.SGD(self.discriminator.parameters(), lr=0.1)], []


KINDS: dict[str, type[Logged]] = {
    kind.__name__: kind for kind in (AutoEncoder, Classifier, LooseParameter, Adversaries)
}


def fit(
    kind: str,
    folder: str,
    *,
    steps: int = 6,
    batch: int = 12,
    wrapped: bool = True,
    shuffle: bool = False,
    resume: str | None = None,
    save: str | None = None,
    double: bool = True,
    loaders: bool = True,
    options: dict[str, Any] | None = None,
    **given: Any,
) -> dict[str, Any]:
    """Train with a global batch of `batch` samples, on all ranks of the pool or in one process."""
    L.seed_everything(3, verbose=False)
    model = KINDS[kind]().to(torch.float64 if double else torch.float32)
    ranks = int(os.environ["WORLD_SIZE"]) if wrapped else 1
    strategy: Any = varuna.lightning.VarunaStrategy(measure=False, **(options or {})) if wrapped else "auto"
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=ranks,
        max_steps=steps,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, **given},
    )
    data_loaders = [DataLoader(data(double), batch_size=batch // ranks, shuffle=s) for s in (shuffle, False)]
    trainer.fit(model, *(data_loaders if loaders else ()), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return {
        "losses": model.losses,
        "validations": model.validations,
        "rates": model.rates,
        "state": {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
        "optimizers": [optimizer.state_dict()["state"] for optimizer in trainer.optimizers],
    }


class MaskedLoss(Classifier):
    """The loss ignores labels: it divides by those that count."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        x, y = batch
        loss = F.cross_entropy(self(x), y.where(x[:, 0] < 0, -100))
        self.log("train_loss", loss)
        return loss


class HandWritten(Classifier):
    """A masked mean, written by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        x, y = batch
        mask = (x[:, 0] < 0).to(x.dtype)
        losses = F.cross_entropy(self(x), y, reduction="none")
        loss = (losses * mask).sum() / mask.sum()
        self.log("train_loss", loss, sync_dist=True)
        return loss


class Bypassing(Classifier):
    """Calls the whole, and then a module inside."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        return self(batch[0]).square().mean() + self.layers(batch[0]).square().mean()


class Weights(Classifier):
    """Uses a weight of a part outside of it, with this rank's samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        return self(batch[0]).square().mean() + F.linear(batch[0], self.layers[0].weight).square().mean()


class Prodigy(torch.optim.SGD):
    """Stands for the class of the package prodigyopt."""


class Estimating(Classifier):
    """Its optimizer estimates a step size from all parameters."""

    def configure_optimizers(self) -> Any:
        return Prodigy(self.parameters(), lr=0.1)


class EndsEarly(AutoEncoder):
    """The data of the second rank ends before that of the first."""

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(2 if os.environ.get("RANK") == "1" else 4), batch_size=2)


class Stream(IterableDataset[Any]):
    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        yield from itertools.islice(data(), 2 * self.batches)


KINDS |= {
    kind.__name__: kind for kind in (MaskedLoss, HandWritten, Bypassing, Weights, EndsEarly, Estimating)
}


def refused(kind: str, folder: str, **given: Any) -> str:
    """Return the error that ends this rank."""
    loaders = not given.pop("own_data", False)
    try:
        fit(kind, folder, loaders=loaders, **given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"
