"""A restarted manager restores its state from the journal."""

import errno
import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from varuna.files import LineFile
from varuna.morph import commands, events
from varuna.morph.decide import decide
from varuna.morph.failures import ErrorFile, ErrorMessage, ExtraInfo, WorkerFailure
from varuna.morph.journal import (
    GenerationLaunched,
    JobBegun,
    JobOver,
    Journal,
    JournalRecord,
    SaveRequested,
    StoreSeen,
    _line,
    counts_changed,
    counts_record,
    last_logged_number,
    read_journal,
    restore_state,
)
from varuna.morph.state import Generation, JobVerdict, ManagerSettings, Outcome, WorkerProgress
from varuna.plan.search.choose import lay_out

LAYOUT = lay_out(2, 1, batch_size=4, microbatch_size=1)
RECORDS: list[JournalRecord] = [
    JobBegun("job", 4000, "/logs"),
    GenerationLaunched(Generation(1, ("a", "b"), ((0,), (1,)), ("x", "y"), LAYOUT, None, "a", 4001)),
    StoreSeen("/store"),
    GenerationLaunched(Generation(2, ("b", "a"), ((0,), (1,)), ("y", "z"), LAYOUT, 40, "b", 4002)),
]


def write(path: Path, records: list[JournalRecord]) -> None:
    journal = Journal(path, read_journal(path).records)
    for record in records:
        journal.write(record)
    journal.close()


def launched(number: int) -> GenerationLaunched:
    generation = Generation(number, ("a", "b"), ((0,), (1,)), ("x", "y"), LAYOUT, None, "a", 4001)
    return GenerationLaunched(generation)


def lines_of(path: Path, records: list[JournalRecord]) -> list[bytes]:
    """Write each record as a journal appends it, and return the lines."""
    path.unlink(missing_ok=True)
    journal = Journal(path)
    for record in records:
        journal.write(record)
    journal.close()
    return path.read_bytes().splitlines(keepends=True)


