"""Leads a job over machines that come and go: it listens, decides, and does what was decided.

    machine list ─┐                                        ┌─► agents: start, save, kill
    agents ───────┼─► event ─► decide(state, event, now) ──┼─► starters, planner, checkpoints
    commands ─────┘                                        └─► journal, event log, terminal

All deciding is in `varuna.morph.decide`. What is here may fail, and then that is an event too.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec

from varuna.environment import VarunaEnvironment
from varuna.morph.clock import WakingClock
from varuna.morph.decide import decide
from varuna.morph.interval import SaveRhythm
from varuna.morph.journal import Journal, Launched, Over, Saving, StoreSeen, count, counts_anew
from varuna.morph.machines import is_loopback, read_machines
from varuna.morph.protocol.messages import (
    Answer,
    Ask,
    AskLog,
    Beat,
    Dismiss,
    Ended,
    Failed,
    Hello,
    Kill,
    LogLines,
    MachineStatus,
    Message,
    Noticed,
    Output,
    Release,
    Save,
    Stacks,
    Start,
    Status,
    StoreOpen,
    Unnoticed,
    Welcome,
    WorkerStatus,
    read_from_agent,
    write,
)
from varuna.morph.protocol.orders import AgentOrders, StartedAgent, Starter
from varuna.morph.protocol.wire import Refused, Wire
from varuna.morph.run.job_folder import Contact
from varuna.morph.state import (
    AgentJoined,
    AgentLeft,
    AgentNotStarted,
    CheckpointFound,
    Command,
    DumpStacks,
    EndAgent,
    Event,
    FindCheckpoint,
    Finish,
    Generation,
    JobState,
    KillWorkers,
    Launch,
    ListRead,
    MakePlan,
    Member,
    Notice,
    Planned,
    Proposal,
    Pulse,
    Recalled,
    ReleaseMachine,
    SaveAndEnd,
    StartAgent,
    StopAsked,
    StoreReady,
    Tell,
    Tick,
    Verdict,
    WorkerFailed,
    WorkersEnded,
)
from varuna.morph.stragglers import Rule, Watch, look
from varuna.types import JobSpec, MachineWorkers

TICK_SECONDS = 0.25
HELLO_SECONDS = 5.0
"""How long a caller may take to show that it knows the secret."""
MAX_STRANGERS = 2048
"""Callers that have not done so yet; more are turned away at once."""
LINGER_SECONDS = 5.0
"""How long agents may take to go when the job is over."""


Heard = tuple[str, int | None, tuple[Pulse, ...]]
"""A heartbeat: the agent, the generation that it runs, how far its workers are."""


class Planner(Protocol):
    """What to run on these machines, in this order; may take seconds, and may refuse."""

    def __call__(self, machines: tuple[str, ...]) -> Proposal: ...


class Connection(asyncio.Protocol):
    """One caller: a stranger until its first message, which must be a Hello or an Ask."""

    def __init__(self, manager: "Manager") -> None:
        self.manager = manager
        self.wire = Wire(manager.secret, calls=False)
        self.transport: asyncio.Transport | None = None
        self.agent = ""
        self.machine = ""
        self.pid = 0
        self.pulses: tuple[Pulse, ...] = ()  # the last
        self.timer: asyncio.TimerHandle | None = None
        self.closed_because = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.manager.strangers) >= MAX_STRANGERS:
            self.close("too many callers that have not said who they are")
            return
        self.manager.strangers.add(self)
        transport.write(self.wire.greeting)
        self.timer = asyncio.get_running_loop().call_later(HELLO_SECONDS, self.give_up)

    def give_up(self) -> None:
        self.refuse("it did not show that it knows the job's secret")

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self.wire.feed(data):
                self.manager.heard(self, read_from_agent(payload))
        except (Refused, msgspec.DecodeError) as error:
            self.refuse(str(error))

    def refuse(self, why: str) -> None:
        """Tells the log, and the caller nothing."""
        peer = self.transport.get_extra_info("peername") if self.transport is not None else None
        self.manager.num_refused = count = self.manager.num_refused + 1
        if count <= 10 or not count & (count - 1):  # whoever knocks for ever must not fill the disk
            self.manager.log("caller refused", f"{peer}: {why}" + (f" (the {count}th)" if count > 10 else ""))
        self.close(why)

    def connection_lost(self, error: Exception | None) -> None:
        self.known()
        self.manager.hung_up(self, self.closed_because or (str(error) if error else "it hung up"))

    def known(self) -> None:
        """No stranger any more."""
        self.manager.strangers.discard(self)
        if self.timer is not None:
            self.timer.cancel()

    def send(self, message: Message) -> None:
        if self.transport is not None and not self.transport.is_closing() and self.wire.greeted:
            self.transport.write(self.wire.pack(write(message)))

    def close(self, why: str) -> None:
        self.closed_because = why
        if self.transport is not None:
            self.transport.close()


class Manager:
    def __init__(
        self,
        job: JobSpec,
        contact: Contact,
        state: JobState,
        *,
        planner: Planner,
        starter_of: Callable[[str], Starter],
        newest: Callable[[str], int | None],
        address_for: Callable[[str], str],
        journal: Journal,
        clock: WakingClock,
        say: Callable[..., None],
    ) -> None:
        self.job = job
        self.contact = contact
        self.state = state
        self.secret = bytes.fromhex(contact.secret)
        self.planner = planner
        self.starter_of = starter_of
        self.newest = newest
        self.address_for = address_for  # that a machine dials: the manager listens where it is asked for
        self.servers: dict[str, asyncio.Server] = {}
        self.journal = journal
        self.clock = clock
        self.say = say
        self.strangers: set[Connection] = set()
        self.agents: dict[str, Connection] = {}  # by machine
        self.started: dict[str, StartedAgent] = {}
        self.beats: dict[str, Heard] = {}
        self.questions: dict[int, Connection] = {}
        self.num_questions = 0
        self.num_refused = 0
        self.list_seen: object = None
        self.stragglers = Watch()
        self.slow: dict[str, None] = {}  # machines, in the order in which they were found
        self.begun_at = self.clock.now()
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.verdict: Verdict | None = None
        self.finished = asyncio.Event()
        Path(job.log_dir).mkdir(parents=True, exist_ok=True)
        self.event_log = (Path(job.log_dir) / "events.jsonl").open("ab", buffering=0)

    # ------------------------------------------------------------ its life

    async def lead(self, listener: socket.socket, *, signals: bool = True) -> Verdict:
        """To its end. Only in a main thread can it answer to `signals`."""
        await self.listen(listener.getsockname()[0], listener)
        if signals:
            self.answer_signals()
        ticking = asyncio.create_task(self.tick())
        ticking.add_done_callback(lambda _: self.events.put_nowait(Tick({})))
        try:
            while not self.finished.is_set():
                event = await self.events.get()
                if ticking.done():
                    ticking.result()  # an error ends the manager: better none than one that is deaf
                self.happened(event)
            assert self.verdict is not None
            await self.see_agents_off()
            return self.verdict
        finally:
            ticking.cancel()
            for server in self.servers.values():
                server.close()
            for task in self.tasks:
                task.cancel()

    def answer_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup it goes on
                loop.add_signal_handler(number, self.interrupted, number)
        loop.add_signal_handler(signal.SIGUSR1, self.asked_to_save)

    async def listen(self, address: str, listener: socket.socket | None = None) -> None:
        if address not in self.servers:
            sock = listener or socket.create_server((address, self.contact.port))
            loop = asyncio.get_running_loop()
            self.servers[address] = await loop.create_server(lambda: Connection(self), sock=sock)
            self.log("listening", f"{address}:{self.contact.port}")

    def interrupted(self, number: int) -> None:
        name = signal.Signals(number).name
        if isinstance(self.state.verdict, Verdict) and self.state.verdict.exit_code == 128 + number:
            sys.exit(128 + number)  # a second time: at once
        self.events.put_nowait(StopAsked(f"{name}: ending all workers", save=False, exit_code=128 + number))

    def asked_to_save(self) -> None:
        self.events.put_nowait(StopAsked("SIGUSR1: save and end"))

    async def tick(self) -> None:
        while True:
            self.read_list()
            for machine, started in list(self.started.items()):
                if (why := started.ended()) is not None:
                    del self.started[machine]
                    if machine not in self.agents:
                        self.events.put_nowait(AgentNotStarted(machine, why))
            beats, self.beats = self.beats, {}
            self.look_for_stragglers(beats)
            self.events.put_nowait(Tick(beats))
            await asyncio.sleep(TICK_SECONDS)

    async def see_agents_off(self) -> None:
        deadline = self.clock.now() + LINGER_SECONDS
        while self.clock.now() < deadline and (
            self.agents or any(started.ended() is None for started in self.started.values())
        ):
            await asyncio.sleep(0.02)
        for started in self.started.values():
            if started.ended() is None:
                started.kill()

    def read_list(self) -> None:
        """The file is looked at each tick, and read where it has changed."""
        if not self.state.settings.morphs and self.list_seen is not None:
            return
        try:
            found = os.stat(self.job.machine_list)
            seen: object = (found.st_mtime_ns, found.st_size, found.st_ino)
            if seen == self.list_seen:
                return
            text = Path(self.job.machine_list).read_text(errors="replace")
        except OSError as error:
            seen, text = str(error), ""
            if seen == self.list_seen:
                return
            self.log("list unreadable", seen)
        self.list_seen = seen
        machines, problems = read_machines(text)
        for problem in problems:
            self.log("list", problem)
        self.events.put_nowait(ListRead(machines))

    def look_for_stragglers(self, beats: Mapping[str, Heard]) -> None:
        generation = self.state.generation
        if generation is None or not beats:
            return
        times = {
            pulse.rank: (pulse.steps, pulse.compute_seconds)
            for _, number, pulses in beats.values()
            for pulse in pulses
            if number == generation.number
        }
        self.stragglers, ranks = look(self.stragglers, times, generation.layout, Rule())
        for machine in (self.machine_of(generation, rank) for rank in sorted(ranks)):
            if machine is None or machine in self.slow:
                continue
            self.slow[machine] = None
            Path(self.job.slow_file).write_text("".join(f"{name}\n" for name in self.slow))
            why = f"{machine} computes more slowly than others that do the same work"
            self.log("slow machine", f"{why}; see {self.job.slow_file}")
            if self.job.exclude_slow:
                self.noticed(machine, None, why)

    # ------------------------------------------------------------ what happens

    def happened(self, event: Event) -> None:
        before = self.state
        self.state, commands = decide(self.state, event, self.clock.now())
        if self.state.store != before.store:
            self.journal.write(StoreSeen(self.state.store))
        if counts_anew(before, self.state):
            self.journal.write(count(self.state, self.clock.now() - self.begun_at))
        for command in commands:
            self.carry_out(command)

    def heard(self, connection: Connection, message: Message) -> None:
        if not connection.agent:
            connection.known()
            if isinstance(message, Hello):
                self.let_in(connection, message)
            elif isinstance(message, Ask):
                self.answer(connection, message)
            else:
                connection.refuse("its first word was neither Hello nor Ask")
            return
        machine, agent = connection.machine, connection.agent
        if isinstance(message, Beat):
            self.beats[machine] = (agent, message.generation, message.pulses)
            connection.pulses = message.pulses
        elif isinstance(message, StoreOpen):
            self.events.put_nowait(StoreReady(machine, agent, message.port))
        elif isinstance(message, Failed):
            self.events.put_nowait(WorkerFailed(machine, agent, message.generation, message.outcome))
        elif isinstance(message, Ended):
            self.events.put_nowait(
                WorkersEnded(machine, agent, message.generation, message.outcomes, message.pulses)
            )
        elif isinstance(message, Noticed):
            self.noticed(message.machine or machine, message.seconds, message.why)
        elif isinstance(message, Unnoticed):
            self.events.put_nowait(Recalled(machine))
        elif isinstance(message, Output):
            stream = sys.stderr if message.error else sys.stdout
            for line in message.text.splitlines():
                print(f"[rank {message.rank}] {line}", file=stream, flush=True)
        elif isinstance(message, LogLines) and (asker := self.questions.pop(message.question, None)):
            asker.send(Answer(bool(message.text), message.text or "there is no such log"))
            asker.close("answered")

    def let_in(self, connection: Connection, hello: Hello) -> None:
        if hello.job != self.contact.job:
            connection.send(Dismiss("its job is over"))
            connection.refuse(f"it is an agent of job {hello.job}, this is {self.contact.job}")
            return
        if earlier := self.agents.get(hello.machine):
            if earlier.agent != hello.agent:
                connection.send(Dismiss("this machine has an agent already"))
                return
            earlier.machine = ""  # the same agent has dialled again: the end of this one is no loss
            earlier.close("replaced")
        connection.machine, connection.agent, connection.pid = hello.machine, hello.agent, hello.pid
        self.agents[hello.machine] = connection
        connection.send(Welcome(self.job.environment))
        self.events.put_nowait(
            AgentJoined(hello.machine, hello.agent, hello.generation, hello.address, hello.store_port)
        )

    def hung_up(self, connection: Connection, why: str) -> None:
        if connection.machine and self.agents.get(connection.machine) is connection:
            del self.agents[connection.machine]
            self.events.put_nowait(AgentLeft(connection.machine, connection.agent, why))

    def noticed(self, machine: str, seconds: float | None, why: str) -> None:
        deadline = None if seconds is None else self.clock.now() + seconds
        self.events.put_nowait(Notice(machine, deadline, why))

    def answer(self, connection: Connection, ask: Ask) -> None:
        if ask.job != self.contact.job:
            connection.refuse(f"it asks about job {ask.job}, this is {self.contact.job}")
            return
        if ask.what == "status":
            connection.send(Answer(True, "", msgspec.Raw(msgspec.json.encode(self.status()))))
        elif ask.what == "stop":
            self.events.put_nowait(StopAsked(ask.why or "it was asked to stop", save=ask.save))
            connection.send(Answer(True, "the job saves and ends" if ask.save else "the job ends"))
        elif ask.what in ("drain", "preempt"):
            known = ask.machine in self.state.members
            if known:
                self.noticed(ask.machine, ask.seconds, ask.why or "it was asked to be drained")
            text = f"{ask.machine} is left" if known else f"{ask.machine} is no machine of this job"
            connection.send(Answer(known, text))
        elif ask.what == "logs":
            self.ask_for_log(connection, ask)
            return
        else:
            connection.send(Answer(False, f"unknown question {ask.what!r}"))
        connection.close("answered")

    def ask_for_log(self, connection: Connection, ask: Ask) -> None:
        generation = self.state.generation
        machine = None if generation is None else self.machine_of(generation, ask.rank)
        if generation is None or machine not in self.agents:
            connection.send(Answer(False, f"rank {ask.rank} is on no machine that can be reached"))
            connection.close("answered")
            return
        self.num_questions += 1
        self.questions[self.num_questions] = connection
        number = generation.number if ask.generation is None else ask.generation
        self.agents[machine].send(AskLog(self.num_questions, number, ask.rank, ask.lines))

    def machine_of(self, generation: Generation, rank: int) -> str | None:
        places = zip(generation.machines, generation.ranks, strict=True)
        return next((machine for machine, ranks in places if rank in ranks), None)

    def status(self) -> Status:
        state, now = self.state, self.clock.now()
        generation = state.generation
        return Status(
            job=self.contact.job,
            pid=os.getpid(),
            phase=state.phase,
            phase_seconds=round(now - state.since, 3),
            reason=state.reason,
            generation=None if generation is None else generation.number,
            layout=None if generation is None else str(generation.layout),
            resume_step=None if generation is None else generation.resume_step,
            iteration=state.best_iteration,
            step_seconds=state.step_seconds,
            store=state.store,
            saved_step=state.saved_step if state.saved_step >= 0 else None,
            losses=state.losses,
            save_seconds=state.save_seconds,
            save_every_seconds=round(state.save_every_seconds, 1),
            slow_machines=tuple(self.slow),
            log_dir=self.job.log_dir,
            machines=tuple(self.status_of(member, now) for member in state.members.values()),
        )

    def status_of(self, member: Member, now: float) -> MachineStatus:
        connection = self.agents.get(member.name)
        pulses = connection.pulses if connection is not None else ()
        return MachineStatus(
            machine=member.name,
            state=state_of(self.state, member.name),
            agent_pid=connection.pid if connection is not None else None,
            seen_seconds_ago=round(now - member.seen, 3) if member.agent else None,
            workers=tuple(
                WorkerStatus(
                    pulse.rank, pulse.pid, pulse.iteration, pulse.compute_seconds, pulse.step_seconds
                )
                for pulse in pulses
            ),
        )

    # ------------------------------------------------------------ what is done about it

    def carry_out(self, command: Command) -> None:
        if isinstance(command, Tell):
            self.log(command.what, command.why)
        elif isinstance(command, StartAgent):
            self.spawn(self.start_agent(command.machine))
        elif isinstance(command, EndAgent):
            self.end_agent(command)
        elif isinstance(command, MakePlan):
            self.spawn(self.make_plan(command.machines))
        elif isinstance(command, FindCheckpoint):
            self.spawn(self.find_checkpoint(command.store))
        elif isinstance(command, Launch):
            self.launch(command)
        elif isinstance(command, SaveAndEnd):
            self.journal.write(Saving(command.generation))
            self.log("saving", command.why)
            self.tell_agents(command.machines, Save(command.generation))
        elif isinstance(command, KillWorkers):
            self.tell_agents((command.machine,), Kill(command.generation))
        elif isinstance(command, DumpStacks):
            self.tell_agents(command.machines, Stacks(command.generation))
        elif isinstance(command, ReleaseMachine):
            self.tell_agents((command.machine,), Release())
        elif isinstance(command, Finish):
            self.finish(command.verdict)
        else:
            raise AssertionError(f"no hand for {command}")

    def spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def tell_agents(self, machines: tuple[str, ...], message: Message) -> None:
        for machine in machines:
            if connection := self.agents.get(machine):
                connection.send(message)

    async def start_agent(self, machine: str) -> None:
        try:
            address = await asyncio.to_thread(self.address_for, machine)
            await self.listen(address)
            host = f"[{address}]" if ":" in address else address
            orders = AgentOrders(
                job=self.contact.job,
                machine=machine,
                managers=(f"{host}:{self.contact.port}",),
                secret=self.contact.secret,
                cloud=self.job.cloud,
                cloud_url=self.job.cloud_url,
            )
            self.started[machine] = await asyncio.to_thread(self.starter_of(machine).start, orders)
        except (OSError, ValueError) as error:
            self.events.put_nowait(AgentNotStarted(machine, str(error)))

    def end_agent(self, command: EndAgent) -> None:
        connection = self.agents.get(command.machine)
        if connection is not None:
            connection.send(Dismiss(command.why))
        if connection is None or command.deaf:
            if connection is not None:
                del self.agents[command.machine]
                connection.close(command.why)
            started = self.started.pop(command.machine, None)
            # One that is cut off ends by itself; a word that reaches it later would only end its return.
            if started is not None and (connection is None or is_loopback(command.machine)):
                started.kill()

    async def make_plan(self, machines: tuple[str, ...]) -> None:
        try:
            proposal = await asyncio.to_thread(self.planner, machines)
        except Exception as error:
            proposal = Proposal(machines, problem=str(error) or type(error).__name__)
        self.events.put_nowait(Planned(proposal))

    async def find_checkpoint(self, store: str) -> None:
        try:
            found = CheckpointFound(await asyncio.to_thread(self.newest, store))
        except Exception as error:
            found = CheckpointFound(None, f"{store}: {error}")
        self.events.put_nowait(found)

    def launch(self, command: Launch) -> None:
        generation = command.generation
        self.journal.write(Launched(generation))
        self.stragglers = Watch()
        resumed = "" if generation.resume_step is None else f", from step {generation.resume_step}"
        self.log(
            "generation",
            f"{generation.number}: {generation.layout} on {', '.join(generation.machines)}{resumed} "
            f"({command.why})",
        )
        for reason in command.reasons:
            what, _, why = reason.partition(": ")
            self.log(what, why)
        if generation.layout.idle:
            self.log("idle devices", self.name_idle(generation))
        rhythm = SaveRhythm(
            every_seconds=self.job.save_every_seconds,
            failures=self.state.losses,
            observed_seconds=self.state.seconds_before + self.clock.now() - self.begun_at,
            save_seconds=self.state.save_seconds,
        )
        saves = VarunaEnvironment(saves=msgspec.json.encode(rhythm).decode())
        environment = {**generation.environment, **saves.write()}
        for machine, ranks in zip(generation.machines, generation.ranks, strict=True):
            workers = MachineWorkers(
                job=self.job,
                layout=generation.layout,
                ranks=ranks,
                master_addr=generation.master_addr,
                master_port=generation.master_port,
                resume_step=generation.resume_step,
                environment=environment,
            )
            self.tell_agents((machine,), Start(generation.number, workers))

    def name_idle(self, generation: Generation) -> str:
        """Of machines with ranks; whoever has none is a spare."""
        idle = {
            machine: self.job.devices_per_machine - len(ranks)
            for machine, ranks in zip(generation.machines, generation.ranks, strict=True)
        }
        partly = [f"{count} of {machine}" for machine, count in idle.items() if count]
        spares = [f"all of {name}" for name in self.state.usable if name not in generation.machines]
        return ", ".join([*partly, *spares])

    def finish(self, verdict: Verdict) -> None:
        self.journal.write(Over(verdict))
        self.record(verdict.how, verdict.reason)  # whoever leads says it, with the place of the logs
        self.verdict = verdict
        self.finished.set()

    def log(self, what: str, why: str) -> None:
        self.record(what, why)
        self.say(f"{what}: {why}")

    def record(self, what: str, why: str) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"at": now, "what": what, "why": why}
        with suppress(OSError):  # a full disk is no reason to leave the job alone
            self.event_log.write(msgspec.json.encode(line) + b"\n")


def state_of(state: JobState, machine: str) -> str:
    """In a word, for people."""
    member = state.members[machine]
    if not member.agent:
        return "starting" if member.starting is not None else "lost" if member.lost_at else "absent"
    if member.leaves:
        return "leaving"
    if state.active and state.generation is not None and machine in state.generation.machines:
        return "at work"
    return "spare" if member.warm else "warming up"
