"""Loss files, the comparison of losses, and traces that fit on a few machines (B5, PRO-2)."""

import math
import os
from pathlib import Path

import pytest

from varuna.chaos.job import ChaosJob
from varuna.chaos.market import fit_trace, names_of
from varuna.chaos.undisturbed import compare_losses
from varuna.observe.losses import LossFollower, LossRecord, open_losses
from varuna.simulate.traces import parse_trace


def test_a_follower_reads_whole_lines_of_every_worker_once(tmp_path: Path) -> None:
    environment = {"VARUNA_LOSSES": str(tmp_path), "RANK": "1"}
    one, other = open_losses(environment), open_losses(environment)
    assert one is not None and other is not None
    assert open_losses({}) is None
    follower = LossFollower(tmp_path)
    one.write(0, 0.1)
    environment["VARUNA_GENERATION"], environment["RANK"] = "4", "0"  # a morph in place
    one.write(1, math.nan)
    other.write(1, 1 / 3)
    found = sorted(follower.read())
    assert found[0] == LossRecord(0, 0, 1, 0.1)
    assert LossRecord(1, 4, 0, 1 / 3) in found and len(found) == 3
    with (tmp_path / "killed").open("w") as file:
        file.write("2 4 0 0.25\n3 4 0 0.")
    assert follower.read() == [LossRecord(2, 4, 0, 0.25)]
    assert follower.read() == []


def test_steps_of_a_job_that_starts_again_are_counted_apart(tmp_path: Path) -> None:
    """B5, PRO-2: generations begin with 1 again. A step counts as redone only if no checkpoint had it."""
    job = ChaosJob(tmp_path, command=["--help"], environment=os.environ, home=tmp_path, losses=tmp_path)
    try:
        worker, environment = tmp_path / "worker", {"VARUNA_LOSSES": str(tmp_path)}
        worker.write_text("".join(f"{step} {1 + step // 3} 0 0.5\n" for step in range(6)))
        job.read_steps()
        job._note("varuna: generation: 2: 1 stage")
        assert (job.generation, job.step, job.steps_redone) == (2, -1, 0)
        job.wait_for_ended()
        job.start_again()
        writer = open_losses(environment | {"VARUNA_GENERATION": "1"})
        assert writer is not None
        job._note("varuna: generation: 1: 1 stage")
        for step in (4, 5, 6):
            writer.write(step, 0.5)
        job.read_steps()
        assert (job.generation, job.step, len(job.steps)) == (3, 6, 9)
        assert job.steps_redone == 2
    finally:
        job.close()


@pytest.mark.parametrize(
    ("losses", "equal"),
    [
        ([1.0, 0.5, 0.25], True),
        ([1.0, 0.5 + 4e-7, 0.25], True),
        ([1.0, 0.5 + 4e-3, 0.25], False),
        ([1.0, math.nan, 0.25], False),
        ([1.0, 0.5], False),  # a step is missing
        ([], False),
    ],
)
def test_losses_are_equal_only_if_every_step_is(losses: list[float], equal: bool) -> None:
    plain = {0: 1.0, 1: 0.5, 2: 0.25}
    records = [LossRecord(step, 1, 0, loss) for step, loss in enumerate(losses)]
    found = compare_losses(records, plain, tolerance=1e-4)
    assert found.equal is equal
    if losses[1:2] == [0.5 + 4e-3]:
        assert (found.first_different, found.worst_step) == (1, 1)


def test_a_step_that_was_run_again_with_another_loss_differs() -> None:
    records = [LossRecord(0, 1, 0, 1.0), LossRecord(0, 2, 0, 1.5)]
    assert compare_losses(records, {0: 1.0}, tolerance=1e-4).first_different == 0


def test_a_trace_is_thinned_to_the_machines_that_there_are() -> None:
    rows = ["seconds,event,machine", *(f"{60 + n},add,m{n}" for n in range(10)), "120,remove,m0", "600,end,"]
    trace = parse_trace("\n".join(rows).encode(), source="test")
    found = fit_trace(trace, most=4, speedup=10)
    assert found.most_machines == 4
    assert names_of(found) == ["m0", "m3", "m6", "m9"]
    assert found.changes[0].at == 0.0
    assert found.changes[-1].removed == ("m0",) and found.changes[-1].at == pytest.approx(6.0)
    assert found.end == pytest.approx(54.0)
