"""Real jobs whose workers morph in place: the losses of one process, the same process ids, no checkpoint."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.morph.jobs import PATIENT, TRAIN, Job, check

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


def restarts(job: Job) -> list[str]:
    """Return the generations after the first that workers have not entered in place."""
    return [line for line in job.generations[1:] if ", in place (" not in line]


def test_machines_join_and_leave_without_a_restart_or_a_checkpoint(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """HOT-1, HOT-2, HOT-5: one, two and three replicas, and rank 0 leaves."""
    options = ("--save-every", "off")
    with Job(tmp_path, machines=2, script=NEVER_SAVES + FETCHES, options=options, manager=PATIENT) as job:
        job.wait_for_steps(3)
        job.write_list(1, 2, 3)
        job.wait_for("1 stage x 3 replicas")
        job.wait_for("morphed: ")
        pids = job.worker(2), job.worker(3)
        job.wait_for_steps(3)
        job.write_list(2, 3)
        job.wait_for("1 stage x 2 replicas")
        job.wait_for("morphed: ")
        job.wait_for_steps(3)
        assert (job.worker(2), job.worker(3)) == pids
        check(job, reference)
    assert not restarts(job) and "saving" not in job.text and not saved(tmp_path)


def test_stages_move_to_machines_that_join_and_back(tmp_path: Path, reference: dict[int, float]) -> None:
    """HOT-1, HOT-2: two stages on two machines, on four, and on the two that joined."""
    options = ("--save-every", "off")
    script = NEVER_SAVES + FETCHES
    with Job(tmp_path, machines=2, stages=2, script=script, options=options, manager=PATIENT) as job:
        job.wait_for_steps(3)
        job.write_list(1, 2, 3, 4)
        job.wait_for("2 stages x 2 replicas")
        job.wait_for("morphed: ")
        pids = job.worker(3), job.worker(4)
        job.wait_for_steps(3)
        job.write_list(3, 4)
        job.wait_for("2 stages x 1 replica,")
        job.wait_for("morphed: ")
        job.wait_for_steps(3)
        assert (job.worker(3), job.worker(4)) == pids
        check(job, reference)
    assert not restarts(job) and not saved(tmp_path)


def test_scripts_that_pass_tensors_restart_and_the_log_says_why(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """HOT-2: the ladder."""
    with Job(tmp_path, machines=2, script=TRAIN, manager=PATIENT) as job:
        job.wait_for_steps(3)
        job.write_list(2)
        assert "cannot morph in place: rank 0: " in job.wait_for("warm restart: ")
        job.wait_for_change("1 stage x 1 replica,")
        check(job, reference)


def test_survivors_of_losses_keep_their_processes_and_no_step_is_lost(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """HOT-1, HOT-3, HOT-4: a worker is killed and comes back; then a machine falls silent."""
    options = ("--save-every", "off")
    with Job(tmp_path, machines=3, script=NEVER_SAVES + FETCHES, options=options) as job:
        job.wait_for_steps(3)
        job.wait_for_reports(2)
        pids = job.worker(1), job.worker(2)
        os.kill(job.worker(3), signal.SIGKILL)
        assert "was killed by SIGKILL" in job.wait_for("recovering: rank 2")
        job.wait_for("1 stage x 3 replicas")  # the machine is back
        job.wait_for("morphed: ")
        assert (job.worker(1), job.worker(2)) == pids
        job.wait_for_reports(2)
        silent = job.agent(2), job.worker(2)  # rank 0 prints the losses
        for pid in silent:
            os.kill(pid, signal.SIGSTOP)
        job.wait_for("recovering: 127.0.0.2 was lost: no heartbeat")
        job.wait_for("morphed: ")
        job.wait_for_steps(2)
        assert job.worker(1) == pids[0]
        for pid in silent:
            with suppress(ProcessLookupError):  # the manager may have killed it
                os.kill(pid, signal.SIGCONT)
        check(job, reference)
    assert "generation ended" not in job.text and not saved(tmp_path)


IN_BATCHES = FETCHES.replace(
    """while model.iteration < STEPS:
    step = model.iteration
    loss, _ = model.step(lambda samples: {"x": x[samples], "y": y[samples]}, order=order)
