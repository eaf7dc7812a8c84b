"""`decide`: at any time one generation, only on live machines, and every job can end."""

from collections.abc import Sequence
from itertools import pairwise

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from varuna.morph import commands, events
from varuna.morph.decide import decide, decide_all
from varuna.morph.failures import BROKEN, SCRIPT_MISTAKE, ErrorFile, ErrorMessage, ExtraInfo, WorkerFailure
from varuna.morph.run.worker_env import ranks_of_machine
from varuna.morph.state import (
    CodeIdentity,
    Generation,
    JobState,
    MachinePlan,
    ManagerSettings,
    MorphParts,
    Outcome,
    WorkerProgress,
)
from varuna.plan.search.choose import lay_out

WELL = Outcome(None)
SAVED = Outcome(None, on_demand=True)


def raised(rank: int, kind: str = "ValueError", *, seconds: float = 1.0) -> Outcome:
    info = ExtraInfo(f"Traceback of {kind}", "1", kinds=(kind,), seconds=seconds)
    return Outcome(WorkerFailure(rank, 1, ErrorFile(ErrorMessage(f"{kind}: no", info))))


def killed(rank: int) -> Outcome:
    return Outcome(WorkerFailure(rank, -9, None))


class World:
    """Simulated machines, agents and workers that follow the commands; the clock is a number."""

    def __init__(
        self, machines: Sequence[str], *, stages: int = 1, hot: bool = False, devices: int = 1
    ) -> None:
        self.state = JobState(settings=ManagerSettings(hot=hot))
        self.devices = devices  # of each machine
        self.new: set[str] = set()  # machines whose workers have made no step
        self.copies = False  # each worker has a copy of the state of the one before it
        self.replicated = True  # each replica has the whole state of its stage
        self.why_not = ""  # why workers cannot morph in place
        self.codes: dict[str, CodeIdentity] = {}  # of the workers of each machine
        self.waited = 0.0  # from the notice of a loss to the order: part of the pause
        self.prepares = True  # joiners get prepared
        self.morphs = True  # workers carry orders out
        self.entered: dict[str, int] = {}  # machine: generation that its workers report
        self.ranks: dict[str, tuple[int, ...]] = {}  # machine: ranks of its live workers
        self.busy: set[str] = set()  # machines whose workers do not see their orders yet
        self.taken: dict[str, int] = {}  # machine: last order that its workers have taken
        self.bytes_move = False  # workers report progress while they morph
        self.morphed: list[commands.Morph] = []
        self.prepared: list[commands.Prepare] = []
        self.stages = stages
        self.now = 100.0
        self.agents: dict[str, str] = {}  # those that are connected
        self.unresponsive: set[str] = set()  # connected, but silent and without effect
        self.workers: dict[str, int] = {}  # machine: generation of its live workers
        self.last: dict[str, int] = {}  # agent: generation of its last workers
        self.pending: list[commands.Command] = []
        self.launched: list[commands.Launch] = []
        self.logged: list[str] = []
        self.released: list[str] = []
        self.iteration = 0
        self.steps_before = 0  # steps of the workers that were repeated after losses
        self.num_agents = 0
        self.starts_agents = True
        self.unreachable: set[str] = set()  # no agent can be started there
        self.slow_to_exit: set[str] = set()  # its agent does not exit when it is dismissed
        self.hung = False  # its workers hear nothing
        self.progress_differs = False  # a machine counts more activity than another
        self.staggered = False  # a tick has the heartbeat of one machine only
        self.cannot_save = False  # its store is full
        self.num_tries = 0  # requests to save
        self.failed_saves = 0
        self.saving = False  # a save runs, and takes long
        self.script_saves = False  # the library cannot save on request
        self.checkpoint: events.CheckpointFound | None = None  # None: the newest is whole
        self.verdict: commands.Finish | None = None
        self.happens(events.MachineListRead(tuple(machines)))

    # ------------------------------------------------------------ deciding and carrying out

    def happens(self, event: events.Event) -> None:
        self.state, found = decide(self.state, event, self.now)
        for command in found:
            if isinstance(command, commands.Launch):
                self.check_launch(command)
            elif isinstance(command, commands.Morph):
                self.check_morph(command)
            self.pending.append(command)

    def check_launch(self, launch: commands.Launch) -> None:
        generation = launch.generation
        assert not set(self.workers) - self.given_up(), "an older generation is alive"
        for machine, agent in zip(generation.machines, generation.agents, strict=True):
            assert self.state.members[machine].agent == agent != ""
            assert self.state.members[machine].listed or self.state.members[machine].kept
        assert generation.layout.num_ranks == sum(map(len, generation.ranks))
        assert generation.number > max((one.generation.number for one in self.launched), default=0)
        self.launched.append(launch)

    def check_morph(self, morph: commands.Morph) -> None:
        """HOT-1, HOT-3: the old ranks that stay or leave hold every stage, and none of them is lost."""
        alive = {rank for rank in (*morph.previous, *morph.leaving) if rank is not None}
        assert not alive & set(morph.lost)
        held = alive | {self.copied(rank, morph.last) for rank in alive if self.copies}
        assert all(held & set(stage) for stage in morph.last.layout.stage_map)
        everyone = set(range(morph.last.layout.num_ranks))
        assert alive | set(morph.lost) & everyone == everyone
        assert morph.generation.number > morph.last.number and morph.generation.master_port
        for machine, agent in zip(morph.generation.machines, morph.generation.agents, strict=True):
            assert self.state.members[machine].agent == agent != ""
        self.morphed.append(morph)

    def copied(self, rank: int, generation: Generation) -> int:
        return (rank - 1) % generation.layout.num_ranks

    def given_up(self) -> set[str]:
        """Return the machines that the manager has given up; their workers cannot disturb the job."""
        return {name for name in self.workers if self.known_agent(name) is None}

    def known_agent(self, machine: str) -> str | None:
        member = self.state.members.get(machine)
        return member.agent if member is not None and member.agent else None

    def carry_out(self) -> None:
        """Carry out all commands, with their immediate consequences."""
        while self.pending:
            command = self.pending.pop(0)
            if isinstance(command, commands.StartAgent):
                if self.starts_agents and command.machine not in self.unreachable:
                    self.join(command.machine)
                else:
                    self.happens(events.AgentNotStarted(command.machine, "the machine is dead"))
            elif isinstance(command, commands.EndAgent) and command.machine in self.unresponsive:
                pass  # it will see when it comes back
            elif isinstance(command, commands.EndAgent):
                if command.unresponsive or command.machine not in self.slow_to_exit:
                    self.lose_agent(command.machine)
            elif isinstance(command, commands.MakePlan):
                self.happens(events.PlanReady(self.plan(command.machines, command.devices)))
            elif isinstance(command, commands.FindCheckpoint):
                self.happens(self.checkpoint or events.CheckpointFound(self.iteration // 10 * 10))
            elif isinstance(command, commands.Launch):
                self.start_all(command.generation, command.generation.machines)
            elif isinstance(command, commands.Prepare):
                self.prepared.append(command)
                self.start_all(command.generation, command.joiners)
                for machine in command.joiners:
                    self.entered[machine] = 0
            elif isinstance(command, commands.Morph):
                self.morph(command)
            elif isinstance(command, commands.RepeatOrders):
                self.morph(command.morph, command.machines)
            elif isinstance(command, commands.SaveAndEnd) and self.cannot_save:
                self.num_tries += 1
                self.failed_saves += 1
            elif isinstance(command, commands.SaveAndEnd):
                self.num_tries += 1
                if not self.hung and not self.saving and not self.unresponsive & set(command.machines):
                    for machine in command.machines:
                        self.end_workers(machine, SAVED)
            elif isinstance(command, commands.KillWorkers):
                for machine in command.machines:
                    if machine in self.agents and machine not in self.unresponsive:
                        last = self.last.get(self.agents[machine], command.generation)
                        if last <= command.generation:
                            self.workers.pop(machine, None)
                        ended = min(last, command.generation)
                        self.happens(events.WorkersEnded(machine, self.agents[machine], ended, ()))
            elif isinstance(command, commands.ReleaseMachines):
                self.released.extend(command.machines)
            elif isinstance(command, commands.LogEvent):
                self.logged.append(f"{command.what}: {command.why}")
            elif isinstance(command, commands.Finish):
                assert self.verdict is None
                self.verdict = command

    def start_workers(self, machine: str, number: int) -> None:
        agent = self.agents[machine]
        if number > self.last.get(agent, 0):  # else the agent takes it for an outdated message
            self.workers[machine] = self.last[agent] = number

    def start_all(self, generation: Generation, machines: tuple[str, ...]) -> None:
        for machine, ranks in zip(generation.machines, generation.ranks, strict=True):
            if machine in machines and machine in self.agents and machine not in self.unresponsive:
                self.start_workers(machine, generation.number)
                self.ranks[machine], self.entered[machine] = ranks, generation.number
                self.happens(events.StoreReady(machine, self.agents[machine], 2000))

    def morph(self, morph: commands.Morph, machines: Sequence[str] = ()) -> None:
        """Let the workers carry the order out, if all of them hear it. `machines`: only these get it."""
        stay, number = morph.generation.machines, morph.generation.number
        leave = [name for name in morph.last.machines if name not in stay and name in self.workers]
        for machine, ranks in zip(stay, morph.generation.ranks, strict=True):
            if machines and machine not in machines:
                continue
            if machine in self.agents and machine in self.workers and machine not in self.unresponsive:
                self.workers[machine] = self.last[self.agents[machine]] = number
                self.ranks[machine] = ranks
                self.happens(events.StoreReady(machine, self.agents[machine], 3000))
                if machine not in self.busy:
                    self.taken[machine] = number
        if self.morphs and all(
            self.workers.get(name) == self.taken.get(name) == number != self.entered.get(name)
            for name in stay
        ):
            self.entered.update(dict.fromkeys(stay, number))
            for machine in leave:
                self.end_workers(machine, WELL)

    def plan(self, machines: tuple[str, ...], devices: int = 0) -> MachinePlan:
        number = devices or self.devices
        try:
            layout = lay_out(len(machines) * number, self.stages, batch_size=12, microbatch_size=1)
        except ValueError as error:
            return MachinePlan(machines, problem=str(error), devices=devices)
        places = range(len(machines))
        ranks = [ranks_of_machine(layout, place, devices_per_machine=number) for place in places]
        used = tuple(name for name, found in zip(machines, ranks, strict=True) if found)
        return MachinePlan(machines, used, tuple(filter(None, ranks)), layout, devices=devices)

    # ------------------------------------------------------------ events

    def join(self, machine: str) -> None:
        if machine in self.agents:
            return
        self.num_agents += 1
        self.agents[machine] = f"agent {self.num_agents}"
        self.happens(events.AgentJoined(machine, self.agents[machine], None, machine))
        self.happens(events.StoreReady(machine, self.agents[machine], 1000 + self.num_agents))

    def lose_agent(self, machine: str) -> None:
        self.workers.pop(machine, None)
        self.unresponsive.discard(machine)
        if agent := self.agents.pop(machine, None):
            self.happens(events.AgentLeft(machine, agent, "it hung up"))

    def go_silent(self, machine: str) -> None:
        if machine in self.agents:
            self.unresponsive.add(machine)

    def come_back(self, machine: str) -> None:
        """Reconnect with the same workers."""
        if machine in self.unresponsive:
            self.unresponsive.discard(machine)
            has = self.last.get(self.agents[machine])
            self.happens(events.AgentJoined(machine, self.agents[machine], has, machine, 999))
            if has is not None and machine not in self.workers:
                self.happens(events.WorkersEnded(machine, self.agents[machine], has, (SAVED,)))

    def end_workers(self, machine: str, outcome: Outcome) -> None:
        if machine in self.workers and machine in self.agents and machine not in self.unresponsive:
            generation = self.workers.pop(machine)
            self.happens(events.WorkersEnded(machine, self.agents[machine], generation, (outcome,)))

    def kill_worker(self, machine: str, rank: int) -> None:
        """Kill one worker; the machine may have others."""
        if machine not in self.workers or machine not in self.agents or machine in self.unresponsive:
            return
        self.ranks[machine] = tuple(other for other in self.ranks[machine] if other != rank)
        if self.ranks[machine]:
            self.fail_worker(machine, killed(rank))
        else:
            self.end_workers(machine, killed(rank))

    def fail_worker(self, machine: str, outcome: Outcome) -> None:
        if machine in self.workers and machine in self.agents and machine not in self.unresponsive:
            self.happens(events.WorkerFailed(machine, self.agents[machine], self.workers[machine], outcome))

    def all_finish(self) -> None:
        for machine in list(self.workers):
            self.end_workers(machine, WELL)

    def passes(self, seconds: float, *, steps: int = 0, in_step: bool = True) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.25
            self.iteration += steps
            beats = {
                machine: (agent, self.workers.get(machine), self.progress(machine, in_step=in_step))
                for machine, agent in self.agents.items()
                if machine not in self.unresponsive
            }
            if self.staggered:
                due = list(beats)[int(self.now / 0.25) % len(beats)]
                beats = {due: beats[due]}
            self.happens(events.Tick(beats))
            self.carry_out()

    def progress(self, machine: str, *, in_step: bool) -> tuple[WorkerProgress, ...]:
        if machine not in self.workers:
            return ()
        has_copy = self.copies and self.entered[machine]
        generation = self.state.generation if has_copy else None
        moved = int(self.now * 4) if self.bytes_move and self.entered[machine] < self.workers[machine] else 0
        return tuple(
            WorkerProgress(
                rank,
                copy_of=None if generation is None else self.copied(rank, generation),
                taken=self.taken.get(machine, 0),
                hot=not self.why_not and machine not in self.new,
                why_not=self.why_not,
                replicated=self.replicated,
                waits=self.prepares and not self.entered[machine],
                code=self.codes.get(machine, CodeIdentity()),
                generation=self.entered[machine],
                morph_seconds=0.1 + self.waited if self.morphed else 0.0,
                morph_parts=MorphParts(waited=self.waited),
                iteration=self.iteration,
                steps=0 if machine in self.new else self.iteration + self.steps_before,
                activity=self.iteration + moved + (ord(machine[-1]) if self.progress_differs else 0),
                in_step=in_step,
                step_seconds=0.5 if self.iteration else 0.0,
                store="/store",
                saving=self.saving,
                script_saves=self.script_saves,
                failed_saves=self.failed_saves,
                save_problem="no space left" if self.failed_saves else "",
            )
            for rank in self.ranks[machine]
        )

    @property
    def generations(self) -> list[tuple[str, ...]]:
        return [launch.generation.machines for launch in self.launched]


def begun(*machines: str, stages: int = 1, hot: bool = False, devices: int = 1) -> World:
    world = World(machines, stages=stages, hot=hot, devices=devices)
    world.passes(1)
    world.passes(2, steps=1)
    return world


# ---------------------------------------------------------------- scenarios


def test_a_job_starts_when_all_its_machines_are_there_and_ends_when_its_workers_have() -> None:
    world = begun("a", "b")
    world.all_finish()
    world.carry_out()
    assert world.generations == [("a", "b")]
    assert world.verdict is not None and world.verdict.verdict.how == "finished"


def test_a_new_machine_joins_after_a_save() -> None:
    """V39"""
    world = begun("a", "b")
    world.happens(events.MachineListRead(("a", "b", "c")))
    world.passes(3, steps=1)
    assert world.generations == [("a", "b"), ("a", "b", "c")]
    assert world.launched[-1].why == "c joins"
    assert world.launched[-1].generation.resume_step == world.launched[-1].generation.resume_step is not None


def test_a_machine_removed_from_the_list_is_dropped_after_a_save_and_its_agent_ends() -> None:
    """V39"""
    world = begun("a", "b")
    world.happens(events.MachineListRead(("b",)))
    world.passes(3, steps=1)
    assert world.generations == [("a", "b"), ("b",)]
    assert list(world.agents) == ["b"]


def test_nothing_restarts_if_the_best_plan_stays_the_same() -> None:
    """V39: a third machine does not help two stages, and the order of the list does not matter."""
    world = begun("a", "b", stages=2)
    world.happens(events.MachineListRead(("c", "b", "a")))
    world.passes(5, steps=1)
    assert world.generations == [("a", "b")]
    assert any(line.startswith("plan unchanged") for line in world.logged)


def test_a_list_that_keeps_changing_is_used_once_it_is_stable() -> None:
    world = begun("a", "b")
    for extra in ("c", "d", "e"):
        world.happens(events.MachineListRead(("a", "b", extra)))
        world.passes(0.5, steps=1)
    assert len(world.generations) == 1
    world.passes(3, steps=1)
    assert world.generations[1:] == [("a", "b", "e")]


def test_machines_that_warm_up_together_join_together() -> None:
    world = begun("a")
    world.starts_agents = False
    world.happens(events.MachineListRead(("a", "b", "c")))
    for machine in ("b", "c"):
        world.agents[machine] = machine
        world.happens(events.AgentJoined(machine, machine, None, machine))
    world.passes(3, steps=1)
    world.happens(events.StoreReady("b", "b", 2001))
    world.passes(0.5, steps=1)
    assert world.generations == [("a",)], "another one is still starting"
    world.happens(events.StoreReady("c", "c", 2002))
    world.carry_out()
    assert world.generations == [("a",), ("a", "b", "c")], "all are ready, and the list is stable"


def test_an_empty_list_changes_nothing() -> None:
    world = begun("a", "b")
    world.happens(events.MachineListRead(()))
    world.passes(5, steps=1)
    assert world.generations == [("a", "b")] and world.verdict is None


def test_a_lost_machine_is_dropped_at_once_and_the_job_resumes_from_the_newest_checkpoint() -> None:
    """V42"""
    world = begun("a", "b", "c")
    world.passes(10, steps=1)
    world.starts_agents = False
    world.lose_agent("b")
    world.carry_out()
    assert world.generations[1] == ("a", "c")
    world.starts_agents = True
    assert world.launched[1].generation.resume_step == world.iteration // 10 * 10
    world.passes(5, steps=1)
    assert world.generations[2:] == [("a", "c", "b")], "it was restarted and joined"


def test_a_silent_machine_is_lost_within_two_seconds_and_its_old_workers_are_killed() -> None:
    """V42: before it joins again."""
    world = begun("a", "b")
    world.go_silent("b")
    world.passes(2, steps=1)
    assert world.generations[1:] == [("a",)]
    assert world.workers["b"] == 1
    world.come_back("b")
    world.carry_out()
    assert "b" not in world.workers
    world.passes(15, steps=1)
    assert world.generations[2:] == [("a", "b")]


def test_a_flapping_machine_does_not_restart_the_job_each_time() -> None:
    world = begun("a", "b")
    for _ in range(6):
        world.lose_agent("b")
        world.passes(10, steps=1)
    assert len(world.generations) < 6
    world.passes(400, steps=1)
    assert world.generations[-1] == ("a", "b")


def test_a_killed_worker_restarts_the_job_at_once_on_the_same_machines() -> None:
    """V42"""
    world = begun("a", "b")
    world.fail_worker("a", killed(0))
    world.carry_out()
    assert world.generations == [("a", "b"), ("a", "b")]


def test_a_failure_that_quotes_another_waits_for_the_original() -> None:
    world = begun("a", "b")
    world.fail_worker("b", raised(1, "varuna.errors.WorkerError"))
    world.carry_out()
    assert len(world.generations) == 1
    world.fail_worker("a", killed(0))
    world.carry_out()
    assert "rank 0" in world.launched[1].why


def test_repeated_crashes_back_off_and_end_the_job_with_the_reason() -> None:
    """V43"""
    world = begun("a")
    starts = []
    while world.verdict is None:
        if "a" in world.workers:
            starts.append(world.now)
            world.end_workers("a", raised(0))
        world.passes(0.25)
    gaps = [round(later - earlier) for earlier, later in pairwise(starts)]
    assert gaps == [0, 1, 2]
    assert world.verdict.verdict.how == "failed" and "Traceback of ValueError" in world.verdict.verdict.reason


def test_crashes_with_progress_in_between_do_not_stop_the_job() -> None:
    world = begun("a")
    for _ in range(20):
        world.end_workers("a", killed(0))
        world.passes(3, steps=1)
    assert world.verdict is None and len(world.generations) == 21


def test_a_script_that_fails_before_its_first_step_is_not_retried() -> None:
    """V33: with an exception, or with an exit code as argparse does."""
    for outcome in (raised(0), Outcome(WorkerFailure(0, 2, None))):
        world = World(["a"])
        world.passes(1)
        world.end_workers("a", outcome)
        world.carry_out()
        assert world.verdict is not None and world.verdict.verdict.reason.startswith("before its first step")


def test_the_current_step_is_known_after_a_restart_from_an_older_one() -> None:
    """`varuna status` shows it, not the highest step ever reached."""
    world = begun("a")
    world.passes(3, steps=5)
    reached = world.iteration
    assert world.state.iteration == world.state.best_iteration == reached
    world.checkpoint = events.CheckpointFound(20)
    world.end_workers("a", killed(0))
    world.iteration = 20  # the workers load this checkpoint
    world.passes(0.25)
    assert world.state.iteration == 20 and world.state.best_iteration == reached
    world.passes(0.5, steps=1)
    assert world.state.iteration == world.iteration < reached


def test_a_mistake_of_the_script_is_not_retried() -> None:
    """EXA-9: for example, a call that only some ranks make. Steps were made before."""
    info = ExtraInfo("Traceback", "1", kinds=(SCRIPT_MISTAKE, "varuna.errors.WorkerError"), seconds=1.0)
    error = ErrorFile(ErrorMessage("CallMismatch: rank 0 is in evaluate(), rank 1 in step()", info))
    world = begun("a")
    world.passes(3, steps=5)
    world.end_workers("a", Outcome(WorkerFailure(0, 1, error)))
    world.carry_out()
    assert world.verdict is not None and world.verdict.verdict.how == "failed"
    assert "rank 0 is in evaluate(), rank 1 in step()" in world.verdict.verdict.reason


def test_a_broken_checkpoint_does_not_count_as_a_crash_while_older_ones_are_found() -> None:
    """REL-1: the workers set each one aside; one that is found twice could not be marked."""
    world = begun("a")
    world.iteration = 100
    for _ in range(8):  # more than the limit of crashes
        world.end_workers("a", raised(0, BROKEN))
        world.iteration -= 10
        world.passes(1)
    assert world.verdict is None and len(world.generations) == 9
    for _ in range(8):
        if "a" in world.workers:
            world.end_workers("a", raised(0, BROKEN))
        world.passes(5)
    assert world.verdict is not None and "4 times without progress" in world.verdict.verdict.reason


def test_a_store_whose_checkpoints_are_all_broken_ends_the_job() -> None:
    """REL-1"""
    world = begun("a")
    world.checkpoint = events.CheckpointFound(None, "all are broken: 10, 20", none_left=True)
    world.end_workers("a", killed(0))
    world.passes(1)
    assert world.verdict is not None and world.verdict.verdict.reason == "all are broken: 10, 20"


def test_a_hung_job_restarts_and_a_slow_job_does_not() -> None:
    """V43: a step takes 0.5 s, so a minute without progress in a step is a hang; between steps it is not."""
    world = begun("a", "b")
    world.passes(59)
    assert len(world.generations) == 1
    world.passes(2)
    assert len(world.generations) == 2 and "no progress for 60 s" in world.launched[1].why
    world.passes(1, steps=1)
    world.passes(300, in_step=False)
    assert len(world.generations) == 2


def test_a_hang_is_detected_however_the_heartbeats_of_the_machines_fall() -> None:
    """V43: the machines have different counts, and no tick has all of them."""
    world = begun("a", "b", "c")
    world.progress_differs = world.staggered = True
    world.passes(3, steps=1)
    world.passes(59)
    assert len(world.generations) == 1
    world.passes(4)
    assert len(world.generations) == 2 and "no progress for" in world.launched[1].why


def test_a_hung_job_is_detected_during_a_save_request() -> None:
    """V43: after the time limit of a hang, without adding the limit of a save."""
    world = begun("a", "b")
    world.hung = True
    world.passes(40)
    world.happens(events.MachineListRead(("a", "b", "c")))
    world.passes(15)
    assert world.state.phase == "saving"
    world.hung = False
    world.passes(7)
    assert world.generations == [("a", "b"), ("a", "b", "c")] and "no progress for" in world.launched[1].why


def test_a_machine_with_a_notice_is_dropped_at_once() -> None:
    """V41"""
    world = begun("a", "b")
    world.happens(events.NoticeReceived("b", world.now + 20, "the cloud takes it away"))
    world.carry_out()
    assert world.generations == [("a", "b"), ("a",)]


def test_a_machine_that_leaves_is_released_once_when_it_has_no_workers() -> None:
    """V41: so a cloud need not wait for the deadline; a machine whose notice is withdrawn is not released."""
    world = begun("a", "b")
    world.happens(events.NoticeReceived("b", world.now + 20, "the cloud takes it away"))
    assert not any(isinstance(command, commands.ReleaseMachines) for command in world.pending), (
        "it is at work"
    )
    world.carry_out()
    world.passes(1, steps=1)
    assert world.released == ["b"]
    world.happens(events.NoticeWithdrawn("b"))
    world.passes(3, steps=1)
    assert world.released == ["b"] and world.generations[-1] == ("a", "b")


def test_workers_that_do_not_save_in_time_are_killed() -> None:
    world = begun("a", "b")
    world.happens(events.NoticeReceived("b", world.now + 5, "the cloud takes it away"))
    world.pending = [c for c in world.pending if not isinstance(c, commands.SaveAndEnd)]
    world.happens(events.PlanReady(world.plan(("a",))))
    world.pending.clear()  # the request to save is lost
    world.passes(6, steps=1)
    assert world.generations[1:] == [("a",)] and "did not save and end in time" in world.launched[1].why


def test_a_stop_saves_first_and_a_second_one_kills() -> None:
    world = begun("a", "b")
    world.happens(events.StopRequested("enough"))
    assert world.state.phase == "saving"
    world.happens(events.StopRequested("SIGINT", save=False, exit_code=130))
    world.carry_out()
    assert world.verdict is not None and world.verdict.verdict.exit_code == 130 and not world.workers


def test_a_machine_may_be_lost_after_another_has_saved_and_left() -> None:
    """V42: the manager no longer knows the machine that has left."""
    world = begun("a", "b", "c")
    world.happens(events.MachineListRead(("a", "b")))
    world.passes(0.5, steps=1)
    world.go_silent("b")
    world.passes(0.75)
    assert world.state.phase == "saving"
    world.end_workers("c", SAVED)
    world.lose_agent("c")
    assert "c" not in world.state.members
    world.passes(2)
    assert world.generations[1:] == [("a",)]


# ---------------------------------------------------------------- machines that leave and come back


def test_a_machine_that_is_put_back_joins_as_soon_as_its_old_agent_is_gone() -> None:
    """REL-4: not after the 60 s in which a new agent, which the old one keeps out, could connect."""
    world = begun("a", "b")
    world.slow_to_exit.add("b")
    world.happens(events.MachineListRead(("a",)))
    world.passes(3, steps=1)
    assert world.generations[1:] == [("a",)] and "b" in world.agents
    world.happens(events.MachineListRead(("a", "b")))
    world.passes(3, steps=1)
    assert world.num_agents == 2, "no second agent is started beside the old one"
    world.slow_to_exit.clear()
    world.lose_agent("b")
    world.passes(1.25, steps=1)
    assert world.generations[2:] == [("a", "b")]
    assert not any("lost" in line for line in world.logged), "nobody was lost"


def test_an_agent_that_does_not_exit_is_killed_and_replaced() -> None:
    """REL-4"""
    world = begun("a", "b")
    world.slow_to_exit.add("b")
    world.happens(events.MachineListRead(("a",)))
    world.passes(2, steps=1)
    world.happens(events.MachineListRead(("a", "b")))
    world.passes(12, steps=1)
    assert world.generations[1:] == [("a",), ("a", "b")] and world.num_agents == 3


def test_a_machine_that_flaps_through_the_list_waits_longer_each_time() -> None:
    """REL-4"""
    world = begun("a", "b")
    waits = []
    for _ in range(4):
        world.happens(events.MachineListRead(("a",)))
        world.passes(2, steps=1)
        assert world.generations[-1] == ("a",)
        left = world.now
        world.happens(events.MachineListRead(("a", "b")))
        while world.generations[-1] == ("a",):
            world.passes(0.25, steps=1)
        waits.append(round(world.now - left))
    assert [wait // 10 for wait in waits] == [0, 1, 3, 7], waits
    assert any("left or lost 4 times recently: not used for 7" in line for line in world.logged)
    world.passes(700, steps=1)
    world.happens(events.MachineListRead(("a",)))
    world.passes(2, steps=1)
    world.happens(events.MachineListRead(("a", "b")))
    world.passes(2, steps=1)
    assert world.generations[-1] == ("a", "b"), "that was long ago"


def test_machines_are_left_only_when_their_successors_have_joined() -> None:
    """REL-6: a list of machines that cannot be reached changes nothing, and `varuna status` says why."""
    world = begun("a", "b")
    world.unreachable = {"x", "y"}
    world.happens(events.MachineListRead(("x", "y")))
    world.passes(300, steps=1)
    assert world.generations == [("a", "b")] and set(world.workers) == {"a", "b"}
    assert world.state.problems["machines kept"].startswith(
        "a, b is off the list, but works on: x, y has not joined"
    )
    world.unreachable = {"y"}
    world.passes(90, steps=1)
    assert world.generations == [("a", "b")], "the other may still come"
    world.unreachable = set()
    world.passes(90, steps=1)
    assert world.generations == [("a", "b"), ("x", "y")]
    assert set(world.agents) == {"x", "y"} and not world.state.problems


def test_a_kept_machine_works_on_after_a_crash_and_leaves_by_a_drain() -> None:
    """REL-6"""
    world = begun("a", "b")
    world.unreachable = {"x"}
    world.happens(events.MachineListRead(("x",)))
    world.passes(3, steps=1)
    world.fail_worker("a", killed(0))
    world.passes(3, steps=1)
    assert world.generations == [("a", "b"), ("a", "b")]
    world.happens(events.NoticeReceived("a", None, "`varuna drain`"))
    world.passes(3, steps=1)
    assert world.generations[2:] == [("b",)] and set(world.agents) == {"b"}
    world.happens(events.MachineListRead(("a", "x")))
    world.passes(3, steps=1)
    assert world.generations[3:] == [], "a is back, but x is still to come"
    world.happens(events.MachineListRead(("a",)))
    world.passes(30, steps=1)
    assert world.generations[3:] == [("a",)]


def test_machines_stay_if_those_of_the_list_are_not_enough() -> None:
    """REL-6: one machine cannot hold two stages."""
    world = begun("a", "b", stages=2)
    world.happens(events.MachineListRead(("a",)))
    world.passes(30, steps=1)
    assert world.generations == [("a", "b")]
    assert "a is not enough" in world.state.problems["machines kept"]
    world.fail_worker("b", killed(1))
    world.passes(5, steps=1)
    assert world.generations[1:] == [("a", "b")]
    world.happens(events.MachineListRead(("a", "c")))
    world.passes(5, steps=1)
    assert world.generations[2:] == [("a", "c")]


def test_a_machine_that_is_removed_leaves_at_once_though_another_is_lost() -> None:
    """V39, REL-6: only machines that came into the list with the removal are its successors."""
    world = begun("a", "b", "c")
    world.unreachable = {"c"}
    world.lose_agent("c")
    world.passes(3, steps=1)
    assert world.generations[1:] == [("a", "b")]
    world.happens(events.MachineListRead(("a", "c")))
    world.passes(3, steps=1)
    assert world.generations[2:] == [("a",)]


# ---------------------------------------------------------------- changes that cannot save


def test_a_change_that_cannot_save_waits_and_training_goes_on() -> None:
    """REL-3: no step is lost, the manager says why, and tries again after growing waits."""
    world = begun("a", "b")
    world.cannot_save = True
    world.happens(events.MachineListRead(("a",)))
    world.passes(3, steps=1)
    assert world.state.phase == "running" and world.workers == {"a": 1, "b": 1}
    assert "no space left" in world.state.reason
    assert "b leaves: the job cannot save: no space left" in world.state.problems["change postponed"]
    world.passes(200, steps=1)
    assert world.generations == [("a", "b")] and world.num_tries == 5, "after 10, 20, 40, 80 s"
    assert any("next try in 80 s" in line for line in world.logged)
    world.cannot_save = False
    world.passes(160, steps=1)
    assert world.generations[1:] == [("a",)] and world.launched[1].why == "b leaves"
    assert not world.state.problems


def test_a_postponed_change_is_dropped_when_the_list_is_restored() -> None:
    world = begun("a", "b")
    world.cannot_save = True
    world.happens(events.MachineListRead(("a",)))
    world.passes(3, steps=1)
    world.happens(events.MachineListRead(("a", "b")))
    world.passes(30, steps=1)
    assert world.num_tries == 1 and not world.state.problems and world.generations == [("a", "b")]


def test_a_machine_with_a_deadline_leaves_though_the_job_cannot_save() -> None:
    """REL-3, V41: the job tries until then."""
    world = begun("a", "b")
    world.cannot_save = True
    world.happens(events.NoticeReceived("b", world.now + 20, "the cloud takes it away"))
    world.passes(19, steps=1)
    assert world.generations == [("a", "b")] and world.num_tries > 2
    world.passes(3, steps=1)
    assert world.generations[1:] == [("a",)] and "could not save" in world.launched[1].why


def test_a_job_that_cannot_save_does_not_stop_until_it_must() -> None:
    """REL-3: `varuna stop` saves; `varuna stop --now` does not."""
    world = begun("a")
    world.cannot_save = True
    world.happens(events.StopRequested("`varuna stop`"))
    world.passes(60, steps=1)
    assert world.workers and world.verdict is None and world.num_tries == 3
    assert "`varuna stop --now` ends the job" in world.state.problems["change postponed"]
    world.cannot_save = False
    world.passes(40, steps=1)
    assert world.verdict is not None and world.verdict.verdict.how == "stopped"


def test_a_save_that_takes_long_is_not_killed() -> None:
    """REL-3: a minute is the limit until it begins."""
    world = begun("a", "b")
    world.saving = True
    world.happens(events.MachineListRead(("a",)))
    world.passes(300, in_step=False)
    assert world.state.phase == "saving" and world.num_tries == 1
    world.saving = False
    world.passes(62, in_step=False)
    assert world.generations[1:] == [("a",)] and world.num_tries == 2


def test_workers_that_report_no_steps_but_begin_to_save_are_not_killed() -> None:
    """TRA-5: those of Lightning save at the end of an epoch."""
    world = World(("a", "b"))
    world.passes(3)
    world.saving = True
    world.happens(events.MachineListRead(("a",)))
    world.passes(300)
    assert world.state.phase == "saving" and world.generations == [("a", "b")]
    for machine in ("a", "b"):
        world.end_workers(machine, SAVED)
    world.saving = False
    world.passes(2)
    assert world.generations == [("a", "b"), ("a",)] and world.verdict is None


def test_workers_without_a_step_that_do_not_begin_to_save_are_killed() -> None:
    """REL-3: they have nothing to keep."""
    world = World(("a", "b"))
    world.passes(3)
    world.hung = True
    world.happens(events.MachineListRead(("a",)))
    world.passes(60)
    assert world.generations == [("a", "b")]
    world.passes(6)
    assert world.generations[1:] == [("a",)] and "did not save and end in time" in world.launched[1].why


def test_workers_whose_script_ignores_the_request_to_save_are_killed_after_a_minute() -> None:
    """REL-3: the library cannot save for it, so more requests would change nothing."""
    world = begun("a", "b")
    world.script_saves = world.hung = True
    world.happens(events.MachineListRead(("a",)))
    world.passes(60, steps=1)
    assert world.generations == [("a", "b")]
    world.passes(6, steps=1)
    assert world.generations[1:] == [("a",)] and "did not save and end in time" in world.launched[1].why


def test_workers_whose_script_saves_and_ends_start_again() -> None:
    """REL-3: in its own handler, of which the library does not know."""
    world = begun("a", "b")
    world.script_saves = world.hung = True
    world.happens(events.MachineListRead(("a",)))
    world.passes(2, steps=1)
    world.all_finish()
    world.passes(2)
    assert world.verdict is None and world.generations == [("a", "b"), ("a",)]


# ---------------------------------------------------------------- morphs in place


def test_a_machine_joins_in_place_while_the_others_train() -> None:
    """HOT-2, HOT-5: the order comes when the joiner is prepared; nothing is saved or restarted."""
    world = begun("a", "b", hot=True)
    world.prepares = False
    world.happens(events.MachineListRead(("a", "b", "c")))
    world.passes(5, steps=1)
    assert world.state.phase == "running" and world.workers == {"a": 1, "b": 1, "c": 2}
    assert [one.joiners for one in world.prepared] == [("c",)] and not world.morphed
    world.prepares = True
    world.passes(1, steps=1)
    (morph,) = world.morphed
    assert (morph.previous, morph.leaving, morph.lost) == ((0, 1, None), (), ())
    assert world.state.phase == "running" and world.workers == {"a": 2, "b": 2, "c": 2}
    assert len(world.launched) == 1 and not world.num_tries
    assert any(line.startswith("morphed: 2: in place") for line in world.logged)


def test_a_machine_leaves_in_place_and_its_agent_ends_after_the_handover() -> None:
    """HOT-2"""
    world = begun("a", "b", hot=True)
    world.morphs = False
    world.happens(events.MachineListRead(("b",)))
    world.passes(3, steps=1)
    (morph,) = world.morphed
    assert (morph.previous, morph.leaving, morph.generation.machines) == ((1,), (0,), ("b",))
    assert world.state.phase == "morphing" and set(world.agents) == {"a", "b"}
    world.morphs = True
    world.morph(morph)
    world.passes(1, steps=1)
    assert world.state.phase == "running" and list(world.agents) == ["b"] and not world.num_tries


def test_workers_that_cannot_morph_in_place_restart_and_the_log_says_why() -> None:
    """HOT-2: the ladder."""
    world = begun("a", "b", hot=True)
    world.why_not = "the script passes tensors to step()"
    world.happens(events.MachineListRead(("a",)))
    world.passes(3, steps=1)
    assert world.generations == [("a", "b"), ("a",)] and not world.morphed
    assert any("rank 0: the script passes tensors to step()" in line for line in world.logged)


def test_a_joiner_that_fails_is_tried_again_and_nothing_happens_to_the_others() -> None:
    """HOT-5: after three failures in a row, the machine joins by a restart."""
    world = begun("a", "b", hot=True)
    world.prepares = False
    world.happens(events.MachineListRead(("a", "b", "c")))
    for count in (1, 2, 3):
        world.passes(10, steps=1)
        assert len(world.prepared) == count and world.workers["a"] == 1
        world.end_workers("c", raised(2))
        world.carry_out()
        assert count == 3 or (world.workers == {"a": 1, "b": 1} and "c" in world.agents)
    world.passes(3, steps=1)
    assert world.generations == [("a", "b"), ("a", "b", "c")] and world.verdict is None
    assert any("joiners have failed 3 times in a row" in line for line in world.logged)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"varuna": "2"}, "has varuna 2, and the job runs 1"),
        ({"torch": "3"}, "has torch 3, and the job runs 2"),
        ({"script": "newer"}, "runs another version of the script than the job"),
        ({"model": "wider"}, "has wrapped another model than the job"),
    ],
)
def test_a_joiner_with_other_code_is_refused_until_it_is_listed_again(
    other: dict[str, str], why: str
) -> None:
    """HOT-5: the job goes on without it. With the right code, it joins."""
    code = CodeIdentity(varuna="1", torch="2", script="same", model="deep")
    world = begun("a", "b", hot=True)
    world.codes = {"a": code, "b": code, "c": msgspec.structs.replace(code, **other)}
    world.happens(events.MachineListRead(("a", "b", "c")))
    world.passes(30, steps=1)
    assert len(world.prepared) == 1 and not world.morphed and world.workers == {"a": 1, "b": 1}
    assert sum(line.startswith(f"joiner refused: c {why}; the job goes on") for line in world.logged) == 1
    world.codes["c"] = code
    world.happens(events.MachineListRead(("a", "b")))
    world.passes(30, steps=1)
    world.happens(events.MachineListRead(("a", "b", "c")))
    world.passes(30, steps=1)
    assert len(world.morphed) == 1 and len(world.launched) == 1 and not world.num_tries


