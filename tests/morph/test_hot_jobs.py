"""Real jobs whose workers morph in place: the losses of one process, the same process ids, no checkpoint."""

from pathlib import Path

from tests.morph.jobs import TRAIN, Job, check

FETCHES = TRAIN.replace(
    """    share = order.replica(step=step, replica=model.rank_within_stage, num_replicas=model.data_depth)
    loss, _ = model.step({"x": x[share], "y": y[share]})
""",
    """    loss, _ = model.step(lambda samples: {"x": x[samples], "y": y[samples]}, order=order)
""",
)
assert FETCHES != TRAIN
NEVER_SAVES = "EVERY = 0\n"


def saved(folder: Path) -> list[str]:
    """Return the names of all files in the store, except for the claim of the job."""
    return [path.name for path in (folder / "store").glob("**/*") if path.name != ".varuna-owner"]


def test_machines_join_and_leave_without_a_restart_or_a_checkpoint(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """HOT-1, HOT-2, HOT-5: one, two and three replicas, and rank 0 leaves."""
    options = ("--save-every", "off")
    with Job(tmp_path, machines=2, script=NEVER_SAVES + FETCHES, options=options) as job:
        job.wait_for_steps(3)
        job.write_list(1, 2, 3)
        job.wait_for("morphed: 2: in place")
        pids = job.worker(2), job.worker(3)
        job.wait_for_steps(3)
        job.write_list(2, 3)
        job.wait_for("morphed: 3: in place")
        job.wait_for_steps(3)
        assert (job.worker(2), job.worker(3)) == pids
        check(job, reference)
    assert len(job.generations) == 3 and "saving" not in job.text and not saved(tmp_path)


def test_stages_move_to_machines_that_join_and_back(tmp_path: Path, reference: dict[int, float]) -> None:
    """HOT-1, HOT-2: two stages on two machines, on four, and on the two that joined."""
    options = ("--save-every", "off")
    with Job(tmp_path, machines=2, stages=2, script=NEVER_SAVES + FETCHES, options=options) as job:
        job.wait_for_steps(3)
        job.write_list(1, 2, 3, 4)
        job.wait_for("morphed: 2: in place")
        pids = job.worker(3), job.worker(4)
        job.wait_for_steps(3)
        job.write_list(3, 4)
        job.wait_for("morphed: 3: in place")
        job.wait_for_steps(3)
        assert (job.worker(3), job.worker(4)) == pids
        check(job, reference)
    assert len(job.generations) == 3 and not saved(tmp_path)


def test_scripts_that_pass_tensors_restart_and_the_log_says_why(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """HOT-2: the ladder."""
    with Job(tmp_path, machines=2, script=TRAIN) as job:
        job.wait_for_steps(3)
        job.write_list(2)
        assert "cannot morph in place: rank 0: " in job.wait_for("warm restart: ")
        job.wait_for_change("generation: 2: 1 stage x 1 replica")
        check(job, reference)