""",
    """fetch = lambda samples: {"x": x[samples], "y": y[samples]}
for step, inputs in model.batches(fetch, order, steps=STEPS):
    loss, overflow = model.step(inputs)
    if overflow:  # a loss: the next batch is of an earlier step
        continue
""",
)
assert IN_BATCHES != FETCHES


def test_state_that_one_worker_has_survives_in_the_memory_of_another(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """HOT-1, HOT-3: with ZeRO, the others go back to a copy of the killed worker's state."""
    script = IN_BATCHES.replace('device="cpu", seed=3', 'device="cpu", seed=3, shard_optimizer=True')
    assert script != IN_BATCHES
    options = ("--save-every", "off")
    with Job(tmp_path, machines=3, script=NEVER_SAVES + script, options=options, manager=PATIENT) as job:
        job.wait_for_steps(3)
        job.wait_for_copies()
        pids = job.worker(1), job.worker(2)
        os.kill(job.worker(3), signal.SIGKILL)
        assert "was killed by SIGKILL" in job.wait_for("recovering: rank 2")
        job.wait_for("1 stage x 3 replicas")  # the machine is back
        job.wait_for("morphed: ")
        job.wait_for_steps(2)
        assert (job.worker(1), job.worker(2)) == pids
        check(job, reference)
    assert "to the copies of step" in job.text and "generation ended" not in job.text and not saved(tmp_path)


DIES_IN_ITS_FIRST_STEP = """
import os, signal, time
from varuna.train.hot.copies import StateCopies

copy = StateCopies._copy

def trapped(self, model, step):
    copy(self, model, step)
    rank = os.environ["RANK"]
    if os.environ["WORLD_SIZE"] == "3" and os.path.exists("dies"):
        self._mirror.wait()
        open(f"copied_{rank}", "w").close()
        while rank == "2" and not all(os.path.exists(f"copied_{other}") for other in "012"):
            time.sleep(0.01)
        if rank == "2":
            os.unlink("dies")
            os.kill(os.getpid(), signal.SIGKILL)

StateCopies._copy = trapped
"""


