"""Reports updates of a worker: to the manager, to the curves, and to a program that compares losses."""

import os

from varuna.morph.metrics.worker import StepMetrics
from varuna.morph.run.progress_page import ProgressWriter
from varuna.observe.losses import open_losses


class UpdateReporter:
    """Reports each update of one worker once, as one step."""

    def __init__(self, progress: ProgressWriter, metrics: StepMetrics) -> None:
        self.progress, self.metrics = progress, metrics
        self._losses = open_losses(os.environ)

    @property
    def watched(self) -> bool:
        return self.progress.watched or self.metrics.watched or self._losses is not None

    def finish(
        self,
        iteration: int,
        *,
        loss: float | None,
        samples: int,
        batch_size: int,
        compute_seconds: float,
        is_first: bool,
    ) -> None:
        """Report an update. Loss None: not known. `iteration`: number of finished updates.

        `samples`: of the whole job in this update; `batch_size`: those that the manager expects.
        """
        if self.progress.watched or self.metrics.watched:
            seconds = self.progress.leave(iteration, compute_seconds, missing_samples=batch_size - samples)
            self.metrics.finish_step(iteration, loss, seconds=seconds, samples=samples, is_first=is_first)
        if self._losses is not None and loss is not None:
            self._losses.write(iteration - 1, loss)