def test_joiners_that_wait_for_a_store_that_never_opens_are_given_up() -> None:
    """HOT-5: in time, and with the reason. The job does not prepare for good: the next rung is a save."""
    world = begun("a", "b", hot=True)
    world.prepares = False
    world.happens(events.MachineListRead(("a", "b", "c")))
    world.passes(5, steps=1)
    world.happens(events.StoreEnded("a", world.agents["a"], world.state.members["a"].store_port, "killed"))
    world.prepares = True
    world.passes(world.state.settings.prepare_seconds + 1, steps=1)
    assert not world.morphed and world.num_tries == 1
    assert any("a has opened no store for the next generation within 600 s" in line for line in world.logged)
    assert any(line.endswith("a has no store for the next generation") for line in world.logged)


def test_a_change_right_after_a_join_waits_for_the_first_step_of_the_joiner() -> None:
    """HOT-2: until then it does not know whether it can morph in place."""
    world = begun("a", "b", hot=True)
    world.new.add("c")
    world.happens(events.MachineListRead(("a", "b", "c")))
    world.passes(3, steps=1)
    world.happens(events.MachineListRead(("a", "c")))
    world.passes(3, steps=1)
    assert world.workers == {"a": 2, "b": 2, "c": 2} and len(world.morphed) == 1
    world.new.clear()
    world.passes(1, steps=1)
    assert world.workers == {"a": 3, "c": 3} and len(world.morphed) == 2 and len(world.launched) == 1


