"""What a killed manager knows when it starts again."""

from pathlib import Path

import hypothesis.strategies as st
from hypothesis import given, settings

from varuna.morph.decide import decide
from varuna.morph.journal import Begun, Journal, Launched, Over, Record, Saving, StoreSeen, read, restore
from varuna.morph.placement import lay_out
from varuna.morph.state import AgentJoined, Generation, Outcome, SaveAndEnd, Settings, Verdict, WorkersEnded

LAYOUT = lay_out(2, 1, batch_size=4, microbatch_size=1)
RECORDS: list[Record] = [
    Begun("job", 4000, "/logs"),
    Launched(Generation(1, ("a", "b"), ((0,), (1,)), ("x", "y"), LAYOUT, None, "a", 4001)),
    StoreSeen("/store"),
    Launched(Generation(2, ("b", "a"), ((0,), (1,)), ("y", "z"), LAYOUT, 40, "b", 4002)),
]


def write(path: Path, records: list[Record]) -> None:
    journal = Journal(path)
    for record in records:
        journal.write(record)
    journal.close()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000))
def test_wherever_the_last_line_is_torn_the_others_stand_and_the_next_is_whole(
    tmp_path_factory: object, cut: int
) -> None:
    """V45"""
    path = Path(tmp_path_factory.mktemp("journal")) / "journal"  # type: ignore[attr-defined]
    write(path, RECORDS)
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    whole = data.count(b"\n")
    assert list(read(path)) == RECORDS[:whole]
    write(path, [StoreSeen("/other")])
    assert list(read(path)) == [*RECORDS[:whole], StoreSeen("/other")]


def test_a_manager_started_again_expects_the_agents_of_its_last_generation(tmp_path: Path) -> None:
    """V45"""
    write(tmp_path / "journal", RECORDS)
    state = restore(read(tmp_path / "journal"), settings=Settings(), now=50.0)
    assert state.phase == "running" and state.next_number == 3 and state.store == "/store"
    assert {name: member.agent for name, member in state.members.items()} == {"a": "z", "b": "y"}


def test_a_manager_that_was_killed_within_a_morph_goes_on_with_it(tmp_path: Path) -> None:
    """V45: workers that have saved and ended did as they were asked to; that is not the end of the job."""
    write(tmp_path / "journal", [*RECORDS, Saving(2)])
    state = restore(read(tmp_path / "journal"), settings=Settings(), now=50.0)
    for machine, agent in (("b", "y"), ("a", "z")):
        state, commands = decide(state, AgentJoined(machine, agent, 2), 51.0)
        assert any(isinstance(command, SaveAndEnd) for command in commands), "it may not have heard"
        state, _ = decide(state, WorkersEnded(machine, agent, 2, (Outcome(None, on_demand=True),)), 51.0)
    assert state.phase == "gathering" and state.verdict is None


def test_only_the_last_job_counts_and_an_end_is_one(tmp_path: Path) -> None:
    over = Over(Verdict("finished", 0, "well"))
    write(tmp_path / "journal", [*RECORDS, over, Begun("next", 1, "/logs")])
    assert list(read(tmp_path / "journal")) == [Begun("next", 1, "/logs")]
    assert restore([*RECORDS, over], settings=Settings(), now=0.0).phase == "over"
    assert not read(tmp_path / "nowhere")
