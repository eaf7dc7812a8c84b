"""A manager that resumes from a damaged journal continues the job with new generation numbers."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.morph.test_decide import HAPPENINGS, SAVED, World, play, recover_and_end
from varuna.morph import commands, events
from varuna.morph.decide import decide
from varuna.morph.journal import JobBegun, Journal, read_journal, records_of, restore_state


class JournaledWorld(World):
    """A world whose manager keeps a journal, as `Manager` does, and can be restarted."""

    def __init__(self, path: Path, *, stages: int = 1, hot: bool = False) -> None:
        self.path = path
        self.journal = Journal(path, [JobBegun("job", 4000, "/logs")])
        self.unique = True  # the log folders tell a restarted manager the last number
        super().__init__(["a", "b"], stages=stages, hot=hot)

    def happens(self, event: events.Event) -> None:
        before = self.state
        after, found = decide(before, event, self.now)
        for record in records_of(before, after, found, seconds=1.0):
            self.journal.write(record)
        super().happens(event)

    def check_launch(self, launch: commands.Launch) -> None:
        number = launch.generation.number
        for machine in launch.generation.machines:
            if machine in self.agents and machine not in self.unresponsive:
                assert number > self.last.get(self.agents[machine], 0), "its agent would ignore it"
        if self.unique:
            super().check_launch(launch)

    def restart(self, *listed: str, with_logs: bool = True) -> None:
        """Restart the manager; all connected agents find it. The machine list is a, b by default."""
        self.journal.close()
        self.pending.clear()
        records = read_journal(self.path).records
        started = (*self.launched, *self.morphed, *self.prepared)
        last = max((one.generation.number for one in started), default=0)
        self.unique = with_logs
        self.state = restore_state(
            records, settings=self.state.settings, now=self.now, last_number=last if with_logs else 0
        )
        self.journal = Journal(self.path, records)
        self.happens(events.MachineListRead(listed or ("a", "b")))
        for machine, agent in list(self.agents.items()):
            if machine in self.unresponsive:
                continue
            has = self.last.get(agent)
            self.happens(events.AgentJoined(machine, agent, has, machine, 999))
            if has is not None and machine not in self.workers:
                self.happens(events.WorkersEnded(machine, agent, has, (SAVED,)))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(HAPPENINGS, max_size=20),
    st.lists(HAPPENINGS, max_size=8),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_after_any_damage_of_the_journal_no_number_repeats_and_the_job_can_end(
    tmp_path_factory: pytest.TempPathFactory,
    before: list[tuple[str, object]],
    after: list[tuple[str, object]],
    flips: bool,
    with_logs: bool,
    hot: bool,
    data: st.DataObject,
) -> None:
    """REL-3: a journal cut anywhere, or with any bit flipped; agents ignore numbers that they know."""
    world = JournaledWorld(tmp_path_factory.mktemp("resume") / "journal", hot=hot)
    for what, how in before:
        play(world, what, how)
        world.carry_out()
    if world.state.phase == "over":
        return
    content = bytearray(world.path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if flips:
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    world.path.write_bytes(bytes(content) if flips else bytes(content[:place]))
    world.restart(with_logs=with_logs)
    for what, how in after:
        play(world, what, how)
        world.carry_out()
    recover_and_end(world)


def test_a_machine_that_ignores_its_generation_does_not_stop_the_job_for_ever() -> None:
    """REL-3, REL-2: the manager sees in the heartbeats that no worker runs there."""
    world = World(["a", "b"])
    world.last = {"agent 1": 1, "agent 2": 1}  # so they ignore generation 1
    world.passes(20, steps=1)
    assert [launch.generation.number for launch in world.launched] == [1, 2]
    assert "does not run its workers" in world.launched[1].why
    assert world.workers == {"a": 2, "b": 2}