def test_a_machine_with_a_deadline_leaves_before_another_one_joins() -> None:
    """HOT-2, HOT-5"""
    world = begun("a", "b", hot=True)
    world.prepares = False
    world.happens(events.MachineListRead(("a", "b", "c")))
    world.passes(3, steps=1)
    world.happens(events.NoticeReceived("b", world.now + 20, "the cloud takes it away"))
    world.passes(2, steps=1)
    assert [morph.generation.machines for morph in world.morphed] == [("a",)]
    assert "b" in world.released and len(world.prepared) == 2
    world.prepares = True
    world.passes(2, steps=1)
    assert world.morphed[-1].generation.machines == ("a", "c") and len(world.launched) == 1


def test_survivors_of_a_killed_worker_go_on_in_place_and_its_machine_joins_again() -> None:
    """HOT-3"""
    world = begun("a", "b", hot=True)
    world.passes(3, steps=1)
    world.end_workers("b", killed(1))
    world.carry_out()
    assert [(m.previous, m.leaving, m.lost) for m in world.morphed] == [((0,), (), (1,))]
    world.passes(5, steps=1)
    assert world.morphed[1].previous == (0, None) and world.workers == {"a": 3, "b": 3}
    assert len(world.launched) == 1 and world.state.losses == 1


def test_survivors_of_a_lost_machine_go_on_in_place() -> None:
    """HOT-3"""
    world = begun("a", "b", "c", hot=True)
    world.starts_agents = False
    world.lose_agent("a")
    world.carry_out()
    assert [(m.previous, m.lost) for m in world.morphed] == [((1, 2), (0,))]
    world.passes(3, steps=1)
    assert world.state.phase == "running" and len(world.launched) == 1
    world.go_silent("c")  # its connections stay open: the order frees the workers that wait for it
    world.passes(3, steps=1)
    assert [(m.previous, m.lost) for m in world.morphed[1:]] == [((0,), (1,))] and len(world.launched) == 1


