"""A run of trackio, which keeps its data on this machine. TRACKIO_PROJECT names the project."""

import math
import os
import time
from collections.abc import Sequence

import trackio

from varuna.observe.trackers.rows import MetricRow
from varuna.observe.trackers.tracker import TrackedJob

WRITE_SECONDS = 10.0
"""Time limit for trackio's thread, which writes twice a second."""
POLL_SECONDS = 0.05


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
        limit = time.monotonic() + WRITE_SECONDS
        while is_writing(self._run) and time.monotonic() < limit:
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        self._run.finish()


def is_writing(run: object) -> bool:
    """Return whether rows wait for trackio's own thread. Versions without these fields are not waited for."""
    return bool(getattr(run, "_queued_logs", None) or getattr(run, "_sending_batch", None))


def open_tracker(job: TrackedJob) -> TrackioTracker:
    return TrackioTracker(job)
