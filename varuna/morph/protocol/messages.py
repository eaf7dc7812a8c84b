"""Messages between the manager, agents and commands.

Some events and commands travel as they are: see `ToManager` and `FromManager`.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from varuna.morph import commands, events
from varuna.morph.state import WorkerProgress
from varuna.observe.history import ScalarPoint, StepPoint
from varuna.observe.ledger import LedgerReport
from varuna.types import Layout, MachineWorkers, repr_without_values

LogStream = Literal["out", "err", "timeline", "trace", "trace.old", "traces"]
"""Files beside the logs: the last measured step, in the log folder of the first rank; recorded steps of a
worker; and the list of all these files of a machine (JSON)."""


class ManagerMessage(msgspec.Struct, frozen=True, tag=True):
    """A message from or to the manager."""


class AgentHello(ManagerMessage, frozen=True):
    """First message of an agent on every connection."""

    job: str
    pid: int
    joined: events.AgentJoined


class AgentHeartbeat(ManagerMessage, frozen=True):
    generation: int | None  # generation of its live workers
    progress: tuple[WorkerProgress, ...] = ()
    morphed: bool = (
        False  # its workers have just entered the generation: the manager does not wait for a tick
    )


class WorkerMetrics(ManagerMessage, frozen=True):
    """New steps and scalars of a worker."""

    rank: int
    steps: tuple[StepPoint, ...] = ()
    scalars: tuple[ScalarPoint, ...] = ()
    dropped: int = 0  # records that were thinned out or overwritten since the last message


class PreemptionReport(ManagerMessage, frozen=True):
    """A machine will be taken away."""

    seconds: float | None  # from now; None: without a deadline
    why: str
    machine: str = ""  # "": the machine of the sender


class WorkerOutput(ManagerMessage, frozen=True):
    """Lines that a worker wrote, for the manager's terminal."""

    rank: int
    text: str
    is_stderr: bool = False


class LogPage(msgspec.Struct, frozen=True):
    """A part of a worker's log, or the result of a search in it. Numbers are places in the file."""

    start: int  # after a search: start of the lines; after a read: end of the data
    stop: int  # end of what was searched or read
    lines: int = 0  # the search is not complete: search for this many lines before `start`
    data: bytes = b""


class LogReply(ManagerMessage, frozen=True):
    request: int
    page: LogPage | None  # None: there is no such log


class Welcome(ManagerMessage, frozen=True):
    environment: Mapping[str, str]  # for all processes of the agent

    def __repr__(self) -> str:
        return repr_without_values(self)


class StartWorkers(ManagerMessage, frozen=True):
    """Start the workers of one machine."""

    generation: int
    workers: MachineWorkers
    joins: bool = False  # they wait for a morph order, which may change everything but the generation


class MorphWorkers(ManagerMessage, frozen=True):
    """Order the workers of one machine into the next generation. See `varuna.types.MorphOrder`."""

    generation: int
    workers: MachineWorkers  # of the next generation; without ranks: all workers hand over, then exit
    last_layout: Layout
    previous: tuple[int | None, ...]
    leaving: tuple[int, ...]
    lost: tuple[int, ...]
    why: str


class Dismiss(ManagerMessage, frozen=True):
    """Exit: the job is over, or the machine is not needed."""

    why: str


class LogRequest(ManagerMessage, frozen=True):
    """Search for the last `lines` lines before `stop`, or, if `lines` is 0, read from `start` to `stop`."""

    request: int
    generation: int
    rank: int
    stream: LogStream
    lines: int
    start: int = 0
    stop: int | None = None  # None: the end of the file


class ManagerRequest(ManagerMessage, frozen=True):
    """The message of a command such as `varuna status`. `varuna logs` sends several."""

    job: str
    what: str  # status, view, stop, drain, logs, preempt
    machine: str = ""
    rank: int = 0
    generation: int | None = None
    stream: LogStream = "out"
    lines: int = 0  # this and the next two: see LogRequest
    start: int = 0
    stop: int | None = None
    seconds: float | None = None
    save: bool = True
    why: str = ""


class ManagerReply(ManagerMessage, frozen=True):
    ok: bool
    text: str
    status: msgspec.Raw = msgspec.Raw(b"null")
    log: LogPage | None = None
    machine: str = ""  # that has the log
    generation: int | None = None  # of the log


class WorkerStatus(msgspec.Struct, frozen=True):
    rank: int
    pid: int
    iteration: int
    compute_seconds: float
    step_seconds: float
    copy_of: int | None = None  # rank whose state it has a copy of


class MachineStatus(msgspec.Struct, frozen=True):
    machine: str
    state: str
    agent_pid: int | None
    seen_seconds_ago: float | None
    workers: tuple[WorkerStatus, ...]


class JobStatus(msgspec.Struct, frozen=True):
    """Output of `varuna status --json`."""

    job: str
    pid: int
    phase: str
    phase_seconds: float
    reason: str
    generation: int | None
    layout: str | None
    resume_step: int | None
    iteration: int
    step_seconds: float
    store: str
    checkpoint_note: str  # the last broken checkpoints that were set aside, and the steps that were lost
    saved_step: int | None
    losses: int
    save_seconds: float  # time that a checkpoint blocks training
    save_every_seconds: float  # autosave interval; 0: off, or unknown before the first save
    slow_machines: tuple[str, ...]
    log_dir: str
    machines: tuple[MachineStatus, ...]
    problems: Mapping[str, str] = {}  # by topic: what the manager lacks or waits for
    ledger: LedgerReport | None = None


ToManager = (
    AgentHello
    | AgentHeartbeat
    | WorkerMetrics
    | events.StoreReady
    | events.StoreEnded
    | events.WorkerFailed
    | events.LeaverFailed
    | events.WorkersEnded
    | PreemptionReport
    | events.NoticeWithdrawn
    | WorkerOutput
    | LogReply
    | ManagerRequest
)
FromManager = (
    Welcome
    | StartWorkers
    | MorphWorkers
    | commands.SaveAndEnd
    | commands.KillWorkers
    | commands.DumpStacks
    | commands.ReleaseMachines
    | Dismiss
    | LogRequest
    | ManagerReply
)

read_to_manager: Callable[[bytes], ToManager] = msgspec.json.Decoder(ToManager).decode
read_from_manager: Callable[[bytes], FromManager] = msgspec.json.Decoder(FromManager).decode
write_message: Callable[[ManagerMessage | events.Event | commands.Command], bytes] = msgspec.json.encode