def test_a_loss_without_another_holder_of_a_stage_restarts_from_the_store() -> None:
    """HOT-3: with one replica, nobody has the state of the lost stage."""
    world = begun("a", "b", stages=2, hot=True)
    world.passes(3, steps=1)
    world.end_workers("b", killed(1))
    world.passes(2, steps=1)
    assert not world.morphed and world.generations == [("a", "b")] * 2


def test_survivors_that_are_too_few_hold_their_state_until_a_machine_replaces_the_lost_one() -> None:
    """HOT-3: the machine of a killed worker; another one that joins later; none in time."""
    world = begun("a", "b", stages=2, hot=True)
    world.copies = True
    world.passes(3, steps=1)
    world.end_workers("b", killed(1))
    world.passes(1)
    assert [(m.previous, m.leaving, m.lost) for m in world.morphed] == [((0, None), (), (1,))]
    assert world.workers == {"a": 2, "b": 2} and world.state.phase == "running"
    world.passes(3, steps=1)
    world.unreachable.add("a")
    world.lose_agent("a")
    world.passes(20)
    assert world.state.phase == "running" and world.state.holding and world.workers == {"b": 2}
    world.happens(events.MachineListRead(("b", "c")))
    world.passes(2)
    assert [(m.previous, m.lost) for m in world.morphed[1:]] == [((1, None), (0,))]
    assert world.workers == {"b": 3, "c": 3} and len(world.launched) == 1 and world.state.crashes == 1
    world.passes(3, steps=1)
    world.unreachable.add("c")
    world.lose_agent("c")
    world.passes(44)
    assert world.state.holding and world.workers == {"b": 3}
    world.passes(2)
    assert world.state.phase == "gathering" and not world.workers and len(world.morphed) == 2
    assert "cold restart: no machine has replaced the lost one in time" in world.logged
    world.unreachable.clear()
    world.passes(60)
    assert world.generations == [("a", "b"), ("b", "c")]


