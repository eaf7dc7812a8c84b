"""What the manager knows of a job, what may happen to it, and what can be done about that."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from varuna.morph.failures import WorkerFailure
from varuna.types import Layout

Phase = Literal["gathering", "running", "saving", "ending", "over"]
"""
    gathering   nothing runs: machines are waited for, a plan and a checkpoint looked for
    running     the generation's workers are at work, or start
    saving      they have been asked to save and to end
    ending      they have been killed; all that can be reached must say that it is done
    over        the job is
"""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How patient the manager is."""

    morphs: bool = True  # else it keeps to the machines of the start, and ends with the first that fails
    settle_seconds: float = 0.75  # machines must have been the same for so long before a change is planned
    gather_seconds: float = 30.0  # how long those that are there wait for the others when a job starts
    start_seconds: float = 60.0  # from the start of an agent until it dials in
    lost_seconds: float = 1.5  # without a heartbeat
    attach_seconds: float = 10.0  # for agents to find a manager that was started again
    save_seconds: float = 60.0  # for a save, unless a notice leaves less
    end_seconds: float = 10.0  # for an agent to say that its killed workers are gone
    second_hand_seconds: float = 2.0  # to hear from the worker that others blame
    crash_limit: int = 3  # crashes without progress; one more ends the job
    flap_seconds: float = 600.0  # losses of a machine further back than this are forgotten
    hang_steps: float = 10.0  # so many step times within a step without progress are a hang
    hang_seconds: float = 60.0  # but no less than this
    stacks_seconds: float = 0.5  # for the stacks of a hang to be written, before it is ended
    idle_seconds: float = 900.0  # and outside of steps, where anything may happen, than this


class Member(msgspec.Struct, frozen=True):
    """A machine of the list, or one that still has workers."""

    name: str
    listed: bool = True
    agent: str = ""  # the agent that is connected; "" where none is
    address: str = ""  # where other machines reach it
    seen: float = 0.0  # when it was last heard of
    warm: bool = False  # a start costs no import there
    store_port: int = 0  # where it has a store ready for the next generation
    starting: float | None = None  # since when an agent is being started
    retry_at: float = 0.0  # no start before
    start_failures: int = 0  # one after the other
    lost_at: tuple[float, ...] = ()
    welcome_at: float = 0.0  # a flapping machine takes part from then on
    leave_by: float | None = None  # a notice: takes no part any more
    drained: bool = False  # nor this one, until it is listed anew
    released: bool = False  # and it has been told so
    workers: int | None = None  # the generation whose workers it has, or may have

    @property
    def leaves(self) -> bool:
        return self.drained or self.leave_by is not None


class Generation(msgspec.Struct, frozen=True):
    """One start of the job's workers on a set of machines."""

    number: int
    machines: tuple[str, ...]  # those with ranks
    ranks: tuple[tuple[int, ...], ...]  # of each
    agents: tuple[str, ...]  # of each
    layout: Layout
    resume_step: int | None
    master_addr: str
    master_port: int
    plan: str = ""  # the planner's whole answer, to be compared
    environment: Mapping[str, str] = {}  # what the planner wants workers to know


class Proposal(msgspec.Struct, frozen=True):
    """What the planner answers for a set of machines; without a layout, why there is none."""

    machines: tuple[str, ...]  # that it was asked about
    used: tuple[str, ...] = ()  # those with ranks
    ranks: tuple[tuple[int, ...], ...] = ()  # of each
    layout: Layout | None = None
    plan: str = ""
    environment: Mapping[str, str] = {}
    problem: str = ""
    reasons: tuple[str, ...] = ()  # of the planner, for whoever watches

    def same_as(self, generation: Generation) -> bool:
        assert self.layout is not None
        layout = generation.layout
        return (self.used, self.ranks, self.layout.stage_map, self.layout.microbatch_size, self.plan) == (
            generation.machines,
            generation.ranks,
            layout.stage_map,
            layout.microbatch_size,
            generation.plan,
        )


class Outcome(msgspec.Struct, frozen=True):
    """How one worker ended."""

    failure: WorkerFailure | None  # None: normally
    on_demand: bool = False  # after a save that it was asked for
    last_lines: str = ""  # of its stderr


class Pulse(msgspec.Struct, frozen=True):
    """How far a worker is, as its agent reads it off the progress board."""

    rank: int
    pid: int = 0
    iteration: int = 0
    steps: int = 0  # done by this process
    activity: int = 0  # counts whatever shows life: steps, evaluations, checkpoints
    in_step: bool = False
    compute_seconds: float = 0.0  # of its last step, waiting left out
    step_seconds: float = 0.0  # of its last step, from entry to entry
    saved_step: int = -1
    save_seconds: float = 0.0
    save_every_seconds: float = 0.0  # by itself, as far as this rank knows
    store: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """How the job ends."""

    how: Literal["finished", "failed", "stopped"]
    exit_code: int
    reason: str


