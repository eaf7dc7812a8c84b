"""Events that change the state of a job."""

from collections.abc import Mapping

import msgspec

from varuna.morph.state import Heartbeat, MachinePlan, Outcome, WorkerProgress


class Event(msgspec.Struct, frozen=True, tag=True):
    """Something that happened."""


class MachineListRead(Event, frozen=True):
    machines: tuple[str, ...]


class AgentJoined(Event, frozen=True):
    machine: str
    agent: str
    generation: int | None  # generation of the agent's last workers
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
    """The agent is warm and has a rendezvous store for the next generation. Sent by agents."""

    machine: str
    agent: str
    port: int


class StoreEnded(Event, frozen=True):
    """A store of this or the next generation has ended unexpectedly. Sent by agents."""

    machine: str
    agent: str
    port: int
    why: str
    trains: bool = False  # workers of this machine have trained a step, so they can save


class WorkerFailed(Event, frozen=True):
    """One worker failed while others still run. Sent by agents."""

    machine: str
    agent: str
    generation: int
    outcome: Outcome


class LeaverFailed(Event, frozen=True):
    """A worker that leaves in a morph failed, on a machine whose other workers stay. Sent by agents."""

    machine: str
    agent: str
    generation: int  # that the others enter without it
    outcome: Outcome


class WorkersEnded(Event, frozen=True):
    """All workers of a machine have ended. Sent by agents."""

    machine: str
    agent: str
    generation: int
    outcomes: tuple[Outcome, ...]
    progress: tuple[WorkerProgress, ...] = ()  # final progress of each worker


class PlanReady(Event, frozen=True):
    proposal: MachinePlan


class CheckpointFound(Event, frozen=True):
    step: int | None
    problem: str = ""
    none_left: bool = False  # there are checkpoints, but all are broken


class NoticeReceived(Event, frozen=True):
    """A machine will be taken away, or the user drains it."""

    machine: str
    deadline: float | None  # None: drained, without a deadline
    why: str


class NoticeWithdrawn(Event, frozen=True):
    machine: str


class StopRequested(Event, frozen=True):
    why: str
    save: bool = True
    exit_code: int = 0


class ProblemChanged(Event, frozen=True):
    """The manager lacks something, such as space for its journal, or has it again."""

    topic: str
    why: str  # "": the problem is solved


class Tick(Event, frozen=True):
    """Time has passed. `heartbeats` holds the last heartbeat of each machine since the last tick.

    `heard` has the times at which they came; without it, they come now.
    """

    heartbeats: Mapping[str, Heartbeat] = {}
    heard: Mapping[str, float] = {}