def test_survivors_hold_their_state_only_if_a_machine_may_come_and_can_be_stopped() -> None:
    """HOT-3: the lost machine leaves; joiners fail again and again; the user stops the job."""
    for end in ("leaves", "fails", "stop"):
        world = begun("a", "b", stages=2, hot=True)
        world.copies = True
        world.prepares = False
        world.passes(3, steps=1)
        if end == "leaves":
            world.happens(events.NoticeReceived("b", world.now + 0.1, "the cloud takes it away"))
        world.end_workers("b", killed(1))
        world.passes(1)
        assert world.state.holding == (end != "leaves")
        if end == "fails":
            for _ in range(3):
                world.end_workers("b", raised(1))
                world.passes(10)
        elif end == "stop":
            world.happens(events.StopRequested("enough"))
            world.carry_out()
            assert world.verdict is not None and world.verdict.verdict.how == "stopped"
        assert not world.morphed and (end != "fails" or len(world.launched) == 2)


def test_a_loss_right_after_a_start_waits_for_the_next_reports_of_the_survivors() -> None:
    """HOT-3: a first step may be newer than the last heartbeat. Workers that cannot morph restart at once."""
    for why_not in ("", "the script passes tensors to step()"):
        for dies in (False, True):
            world = World(["a", "b", "c"], hot=True)
            world.passes(1)
            world.why_not = why_not
            world.passes(0.25, steps=1)
            if not why_not:
                world.state = msgspec.structs.replace(world.state, progress={})
            if dies:
                world.lose_agent("b")
            else:
                world.end_workers("b", killed(1))
            world.carry_out()
            assert len(world.launched) == 1 + bool(why_not) and not world.morphed
            world.passes(2, steps=1)
            assert [m.lost for m in world.morphed[:1]] == ([] if why_not else [(1,)])
            assert len(world.launched) == 1 + bool(why_not)


