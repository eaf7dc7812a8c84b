"""Strangers attack a job from its own machines and from another host: nothing runs, nothing ends."""

import json
from pathlib import Path

import pytest

from tests.morph.jobs import check
from tests.morph.stranger_attacks import CLOSED, HELD, IDLE, REFUSED
from tests.morph.strangers import OWN_CHANNELS, SECRET, BesiegedJob, besieged, draw


@pytest.mark.timeout(200)
def test_strangers_change_nothing(tmp_path: Path, reference: dict[int, float]) -> None:
    """SEC-1, SEC-2, SEC-3, SEC-4: every attack on every listening socket of the job."""
    with besieged(tmp_path) as siege:
        doors = siege.doors()
        assert {door.owner for door in doors} >= {"manager", "store", "worker", "agent"}
        matrix = siege.attack_all(doors)
        found = draw(matrix)
        for (door, _), outcomes in matrix.items():
            expected = {REFUSED if door.startswith(OWN_CHANNELS) else CLOSED, "-"}
            # Connections that wait in the kernel's queue are held, and harm nobody.
            allowed = {attack: {*expected, HELD} if attack == IDLE else expected for attack in outcomes}
            wrong = [attack for attack, outcome in outcomes.items() if outcome not in allowed[attack]]
            assert not wrong, f"{door}: {wrong}\n{found}"
        status = json.loads(siege.job.varuna("status", "--json").stdout)
        assert (status["generation"], status["phase"]) == (1, "running")
        assert_refusals_are_logged(siege)
        listed = siege.listed_processes()
        assert b"varuna.morph.run.agent" in listed and b"PRIVATE KEY" not in listed
        check(siege.job, reference)
        assert siege.strangers.marks() == []
        assert siege.recorder.num_bytes > 100_000 and not siege.recorder.contains(SECRET)
        assert_files_are_private(tmp_path)


@pytest.mark.timeout(200)
def test_strangers_do_not_join_the_next_generation(tmp_path: Path, reference: dict[int, float]) -> None:
    """SEC-1, SEC-2: sockets that listen only while groups form, and the store that is open in advance."""
    with besieged(tmp_path) as siege:
        job = siege.job
        stores = [door for door in siege.doors() if door.owner == "store" and door.host == "n1"]
        (spare,) = (door for door in stores if not siege.is_used(door))
        attack = siege.attack("new sockets", "n1", [], 15.0)
        joins = [siege.attack("join", host, [spare], 20.0) for host in ("n1", siege.outside.name)]
        job.write_list(1)
        job.wait_for_change("generation: 2: 2 stages x 1 replica")
        job.wait_for_steps(3)
        assert int(siege.strangers.outcomes(attack)["all"]) > 5
        for join in joins:
            assert siege.strangers.outcomes(join)[spare.name].startswith(REFUSED)
        assert job.status()["generation"] == 2
        check(job, reference)
        assert siege.strangers.marks() == []


def assert_files_are_private(folder: Path) -> None:
    """Only the env file and the checkpoints are as the user's umask makes them."""
    found = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert [str(path) for path, data in found.items() if SECRET.encode() in data] == ["varuna.env"]
    assert {path.name for path, data in found.items() if b"PRIVATE KEY" in data} == {"manager.json"}
    ours = [path for name in ("home/jobs", "varuna_logs") for path in (folder / name).rglob("*")]
    assert len(ours) > 10
    assert [path for path in ours if path.stat().st_mode & 0o077] == []


def assert_refusals_are_logged(siege: BesiegedJob) -> None:
    refused = [event["why"] for event in siege.events() if event["what"] == "caller refused"]
    assert any(siege.lab.address in why for why in refused), refused
    assert any(siege.outside.address in why for why in refused), refused