def test_a_loss_in_the_first_step_after_a_morph_needs_no_store(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """HOT-3: with ZeRO, as soon as the first copies have arrived."""
    (tmp_path / "dies").touch()
    script = IN_BATCHES.replace('device="cpu", seed=3', 'device="cpu", seed=3, shard_optimizer=True')
    script = DIES_IN_ITS_FIRST_STEP + NEVER_SAVES + script
    options = ("--save-every", "off")
    with Job(tmp_path, machines=2, script=script, options=options, manager=PATIENT) as job:
        job.wait_for_steps(3)
        pids = job.worker(1), job.worker(2)
        job.write_list(1, 2, 3)
        job.wait_for("1 stage x 3 replicas")
        assert "was killed by SIGKILL" in job.wait_for("recovering: rank 2")
        job.wait_for("1 stage x 3 replicas")  # the machine is back
        job.wait_for("morphed: ")
        job.wait_for_steps(2)
        assert (job.worker(1), job.worker(2)) == pids
        check(job, reference)
    assert not restarts(job) and "generation ended" not in job.text and not saved(tmp_path)


def test_one_replica_survives_kills_joins_and_leaves_in_the_memory_of_the_others(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """HOT-1, HOT-2, HOT-3: two stages, D = 1: the survivor holds all state until another worker joins it."""
    options = ("--save-every", "off")
    script = NEVER_SAVES + IN_BATCHES
    with Job(tmp_path, machines=2, stages=2, script=script, options=options, manager=PATIENT) as job:
        job.wait_for_steps(3)
        job.wait_for_copies()
        first = job.worker(1)
        os.kill(job.worker(2), signal.SIGKILL)
        job.wait_for("holding: 127.0.0.1 has copies of all state")
        assert "until 127.0.0.2 joins" in job.wait_for("recovering: rank 1 (stage 1, replica 0) was killed")
        job.wait_for("morphed: ")
        job.wait_for_reports(2)
        job.write_list(1, 3)
        job.wait_for("on 127.0.0.1, 127.0.0.3, in place")
        job.wait_for("morphed: ")
        assert job.worker(1) == first
        job.wait_for_copies()
        second = job.worker(3)
        os.kill(job.agent(1), signal.SIGKILL)  # its worker, with rank 0, dies with it
        job.wait_for("recovering: 127.0.0.1 was lost")
        job.wait_for("morphed: ")
        job.wait_for_reports(2)
        assert job.worker(3) == second
        check(job, reference)
    logs = "".join(path.read_text() for path in tmp_path.glob("varuna_logs/*/generation_*/rank_*.err"))
    assert "to the copies of step" in logs and "generation ended" not in job.text and not saved(tmp_path)


def test_a_loss_of_both_holders_and_of_all_machines_falls_to_the_store(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """HOT-1, HOT-3: with ZeRO, a worker and the one with its copy are killed; then every machine."""
    script = IN_BATCHES.replace('device="cpu", seed=3', 'device="cpu", seed=3, shard_optimizer=True')
    with Job(tmp_path, machines=3, script=script, manager=PATIENT) as job:
        job.wait_for_steps(12)
        job.wait_for_copies()
        held = {job.machine(number)["workers"][0]["copy_of"]: number for number in (1, 2, 3)}
        for number in (1, held[0]):  # rank 0 is on the first machine
            os.kill(job.worker(number), signal.SIGKILL)
        job.wait_for("cold restart: ")
        job.wait_for("1 stage x 3 replicas")
        job.wait_for_steps(12)
        job.wait_for_reports(1)
        for number in (1, 2, 3):
            os.kill(job.agent(number), signal.SIGKILL)
        job.wait_for("generation ended: ")
        job.wait_for("generation: ")
        job.wait_for_steps(2)
        check(job, reference)
    assert len([line for line in job.generations if ", from step " in line]) >= 2, job.text


TRAPS = """
import os, signal
from pathlib import Path

def is_trapped(name):
    return "VARUNA_JOINS" in os.environ and Path(name).exists()

def trap():
    if is_trapped("dies"):
        os.unlink("dies")  # once
        os.kill(os.getpid(), signal.SIGKILL)
"""
WITH_TRAPS = FETCHES.replace("nn.Linear(4, 8), nn.Linear(8, 1)", "nn.Linear(4, n), nn.Linear(n, 1)")
WITH_TRAPS = WITH_TRAPS.replace(
    "super().__init__()", 'super().__init__()\n        n = 9 if is_trapped("other") else 8'
)
WITH_TRAPS = WITH_TRAPS.replace("return ((self", "trap()\n        return ((self")


def test_joiners_that_die_or_have_another_model_are_refused_alone(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """HOT-5: killed while it captures; another model; then the machine is repaired, and joins."""
    options = ("--save-every", "off")
    (tmp_path / "dies").touch()
    (tmp_path / "other").touch()
    script = NEVER_SAVES + TRAPS + WITH_TRAPS
    with Job(tmp_path, machines=2, script=script, options=options, manager=PATIENT) as job:
        job.wait_for_steps(2)
        pids = job.worker(1), job.worker(2)
        job.write_list(1, 2, 3)
        assert "was killed by SIGKILL" in job.wait_for("join failed: 127.0.0.3: retry in 2 s")
        line = job.wait_for("joiner refused: 127.0.0.3 has wrapped another model than the job")
        assert "remove it from the list and add it again" in line
        job.wait_for_steps(2)
        (tmp_path / "other").unlink()
        job.write_list(1, 2)
        job.wait_for("machine unlisted: 127.0.0.3")
        job.write_list(1, 2, 3)
        job.wait_for("1 stage x 3 replicas")
        job.wait_for_steps(2)
        assert (job.worker(1), job.worker(2)) == pids
        check(job, reference)
    assert not restarts(job) and "generation ended" not in job.text and not saved(tmp_path)


FAILS_IN_ITS_JOIN = """
import os
from varuna.train.hot.moving import MovingState

hand_over = MovingState.hand_over

def trapped(self, *arguments):
    for how in ("raises", "ends"):
        if self.is_joiner and os.path.exists(how):
            os.unlink(how)
            if how == "ends":
                os._exit(0)
            raise ValueError("the disk of this machine is broken")
    return hand_over(self, *arguments)

MovingState.hand_over = trapped
"""


@pytest.mark.parametrize("stages", [1, 2])
def test_joiners_that_raise_or_end_in_the_middle_of_their_join_cost_only_themselves(
    tmp_path: Path, reference: dict[int, float], stages: int
) -> None:
    """HOT-3, HOT-5: also if no stage has replicas. At last they join."""
    options = ("--save-every", "off")
    script = NEVER_SAVES + FAILS_IN_ITS_JOIN + FETCHES
    with Job(tmp_path, machines=2, stages=stages, script=script, options=options, manager=PATIENT) as job:
        job.wait_for_steps(3)
        pids = job.worker(1), job.worker(2)
        (tmp_path / "raises").touch()
        machines = range(1, 3 + stages)
        job.write_list(*machines)
        assert "raised ValueError: the disk of this machine is broken" in job.wait_for("recovering: ")
        job.wait_for("morphed: ")
        (tmp_path / "ends").touch()
        assert "was lost: its workers ended in the middle of the change" in job.wait_for("recovering: ")
        job.wait_for("morphed: ")
        job.wait_for("1 stage x 3 replicas" if stages == 1 else "2 stages x 2 replicas")
        job.wait_for("morphed: ")
        job.wait_for_reports(2)
        assert (job.worker(1), job.worker(2)) == pids
        check(job, reference)
    assert not restarts(job) and "generation ended" not in job.text and not saved(tmp_path)


BEGINS_WITH_THE_FIRST_EPOCH = """
def fetch(samples):
    return {"x": x[samples], "y": y[samples]}

for end in range(2, STEPS, 2):
    for step, inputs in model.batches(fetch, order, steps=end):
        loss, _ = model.step(inputs)
        optimizer.step()
        model.zero_grad()
        print("step", step, "loss", float(loss), flush=True)
        time.sleep(0.05)
    model.evaluate(fetch, batch_size=6)
"""


def test_a_joiner_that_evaluates_past_epochs_again_is_refused_alone(tmp_path: Path) -> None:
    """HOT-5, EXA-9: the others are in a step. Before, gloo ended processes: the messages had other sizes."""
    script = FETCHES.partition("while model.iteration < STEPS:")[0] + BEGINS_WITH_THE_FIRST_EPOCH
    with Job(tmp_path, machines=2, stages=1, script=script, manager=PATIENT) as job:
        job.wait_for_steps(5)
        pids = job.worker(1), job.worker(2)
        job.write_list(1, 2, 3)
        assert "begin with the present epoch" in job.wait_for("recovering: ")
        job.wait_for("morphed: ")
        job.wait_for_steps(2)
        assert (job.worker(1), job.worker(2)) == pids
    assert not restarts(job)


def test_joiners_that_raise_while_survivors_hold_the_state_are_replaced(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """HOT-3, HOT-5: D = 1: the job goes back to its copies, is interrupted, and goes back again."""
    options = ("--save-every", "off")
    script = NEVER_SAVES + FAILS_IN_ITS_JOIN + IN_BATCHES
    with Job(tmp_path, machines=2, stages=2, script=script, options=options, manager=PATIENT) as job:
        job.wait_for_steps(3)
        job.wait_for_copies()
        first = job.worker(1)
        (tmp_path / "raises").touch()
        os.kill(job.worker(2), signal.SIGKILL)
        job.wait_for("holding: 127.0.0.1 has copies of all state")
        job.wait_for("recovering: rank 1 (stage 1, replica 0) was killed")
        job.wait_for("holding: 127.0.0.1 has copies of all state")
        job.wait_for(
            "recovering: rank 1 (stage 1, replica 0) raised ValueError: the disk of this machine is broken"
        )
        job.wait_for("morphed: ")
        job.wait_for_reports(2)
        assert job.worker(1) == first
        check(job, reference)
    assert "generation ended" not in job.text and not saved(tmp_path)


DEATHS = """
import os, signal, time
import varuna.train.hot.morph as morphs
from varuna.train.saving.checkpoints import Checkpoints
from varuna.train.saving.saver import Saver

def trap(owner, name, place):
    original = getattr(owner, name)

    def trapped(subject, *arguments, **options):
        try:
            os.unlink(place(subject))  # once
        except FileNotFoundError:
            return original(subject, *arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, trapped)

def enters(order):
    while os.path.exists("hold_morphs"):
        time.sleep(0.01)
    return f"morph_{order.rank}"

trap(morphs, "enter_generation", enters)
trap(Checkpoints, "save", lambda _: "save_" + os.environ["RANK"])
trap(Saver, "run_requests", lambda _: "request_" + os.environ["RANK"])
"""


def test_losses_in_a_morph_in_a_save_in_a_request_and_while_the_manager_restarts(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """HOT-1, HOT-3, HOT-4: rank 0 keeps its process through all of them; a signal is not lost with a rank.

    A manager that is killed in the middle of a morph goes on with it. There, a worker that leaves is lost.
    """
    options = ("--save-every", "off")
    with Job(tmp_path, machines=2, script=DEATHS + FETCHES, options=options, manager=PATIENT) as job:
        job.wait_for_steps(3)
        first = job.worker(1)
        (tmp_path / "morph_2").touch()  # the joiner
        job.write_list(1, 2, 3)
        job.wait_for("recovering: rank 2")
        job.wait_for("1 stage x 3 replicas")  # it has joined after all
        job.wait_for("morphed: ")
        (tmp_path / "morph_1").touch()  # a survivor
        job.write_list(1, 2, 3, 4)
        job.wait_for("recovering: rank 1")
        job.wait_for("1 stage x 4 replicas")
        job.wait_for("morphed: ")
        (tmp_path / "save_3").touch()
        job.wait_for("recovering: rank 3")
        job.wait_for("1 stage x 4 replicas")
        job.wait_for("morphed: ")
        job.wait_for_reports(2)
        (tmp_path / "hold_morphs").touch()
        job.write_list(1, 2, 3)
        job.wait_for("1 stage x 3 replicas")
        job.process.kill()
        job.restart("--resume")
        job.wait_for("agent joined: 127.0.0.4, with generation")
        (tmp_path / "morph_None").touch()  # the worker that leaves
        (tmp_path / "hold_morphs").unlink()
        job.wait_for("recovering: 127.0.0.4 failed while it handed its state over")
        job.wait_for("morphed: ")
        job.wait_for_reports(2)
        victim = job.worker(2)
        job.process.kill()
        os.kill(victim, signal.SIGKILL)
        job.restart("--resume")
        job.wait_for("recovering: rank ")
        job.wait_for("1 stage x 3 replicas")
        job.wait_for("morphed: ")
        job.wait_for_reports(2)
        assert job.worker(1) == first
        (tmp_path / "request_2").touch()
        os.kill(first, signal.SIGUSR1)
        job.wait_for("recovering: rank 2")
        job.wait_for("SIGUSR1: a checkpoint was saved")
        job.restart()
        assert "generation ended" not in job.text
        check(job, reference)