def test_survivors_of_a_loss_in_a_morph_go_on_in_place() -> None:
    """HOT-3: a rank or the joiner itself is lost while the workers enter a generation; then another one."""
    for victim, rank in (("b", 1), ("c", 2)):
        world = begun("a", "b", "c", hot=True)
        world.happens(events.MachineListRead(("a", "b", "c", "d")))
        world.morphs = False
        world.passes(3, steps=1)
        assert world.state.phase == "morphing" and len(world.morphed) == 1
        if victim == "b":
            world.end_workers("b", killed(1))
        else:  # its worker has ended before its agent got the order
            agent = world.agents["c"]
            world.workers.pop("c")
            world.happens(events.WorkersEnded("c", agent, 1, (killed(2),)))
        world.morphs = True
        world.passes(1, steps=1)
        assert [(m.lost, len(m.previous)) for m in world.morphed[1:2]] == [((rank,), 3)]
        assert world.state.phase == "running" and len(world.launched) == 1
        world.lose_agent("a")
        world.lose_agent("d")
        world.passes(2, steps=1)
        assert len(world.morphed[-1].generation.machines) >= 1 and len(world.launched) == 1


def test_a_morph_that_takes_too_long_restarts_from_the_store() -> None:
    """HOT-3: the ladder."""
    world = begun("a", "b", "c", hot=True)
    world.morphs = False
    world.happens(events.MachineListRead(("a", "b")))
    world.passes(2, steps=1)
    assert world.state.phase == "morphing"
    world.passes(65)
    assert world.generations == [("a", "b", "c"), ("a", "b")] and "c" not in world.workers


