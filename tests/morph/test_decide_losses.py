"""`decide`: losses on machines with several workers, in the middle of a change, and again and again."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tests.morph.test_decide import WELL, World, begun, killed, raised
from tests.morph.test_resume import JournaledWorld
from varuna.morph import commands, events
from varuna.morph.failures import ErrorFile, ErrorMessage, ExtraInfo, WorkerFailure
from varuna.morph.state import Outcome

# ---------------------------------------------------------------- several workers on a machine


def test_workers_go_on_in_place_when_another_one_on_their_only_machine_is_killed() -> None:
    """HOT-3: no step is lost. Then the job saves and restarts, because the machine gets a worker more."""
    world = begun("a", hot=True, devices=4)
    world.passes(3, steps=1)
    world.cannot_save = True
    world.kill_worker("a", 1)
    world.carry_out()
    (morph,) = world.morphed
    assert (morph.previous, morph.leaving, morph.lost) == ((0, 2, 3), (), (1,))
    assert morph.generation.ranks == ((0, 1, 2),)
    world.passes(3, steps=1)
    assert len(world.launched) == 1 and world.state.phase == "running" and world.num_tries == 1
    assert any("a gets 4 workers, and has 3" in line for line in world.logged)
    world.cannot_save = False
    world.passes(15, steps=1)
    assert [launch.generation.ranks for launch in world.launched[1:]] == [((0, 1, 2, 3),)]


def test_workers_go_on_in_place_when_every_machine_loses_one() -> None:
    """HOT-3: two stages; a machine with more workers than the others have lets one go, with its state."""
    world = begun("a", "b", stages=2, hot=True, devices=4)
    world.passes(3, steps=1)
    world.cannot_save = True
    world.kill_worker("a", 0)
    world.kill_worker("b", 5)
    world.kill_worker("b", 6)
    world.carry_out()
    (morph,) = [one for one in world.morphed if len(one.lost) == 3]
    assert morph.previous == (1, 2, 4, 7) and morph.leaving == (3,)
    assert morph.generation.machines == ("a", "b") and len(world.launched) == 1


def test_a_machine_that_lost_one_of_its_workers_leaves_and_joins_again_if_the_others_have_a_plan() -> None:
    """HOT-3: nothing restarts. The workers that it still has hand over what only they have."""
    world = begun("a", "b", stages=2, hot=True, devices=2)
    world.passes(3, steps=1)
    world.kill_worker("b", 3)
    world.carry_out()
    assert [(m.previous, m.leaving, m.lost) for m in world.morphed] == [((0, 1), (2,), (3,))]
    world.passes(5, steps=1)
    assert world.morphed[-1].previous == (0, 1, None, None) and world.workers == {"a": 3, "b": 3}
    assert len(world.launched) == 1


def test_the_workers_of_hurt_machines_go_on_if_the_other_machines_have_no_plan() -> None:
    """HOT-3: one machine with two devices cannot hold three stages; three machines with one each can."""
    world = begun("a", "b", "c", stages=3, hot=True, devices=2)
    world.passes(3, steps=1)
    world.kill_worker("a", 0)
    world.kill_worker("b", 2)
    world.carry_out()
    assert [m.lost for m in world.morphed] == [(0, 2)] and world.morphed[0].generation.layout.num_ranks == 3
    assert world.state.unplannable == ("c",) and len(world.launched) == 1


# ---------------------------------------------------------------- in the middle of a change


def test_a_loss_while_a_machine_leaves_costs_no_restart_if_the_others_hold_every_stage() -> None:
    """HOT-3: a worker that stays, the worker that leaves, or its machine is lost."""
    for victim in ("b", "c", "machine c"):
        world = begun("a", "b", "c", hot=True)
        world.morphs = False
        world.happens(events.MachineListRead(("a", "b")))
        world.passes(2, steps=1)
        assert world.state.phase == "morphing" and world.morphed[0].leaving == (2,)
        if victim == "machine c":
            world.lose_agent("c")
        else:
            world.end_workers(victim, killed(1 if victim == "b" else 2))
        world.morphs = True
        world.passes(0.5, steps=1)
        stay, lost = (
            ((0,), (1,)) if victim == "b" else ((0, 1), (2,))
        )  # there is no rank 2 of those that stay
        assert [(m.previous, m.leaving, m.lost) for m in world.morphed[1:2]] == [(stay, (), lost)]
        world.passes(5, steps=1)
        assert world.state.phase == "running" and len(world.launched) == 1, victim
        assert set(world.workers) == set(world.agents) == {"a", "b"}
        assert not any("c: its leaving workers" in line for line in world.logged), "they are killed at once"


def handing_over(generation: int) -> Outcome:
    """Return the end of a worker that leaves, and has handed its state over to this generation."""
    return msgspec.structs.replace(killed(3), entered=generation)


@pytest.mark.parametrize("has_given", [False, True])
@pytest.mark.parametrize("machine", ["b", "c"])
def test_a_worker_that_leaves_is_missed_until_it_has_handed_its_state_over(
    machine: str, has_given: bool
) -> None:
    """HOT-3: it is killed, on a machine whose other worker stays, or on one that leaves.

    The others would wait for its state, and then end with an error. Later, its end costs nothing.
    """
    world = begun("a", "b", "c", stages=3, hot=True, devices=2)
    world.morphs = False
    world.happens(events.MachineListRead(("a", "b")))
    world.passes(2, steps=1)
    assert world.state.phase == "morphing" and world.morphed[0].leaving == (3, 4, 5)
    number = world.morphed[0].generation.number
    outcome = handing_over(number if has_given else number - 1)
    if machine == "b":
        world.happens(events.LeaverFailed("b", world.agents["b"], number, outcome))
    else:
        world.end_workers("c", outcome)
    world.morphs = True
    world.passes(3, steps=1)
    if has_given:
        assert len(world.morphed) == 1
        return
    assert f"{machine} failed while it handed its state over" in world.logged[-2], world.logged
    assert world.state.phase == "running" and len(world.launched) == 1
    world.happens(events.LeaverFailed("b", world.agents["b"], number, outcome))  # comes again, and too late
    world.passes(1, steps=1)
    assert len(world.morphed) == 2


def test_a_loss_while_the_last_holder_of_a_stage_leaves_restarts_from_the_store() -> None:
    """HOT-3: the worker that leaves is the only one that has the second stage, and it is lost."""
    world = begun("a", "b", stages=2, hot=True)
    world.morphs = False
    world.happens(events.MachineListRead(("a", "c")))
    world.passes(3, steps=1)
    assert world.state.phase == "morphing" and world.morphed[0].leaving == (1,)
    world.end_workers("b", killed(1))
    world.passes(3, steps=1)
    assert world.generations == [("a", "b"), ("a", "c")]
    assert any("the workers that stay do not hold every stage" in line for line in world.logged)
    assert "b failed while it handed its state over" in world.launched[1].why


def joining(*machines: str) -> World:
    """Return a world in which d joins these machines, and its workers have all taken their orders."""
    world = begun(*machines, hot=True)
    world.morphs = False
    world.happens(events.MachineListRead((*machines, "d")))
    world.passes(3, steps=1)
    assert world.state.phase == "morphing" and len(world.morphed) == 1
    return world


@pytest.mark.parametrize("how", ["killed", "raises", "ends", "hangs"])
def test_a_joiner_that_fails_in_the_middle_of_its_join_costs_only_itself(how: str) -> None:
    """HOT-3, HOT-5: the others go on in place, also after one that hangs. It is tried again."""
    world = joining("a", "b", "c")
    if how == "hangs":
        world.passes(59)
        assert len(world.morphed) == 1
        world.morphs = True
        world.passes(2)
    else:
        world.end_workers("d", {"killed": killed(3), "raises": raised(3), "ends": WELL}[how])
    world.morphs = True
    world.passes(1, steps=1)
    assert [(m.previous, m.leaving, m.lost) for m in world.morphed[1:]] == [((0, 1, 2), (), (3,))]
    assert world.state.phase == "running" and "d" not in world.workers and world.state.join_failures == 1
    why = {
        "killed": "SIGKILL",
        "raises": "raised ValueError",
        "ends": "ended in the middle",
        "hangs": "in time",
    }
    assert [why[how] in line for line in world.logged if line.startswith("recovering")] == [True]
    world.passes(5, steps=1)
    assert world.workers == dict.fromkeys("abcd", 4) and world.state.join_failures == 0
    assert len(world.launched) == 1 and not world.state.crashes and not world.num_tries


def test_a_joiner_is_not_given_up_for_a_worker_that_hangs_before_the_change() -> None:
    """HOT-3: the job restarts after one deadline. Before, the others waited for the same worker once more."""
    world = begun("a", "b", "c", hot=True)
    world.morphs = False
    world.busy = set("abc")  # b has stopped in its step, and the others wait for it
    world.happens(events.MachineListRead(("a", "b", "c", "d")))
    world.passes(3, steps=1)
    assert world.state.phase == "morphing" and len(world.morphed) == 1
    world.passes(62)
    assert len(world.morphed) == 1 and world.generations == [tuple("abc"), tuple("abcd")]
    assert "the workers did not morph in time" in world.logged[-1] and not world.state.join_failures


@pytest.mark.parametrize("kind, others_go_on", [("varuna.errors.PastCall", True), ("ValueError", False)])
def test_a_joiner_that_raises_after_its_join_costs_only_itself_if_the_others_have_not_seen_its_error(
    kind: str, others_go_on: bool
) -> None:
    """HOT-5"""
    world = begun("a", "b", hot=True)
    world.new.add("d")
    world.happens(events.MachineListRead(("a", "b", "d")))
    world.passes(2, steps=1)
    assert world.state.phase == "running" and "d" in world.workers
    info = ExtraInfo("", "0", kinds=(kind,))
    error = ErrorFile(ErrorMessage(f"{kind}: no", info))
    world.end_workers("d", Outcome(WorkerFailure(2, 1, error)))
    world.passes(0.5, steps=1)
    assert any(line.startswith("recovering") for line in world.logged) == others_go_on
    assert world.state.join_failures == others_go_on


def test_a_joiner_that_fails_again_and_again_is_at_last_added_by_a_restart() -> None:
    """HOT-5: the ladder. It never ends the job."""
    world = joining("a", "b")
    for failures in (1, 2, 3):
        world.end_workers("d", raised(2))
        world.morphs = True
        world.passes(1, steps=1)
        assert world.state.join_failures == (failures if failures < 3 else 0)
        assert world.state.phase == "running"
        world.morphs = False
        world.passes(20, steps=1)
    assert len(world.morphed) == 6
    assert any("joiners have failed 3 times in a row" in line for line in world.logged)
    assert world.generations == [("a", "b"), ("a", "b", "d")] and world.verdict is None


def test_a_joiner_that_dies_before_its_first_step_again_and_again_is_added_by_a_restart() -> None:
    """HOT-5: else it would stop the others for each of its joins, without an end."""
    world = begun("a", "b", hot=True)
    world.new.add("d")  # its worker makes no step
    world.happens(events.MachineListRead(("a", "b", "d")))
    for failures in (1, 2, 3):
        world.passes(2, steps=1)
        assert world.state.phase == "running" and world.workers.keys() == set("abd")
        world.end_workers("d", killed(2))
        world.passes(0.5, steps=1)
        if failures < 3:
            assert world.state.join_failures == failures
            assert world.workers.keys() == set("ab"), "it waits longer and longer"
            world.passes(2.0**failures, steps=1)
    assert any("joiners have failed 3 times in a row" in line for line in world.logged)
    assert world.generations == [("a", "b"), ("a", "b", "d")] and not world.state.crashes
    world.new.clear()
    world.passes(1, steps=1)
    assert world.state.phase == "running" and world.state.join_failures == 0


def test_a_joiner_that_raises_in_its_first_step_restarts_the_job() -> None:
    """HOT-5: all ranks have seen its error, and raise it."""
    world = begun("a", "b", hot=True)
    world.new.add("d")
    world.happens(events.MachineListRead(("a", "b", "d")))
    world.passes(2, steps=1)
    assert world.workers.keys() == set("abd") and world.state.joined == (2,)
    world.end_workers("d", raised(2))
    world.passes(0.5)
    assert len(world.morphed) == 1 and world.state.crashes == 1
    assert any("generation ended" in line and "raised ValueError" in line for line in world.logged)


def test_a_joiner_is_tried_again_as_if_new_once_it_has_made_a_step() -> None:
    """HOT-5: only failures in a row count."""
    world = joining("a", "b")
    world.end_workers("d", killed(2))
    world.morphs = True
    world.passes(1, steps=1)
    world.new.add("d")
    world.passes(4, steps=1)
    assert world.workers.keys() == set("abd") and world.state.join_failures == 1
    world.new.clear()
    world.passes(0.5, steps=1)
    assert world.state.join_failures == 0 and not world.state.joined


def test_a_worker_that_ends_in_the_middle_of_a_change_is_noticed_at_once() -> None:
    """HOT-3: not at the deadline of the morph. The others go on without it."""
    world = joining("a", "b", "c")
    world.end_workers("b", WELL)
    world.morphs = True
    world.passes(0.5, steps=1)
    assert [m.lost for m in world.morphed[1:]] == [(1,)] and len(world.launched) == 1
    assert any("recovering: b was lost: its workers ended in the middle" in line for line in world.logged)


def test_workers_that_end_after_they_have_entered_do_not_break_the_change() -> None:
    """HOT-3: their script was at its end."""
    world = joining("a", "b", "c")
    for machine in ("a", "b", "c", "d"):
        world.end_workers(machine, Outcome(None, entered=2))
    world.carry_out()
    assert len(world.morphed) == 1 and world.verdict is not None
    assert world.verdict.verdict.how == "finished"


def test_a_loss_that_is_reported_again_is_not_one_of_the_worker_that_took_its_rank() -> None:
    """HOT-5: a resumed manager hears of it again from an agent that has no order yet."""
    world = begun("a", hot=True, devices=2)
    world.passes(3, steps=1)
    world.cannot_save, world.morphs = True, False
    world.kill_worker("a", 0)
    world.carry_out()
    (morph,) = world.morphed
    assert (morph.previous, morph.lost, morph.generation.ranks) == ((1,), (0,), ((0,),))
    world.happens(events.WorkerFailed("a", world.agents["a"], 1, killed(0)))
    assert world.state.failures == () and world.state.phase == "morphing"
    world.carry_out()
    assert len(world.morphed) == len(world.launched) == 1


def test_workers_go_on_to_another_generation_if_the_store_dies_in_a_morph() -> None:
    """HOT-3: those that have not connected to it wait for an order; the others lack its error board."""
    world = begun("a", "b", hot=True)
    world.morphs = False
    world.happens(events.MachineListRead(("a", "b", "c")))
    world.passes(3, steps=1)
    generation = world.state.generation
    assert world.state.phase == "morphing" and generation is not None
    master = generation.machines[0]
    world.happens(events.StoreEnded(master, world.agents[master], generation.master_port, "killed", True))
    world.morphs = True
    world.passes(2, steps=1)
    assert [(m.previous, m.lost) for m in world.morphed[1:]] == [((0, 1, 2), (3,))]
    assert world.state.phase == "running" and len(world.launched) == 1
    assert any("recovering: the store of the job on a has ended" in line for line in world.logged)


@pytest.mark.parametrize("second", ["b", "c"])
def test_a_second_loss_while_the_others_go_back_needs_holders_of_all_state(second: str) -> None:
    """HOT-3: b has the only copy of the state of a. Without it, the checkpoint store decides."""
    world = begun("a", "b", "c", "d", stages=4, hot=True)
    world.copies, world.stages = True, 1
    world.passes(3, steps=1)
    world.morphs = False
    world.end_workers("a", killed(0))
    world.passes(1)
    assert [m.lost for m in world.morphed] == [(0,)] and world.state.phase == "morphing"
    assert world.state.morph_holds == ((1, 0), (2, 1), (3, 2))
    world.end_workers(second, killed("bcd".index(second)))
    world.morphs = True
    world.passes(1)
    assert [m.lost for m in world.morphed[1:]] == ([(1,)] if second == "c" else [])
    assert any("do not hold every stage" in line for line in world.logged) == (second == "b")


@pytest.mark.parametrize("victim", ["c", "b"])
def test_state_that_each_rank_has_alone_survives_only_the_loss_of_a_joiner_in_a_change(victim: str) -> None:
    """HOT-3: ZeRO. The ranks that were there before have all state as long as all of them live."""
    world = begun("a", "b", hot=True)
    world.replicated = world.morphs = False
    world.happens(events.MachineListRead(("a", "b", "c")))
    world.passes(3, steps=1)
    assert world.state.phase == "morphing" and not world.state.morph_whole
    world.end_workers(victim, killed("abc".index(victim)))
    world.morphs = True
    world.passes(1, steps=1)
    assert [m.lost for m in world.morphed[1:]] == ([(2,)] if victim == "c" else [])
    assert any("do not hold every stage" in line for line in world.logged) == (victim == "b")


def test_survivors_that_are_too_few_wait_for_another_machine_when_their_joiner_fails() -> None:
    """HOT-3, HOT-5: D = 1: they still have copies of the lost state."""
    world = begun("a", "b", stages=2, hot=True)
    world.copies = True
    world.passes(3, steps=1)
    world.morphs = False
    world.end_workers("b", killed(1))
    world.passes(2)
    assert world.state.phase == "morphing" and world.morphed[-1].previous == (0, None)
    world.end_workers("b", raised(1))
    world.morphs = True
    world.passes(5)
    assert [m.previous for m in world.morphed] == [(0, None), (0, None)]
    assert world.state.phase == "running" and len(world.launched) == 1
    assert len([line for line in world.logged if line.startswith("holding")]) == 2


def test_survivors_that_wait_for_a_machine_restart_if_one_of_them_loses_a_worker() -> None:
    """HOT-3: the next generation counts on that worker, and would wait for it until its deadline."""
    world = begun("a", "b", "c", "d", stages=8, hot=True, devices=2)
    world.copies = True
    world.copied = lambda rank, generation: (rank - 2) % 8  # type: ignore[method-assign]
    world.passes(3, steps=1)
    world.prepares = False
    world.lose_agent("d")
    world.passes(2)
    assert world.state.holding and world.prepared[-1].joiners == ("d",)
    world.kill_worker("b", 2)
    world.prepares = True
    world.passes(3)
    assert not world.morphed and world.state.phase == "running"
    assert [launch.generation.machines for launch in world.launched[1:]] == [("a", "b", "c", "d")]


# ---------------------------------------------------------------- a manager that is killed in a change


class InterruptedWorld(JournaledWorld):
    """A manager that is killed when it has sent orders to some machines."""

    def __init__(self, path: Path, heard: Sequence[str]) -> None:
        self.heard = heard
        super().__init__(path, hot=True)
        self.happens(events.MachineListRead(("a", "b", "c")))
        self.passes(1)
        self.passes(3, steps=1)

    def morph(self, morph: commands.Morph, machines: Sequence[str] = ()) -> None:
        super().morph(morph, machines or (*self.heard, "no other"))


@pytest.mark.parametrize("heard", ["", "a", "d", "ab", "abcd"])
def test_a_manager_that_was_killed_in_a_join_goes_on_with_it(tmp_path: Path, heard: str) -> None:
    """V45, HOT-2: it sends the orders again; an agent that has its order ignores it."""
    world = InterruptedWorld(tmp_path / "journal", heard)
    world.morphs = False
    world.happens(events.MachineListRead(("a", "b", "c", "d")))
    world.passes(3, steps=1)
    assert len(world.morphed) == 1 and world.workers["d"] == 2
    world.morphs = True
    world.restart("a", "b", "c", "d")
    world.passes(1, steps=1)
    assert world.workers == dict.fromkeys("abcd", 2) and world.state.phase == "running"
    assert len(world.launched) == len(world.morphed) == 1 and not world.num_tries
    world.restart("a", "b", "c", "d")
    world.passes(3, steps=1)
    assert world.state.phase == "running" and world.workers == dict.fromkeys("abcd", 2), (
        "that is journaled, too"
    )


@pytest.mark.parametrize("heard", ["", "b", "c", "ab", "abc"])
def test_a_manager_that_was_killed_in_a_leave_goes_on_with_it(tmp_path: Path, heard: str) -> None:
    """V45, HOT-2: the machine that leaves hands its state over, and is dismissed afterwards."""
    for lost in (False, True):
        world = InterruptedWorld(tmp_path / f"journal {lost}", heard)
        world.morphs = False
        world.happens(events.MachineListRead(("b", "c")))
        world.passes(3, steps=1)
        (morph,) = world.morphed
        assert morph.leaving == (0,)
        if lost:
            world.agents.pop("a")
            world.workers.pop("a")
        else:
            world.morphs = True
        world.restart("b", "c")
        assert "a" in world.state.leaving
        world.passes(1, steps=1)
        assert world.state.phase == "morphing" if lost else world.state.phase == "running"
        world.morphs, world.heard = True, "bc"
        world.passes(14, steps=1)
        assert world.state.phase == "running" and len(world.launched) == 1
        assert set(world.workers) == set(world.agents) == {"b", "c"} and len(world.morphed) == 1 + lost


# ---------------------------------------------------------------- deadlines


def test_a_morph_is_not_ended_while_tensors_move() -> None:
    """HOT-2: 20 GB take minutes. Without progress for a minute it ends."""
    world = begun("a", "b", "c", hot=True)
    world.morphs = False
    world.bytes_move = True
    world.happens(events.MachineListRead(("a", "b")))
    world.passes(2, steps=1)
    world.passes(600)
    assert world.state.phase == "morphing" and len(world.launched) == 1
    world.bytes_move = False
    world.passes(59)
    assert world.state.phase == "morphing"
    world.passes(4)
    assert len(world.launched) == 2 and "did not morph in time" in world.launched[1].why


def test_the_time_of_a_planned_change_begins_when_all_workers_have_seen_their_orders() -> None:
    """HOT-2: a script may evaluate or write files for minutes between two steps. A hang in a step counts."""
    for in_step in (False, True):
        world = begun("a", "b", "c", hot=True)
        world.busy = {"b"}
        world.happens(events.MachineListRead(("a", "b")))
        world.passes(2, steps=1)
        world.passes(70 if in_step else 300, in_step=in_step)
        assert (world.state.phase == "morphing") != in_step and len(world.launched) == 1 + in_step
        if in_step:
            continue
        world.busy.clear()
        world.morph(world.morphed[0])
        world.passes(1, steps=1)
        assert world.state.phase == "running" and world.workers == {"a": 2, "b": 2}


def test_survivors_of_a_loss_wait_for_one_that_is_busy_between_two_steps() -> None:
    """HOT-3: 15 minutes, as in a planned change. One that does not end its step is a hang."""
    for in_step in (False, True):
        world = begun("a", "b", "c", hot=True)
        world.passes(3, steps=1)
        world.busy = {"b"}
        world.end_workers("c", killed(2))
        world.passes(800 if not in_step else 70, in_step=in_step)
        assert [m.lost for m in world.morphed] == [(2,)] and len(world.launched) == 1 + in_step
        if in_step:
            continue
        world.busy.clear()
        world.morph(world.morphed[0])
        world.passes(1, steps=1)
        assert world.state.phase == "running" and len(world.launched) == 1


def test_a_deadline_of_a_machine_that_leaves_does_not_end_its_handover() -> None:
    """HOT-3: when it is gone, the others go on in place."""
    world = begun("a", "b", "c", hot=True)
    world.morphs = False
    world.happens(events.NoticeReceived("c", world.now + 5, "the cloud takes it away"))
    world.passes(10)
    assert world.state.phase == "morphing" and len(world.launched) == 1
    world.unreachable.add("c")
    world.lose_agent("c")
    world.morphs = True
    world.passes(2, steps=1)
    assert world.state.phase == "running" and len(world.launched) == 1


def test_after_a_morph_that_took_too_long_planned_changes_save_and_restart() -> None:
    """HOT-2: so they lose no step again. Losses are still survived in place, which clears it."""
    world = begun("a", "b", "c", hot=True)
    world.morphs = False
    world.happens(events.MachineListRead(("a", "b")))
    world.passes(70)
    assert world.generations == [("a", "b", "c"), ("a", "b")]
    world.morphs = True
    world.passes(3, steps=1)
    world.happens(events.MachineListRead(("a", "b", "d")))
    world.passes(3, steps=1)
    assert world.generations[2:] == [("a", "b", "d")] and len(world.morphed) == 1 and world.num_tries == 1
    assert any("a change in place took too long before (c leaves: " in line for line in world.logged)
    world.passes(3, steps=1)
    world.end_workers("b", killed(1))
    world.passes(5, steps=1)
    assert [m.lost for m in world.morphed[1:]] == [(1,), ()] and len(world.launched) == 3


def test_a_change_right_after_another_waits_until_the_first_machine_has_a_store() -> None:
    """HOT-2: it opens one within milliseconds. Nothing restarts."""
    world = begun("a", "b", "c", hot=True)
    world.happens(events.StoreEnded("a", world.agents["a"], world.state.members["a"].store_port, "killed"))
    world.state = msgspec.structs.replace(world.state, since=world.now)
    world.happens(events.MachineListRead(("a", "b")))
    world.passes(3, steps=1)
    assert not world.morphed and not world.num_tries
    world.happens(events.StoreReady("a", world.agents["a"], 4000))
    world.passes(1, steps=1)
    assert [m.leaving for m in world.morphed] == [(2,)] and len(world.launched) == 1


# ---------------------------------------------------------------- crashes


def test_losses_that_are_survived_by_going_back_end_no_job_that_makes_steps() -> None:
    """HOT-3: with copies, survivors repeat some steps, and may be hit again before the newest one."""
    world = begun("a", "b", stages=2, hot=True)
    world.copies = True
    world.passes(10, steps=1)
    newest = world.iteration
    for count in range(8):
        world.kill_worker("b", 1)
        world.iteration = newest - 20  # of their copies
        world.steps_before = 20 + 4 * count
        world.passes(2)
        assert world.state.phase == "running" and world.verdict is None, world.logged
        world.passes(1, steps=1)
    assert len(world.launched) == 1 and world.state.crashes <= 2 and world.state.best_iteration == newest
    world.passes(10, steps=1)
    assert world.state.best_iteration > newest


def test_a_worker_that_dies_at_the_same_step_again_and_again_ends_the_job() -> None:
    """HOT-3: also if the others repeat some steps each time. Without steps in between, after four times."""
    for repeats in (True, False):
        world = begun("a", "b", stages=2, hot=True)
        world.copies = True
        world.passes(10, steps=1)
        newest, count = world.iteration, 0
        while world.verdict is None:
            count += 1
            world.kill_worker("b", 1)
            world.iteration = newest - 4
            world.steps_before = 4 * count if repeats else 4
            world.passes(20)
            world.passes(1, steps=repeats)
        assert count == (17 if repeats else 4)
        assert "without progress in between" in world.verdict.verdict.reason
