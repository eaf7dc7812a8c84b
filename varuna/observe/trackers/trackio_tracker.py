"""A run of trackio, which keeps its data on this machine. TRACKIO_PROJECT names the project."""

import math
import os
from collections.abc import Sequence

import trackio

from varuna.observe.trackers.tracker import MetricRow, TrackedJob


class TrackioTracker:
    def __init__(self, job: TrackedJob) -> None:
        """Open the run, or continue it if an earlier manager of the job has begun it."""
        project = os.environ.get("TRACKIO_PROJECT", "varuna")
        self._run = trackio.init(
            project=project, name=job.name, resume="allow", config=dict(job.settings), embed=False
        )

    def write(self, rows: Sequence[MetricRow]) -> None:
        for row in rows:
            values = {name: value for name, value in row.values.items() if math.isfinite(value)}
            self._run.log(values, step=row.step)

    def close(self) -> None:
        self._run.finish()


def open_tracker(job: TrackedJob) -> TrackioTracker:
    return TrackioTracker(job)
