"""A restarted manager restores its state from the journal."""

from pathlib import Path

import hypothesis.strategies as st
from hypothesis import given, settings

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
    counts_changed,
    counts_record,
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
    journal = Journal(path)
    for record in records:
        journal.write(record)
    journal.close()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000))
def test_an_incomplete_last_line_is_ignored_and_the_next_record_is_complete(
    tmp_path_factory: object, cut: int
) -> None:
    """V45"""
    path = Path(tmp_path_factory.mktemp("journal")) / "journal"  # type: ignore[attr-defined]
    write(path, RECORDS)
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    whole = data.count(b"\n")
    assert list(read_journal(path)) == RECORDS[:whole]
    write(path, [StoreSeen("/other")])
    assert list(read_journal(path)) == [*RECORDS[:whole], StoreSeen("/other")]


def test_a_restarted_manager_expects_the_agents_of_its_last_generation(tmp_path: Path) -> None:
    """V45"""
    write(tmp_path / "journal", RECORDS)
    state = restore_state(read_journal(tmp_path / "journal"), settings=ManagerSettings(), now=50.0)
    assert state.phase == "running" and state.next_number == 3 and state.store == "/store"
    assert {name: member.agent for name, member in state.members.items()} == {"a": "z", "b": "y"}


def test_a_manager_killed_during_a_save_continues_the_change(tmp_path: Path) -> None:
    """V45: the job continues after its workers have saved and exited on request."""
    write(tmp_path / "journal", [*RECORDS, SaveRequested(2)])
    state = restore_state(read_journal(tmp_path / "journal"), settings=ManagerSettings(), now=50.0)
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
    again = restore_state(read_journal(tmp_path / "journal"), settings=ManagerSettings(), now=50.0)
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
    records = read_journal(tmp_path / "journal")
    state = restore_state(records, settings=ManagerSettings(), now=0.0)
    assert [type(record).__struct_config__.tag for record in records] == [
        *["Begun", "Launched", "Saving", "StoreSeen", "Counted", "Over"]
    ]
    assert state.generation is not None and state.generation.resume_step == 40
    assert (state.phase, state.store, state.crashes, state.losses) == ("over", "/store", 1, 2)


def test_only_records_of_the_last_job_count(tmp_path: Path) -> None:
    over = JobOver(JobVerdict("finished", 0, "well"))
    write(tmp_path / "journal", [*RECORDS, over, JobBegun("next", 1, "/logs")])
    assert list(read_journal(tmp_path / "journal")) == [JobBegun("next", 1, "/logs")]
    assert restore_state([*RECORDS, over], settings=ManagerSettings(), now=0.0).phase == "over"
    assert not read_journal(tmp_path / "nowhere")
