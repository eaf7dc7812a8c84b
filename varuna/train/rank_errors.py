"""Errors of one rank, reported to all ranks; shared by `Varuna` and `pyrannc.RaNNCModule`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from varuna.capture import StageState
from varuna.errors import OutOfDeviceMemory
from varuna.execute.comm.session import Session
from varuna.execute.device.out_of_memory import (
    Remedies,
    StageLayout,
    describe_out_of_memory,
    replace_out_of_memory,
)
from varuna.execute.step.trainer import Trainer


@contextmanager
def report_errors(
    session: Session,
    activity: str,
    *,
    trainer: Callable[[], Trainer | None],
    explain_memory: Callable[[torch.OutOfMemoryError], Exception | None],
) -> Iterator[None]:
    """Report an error in this block to all ranks, then raise it here.

    The report names the operation that the trainer runs, or `activity` outside of a step. `trainer()`
    returns None before the model is partitioned.
    `explain_memory` replaces an out-of-memory error of the device; None keeps the original error.
    """
    if (begun := trainer()) is not None:
        begun.engine.where = ""  # that of an earlier call
    try:
        with replace_out_of_memory(explain_memory):
            yield
    except Exception as error:
        current = trainer()
        operation = "" if current is None else current.engine.where
        session.report_error(error, operation or activity)
        raise


def explain_out_of_memory(
    error: torch.OutOfMemoryError,
    *,
    trainer: Trainer,
    state: StageState,
    optimizer: torch.optim.Optimizer | None,
    microbatch_size: int,
    held_microbatches: Callable[[int], int],
    remedies: Remedies,
) -> OutOfDeviceMemory:
    """Return an error that names the largest users of device memory and a layout that fits.

    `held_microbatches(size)` is the number of micro-batches of this size that the stage holds at once.
    """
    plan = trainer.plan
    recompute = plan.stages[trainer.session.stage].recompute
    return describe_out_of_memory(
        error,
        device=trainer.engine.device,
        parameters=state.parameters(),
        buffers=state.buffers(),
        optimizer=optimizer,
        stage=trainer.engine.stage,
        layout=StageLayout(plan.depth, microbatch_size, held_microbatches, recompute),
        remedies=remedies,
    )
