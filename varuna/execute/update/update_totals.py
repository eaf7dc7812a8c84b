"""Adds up the steps of one update: the manager, the metrics and the losses see them as one step."""

from dataclasses import dataclass

from varuna.execute.update.reduce import StepTotals


@dataclass
class UpdateTotals:
    """Loss, samples and compute time of the steps whose gradients make one update."""

    ends: bool = True  # the next step is the last one of its update
    is_open: bool = False  # a step of the update has run, and others follow
    loss: float = 0.0
    samples: int = 0
    compute_seconds: float = 0.0

    def add(self, totals: StepTotals, compute_seconds: float) -> None:
        """Add a step that has ended."""
        if not self.is_open:
            self.loss, self.samples, self.compute_seconds = 0.0, 0, 0.0
        self.loss += totals.loss
        self.samples += totals.samples
        self.compute_seconds += compute_seconds
        self.is_open = not self.ends
