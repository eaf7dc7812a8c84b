"""Replies of the manager to commands: `varuna status`, `stop`, `drain` and `logs`."""

import asyncio
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from varuna.morph import events
from varuna.morph.metrics.view import describe_member
from varuna.morph.protocol import messages
from varuna.morph.protocol.generations import read_machines
from varuna.morph.run.connections import ManagerConnection
from varuna.morph.state import JobState
from varuna.observe.job_view import JobView
from varuna.observe.ledger import LedgerReport

LOG_SECONDS = 8.0
"""Time limit for an agent to send a page of a log."""


class LogWait(NamedTuple):
    """A command that waits for a page of a log."""

    caller: ManagerConnection
    machine: str
    generation: int
    timer: asyncio.TimerHandle


class RequestHandler:
    def __init__(
        self,
        job: str,
        *,
        log_dir: str,
        agents: Mapping[str, ManagerConnection],
        slow_machines: Collection[str],
        ledger: Callable[[], LedgerReport],
        view: Callable[[], JobView],
        put_event: Callable[[events.Event], None],
    ) -> None:
        self._job = job
        self._log_dir = log_dir
        self._agents = agents
        self._slow_machines = slow_machines
        self._ledger = ledger
        self._view = view
        self._put_event = put_event
        self._waiting: dict[int, LogWait] = {}
        self._num_log_requests = 0

    def handle(
        self, caller: ManagerConnection, request: messages.ManagerRequest, state: JobState, *, now: float
    ) -> None:
        if request.job != self._job:
            caller.refuse(f"it asks for job {request.job}, but this is job {self._job}")
        elif request.what == "logs":
            self._request_log(caller, request, state)
        elif request.what == "status":
            status = msgspec.json.encode(self._status(state, now=now))
            _reply(caller, True, "", status)
        elif request.what == "view":
            _reply(caller, True, "", msgspec.json.encode(self._view()))
        elif request.what == "stop":
            self._put_event(events.StopRequested(request.why or "stop requested", save=request.save))
            _reply(caller, True, "the job saves and ends" if request.save else "the job ends")
        elif request.what in ("drain", "preempt"):
            if request.machine in state.members:
                deadline = None if request.seconds is None else now + request.seconds
                why = request.why or "drain requested"
                self._put_event(events.NoticeReceived(request.machine, deadline, why))
                _reply(caller, True, f"the job continues without {request.machine}")
            else:
                _reply(caller, False, f"{request.machine} is not a machine of this job")
        else:
            _reply(caller, False, f"unknown request {request.what!r}")

    def _status(self, state: JobState, *, now: float) -> messages.JobStatus:
        generation = state.generation
        return messages.JobStatus(
            job=self._job,
            pid=os.getpid(),
            phase=state.phase,
            phase_seconds=round(now - state.since, 3),
            reason=state.reason,
            generation=None if generation is None else generation.number,
            layout=None if generation is None else str(generation.layout),
            resume_step=None if generation is None else generation.resume_step,
            iteration=state.iteration,
            step_seconds=state.step_seconds,
            store=state.store,
            checkpoint_note=state.note,
            saved_step=state.saved_step if state.saved_step >= 0 else None,
            losses=state.losses,
            save_seconds=state.save_seconds,
            save_every_seconds=round(state.save_every_seconds, 1),
            slow_machines=tuple(self._slow_machines),
            log_dir=self._log_dir,
            machines=tuple(
                machine_status(state, name, self._agents.get(name), now=now) for name in state.members
            ),
            problems=state.problems,
            ledger=self._ledger(),
        )

    def _request_log(
        self, caller: ManagerConnection, request: messages.ManagerRequest, state: JobState
    ) -> None:
        number = request.generation
        if number is None and state.generation is not None:
            number = state.generation.number
        machine = request.machine or self._machine_of(request.rank, number, state)
        if number is None or not machine:
            _reply(caller, False, f"rank {request.rank} is not on a connected machine")
            return
        if machine not in self._agents:
            which = f"rank {request.rank} of generation {number}"
            _reply(caller, False, f"{which} is on {machine}, which is not connected")
            return
        self._num_log_requests = ticket = self._num_log_requests + 1
        why = f"{machine} did not send the log of rank {request.rank} within {LOG_SECONDS:.0f} s"
        timer = asyncio.get_running_loop().call_later(LOG_SECONDS, self._fail_log, ticket, why)
        self._waiting[ticket] = LogWait(caller, machine, number, timer)
        self._agents[machine].send(
            messages.LogRequest(
                ticket, number, request.rank, request.stream, request.lines, request.start, request.stop
            )
        )

    def _machine_of(self, rank: int, number: int | None, state: JobState) -> str | None:
        """Return the machine of a rank in a generation; None: it is not known."""
        present = state.generation
        if number is not None and (present is None or number != present.number):
            known = read_machines(Path(self._log_dir), number)
            if known:
                return known.get(rank)
        return None if present is None else present.machine_of(rank)

    def forward_log(self, reply: messages.LogReply) -> None:
        if wait := self._waiting.pop(reply.request, None):
            wait.timer.cancel()
            if reply.page is None:
                _reply(wait.caller, False, "there is no such log")
            else:
                _send(
                    wait.caller,
                    messages.ManagerReply(
                        True, "", log=reply.page, machine=wait.machine, generation=wait.generation
                    ),
                )

    def _fail_log(self, ticket: int, why: str) -> None:
        if wait := self._waiting.pop(ticket, None):
            wait.timer.cancel()
            _reply(wait.caller, False, why)

    def connection_closed(self, connection: ManagerConnection) -> None:
        """End the log requests of a command or to an agent that has disconnected."""
        for ticket, wait in list(self._waiting.items()):
            if connection in (wait.caller, self._agents.get(wait.machine)):
                self._fail_log(ticket, f"{wait.machine} has disconnected")


def _reply(caller: ManagerConnection, ok: bool, text: str, status: bytes = b"null") -> None:
    _send(caller, messages.ManagerReply(ok, text, msgspec.Raw(status)))


def _send(caller: ManagerConnection, reply: messages.ManagerReply) -> None:
    caller.send(reply)
    caller.close_when_idle()


def machine_status(
    state: JobState, machine: str, connection: ManagerConnection | None, *, now: float
) -> messages.MachineStatus:
    member = state.members[machine]
    return messages.MachineStatus(
        machine=machine,
        state=describe_member(state, machine, now=now),
        agent_pid=connection.pid if connection is not None else None,
        seen_seconds_ago=round(now - member.seen, 3) if member.agent else None,
        workers=tuple(
            messages.WorkerStatus(w.rank, w.pid, w.iteration, w.compute_seconds, w.step_seconds, w.copy_of)
            for w in (connection.progress if connection is not None else ())
        ),
    )
