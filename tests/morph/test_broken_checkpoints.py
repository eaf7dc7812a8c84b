"""Real jobs whose newest checkpoint is damaged go on from an older one."""

import json
from pathlib import Path

import pytest

from tests.morph.jobs import TRAIN, Job, check

DAMAGE = """
EVERY = 0

def misbehave(step):  # the first generation saves at 10 and 20, and dies at 25; then the newest is damaged
    if os.environ.get("VARUNA_GENERATION") == "1":
        if step in (9, 19):
            model.checkpoint("store")
        if step == 24:
            if HARM and model.stage == 0:
                harm(Path("store"))
            os.kill(os.getpid(), 9)

def harm(store):
    for folder in HARM:
        for path in sorted((store / folder).glob("stage-0-*.safetensors")):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)

"""
CHECKED = "assert resumed is None or int(resumed) == model.iteration, (resumed, model.iteration)"
NO_AUTOSAVE = ["--save_every", "off"]
RESUMED = 'model.resume("store")'
EXPLICIT = """
if "VARUNA_RESUME_STEP" in os.environ:
    model.load_checkpoint("store", int(os.environ["VARUNA_RESUME_STEP"]))
"""


def script(*harmed: str, explicit: bool = False) -> str:
    train = TRAIN if explicit else TRAIN.replace(CHECKED, "")
    assert (CHECKED in train) == explicit
    return f"HARM = {harmed}\n" + DAMAGE + (train.replace(RESUMED, EXPLICIT) if explicit else train)


def test_a_job_goes_back_to_the_newest_checkpoint_that_verifies(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """REL-1: the log, `varuna status` and the event log name the broken one and count the lost steps."""
    with Job(tmp_path, machines=2, stages=2, script=script("varuna_ckpt_20"), options=NO_AUTOSAVE) as job:
        assert "from step 20" in job.wait_for("generation: 2:")
        line = job.wait_for("varuna: broken checkpoint: checkpoint 20 is broken and was set aside")
        assert "rank 0 (stage 0, replica 0): " in line and "10 steps are lost" in line
        job.wait_for_steps(3)
        assert "broken checkpoint: checkpoint 20" in job.varuna("status").stdout
        assert "10 steps are lost" in json.loads(job.varuna("status", "--json").stdout)["checkpoint_note"]
        listed = json.loads(job.varuna("checkpoint", "ls", "--json", str(tmp_path / "store")).stdout)
        states = {one["step"]: one["state"] for one in listed["checkpoints"]}
        assert states[20] == "broken" and listed["newest"] == 10
        check(job, reference)
        assert len(job.generations) == 2
    (log,) = tmp_path.glob("**/events.jsonl")
    assert '"what":"broken checkpoint"' in log.read_text()


def test_a_script_that_loads_the_managers_step_gets_an_older_one_next(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """REL-1: the worker refuses the broken step and sets it aside; the manager then names an older one."""
    with Job(
        tmp_path, machines=2, stages=2, script=script("varuna_ckpt_20", explicit=True), options=NO_AUTOSAVE
    ) as job:
        assert "from step 20" in job.wait_for("generation: 2:")
        assert "BrokenCheckpoint" in job.wait_for("generation ended: 2")
        assert "from step 10" in job.wait_for("generation: 3:")
        check(job, reference)


@pytest.mark.parametrize("explicit", [False, True])
def test_a_job_without_a_whole_checkpoint_ends_and_lists_what_it_found(
    explicit: bool, tmp_path: Path
) -> None:
    """REL-1: it does not begin at step 0 again."""
    harmed = script("varuna_ckpt_20", "varuna_ckpt_10", explicit=explicit)
    with Job(tmp_path, machines=1, script=harmed, options=NO_AUTOSAVE) as job:
        assert job.finish() == 1, job.text
        assert "has no complete checkpoint: checkpoint 20: " in job.text and "checkpoint 10: " in job.text
        assert job.lines[-1].startswith("all workers have ended") and job.losses.keys() == set(range(24))
