"""Keeps the ledger of a real job, in the file `ledger.json` of its log folder.

A restarted manager reads the file and continues. The time in between counts as what the machines did last. If
the file cannot be read, the ledger begins at the restart, and `LedgerKeeper.loss` says so.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from varuna.codec import decode
from varuna.files import write_atomic
from varuna.morph.accounting import Accountant
from varuna.morph.state import JobState
from varuna.observe.ledger import Ledger, LedgerReport, report_ledger
from varuna.types import JobSpec

NAME = "ledger.json"
DAMAGED = "ledger.json.damaged"
WRITE_SECONDS = 30.0
"""The file is written after this time, and whenever the phase changes."""


def read_ledger(folder: Path) -> Ledger:
    """Read the ledger of a log folder, or the file itself."""
    path = folder / NAME if folder.is_dir() else folder
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"there is no ledger: {path} (name the log folder of a job; `varuna run` writes the file)"
        ) from None
    return decode(data, Ledger, str(path))


class LedgerKeeper:
    def __init__(
        self, job: JobSpec, *, continues: bool, wall: Callable[[], float], monotonic: Callable[[], float]
    ) -> None:
        """`continues`: the job had a manager before. A clock that is set back does not disturb the ledger."""
        self.problem = ""  # why the file is not up to date
        self.loss = ""  # why the time before this manager is not in the ledger
        self._path = Path(job.log_dir) / NAME
        self._monotonic = monotonic
        self._offset = wall() - monotonic()
        ledger = self._earlier() if continues else self._new()
        self._offset = max(self._offset, ledger.at - monotonic())
        ledger.prices, ledger.on_demand_price = dict(job.prices), job.on_demand_price
        self._accountant = Accountant(ledger, devices_per_machine=job.devices_per_machine)
        self._written: tuple[str, int] | None = None
        self._write_at = 0.0

    def _new(self) -> Ledger:
        return Ledger(begun_at=self._now(), at=self._now())

    def _earlier(self) -> Ledger:
        """Return the ledger of the last manager. If it cannot be read, keep the file, and begin a new one."""
        try:
            found = read_ledger(self._path)
            if not 0 < found.begun_at <= found.at:
                raise ValueError(f"{self._path} is not a valid Ledger: it has no beginning")
        except (OSError, ValueError) as error:
            new = self._new()
            since = datetime.fromtimestamp(new.begun_at, UTC).isoformat(sep=" ", timespec="seconds")
            self.loss = f"{error}{self._set_aside()}; the ledger counts from {since}, without the time before"
            return new
        return found

    def _set_aside(self) -> str:
        """Rename the file; say what has become of it."""
        aside = self._path.with_name(DAMAGED)
        number = 1
        while aside.exists():
            aside, number = self._path.with_name(f"{DAMAGED}.{number}"), number + 1
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f" (it cannot be renamed to {aside.name}: {error.strerror or error})"
        return f" (kept as {aside.name})"

    def _now(self) -> float:
        return self._monotonic() + self._offset

    def observe(self, state: JobState, *, clock: float) -> None:
        """Book the time until now. Write the file if it is time, or if the phase has changed.

        `clock`: the time of the manager's decisions.
        """
        self._accountant.observe(state, self._now(), clock=clock)
        ledger = self._accountant.ledger
        now, place = self._monotonic(), (ledger.phase, ledger.generation)
        if place != self._written or now >= self._write_at:
            self._write_at = now + WRITE_SECONDS
            try:
                write_atomic(self._path, msgspec.json.encode(ledger).decode(), fsync=False, private=True)
                self._written, self.problem = place, ""
            except OSError as error:  # a full disk must not end the job
                self._written = place
                self.problem = f"{self._path} cannot be written: {error.strerror or error}"

    def report(self) -> LedgerReport:
        return report_ledger(self._accountant.ledger)
