"""Remembers what a tracker has: a restarted manager sends it the missing points, and none twice.

The file `sent_NAME.json` in the log folder has the last step of each curve that the tracker has taken. It is
written after each batch: a manager that is killed between the two sends this batch again, with equal values.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from varuna.codec import UNDECODABLE
from varuna.files import write_atomic
from varuna.observe.history import ScalarPoint
from varuna.observe.history_file import NAME as METRICS
from varuna.observe.history_file import read_lines
from varuna.observe.trackers.rows import MetricRow, rows_of


class SentPoints:
    def __init__(self, folder: Path, tracker: str) -> None:
        """Without a file, as for a tracker that a resumed job adds, all earlier points count as sent."""
        self._folder = folder
        self._path = folder / f"sent_{tracker}.json"
        self._last: dict[str, int] = {}
        try:
            self._last = msgspec.json.decode(self._path.read_bytes(), type=dict[str, int])
        except (OSError, *UNDECODABLE):
            with suppress(OSError):
                self.note(self.unsent(self._recorded_rows()))

    def missing(self) -> list[MetricRow]:
        """Return the points of the job's file that the tracker does not have."""
        try:
            return self.unsent(self._recorded_rows())
        except OSError:  # the history reports it
            return []

    def _recorded_rows(self) -> list[MetricRow]:
        steps, scalars = [], []
        for line in read_lines(self._folder / METRICS):
            if line.name:
                scalars.append(ScalarPoint(line.name, line.step, line.at, line.value))
            else:
                steps.append(line.step_point)
        return rows_of(steps, scalars)

    def unsent(self, rows: Iterable[MetricRow]) -> list[MetricRow]:
        """Return the values that the tracker does not have, each once."""
        last, found = dict(self._last), []
        for row in rows:
            sent = [name for name in row.values if row.step <= last.get(name, -1)]
            if sent:
                row = row._replace(values={name: row.values[name] for name in row.values if name not in sent})
            if row.values:
                last.update(dict.fromkeys(row.values, row.step))
                found.append(row)
        return found

    def note(self, rows: Iterable[MetricRow]) -> None:
        """Note that the tracker has these rows, which `unsent` has returned."""
        for row in rows:
            self._last.update(dict.fromkeys(row.values, row.step))
        with suppress(OSError):  # a full disk, which other files report
            write_atomic(self._path, msgspec.json.encode(self._last).decode(), fsync=False, private=True)