class JobState(msgspec.Struct, frozen=True):
    settings: Settings = Settings()
    phase: Phase = "gathering"
    since: float = 0.0  # of this phase
    reason: str = "the job starts"  # for this phase
    members: Mapping[str, Member] = {}
    changed_at: float = 0.0  # when the usable machines last changed
    usable: tuple[str, ...] = ()
    present: tuple[str, ...] = ()  # those that are connected, usable or not yet
    present_at: float = 0.0  # when they last changed
    generation: Generation | None = None  # the one at work, or the last
    next_number: int = 1
    ended: Mapping[str, tuple[Outcome, ...]] = {}  # the generation's machines whose workers are all gone
    failures: tuple[Outcome, ...] = ()  # of the generation, in the order in which they were told
    failed_at: float = 0.0
    deadline: float = 0.0  # of saving, and of ending
    asked_plan: tuple[str, ...] | None = None  # the machines for which the planner is at work
    proposal: Proposal | None = None  # the latest
    asked_checkpoint: bool = False
    resume_step: int | None = None  # as the user typed it, for the first generation
    wait_until: float = 0.0  # no start before: crashes back off
    crashes: int = 0  # without progress in between
    best_iteration: int = 0
    iteration_at_crash: int = 0
    progressed_at: float = 0.0  # within this generation
    stacks_at: float = 0.0  # when workers that hang were last asked where
    activity: int = 0
    in_step: bool = False
    step_seconds: float = 0.0
    store: str = ""  # where the job saves
    saved_step: int = -1
    save_seconds: float = 0.0
    save_every_seconds: float = 0.0
    losses: int = 0  # of machines or workers, since the start
    seconds_before: float = 0.0  # that managers of before have watched for them
    attach_until: float = 0.0  # agents of before may dial in: no second one is started
    verdict: Verdict | None = None  # to be carried out when all has ended

    @property
    def active(self) -> bool:
        """Whether workers may be alive."""
        return self.phase in ("running", "saving", "ending")


# ---------------------------------------------------------------- events


class Event(msgspec.Struct, frozen=True, tag=True):
    pass


class ListRead(Event, frozen=True):
    machines: tuple[str, ...]


class AgentJoined(Event, frozen=True):
    machine: str
    agent: str
    generation: int | None  # whose workers it has, or had last
    address: str = ""
    store_port: int = 0


class AgentLeft(Event, frozen=True):
    machine: str
    agent: str
    why: str


class AgentNotStarted(Event, frozen=True):
    machine: str
    why: str


class StoreReady(Event, frozen=True):
    machine: str
    agent: str
    port: int


class WorkerFailed(Event, frozen=True):
    """Told at once; that all workers of the machine are gone is told apart."""

    machine: str
    agent: str
    generation: int
    outcome: Outcome


class WorkersEnded(Event, frozen=True):
    machine: str
    agent: str
    generation: int
    outcomes: tuple[Outcome, ...]
    pulses: tuple[Pulse, ...] = ()  # their last


class Planned(Event, frozen=True):
    proposal: Proposal


class CheckpointFound(Event, frozen=True):
    step: int | None
    problem: str = ""


class Notice(Event, frozen=True):
    """A machine will be taken away, or is to be left."""

    machine: str
    deadline: float | None  # None: no hurry
    why: str


class Recalled(Event, frozen=True):
    """The notice was withdrawn."""

    machine: str


class StopAsked(Event, frozen=True):
    why: str
    save: bool = True
    exit_code: int = 0


class Tick(Event, frozen=True):
    """Time has passed, and with it came heartbeats: of agents, with the pulses of their workers."""

    beats: Mapping[str, tuple[str, int | None, tuple[Pulse, ...]]] = {}  # machine: agent, generation, pulses


# ---------------------------------------------------------------- commands


class Command(msgspec.Struct, frozen=True, tag=True):
    pass


class StartAgent(Command, frozen=True):
    machine: str


class EndAgent(Command, frozen=True):
    """Dismisses it where it is connected; kills what was started where it is not, or does not listen."""

    machine: str
    why: str
    deaf: bool = False


class MakePlan(Command, frozen=True):
    machines: tuple[str, ...]


class FindCheckpoint(Command, frozen=True):
    store: str


class Launch(Command, frozen=True):
    generation: Generation
    why: str
    reasons: tuple[str, ...] = ()  # for this plan


class SaveAndEnd(Command, frozen=True):
    generation: int
    machines: tuple[str, ...]
    why: str


class KillWorkers(Command, frozen=True):
    """All of this generation and older ones."""

    machine: str
    generation: int
    why: str


class DumpStacks(Command, frozen=True):
    generation: int
    machines: tuple[str, ...]


class ReleaseMachine(Command, frozen=True):
    """It leaves, and has no part any more."""

    machine: str


class Tell(Command, frozen=True):
    """For the event log, and for whoever watches."""

    what: str
    why: str


class Finish(Command, frozen=True):
    verdict: Verdict
