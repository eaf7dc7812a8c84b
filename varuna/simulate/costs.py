"""Costs of a join, a leave, a loss, a save and a restart: from a file, or from the ledger of a real job."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median

import msgspec

from varuna.codec import decode, encode
from varuna.files import write_atomic
from varuna.morph.state import ManagerSettings
from varuna.observe.ledger import Ledger
from varuna.simulate.job_events import MeasuredEvents


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of each part of a change of machines."""

    source: str = "assumed"
    join_seconds: float = 8.0  # from a new machine until its agent is ready; the others train meanwhile
    first_join_seconds: float | None = None  # the same before the job has started; None: join_seconds
    detect_seconds: float = ManagerSettings().lost_seconds  # from the loss of a machine to its detection
    end_seconds: float = 0.1  # to kill all workers
    gather_seconds: float = 0.2  # to plan, and to find the newest checkpoint
    start_seconds: float = 2.0  # from the start of the workers to the start of their first step
    first_start_seconds: float | None = None  # the same at the start of the job; None: start_seconds
    prepare_seconds: float | None = None  # of machines that join in place; None: start_seconds
    save_seconds: float = 0.5  # an automatic save stops training for this long
    write_seconds: float = 5.0  # after that, until the checkpoint is complete
    morph_seconds: float = 0.5  # pause of a morph in place (`varuna run --hot`)
    leave_seconds: float = 1.0  # a requested save: from the end of a step to the end of the workers
    saves_on_request: bool = True  # False: a planned change goes back to the last automatic save
    steps: Mapping[int, float] = {}  # step time by number of machines, where no profile is given
    estimated: tuple[str, ...] = ()  # numbers above that the log does not show: defaults

    @property
    def first_join(self) -> float:
        return self.join_seconds if self.first_join_seconds is None else self.first_join_seconds

    @property
    def first_start(self) -> float:
        return self.start_seconds if self.first_start_seconds is None else self.first_start_seconds

    @property
    def prepare(self) -> float:
        return self.start_seconds if self.prepare_seconds is None else self.prepare_seconds

    def __post_init__(self) -> None:
        for name in TIMES:
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1e7:
                raise ValueError(f"{name} must be 0 or more seconds, not {value}")
        for machines, seconds in self.steps.items():
            if machines < 1 or not 0 < seconds < 1e7:
                raise ValueError(f"steps must map numbers of machines to seconds, not {machines}: {seconds}")


TIMES = tuple(name for name in Costs.__struct_fields__ if name.endswith("_seconds"))

PUBLISHED_RESTART = Costs(
    source="published: restart 29 to 43 s, checkpoint 14 s (Parcae, NSDI 2024)",
    join_seconds=30.0,
    detect_seconds=1.5,
    end_seconds=0.0,
    gather_seconds=0.0,
    start_seconds=36.0,
    save_seconds=2.0,
    write_seconds=12.0,
    leave_seconds=14.0,
)
"""Restart of GPT-2 1.5B from a checkpoint, in the middle of the published range."""

TORCHRUN = Costs(
    source="torchrun, tuned: detection and rendezvous as in benchmarks/results/morphing.json",
    join_seconds=30.0,
    detect_seconds=3.0,
    end_seconds=1.0,
    gather_seconds=1.0,
    start_seconds=36.0,
    save_seconds=14.0,
    write_seconds=0.0,
    leave_seconds=0.0,
    saves_on_request=False,
)
"""An elastic restart that loads the last periodic checkpoint; its script loads as long as the one above."""


def read_costs(path: Path) -> Costs:
    try:
        return decode(path.read_bytes(), Costs, str(path))
    except OSError as error:
        raise ValueError(f"cannot read the costs {str(path)!r}: {error.strerror}") from None


def write_costs(path: Path, costs: Costs) -> None:
    write_atomic(path, encode(costs) + "\n")


def calibrate(ledger: Ledger, *, source: str, measured: MeasuredEvents | None = None) -> Costs:
    """Return the means of what a job measured: they add up to its losses, as medians do not.

    `measured` comes from the log of its events. Parts that the job did not meet keep their defaults.
    """
    losses = [one for one in ledger.interruptions if one.kind == "loss"]
    changes = [one for one in ledger.interruptions if one.kind == "change"]
    starts = [one for one in ledger.interruptions if one.kind == "start"]
    if not losses and not changes:
        raise ValueError(
            f"{source} has no change of machines and no loss to measure (let a machine join, leave or fail)"
        )
    step = ledger.step_seconds
    restarts = [one for one in losses + changes if "morphing" not in one.seconds]
    pauses = [
        one.lost.get("morphing", 0.0) / one.machines
        for one in ledger.interruptions
        if "morphing" in one.seconds and one.machines
    ]
    measured = measured or MeasuredEvents()
    found: dict[str, Sequence[float]] = {
        "first_join_seconds": ledger.first_join_seconds,
        "join_seconds": ledger.join_seconds or ledger.first_join_seconds,
        "detect_seconds": measured.detect_seconds,
        "end_seconds": [one.seconds["ending"] for one in losses if "ending" in one.seconds],
        "gather_seconds": [one.seconds.get("gathering", 0.0) for one in restarts],
        "start_seconds": [one.seconds["starting"] for one in losses + changes if "starting" in one.seconds],
        "first_start_seconds": [one.seconds["starting"] for one in starts if "starting" in one.seconds],
        "prepare_seconds": measured.prepare_seconds,
        # Half a step passes, on average, until the workers reach its end.
        "leave_seconds": [
            max(0.0, one.seconds["saving"] - step / 2) for one in changes if "saving" in one.seconds
        ],
        "morph_seconds": measured.morph_seconds or pauses,
        "save_seconds": [ledger.save_seconds / ledger.saves] if ledger.saves else [],
        "write_seconds": [ledger.write_seconds / ledger.saves] if ledger.write_seconds else [],
    }
    known = {name: round(mean(values), 4) for name, values in found.items() if values}
    default = Costs()
    missing = tuple(name for name in TIMES if name not in known and getattr(default, name) is not None)
    steps: dict[int, list[float]] = {}
    for period in ledger.periods:
        if period.step_seconds:
            steps.setdefault(period.machines, []).append(period.step_seconds)
    sizes = {machines: round(median(times), 6) for machines, times in sorted(steps.items())}
    return msgspec.structs.replace(Costs(source=source, steps=sizes, estimated=missing), **known)
