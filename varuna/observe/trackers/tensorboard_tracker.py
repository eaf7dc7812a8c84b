"""TensorBoard event files in the folder `tensorboard` of the log folder: `tensorboard --logdir LOGDIR`."""

import os
import socket
import time
from collections.abc import Iterable, Sequence

from tensorboard.compat.proto.event_pb2 import Event

from varuna.files import make_private_folder
from varuna.observe.trackers.event_records import frame_records
from varuna.observe.trackers.rows import MetricRow
from varuna.observe.trackers.tracker import TrackedJob

FOLDER = "tensorboard"
VERSION = "brain.Event:2"
"""The first event of a file has this version."""


class TensorBoardTracker:
    """Writes one event file; each manager of a job has its own. TensorBoard reads them in order."""

    def __init__(self, job: TrackedJob) -> None:
        folder = job.folder / FOLDER
        make_private_folder(folder)
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / name
        self._append([Event(wall_time=time.time(), file_version=VERSION)])

    def write(self, rows: Sequence[MetricRow]) -> None:
        self._append(event_of(row) for row in rows)

    def _append(self, events: Iterable[Event]) -> None:
        """Write whole events or none: TensorBoard reads no further than one that is cut."""
        data = memoryview(frame_records([event.SerializeToString() for event in events]))
        with self._path.open("ab", buffering=0) as file:
            begin = file.seek(0, os.SEEK_END)
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                file.truncate(begin)
                raise

    def close(self) -> None:
        """Every batch is written already."""


def event_of(row: MetricRow) -> Event:
    event = Event(wall_time=row.at, step=row.step)
    add = event.summary.value.add
    for name, value in row.values.items():
        add(tag=name, simple_value=value)
    return event


def open_tracker(job: TrackedJob) -> TensorBoardTracker:
    return TensorBoardTracker(job)
