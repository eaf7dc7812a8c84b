"""TensorBoard event files in the folder `tensorboard` of the log folder: `tensorboard --logdir LOGDIR`."""

from collections.abc import Sequence

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from varuna.files import make_private_folder
from varuna.observe.trackers.tracker import MetricRow, TrackedJob

FOLDER = "tensorboard"


class TensorBoardTracker:
    def __init__(self, job: TrackedJob) -> None:
        folder = job.folder / FOLDER
        make_private_folder(folder)
        self._writer = EventFileWriter(str(folder))

    def write(self, rows: Sequence[MetricRow]) -> None:
        for row in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
            self._writer.add_event(Event(wall_time=row.at, step=row.step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def open_tracker(job: TrackedJob) -> TensorBoardTracker:
    return TensorBoardTracker(job)