def test_a_script_that_ends_before_it_sees_the_order_finishes_the_job() -> None:
    world = begun("a", "b", hot=True)
    world.morphs, world.busy = False, {"a", "b"}
    world.happens(events.MachineListRead(("a", "b", "c")))
    world.passes(5, steps=1)
    assert world.state.phase == "morphing"
    for machine in ("a", "b"):
        world.end_workers(machine, WELL)
    world.carry_out()
    assert world.verdict is not None and world.verdict.verdict.how == "finished" and not world.workers


# ---------------------------------------------------------------- random events

NAMES = st.sampled_from("abcd")
HAPPENINGS = st.one_of(
    st.tuples(st.just("list"), st.lists(NAMES, max_size=4, unique=True)),
    st.tuples(
        st.sampled_from(
            [
                *["lose", "silent", "back", "killed", "one killed", "raised", "second", "ended", "saved"],
                *["notice", "unstarted"],
            ]
        ),
        NAMES,
    ),
    st.tuples(st.just("time"), st.sampled_from([0.25, 1.0, 3.0, 20.0, 100.0])),
    st.tuples(st.just("steps"), st.sampled_from([0.25, 1.0, 3.0])),
    st.tuples(st.just("stop"), st.booleans()),
    st.tuples(st.just("switch"), st.sampled_from(["prepares", "morphs", "why_not", "copies"])),
)


