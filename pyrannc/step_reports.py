"""Reports of training steps: to the manager of the job, to its curves, and to a program that compares losses.

All wrapped models of a process report together. A step is everything from the first training call since the
last update to the end of the next `optimizer.step()`. It counts if a backward has run in it.
"""

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pyrannc.pipeline import BatchInFlight
from varuna.environment import VarunaEnvironment
from varuna.execute.device.facts import device_facts
from varuna.morph.metrics.update_reporter import UpdateReporter
from varuna.morph.metrics.worker import StepMetrics
from varuna.morph.run.progress_page import ProgressWriter, process_progress

NUMBER_KEY = "varuna_step"
"""Key in the first parameter group of each optimizer: the number of finished steps, kept by checkpoints."""
WHY_NOT_HOT = "pyrannc.RaNNCModule cannot morph in place"


class StepReports:
    """The step that runs in this process, and the number of finished steps."""

    def __init__(self, device: torch.device, rank: int, batch_size: int | None) -> None:
        """`batch_size`: the samples that the manager expects in a step; None: there is no manager."""
        self._is_first, self._batch_size = rank == 0, batch_size
        # A manager watches for hangs from the first training call on, which may capture and plan for long.
        self._updates = UpdateReporter(ProgressWriter(), StepMetrics(device_facts(device)))
        self._optimizers = weakref.WeakSet[torch.optim.Optimizer]()
        self._number = 0
        self._is_open = False  # a step runs
        self._graph = -1  # backward that ran last
        self._samples_of_graph = self._samples = 0  # of it, and of those before it in this step
        self._loss_sum: Tensor | float = 0.0
        self._loss_samples = 0

    @property
    def watched(self) -> bool:
        return self._updates.watched

    def follow(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Report a step at the end of each `step()` of these optimizers."""
        for optimizer in optimizers:
            if optimizer not in self._optimizers:
                self._optimizers.add(optimizer)
                self._continue(optimizer)
                optimizer.register_step_post_hook(lambda *_: self._finish())
                optimizer.register_load_state_dict_post_hook(self._continue)

    def _continue(self, optimizer: torch.optim.Optimizer) -> None:
        """Continue counting where the optimizer's state was saved, if it says so."""
        number = number_in(optimizer)
        self._number = self._number if number is None else number

    @contextmanager
    def call(self, inputs: Mapping[str, Any], *, trains: bool) -> Iterator[None]:
        """Note a forward."""
        if trains and self._updates.progress.watched:
            self._begin()
        yield
        if trains:
            self._updates.metrics.note_inputs(inputs)
            self._begin()
        self._updates.progress.alive()

    def _begin(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        progress = self._updates.progress
        if not progress.watched:
            self._updates.progress = progress = process_progress()
            progress.script_saves()
            progress.hot(False, WHY_NOT_HOT)
        progress.enter()
        progress.meets(False)  # a forward may wait for the data of other ranks, or capture

    @contextmanager
    def backward(self, batch: BatchInFlight, gradients: Sequence[Tensor | None]) -> Iterator[None]:
        """Note a backward, whose samples count once, however many models it passes."""
        self._begin()  # the model may be in eval mode
        progress = self._updates.progress
        progress.alive()  # the script may have done anything since the forward
        progress.meets(True)
        try:
            yield
        finally:
            progress.meets(False)
        progress.alive()
        if batch.is_counted:
            return
        batch.is_counted = True
        graph = torch._C._current_graph_task_id()
        if graph != self._graph:
            self._samples += self._samples_of_graph
            self._graph, self._samples_of_graph = graph, 0
        samples = batch.num_samples
        self._samples_of_graph = max(self._samples_of_graph, samples)
        used = [loss for number, loss in batch.losses.items() if gradients[number] is not None]
        if len(used) == 1:
            self._loss_sum = self._loss_sum + samples * used[0].float()  # on its device: nothing waits for it
            self._loss_samples += samples

    def _finish(self) -> None:
        """End the step, if a backward has run in it: of several optimizers, the first one ends it."""
        if self._graph < 0:
            return
        self._number += 1
        for optimizer in self._optimizers:
            optimizer.param_groups[0][NUMBER_KEY] = self._number
        samples = self._samples + self._samples_of_graph
        self._updates.finish(
            self._number,
            loss=float(self._loss_sum) / self._loss_samples if self._loss_samples else None,
            samples=samples,
            batch_size=samples if self._batch_size is None else self._batch_size,
            compute_seconds=0.0,  # the ranks of a stage may compute different numbers of samples
            is_first=self._is_first,
        )
        self._is_open, self._graph = False, -1
        self._samples_of_graph = self._samples = 0
        self._loss_sum, self._loss_samples = 0.0, 0


def number_in(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the finished steps by the state of an optimizer; None: it does not say."""
    if NUMBER_KEY in optimizer.param_groups[0]:
        return int(optimizer.param_groups[0][NUMBER_KEY])
    counts = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
    return max(counts, default=None)


def open_step_reports(device: torch.device, rank: int) -> StepReports | None:
    """Return the reports of this process; None if nobody watches them."""
    return _open_once(device, rank, VarunaEnvironment.read(os.environ))


@cache
def _open_once(device: torch.device, rank: int, environment: VarunaEnvironment) -> StepReports | None:
    reports = StepReports(device, rank, environment.batch_size)
    return reports if environment.progress_file or reports.watched else None
