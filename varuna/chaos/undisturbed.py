"""Runs the script undisturbed in one process, up to a step, and compares the losses step by step."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from varuna.chaos.job import END_SECONDS
from varuna.chaos.workspace import Workspace
from varuna.observe.losses import LossFollower, LossRecord

LAUNCHER = (sys.executable, "-m", "varuna.launcher")
ABSOLUTE = 1e-9
"""Losses that are this near are equal, also near 0."""


class LossComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The loss curves of the disturbed and the undisturbed run."""

    steps: int  # of the disturbed run
    tolerance: float  # relative
    worst: float = 0.0  # largest relative difference
    worst_step: int = -1
    first_different: int | None = None  # step
    job_loss: float | None = None  # at this step
    plain_loss: float | None = None
    missing: tuple[int, ...] = ()  # steps that no worker has recorded

    @property
    def equal(self) -> bool:
        return self.first_different is None and not self.missing and self.steps > 0


def run_plainly(
    space: Workspace,
    script: Sequence[str],
    *,
    batch_size: int,
    chunk_size: int,
    num_steps: int,
    patience_seconds: float,
    progress: Callable[[int, int, str], None],
) -> dict[int, float]:
    """Return the losses of the script in one process, of the steps 0 to `num_steps` - 1."""
    log = space.folder / "plain.log"
    follower = LossFollower(space.folder / "plain-losses")
    losses: dict[int, float] = {}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *[*LAUNCHER, "--ngpus_per_server", "1", "--nstages", "1"],
                *["--batch_size", str(batch_size), "--chunk_size", str(chunk_size)],
                *["--code_dir", str(space.folder / "plain"), "--log_dir", str(space.folder / "plain-logs")],
                *script,
            ],
            cwd=space.folder / "plain",
            env=space.environment("plain"),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + patience_seconds
        while len(losses) < num_steps:
            ended = process.poll() is not None
            if found := follower.read():
                losses |= {record.step: record.loss for record in found if record.step < num_steps}
                deadline = time.monotonic() + patience_seconds
                progress(len(losses), num_steps, "the script undisturbed, in one process")
            elif ended or time.monotonic() > deadline:
                break
            time.sleep(0.02)
    finally:
        _end(process)
    _check_complete(losses, num_steps, log)
    return losses


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _check_complete(losses: dict[int, float], num_steps: int, log: Path) -> None:
    if len(losses) == num_steps:
        return
    if losses and min(losses) > 0:
        raise ValueError(
            f"the undisturbed run starts with step {min(losses)}: the script has loaded a checkpoint (name "
            "its store by a relative path, so that each run has its own)"
        )
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
    raise ValueError(
        f"the undisturbed run has trained {len(losses)} steps, the disturbed one {num_steps} (the script "
        f"must run in one process, too, with the same number of steps); its last output:\n{tail}"
    )


def compare_losses(
    records: Iterable[LossRecord], plain: dict[int, float], *, tolerance: float
) -> LossComparison:
    """Compare what every worker has recorded, also for steps that were run again."""
    seen: set[int] = set()
    worst, worst_step = 0.0, -1
    first: LossRecord | None = None
    for record in records:
        if record.step not in plain:
            continue
        seen.add(record.step)
        difference = relative_difference(record.loss, plain[record.step])
        if difference > worst:
            worst, worst_step = difference, record.step
        if difference > tolerance and (first is None or record.step < first.step):
            first = record
    return LossComparison(
        steps=len(seen),
        tolerance=tolerance,
        worst=worst,
        worst_step=worst_step,
        first_different=None if first is None else first.step,
        job_loss=None if first is None else first.loss,
        plain_loss=None if first is None else plain[first.step],
        missing=tuple(sorted(plain.keys() - seen)),
    )


def relative_difference(one: float, other: float) -> float:
    if one == other or (one != one and other != other):  # both are NaN
        return 0.0
    difference = abs(one - other)
    if not difference < float("inf"):
        return float("inf")
    return 0.0 if difference <= ABSOLUTE else difference / max(abs(other), ABSOLUTE)
