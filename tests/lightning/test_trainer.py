"""Lightning's Trainer with the strategy "varuna" trains as one process does on the whole batch."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import varuna.lightning
from tests.lightning.modules import Saving, count_labels, data, fit, refused
from tests.pool import Pool
from varuna import CutPoint

STAGES = {"partition_num": 2, "pipeline_num": 2}


def compare(found: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-9) -> None:
    for part in ("losses", "validations", "rates"):
        torch.testing.assert_close(found[part], expected[part], rtol=rtol, atol=rtol)
    assert found["state"].keys() == expected["state"].keys()
    torch.testing.assert_close(found["state"], expected["state"], rtol=rtol, atol=rtol)
    torch.testing.assert_close(found["optimizers"], expected["optimizers"], rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    ("kind", "layouts", "given"),
    [
        ("AutoEncoder", [(2, STAGES), (3, {})], {"shuffle": True, "gradient_clip_val": 0.05}),
        ("AutoEncoder", [(4, STAGES)], {"accumulate_grad_batches": 2, "batch": 8, "steps": 3}),
        ("Classifier", [(2, {"partition_num": 2, "pipeline_num": 1})], {"gradient_clip_val": 0.1}),
        ("LooseParameter", [(2, {}), (2, STAGES)], {}),
        ("Adversaries", [(2, STAGES), (2, {})], {}),
    ],
)
def test_examples_train_as_in_one_process(
    pool: Pool, tmp_path: Path, kind: str, layouts: list[tuple[int, Any]], given: dict[str, Any]
) -> None:
    """TRA-5: losses, validation, learning rates, weights and optimizer state, and the model after fit."""
    expected = fit(kind, str(tmp_path), wrapped=False, **given)
    for world, options in layouts:
        for found in pool.run(fit, world, kind, str(tmp_path), options=options, **given):
            compare(found, expected)


def test_a_checkpoint_goes_on_at_another_layout_and_in_one_process(pool: Pool, tmp_path: Path) -> None:
    """TRA-5: a checkpoint by a callback during training, and one by save_checkpoint after it."""
    first, second = str(tmp_path / "step3.ckpt"), str(tmp_path / "after.ckpt")
    pool.run(fit, 2, "AutoEncoder", str(tmp_path), options=STAGES, steps=4, callbacks=[Saving(first)])
    expected = fit("AutoEncoder", str(tmp_path), wrapped=False, steps=6, resume=first)
    for found in pool.run(fit, 3, "AutoEncoder", str(tmp_path), steps=6, resume=first, save=second):
        compare(found, expected)
    (found, *_) = pool.run(fit, 2, "AutoEncoder", str(tmp_path), options=STAGES, steps=9, resume=second)
    compare(found, fit("AutoEncoder", str(tmp_path), wrapped=False, steps=9, resume=second))


def test_mixed_precision_trains_as_in_one_process(pool: Pool, tmp_path: Path) -> None:
    """TRA-5: bf16-mixed, over stages. On a CPU, Lightning takes it for 16-mixed, too."""
    given: dict[str, Any] = {"precision": "bf16-mixed", "double": False}
    expected = fit("AutoEncoder", str(tmp_path), wrapped=False, **given)
    (found, *_) = pool.run(fit, 2, "AutoEncoder", str(tmp_path), options=STAGES, **given)
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        ("MaskedLoss", {"options": {"check_loss": False}}, "because of ignore_index or class weights"),
        ("HandWritten", {}, "the loss of training_step is no mean over samples: it is"),
        ("Bypassing", {"options": STAGES}, "self.layers(...) is called, but self(...), which contains it"),
        ("Weights", {}, "the gradient of 'layers.0.weight' differs between ranks"),
        ("EndsEarly", {"own_data": True}, "rank 1 in next_epoch()"),
        ("Estimating", {"options": STAGES}, "Prodigy computes one step size from all parameters"),
        ("AutoEncoder", {"sync_batchnorm": True}, "sync_batchnorm=True is not supported"),
        ("AutoEncoder", {"options": {"modules": "encoderr"}}, "modules names 'encoderr', which AutoEncoder"),
    ],
)
def test_what_cannot_work_is_refused_on_all_ranks(
    pool: Pool, tmp_path: Path, kind: str, given: dict[str, Any], said: str
) -> None:
    """TRA-5: with the name of the culprit; nothing hangs."""
    given = {"options": {"timeout_seconds": 20}, **given}
    found = pool.run(refused, 2, kind, str(tmp_path), **given)
    assert all(said in error for error in found), found


@pytest.mark.parametrize("kind", ["MaskedLoss", "HandWritten"])
def test_a_loss_weight_makes_a_masked_loss_that_of_the_whole_batch(
    kind: str, pool: Pool, tmp_path: Path
) -> None:
    """TRA-5"""
    expected = fit(kind, str(tmp_path), wrapped=False)
    options = {"partition_num": 2, "pipeline_num": 1, "loss_weight": count_labels}
    for found in pool.run(fit, 2, kind, str(tmp_path), options=options):
        torch.testing.assert_close(found["state"], expected["state"], rtol=1e-9, atol=1e-9)


def fit_in_a_managed_job(folder: str) -> list[Any]:
    """Return the handlers of SIGUSR1 before, during and after two calls of fit."""
    before = signal.signal(signal.SIGUSR1, note_signal)
    found = [signal.getsignal(signal.SIGUSR1)]
    try:
        for _ in range(2):
            os.environ.update(VARUNA_GENERATION="1", WORLD_SIZE="1")  # Lightning removes the second one
            fit("AutoEncoder", folder, steps=1, callbacks=[NotingHandler(found)])
            found.append(signal.getsignal(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
        del os.environ["VARUNA_GENERATION"]
    return [handler is note_signal for handler in found]


def note_signal(_number: int, _frame: Any) -> None:
    """A handler of the script."""


class NotingHandler(L.Callback):
    def __init__(self, handlers: list[Any]) -> None:
        self.handlers = handlers

    def on_train_batch_start(self, *_: Any) -> None:
        self.handlers.append(signal.getsignal(signal.SIGUSR1))


def test_the_scripts_signal_handler_is_back_after_fit(pool: Pool, tmp_path: Path) -> None:
    """TRA-5: within fit, the manager's signal saves and ends the job."""
    assert pool.run(fit_in_a_managed_job, 1, str(tmp_path)) == [[True, False, True, False, True]]


def fit_pytorch_lightning(folder: str, options: dict[str, Any] | None) -> list[Tensor]:
    """Train a module of the package `pytorch_lightning`, with its own Trainer."""
    import pytorch_lightning as pl

    class Line(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), CutPoint(), nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self(batch[0]).squeeze(1) - batch[1]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    pl.seed_everything(1, verbose=False)
    model, ranks = Line(), 1 if options is None else int(os.environ["WORLD_SIZE"])
    strategy: Any = "auto"
    if options is not None:
        strategy = varuna.lightning.PytorchLightningVarunaStrategy(measure=False, **options)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    common: dict[str, Any] = {"accelerator": "cpu", "default_root_dir": folder, "enable_model_summary": False}
    trainer = pl.Trainer(strategy=strategy, devices=ranks, max_steps=4, **quiet, **common)
    trainer.fit(model, DataLoader(data(double=False), batch_size=12 // ranks))
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_the_package_pytorch_lightning(pool: Pool, tmp_path: Path) -> None:
    """TRA-5: its classes are others than those of `lightning.pytorch`."""
    expected = fit_pytorch_lightning(str(tmp_path), None)
    for found in pool.run(fit_pytorch_lightning, 2, str(tmp_path), STAGES):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