def play(world: World, what: str, how: object) -> None:
    if what == "list":
        assert isinstance(how, list)
        world.happens(events.MachineListRead(tuple(how)))
    elif what in ("time", "steps"):
        assert isinstance(how, float)
        world.passes(how, steps=what == "steps")
    elif what == "switch":
        turned = {"why_not": "" if world.why_not else "tensors"}
        setattr(world, str(how), turned.get(str(how), not getattr(world, str(how), False)))
    elif what == "stop":
        world.happens(events.StopRequested("enough", save=bool(how)))
    else:
        machine = str(how)
        rank = next(iter(world.ranks.get(machine, ())), 0)
        {
            "lose": lambda: world.lose_agent(machine),
            "silent": lambda: world.go_silent(machine),
            "back": lambda: world.come_back(machine),
            "killed": lambda: world.fail_worker(machine, killed(rank)),
            "one killed": lambda: world.kill_worker(machine, rank),
            "raised": lambda: world.end_workers(machine, raised(rank)),
            "second": lambda: world.fail_worker(machine, raised(rank, "varuna.errors.WorkerError")),
            "ended": lambda: world.end_workers(machine, WELL),
            "saved": lambda: world.end_workers(machine, SAVED),
            "notice": lambda: world.happens(events.NoticeReceived(machine, world.now + 5, "notice")),
            "unstarted": lambda: world.happens(events.AgentNotStarted(machine, "no")),
        }[what]()


def recover_and_end(world: World) -> None:
    """All machines recover, and the job must end."""
    for machine in list(world.unresponsive):
        world.come_back(machine)
    world.prepares = world.morphs = True
    world.happens(events.MachineListRead(("a", "b", "e", "f")))
    world.passes(400)
    for _ in range(5):
        if world.verdict is None:
            assert world.workers, f"nothing runs: {world.state.phase}, {world.state.reason}"
            world.all_finish()
            world.carry_out()
            world.passes(130)
    assert world.verdict is not None and not world.workers


@settings(max_examples=60, deadline=None)
@given(st.lists(HAPPENINGS, max_size=40), st.integers(1, 2), st.booleans(), st.booleans(), st.integers(1, 3))
def test_after_any_events_one_generation_lives_at_a_time_and_the_job_can_end(
    story: list[tuple[str, object]], stages: int, promptly: bool, hot: bool, devices: int
) -> None:
    """V42, V43: `World.check_launch` checks it; then all machines recover, and the job must end."""
    world = World(["a", "b"], stages=stages, hot=hot, devices=devices)
    for what, how in story:
        play(world, what, how)
        if promptly:
            world.carry_out()
    recover_and_end(world)


@given(st.lists(HAPPENINGS, max_size=15))
@settings(max_examples=30, deadline=None)
def test_a_state_can_be_written_and_read(story: list[tuple[str, object]]) -> None:
    world = World(["a", "b"])
    for what, how in story:
        play(world, what, how)
    again = msgspec.json.decode(msgspec.json.encode(world.state), type=JobState)
    assert (
        decide(again, events.Tick({}), world.now + 1)[1]
        == decide(world.state, events.Tick({}), world.now + 1)[1]
    )


@given(st.permutations(range(12)), st.lists(st.integers(0, 11), max_size=6))
def test_events_that_arrive_together_have_the_consequences_of_single_ones(
    order: list[int], leaving: list[int]
) -> None:
    """REL-5: a thousand machines may join, and half of them leave, in one batch."""
    names = tuple(f"m{number}" for number in range(12))
    start, _ = decide(JobState(settings=ManagerSettings()), events.MachineListRead(names), 100.0)
    happened: list[events.Event] = []
    for number in order:
        happened.append(events.AgentJoined(names[number], f"agent {number}", None, names[number]))
        happened.append(events.StoreReady(names[number], f"agent {number}", 1))
    happened += [events.AgentLeft(names[number], f"agent {number}", "gone") for number in leaving]
    happened.append(events.Tick({}))
    single = start
    logged: list[commands.Command] = []
    for event in happened:
        single, found = decide(single, event, 100.5)
        logged += [command for command in found if isinstance(command, commands.LogEvent)]
    together, found = decide_all(start, happened, 100.5)
    assert together.members == single.members and together.usable == single.usable
    assert [command for command in found if isinstance(command, commands.LogEvent)] == logged


def test_a_script_may_do_anything_between_the_backwards_of_its_own_loop() -> None:
    """V43, REL-3: a backward that makes no progress is a hang."""
    world = begun("a", "b")
    world.script_saves = True
    world.passes(2, steps=1, in_step=False)
    world.passes(4000, in_step=False)
    assert world.generations == [("a", "b")]
    world.passes(1, steps=1)
    world.passes(62)
    assert len(world.generations) == 2, world.logged
    assert "no progress for 60 s" in world.launched[1].why
