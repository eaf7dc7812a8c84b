"""The manager: runs a job on machines that join, leave and fail.

    machine list ─┐                                        ┌─► agents: start, save, kill
    agents ───────┼─► event ─► decide(state, event, now) ──┼─► starters, planner, checkpoints
    commands ─────┘                                        └─► journal, event log, terminal

All decisions are in `varuna.morph.decide`. This module collects events and carries out commands. A
command that fails becomes an event.
"""

import asyncio
import math
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec

from varuna.addresses import is_loopback
from varuna.environment import VarunaEnvironment
from varuna.errors import BrokenCheckpoint
from varuna.files import LineFile, make_private_folder
from varuna.morph import commands, events
from varuna.morph.clock import SuspendAwareClock
from varuna.morph.decide import decide_all
from varuna.morph.interval import SaveRhythm, count_failures
from varuna.morph.journal import Journal, records_of
from varuna.morph.ledger_file import LedgerKeeper
from varuna.morph.metrics.observer import JobObserver
from varuna.morph.protocol import messages
from varuna.morph.protocol.generations import (
    GenerationCommand,
    describe_generation,
    generation_messages,
    name_unused_devices,
    write_machines,
)
from varuna.morph.protocol.orders import AgentOrders, StartedAgent, Starter
from varuna.morph.run.connections import ConnectionServer, ManagerConnection
from varuna.morph.run.job_folder import ManagerContact
from varuna.morph.run.requests import RequestHandler
from varuna.morph.run.watchers import MachineListWatcher, SlowMachineWatcher
from varuna.morph.run.worker_env import forced
from varuna.morph.state import Heartbeat, JobState, JobVerdict, MachinePlan
from varuna.observe.ledger import ledger_lines
from varuna.types import JobSpec

TICK_SECONDS = 0.25
LATE_SECONDS = 0.01
"""A machine is lost this long after its time is over."""
EXIT_SECONDS = 5.0
"""Time limit for agents to exit when the job is over."""


class Planner(Protocol):
    """Plans the job for some machines. May take seconds, and may raise."""

    def __call__(self, machines: tuple[str, ...], devices: int = 0) -> MachinePlan:
        """Plan for `devices` of each machine; 0: all."""


