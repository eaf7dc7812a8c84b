"""Forks processes that run a function and send back its result; they share this process's memory.

A child starts in milliseconds, with torch imported and the model built. Whatever it changes stays its own.
"""

import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from varuna.errors import WorkerError
from varuna.processes import die_with_parent

KEPT_OUTPUT = 2000
"""Last characters of what a child printed, for the error of a child that died."""
GRACE_SECONDS = 20.0
"""Time that the other ranks of a layout get after one of them failed."""


class ChildError(msgspec.Struct, frozen=True):
    """The error that ended a child, or how the child died."""

    kind: str  # name of the exception's class
    text: str
    is_refusal: bool = False  # of an argument or of the model: CaptureError, ValueError, TypeError, ...
    is_echo: bool = False  # another rank failed first
    trace: str = ""


class Answer(msgspec.Struct, frozen=True):
    """Result of a child: bytes of its own encoding, or an error."""

    value: bytes = b""
    error: ChildError | None = None


class Channel(NamedTuple):
    """One end of a pair of connected sockets; messages are bytes with their length before them."""

    socket: socket.socket

    def send(self, message: bytes) -> None:
        self.socket.sendall(len(message).to_bytes(8, "big") + message)

    def receive(self) -> bytes:
        """Return the next message; raise EOFError if the other end is gone."""
        return self._exactly(int.from_bytes(self._exactly(8), "big"))

    def _exactly(self, count: int) -> bytes:
        chunks = bytearray()
        while len(chunks) < count:
            chunk = self.socket.recv(count - len(chunks))
            if not chunk:
                raise EOFError
            chunks += chunk
        return bytes(chunks)


class Child:
    """A forked process that runs `task(channel)`; its result is the last message."""

    def __init__(self, task: Callable[[Channel], bytes], *, quiet: bool = True) -> None:
        ours, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile() if quiet else None  # noqa: SIM115
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _run(task, Channel(theirs), parent, None if self._output is None else self._output.fileno())
        theirs.close()
        self.channel = Channel(ours)

    def answer(self, message: bytes) -> Answer:
        return msgspec.msgpack.decode(message, type=Answer)

    def end(self) -> ChildError:
        """Kill the child if it still runs; return how it ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.channel.socket.close()
        printed = ""
        if self._output is not None:
            self._output.seek(0)
            printed = self._output.read().decode(errors="replace")[-KEPT_OUTPUT:]
            self._output.close()
        how = os.waitstatus_to_exitcode(status)
        reason = f"signal {signal.Signals(-how).name}" if how < 0 else f"exit code {how}"
        return ChildError("ChildDied", f"the process ended without an answer ({reason}). {printed}".strip())


def _run(task: Callable[[Channel], bytes], channel: Channel, parent: int, output: int | None) -> None:
    """Run the task in the forked child and end it, without the exit handlers of the parent."""
    status = 1
    try:
        die_with_parent(parent)
        if output is not None:
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)  # a notebook's is another
        channel.send(msgspec.msgpack.encode(_answer_of(task, channel)))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _answer_of(task: Callable[[Channel], bytes], channel: Channel) -> Answer:
    try:
        return Answer(value=task(channel))
    except Exception as error:
        return Answer(error=describe_error(error))


def describe_error(error: BaseException) -> ChildError:
    return ChildError(
        kind=type(error).__name__,
        text=str(error) or type(error).__name__,
        is_refusal=isinstance(error, ValueError | TypeError | NotImplementedError),
        is_echo=isinstance(error, WorkerError),
        trace="".join(traceback.format_exception(error))[-6000:],
    )


def run_alone(task: Callable[[], bytes], *, timeout_seconds: float) -> Answer:
    """Run a task in one child."""
    return run_together([lambda _channel: task()], timeout_seconds=timeout_seconds)[0]


def run_together(
    tasks: Sequence[Callable[[Channel], bytes]],
    *,
    timeout_seconds: float,
    relay: Callable[[Sequence[Child]], None] | None = None,
) -> list[Answer]:
    """Run one child for each task at the same time; `relay` passes messages between them at the start."""
    children = [Child(task) for task in tasks]
    pending: dict[Any, int] = {child.channel.socket: rank for rank, child in enumerate(children)}
    answers: dict[int, Answer] = {}
    deadline = time.monotonic() + timeout_seconds
    try:
        if relay is not None:
            with suppress(EOFError, OSError):  # the loop below learns who died
                relay(children)
        while pending and (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select(list(pending), [], [], left)
            for connection in ready:
                rank = pending.pop(connection)
                with suppress(EOFError, OSError):
                    answers[rank] = children[rank].answer(children[rank].channel.receive())
                if rank not in answers or answers[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    finally:
        ends = [child.end() for child in children]
    late = set(pending.values())
    silent = ChildError("Timeout", f"no answer within {timeout_seconds:.0f} s")
    return [
        answers.get(rank, Answer(error=silent if rank in late else ends[rank])) for rank in range(len(tasks))
    ]
