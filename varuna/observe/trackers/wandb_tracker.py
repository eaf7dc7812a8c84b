"""A run of Weights & Biases. WANDB_PROJECT, WANDB_MODE and the other variables of wandb work as usual."""

import os
from collections.abc import Sequence

import wandb

from varuna.observe.trackers.rows import MetricRow
from varuna.observe.trackers.tracker import TrackedJob


class WandbTracker:
    def __init__(self, job: TrackedJob) -> None:
        """Open the run, or continue it if an earlier manager of the job has begun it."""
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "varuna"),
            id=job.name,
            name=job.name,
            resume="allow",
            dir=str(job.folder),
            config=dict(job.settings),
            settings=wandb.Settings(console="off", disable_git=True, silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # scalars may come a little after their step

    def write(self, rows: Sequence[MetricRow]) -> None:
        for row in rows:
            self._run.log({**row.values, "step": row.step, "_timestamp": row.at})

    def close(self) -> None:
        self._run.finish()


def open_tracker(job: TrackedJob) -> WandbTracker:
    return WandbTracker(job)
