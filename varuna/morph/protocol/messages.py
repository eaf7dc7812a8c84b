"""What manager, agents and commands say to each other, once the wire has let them in."""

from collections.abc import Mapping

import msgspec

from varuna.morph.state import Outcome, Pulse
from varuna.types import MachineWorkers


class Message(msgspec.Struct, frozen=True, tag=True):
    pass


# ---------------------------------------------------------------- from an agent


class Hello(Message, frozen=True):
    """The first word of an agent, on every connection that it opens."""

    job: str
    machine: str
    agent: str  # this very process
    pid: int
    address: str  # where other machines reach this one
    generation: int | None  # whose workers it has, or had last
    store_port: int  # of the store for the next generation; 0 while it is not warm


class Beat(Message, frozen=True):
    generation: int | None
    pulses: tuple[Pulse, ...] = ()


class StoreOpen(Message, frozen=True):
    """It is warm: a start costs no import, and there is a store for the next generation."""

    port: int


class Failed(Message, frozen=True):
    generation: int
    outcome: Outcome


class Ended(Message, frozen=True):
    """All its workers of that generation are gone."""

    generation: int
    outcomes: tuple[Outcome, ...]
    pulses: tuple[Pulse, ...] = ()  # their last


class Noticed(Message, frozen=True):
    """This machine, or another one that it has heard of, is about to go."""

    seconds: float | None  # from now
    why: str
    machine: str = ""


class Unnoticed(Message, frozen=True):
    """This machine stays after all."""


class Output(Message, frozen=True):
    """What a worker has written, for the terminal."""

    rank: int
    text: str
    error: bool = False


class LogLines(Message, frozen=True):
    question: int
    text: str


# ---------------------------------------------------------------- to an agent


class Welcome(Message, frozen=True):
    environment: Mapping[str, str]  # for all that it starts


class Start(Message, frozen=True):
    """One machine's part of a generation."""

    generation: int
    workers: MachineWorkers


class Save(Message, frozen=True):
    """And end."""

    generation: int


class Kill(Message, frozen=True):
    """All workers of this generation, and older ones; answered by `Ended`."""

    generation: int


class Stacks(Message, frozen=True):
    """To the workers' logs."""

    generation: int


class Release(Message, frozen=True):
    """This machine is about to go, and may: all is saved, and nothing more is asked of it."""


class Dismiss(Message, frozen=True):
    why: str


class AskLog(Message, frozen=True):
    question: int
    generation: int
    rank: int
    lines: int


# ---------------------------------------------------------------- commands and their answers


class Ask(Message, frozen=True):
    """The first and only word of a command such as `varuna status`."""

    job: str
    what: str  # status, stop, drain, logs, preempt
    machine: str = ""
    rank: int = 0
    lines: int = 50
    generation: int | None = None
    seconds: float | None = None
    save: bool = True
    why: str = ""


class Answer(Message, frozen=True):
    ok: bool
    text: str
    status: msgspec.Raw = msgspec.Raw(b"null")


class WorkerStatus(msgspec.Struct, frozen=True):
    rank: int
    pid: int
    iteration: int
    compute_seconds: float
    step_seconds: float


class MachineStatus(msgspec.Struct, frozen=True):
    machine: str
    state: str
    agent_pid: int | None
    seen_seconds_ago: float | None
    workers: tuple[WorkerStatus, ...]


class Status(msgspec.Struct, frozen=True):
    """What `varuna status` shows."""

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
    saved_step: int | None
    losses: int
    save_seconds: float  # that a checkpoint keeps training waiting
    save_every_seconds: float  # by itself; 0: not, or not known before it has saved once
    slow_machines: tuple[str, ...]
    log_dir: str
    machines: tuple[MachineStatus, ...]


FromAgent = Hello | Beat | StoreOpen | Failed | Ended | Noticed | Unnoticed | Output | LogLines | Ask
ToAgent = Welcome | Start | Save | Kill | Stacks | Release | Dismiss | AskLog | Answer

_from_agent: msgspec.json.Decoder[FromAgent] = msgspec.json.Decoder(FromAgent)
_to_agent: msgspec.json.Decoder[ToAgent] = msgspec.json.Decoder(ToAgent)


def read_from_agent(payload: bytes) -> FromAgent:
    return _from_agent.decode(payload)


def read_to_agent(payload: bytes) -> ToAgent:
    return _to_agent.decode(payload)


def write(message: Message) -> bytes:
    return msgspec.json.encode(message)