@given(st.data())
def test_a_cut_journal_is_read_up_to_its_last_whole_record(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """V45, REL-3: and the next record is whole."""
    path = tmp_path_factory.mktemp("journal") / "journal"
    lines = lines_of(path, RECORDS)
    kept = b"".join(lines)[: data.draw(st.integers(0, len(b"".join(lines))))]
    path.write_bytes(kept)
    num_whole = sum(len(b"".join(lines[: index + 1])) - 1 <= len(kept) for index in range(len(lines)))
    assert list(read_journal(path).records) == RECORDS[:num_whole]
    LineFile(path).append(_line(StoreSeen("/other")))
    assert list(read_journal(path).records) == [*RECORDS[:num_whole], StoreSeen("/other")]


@given(st.data())
def test_a_flipped_bit_costs_its_record_alone(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """REL-3: two records, if it joins their lines."""
    path = tmp_path_factory.mktemp("journal") / "journal"
    lines = lines_of(path, RECORDS)
    content = bytearray(b"".join(lines))
    place = data.draw(st.integers(0, len(content) - 2))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bytes(content))
    starts = [len(b"".join(lines[:index])) for index in range(len(lines))]
    hit = max(index for index, start in enumerate(starts) if start <= place)
    lost = {hit, hit + 1} if place == starts[hit] + len(lines[hit]) - 1 else {hit}
    found = read_journal(path)
    assert list(found.records) == [record for index, record in enumerate(RECORDS) if index not in lost]
    assert found.num_damaged > 0


class FullDisk:
    """Stands for os.write on a disk with some bytes of space left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, space: int, code: int = errno.ENOSPC) -> None:
        self.space = space
        self.code = code
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, fd: int, data: bytes) -> int:
        if not self.space:
            raise OSError(self.code, os.strerror(self.code))
        written = self._write(fd, data[: self.space])
        self.space -= written
        return written


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("space", [0, 1, 40])
def test_a_full_disk_leaves_whole_records_and_the_rest_follows_when_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, space: int, code: int
) -> None:
    """REL-3: a short write is taken back, the journal says why, and later it is complete."""
    path = tmp_path / "journal"
    journal = Journal(path, RECORDS[:2])
    monkeypatch.setattr(
        "varuna.morph.journal.write_atomic", lambda *_, **__: (_ for _ in ()).throw(OSError(code, "full"))
    )
    FullDisk(monkeypatch, space, code)
    journal.write(StoreSeen("/store"))
    assert list(read_journal(path).records) == RECORDS[:2] and read_journal(path).num_damaged == 0
    assert os.strerror(code) in journal.problem and str(path) in journal.problem
    journal.write(launched(5))
    journal.retry(100.0)
    assert "full" in journal.problem
    monkeypatch.undo()
    journal.retry(101.0)
    assert journal.problem, "it does not try all the time"
    journal.retry(105.0)
    assert not journal.problem
    assert list(read_journal(path).records) == [RECORDS[0], StoreSeen("/store"), launched(5)]
    journal.write(SaveRequested(5))
    assert read_journal(path).records[-1] == SaveRequested(5)


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """REL-3"""
    written = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: written(fd, data[:7]))
    assert len(lines_of(tmp_path / "journal", RECORDS)) == len(RECORDS)
    assert list(read_journal(tmp_path / "journal").records) == RECORDS


def test_numbers_of_generations_are_above_those_of_log_folders(tmp_path: Path) -> None:
    """REL-3: also if the journal has lost its last records."""
    for name in ("generation_3", "generation_12", "generation_x", "other_40"):
        (tmp_path / name).mkdir()
    last = last_logged_number(tmp_path)
    assert last == 12 and last_logged_number(tmp_path / "nowhere") == 0
    state = restore_state(RECORDS, settings=ManagerSettings(), now=0.0, last_number=last)
    assert state.next_number == 13
    state, _ = decide(state, events.MachineListRead(("a", "b", "c")), 1.0)
    state, _ = decide(state, events.AgentJoined("c", "w", 20), 1.0)
    assert state.next_number == 21


def test_a_restarted_manager_expects_the_agents_of_its_last_generation(tmp_path: Path) -> None:
    """V45"""
    write(tmp_path / "journal", RECORDS)
    state = restore_state(read_journal(tmp_path / "journal").records, settings=ManagerSettings(), now=50.0)
    assert state.phase == "running" and state.next_number == 3 and state.store == "/store"
    assert {name: member.agent for name, member in state.members.items()} == {"a": "z", "b": "y"}


def test_a_manager_killed_during_a_save_continues_the_change(tmp_path: Path) -> None:
    """V45: the job continues after its workers have saved and exited on request."""
    write(tmp_path / "journal", [*RECORDS, SaveRequested(2)])
    state = restore_state(read_journal(tmp_path / "journal").records, settings=ManagerSettings(), now=50.0)
    for machine, agent in (("b", "y"), ("a", "z")):
        state, found = decide(state, events.AgentJoined(machine, agent, 2), 51.0)
        assert any(isinstance(command, commands.SaveAndEnd) for command in found), (
            "the first request may be lost"
        )
        state, _ = decide(
            state, events.WorkersEnded(machine, agent, 2, (Outcome(None, on_demand=True),)), 51.0
        )
    assert state.phase == "gathering" and state.verdict is None


def test_a_restarted_manager_continues_to_count_crashes(tmp_path: Path) -> None:
    """V45: an error after the first step is retried, also by a restarted manager."""
    state = restore_state(RECORDS, settings=ManagerSettings(), now=0.0)
    for machine, agent in (("b", "y"), ("a", "z")):
        state, _ = decide(state, events.AgentJoined(machine, agent, 2), 1.0)
    beaten, _ = decide(
        state, events.Tick({"a": ("z", 2, (WorkerProgress(rank=1, iteration=3, steps=3),))}), 2.0
    )
    assert counts_changed(state, beaten) and not counts_changed(beaten, beaten)
    error = ErrorFile(ErrorMessage("ValueError: no", ExtraInfo("", "2", ("builtins.ValueError",), 2.5)))
    failure = events.WorkerFailed("a", "z", 2, Outcome(WorkerFailure(1, 1, error)))
    failed, _ = decide(beaten, failure, 3.0)
    assert failed.crashes == failed.losses == 1 and failed.verdict is None

    write(tmp_path / "journal", [*RECORDS, counts_record(failed, 3.0), RECORDS[-1]])
    again = restore_state(read_journal(tmp_path / "journal").records, settings=ManagerSettings(), now=50.0)
    assert (again.crashes, again.losses, again.best_iteration) == (1, 1, 3)
    assert counts_record(again, 4.0).seconds == 7.0
    failed, _ = decide(again, failure, 51.0)
    assert failed.crashes == 2 and failed.verdict is None, "it had made its first step"


OLD_JOURNAL = b"""
{"type":"Begun","job":"job","port":4000,"log_dir":"/logs"}
{"type":"Launched","generation":{"number":2,"machines":["b","a"],"ranks":[[0],[1]],"agents":["y","z"],\
"layout":{"stage_map":[[0,1]],"batch_size":4,"microbatch_size":1,"idle":[]},"resume_step":40,\
"master_addr":"b","master_port":4002,"plan":"","environment":{}}}
{"type":"Saving","generation":2}
{"type":"StoreSeen","store":"/store"}
{"type":"Counted","crashes":1,"losses":2,"iteration":50,"iteration_at_crash":45,"seconds":7.5}
{"type":"Over","verdict":{"how":"stopped","exit_code":0,"reason":"enough"}}
"""


def test_a_journal_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    """The tags and field names are part of the file format."""
    (tmp_path / "journal").write_bytes(OLD_JOURNAL.lstrip().replace(b"\\\n", b""))
    records = read_journal(tmp_path / "journal").records
    state = restore_state(records, settings=ManagerSettings(), now=0.0)
    assert [type(record).__struct_config__.tag for record in records] == [
        *["Begun", "Launched", "Saving", "StoreSeen", "Counted", "Over"]
    ]
    assert state.generation is not None and state.generation.resume_step == 40
    assert (state.phase, state.store, state.crashes, state.losses) == ("over", "/store", 1, 2)


def test_only_records_of_the_last_job_count(tmp_path: Path) -> None:
    over = JobOver(JobVerdict("finished", 0, "well"))
    write(tmp_path / "journal", [*RECORDS, over, JobBegun("next", 1, "/logs")])
    assert list(read_journal(tmp_path / "journal").records) == [JobBegun("next", 1, "/logs")]
    assert restore_state([*RECORDS, over], settings=ManagerSettings(), now=0.0).phase == "over"
    assert not read_journal(tmp_path / "nowhere").records