class Manager:
    def __init__(
        self,
        job: JobSpec,
        contact: ManagerContact,
        state: JobState,
        *,
        planner: Planner,
        starter_of: Callable[[str], Starter],
        newest: Callable[[str], int | None],
        address_for: Callable[[str], str],
        journal: Journal,
        clock: SuspendAwareClock,
        say: Callable[..., None],
        show_output: Callable[[messages.WorkerOutput], None] = lambda output: None,
    ) -> None:
        """`newest` returns the newest step of a store, `address_for` the address that a machine uses."""
        self.job = job
        self.contact = contact
        self.state = state
        self.planner = planner
        self.starter_of = starter_of
        self.newest = newest
        self.forces = job.force
        self.address_for = address_for
        self.journal = journal
        self.clock = clock
        self.say = say
        self.show_output = show_output
        self.agents: dict[str, ManagerConnection] = {}  # by machine
        self.started: dict[str, StartedAgent] = {}  # by machine
        self.heartbeats: dict[str, Heartbeat] = {}  # since the last tick
        self.events: asyncio.Queue[events.Event] = asyncio.Queue()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.verdict: JobVerdict | None = None
        self.begun_at = clock.now()
        self.ledger = LedgerKeeper(
            job, continues=state.attach_until > 0, wall=time.time, monotonic=time.monotonic
        )
        self.observer = JobObserver(
            job, contact.job, ledger=self.ledger.report, continues=state.attach_until > 0
        )
        self.machine_list = MachineListWatcher(Path(job.machine_list))
        self.slow_machines = SlowMachineWatcher(Path(job.slow_file))
        self.requests = RequestHandler(
            contact.job,
            log_dir=job.log_dir,
            agents=self.agents,
            slow_machines=self.slow_machines.machines,
            ledger=self.ledger.report,
            view=lambda: self.observer.view(self.state, now=self.clock.now()),
            put_event=self.events.put_nowait,
        )
        self.server = ConnectionServer(
            contact.credential,
            contact.port,
            on_message=self.handle_message,
            on_close=self.connection_closed,
            log=self.log,
        )
        self.event_log = LineFile(Path(job.log_dir) / "events.jsonl")

    # ------------------------------------------------------------ main loop

    async def run(self, listener: socket.socket, *, signals: bool = True) -> JobVerdict:
        """Run the job to its end. `signals` requires the main thread."""
        await self.server.listen(listener.getsockname()[0], listener)
        if self.ledger.loss:
            self.log("ledger", self.ledger.loss)
        if signals:
            self.handle_signals()
        ticking = asyncio.create_task(self.tick())
        ticking.add_done_callback(lambda _: self.events.put_nowait(events.Tick({})))
        try:
            while self.verdict is None:
                event = await self.events.get()
                if ticking.done():
                    ticking.result()  # raises: a manager without ticks would miss lost machines
                batch = [event]
                while not self.events.empty():
                    batch.append(self.events.get_nowait())
                self.handle_events(batch)
            await self.wait_for_agents()
            return self.verdict
        finally:
            ticking.cancel()
            self.server.close()
            for task in self.tasks:
                task.cancel()

    def handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                loop.add_signal_handler(number, self.interrupt, number)
        stop = events.StopRequested("SIGUSR1: save and end")
        loop.add_signal_handler(signal.SIGUSR1, self.events.put_nowait, stop)

    def interrupt(self, number: int) -> None:
        """End all workers; a second signal exits at once."""
        code = 128 + number
        if self.state.verdict is not None and self.state.verdict.exit_code == code:
            sys.exit(code)
        why = f"{signal.Signals(number).name}: ending all workers"
        self.events.put_nowait(events.StopRequested(why, save=False, exit_code=code))

    async def tick(self) -> None:
        while True:
            self.read_machine_list()
            for machine, started in list(self.started.items()):
                if (why := started.ended()) is not None:
                    del self.started[machine]
                    if machine not in self.agents:
                        self.events.put_nowait(events.AgentNotStarted(machine, why))
            self.journal.retry(self.clock.now())
            self.report_journal()
            heartbeats, self.heartbeats = self.heartbeats, {}
            self.find_slow_machines(heartbeats)
            heard = {machine: connection.heard for machine, connection in self.agents.items()}
            self.events.put_nowait(events.Tick(heartbeats, heard))
            first = min((connection.heard for connection in self.agents.values()), default=math.inf)
            left = first + self.state.settings.lost_seconds - self.clock.now()
            # A machine that falls silent is lost on time.
            await asyncio.sleep(min(TICK_SECONDS, left + LATE_SECONDS) if left > 0 else TICK_SECONDS)

    def read_machine_list(self) -> None:
        if self.machine_list.was_read and not self.state.settings.morphs:
            return
        if (found := self.machine_list.poll(self.clock.now())) is None:
            return
        why = found.problem and f"{found.problem}; the machines stay as they are until the list is valid"
        if why or found.machines:
            self.report_problem("machine list", why)
        for sentence in found.repeated:
            self.log("machine list", sentence)
        if not found.problem:
            self.events.put_nowait(events.MachineListRead(found.machines))

    def find_slow_machines(self, heartbeats: Mapping[str, Heartbeat]) -> None:
        if self.state.generation is None or not heartbeats:
            return
        slow = self.slow_machines.find(heartbeats, self.state.generation)
        self.report_problem("slow machines", self.slow_machines.problem)
        for machine in slow:
            why = f"{machine} computes more slowly than other machines with the same stage"
            self.log("slow machine", f"{why}; see {self.job.slow_file}")
            if self.job.exclude_slow:
                self.events.put_nowait(events.NoticeReceived(machine, None, why))

    def report_journal(self) -> None:
        why = self.journal.problem and (
            f"{self.journal.problem}; the job continues, but `varuna run --resume` may go back to an "
            "earlier generation (free some space)"
        )
        self.report_problem("journal", why)

    def report_problem(self, topic: str, why: str) -> None:
        """Report a problem, or its end, if it has changed."""
        if self.state.problems.get(topic, "") != why:
            self.events.put_nowait(events.ProblemChanged(topic, why))

    async def wait_for_agents(self) -> None:
        """Wait until all agents have exited, then kill those that have not."""
        deadline = self.clock.now() + EXIT_SECONDS
        while self.clock.now() < deadline and (
            self.agents or any(started.ended() is None for started in self.started.values())
        ):
            await asyncio.sleep(0.02)
        for started in self.started.values():
            if started.ended() is None:
                started.kill()

    # ------------------------------------------------------------ events

    def handle_events(self, batch: Sequence[events.Event]) -> None:
        before = self.state
        self.state, found = decide_all(self.state, batch, self.clock.now())
        self.ledger.observe(self.state, clock=self.clock.now())
        self.observer.observe(self.state, now=self.clock.now(), slow=self.slow_machines.machines)
        for topic, why in (("ledger", self.ledger.problem), ("metrics", self.observer.problem)):
            self.report_problem(topic, why)
        for record in records_of(before, self.state, found, seconds=self.clock.now() - self.begun_at):
            self.journal.write(record)
        for command in found:
            self.carry_out(command)

    def handle_message(self, connection: ManagerConnection, message: messages.ToManager) -> None:
        if isinstance(message, messages.AgentHello):
            self.admit(connection, message)
        elif isinstance(message, messages.ManagerRequest):
            self.requests.handle(connection, message, self.state, now=self.clock.now())
        elif not connection.agent:
            connection.refuse("its first message was neither a hello nor a request")
        elif isinstance(message, messages.AgentHeartbeat):
            heartbeat = (connection.agent, message.generation, message.progress)
            self.heartbeats[connection.machine] = heartbeat
            connection.heard = self.clock.now()
            connection.progress = message.progress
            if message.morphed or self.state.failures or self.state.lost:  # the next decision waits for it
                self.events.put_nowait(events.Tick({connection.machine: heartbeat}))
        elif isinstance(message, messages.WorkerMetrics):
            self.observer.add(message)
        elif isinstance(message, events.Event):
            self.events.put_nowait(message)
        elif isinstance(message, messages.PreemptionReport):
            deadline = None if message.seconds is None else self.clock.now() + message.seconds
            machine = message.machine or connection.machine
            self.events.put_nowait(events.NoticeReceived(machine, deadline, message.why))
        elif isinstance(message, messages.WorkerOutput):
            self.show_output(message)
        elif isinstance(message, messages.LogReply):
            self.requests.forward_log(message)

    def admit(self, connection: ManagerConnection, hello: messages.AgentHello) -> None:
        joined = hello.joined
        if hello.job != self.contact.job:
            connection.send(messages.Dismiss("its job is over"))
            connection.refuse(f"it is an agent of job {hello.job}, but this is job {self.contact.job}")
            return
        if earlier := self.agents.get(joined.machine):
            if earlier.agent != joined.agent:
                connection.send(messages.Dismiss("this machine has an agent already"))
                return
            earlier.machine = ""  # the same agent reconnects: it is not lost
            earlier.close("replaced")
        connection.machine, connection.agent, connection.pid = joined.machine, joined.agent, hello.pid
        self.agents[joined.machine], connection.heard = connection, self.clock.now()
        connection.send(messages.Welcome(self.job.environment))
        self.events.put_nowait(joined)

    def connection_closed(self, connection: ManagerConnection, why: str) -> None:
        self.requests.connection_closed(connection)
        if connection.machine and self.agents.get(connection.machine) is connection:
            del self.agents[connection.machine]
            self.events.put_nowait(events.AgentLeft(connection.machine, connection.agent, why))

    # ------------------------------------------------------------ commands

    def carry_out(self, command: commands.Command) -> None:
        if isinstance(command, commands.LogEvent):
            self.log(command.what, command.why)
        elif isinstance(command, commands.StartAgent):
            self.started.pop(command.machine, None)  # an earlier agent: its end is not the new one's
            self.spawn(self.start_agent(command.machine))
        elif isinstance(command, commands.EndAgent):
            self.end_agent(command)
        elif isinstance(command, commands.MakePlan):
            self.spawn(self.make_plan(command))
        elif isinstance(command, commands.FindCheckpoint):
            self.spawn(self.find_checkpoint(command.store))
        elif isinstance(command, commands.Launch | commands.Prepare | commands.Morph):
            self.start_generation(command)
        elif isinstance(command, commands.RepeatOrders):
            self.send_generation(command.morph, command.machines)
        elif isinstance(command, commands.SaveAndEnd):
            self.log("saving", command.why)
            self.send(command.machines, command)
        elif isinstance(command, commands.KillWorkers | commands.DumpStacks | commands.ReleaseMachines):
            self.send(command.machines, command)
        elif isinstance(command, commands.Finish):
            self.record(command.verdict.how, command.verdict.reason)  # `varuna run` prints it
            self.observer.finish(self.state, now=self.clock.now())
            for line in ledger_lines(self.ledger.report()):
                self.say(line)
            self.verdict = command.verdict
        else:
            raise AssertionError(f"unknown command {command}")

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def send(self, machines: tuple[str, ...], message: messages.ManagerMessage | commands.Command) -> None:
        for machine in machines:
            if connection := self.agents.get(machine):
                connection.send(message)

    async def start_agent(self, machine: str) -> None:
        try:
            address = await asyncio.to_thread(self.address_for, machine)
            await self.server.listen(address)
            host = f"[{address}]" if ":" in address else address
            orders = AgentOrders(
                job=self.contact.job,
                machine=machine,
                manager=f"{host}:{self.contact.port}",
                credential=self.contact.credential,
                cloud=self.job.cloud,
                cloud_url=self.job.cloud_url,
            )
            self.started[machine] = await asyncio.to_thread(self.starter_of(machine).start, orders)
        except (OSError, ValueError) as error:
            self.events.put_nowait(events.AgentNotStarted(machine, str(error)))

    def end_agent(self, command: commands.EndAgent) -> None:
        connection = self.agents.get(command.machine)
        if connection is not None:
            connection.send(messages.Dismiss(command.why))
            if not command.unresponsive:
                return
            del self.agents[command.machine]
            connection.close(command.why)
        started = self.started.pop(command.machine, None)
        # A machine that is cut off ends its agent by itself. A kill that reaches it later would end
        # the agent after its return.
        if started is not None and (connection is None or is_loopback(command.machine)):
            started.kill()

    async def make_plan(self, command: commands.MakePlan) -> None:
        machines, devices = command.machines, command.devices
        try:
            proposal = await asyncio.to_thread(self.planner, machines, devices)
        except Exception as error:
            proposal = MachinePlan(machines, problem=str(error) or type(error).__name__)
        self.events.put_nowait(events.PlanReady(msgspec.structs.replace(proposal, devices=devices)))

    async def find_checkpoint(self, store: str) -> None:
        try:
            found = events.CheckpointFound(await asyncio.to_thread(self.newest, store))
        except BrokenCheckpoint as error:
            found = events.CheckpointFound(None, str(error), none_left=True)
        except Exception as error:
            found = events.CheckpointFound(None, f"{store}: {error}")
        self.events.put_nowait(found)

    def start_generation(self, command: GenerationCommand) -> None:
        """Launch a generation, start its joiners, or order all workers into it."""
        generation = command.generation
        with suppress(OSError):  # a second record of the number, if the journal is lost
            make_private_folder(Path(self.job.log_dir) / f"generation_{generation.number}")
        if not isinstance(command, commands.Prepare):
            with suppress(OSError):  # a full disk must not end the job
                write_machines(Path(self.job.log_dir), generation)
            self.slow_machines.reset()
            self.log("generation", describe_generation(command))
            for reason in command.reasons:
                what, _, why = reason.partition(": ")
                self.log(what, why)
            if generation.layout.idle:
                devices = self.job.devices_per_machine
                idle = name_unused_devices(generation, self.state.usable, devices_per_machine=devices)
                self.log("idle devices", idle)
        self.send_generation(command)

    def send_generation(self, command: GenerationCommand, machines: tuple[str, ...] | None = None) -> None:
        """Send each machine its part of a generation; `machines`: only to these."""
        rhythm = SaveRhythm(
            every_seconds=self.job.save_every_seconds,
            failures=count_failures(self.state.losses, self.state.history.survived),
            observed_seconds=self.state.seconds_before + self.clock.now() - self.begun_at,
            save_seconds=self.state.save_seconds,
        )
        hot = "1" if self.state.settings.hot and self.state.settings.morphs else None
        saves = VarunaEnvironment(saves=msgspec.json.encode(rhythm).decode(), hot=hot)
        environment = {**saves.write(), **forced(self.forces)}
        self.forces = False  # later generations must not take the store back
        for machine, message in generation_messages(command, self.job, environment).items():
            if machines is None or machine in machines:
                self.send((machine,), message)

    def log(self, what: str, why: str) -> None:
        """Write to the event log and the terminal."""
        self.record(what, why)
        self.say(f"{what}: {why}")

    def record(self, what: str, why: str) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.observer.add_event(what, why)
        why_not = ""
        try:
            make_private_folder(self.event_log.path.parent)
            self.event_log.append(msgspec.json.encode({"at": now, "what": what, "why": why}))
        except OSError as error:  # a full disk must not end the job
            why_not = f"{self.event_log.path} cannot be written: {error.strerror or error}"
        self.report_problem("event log", why_not)
