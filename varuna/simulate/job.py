"""A simulated job: machines and workers that follow the manager's commands, in simulated time.

All decisions are those of `varuna.morph.decide`. A command takes the time that `Costs` says, and then becomes
the event that a real machine would send. Time jumps from event to event; training in between is computed.
"""

import heapq
import math
from collections.abc import Callable, Sequence

import msgspec

from varuna.morph import commands, events
from varuna.morph.accounting import Accountant
from varuna.morph.decide import decide_all
from varuna.morph.interval import SaveRhythm
from varuna.morph.rules.decision import Decision
from varuna.morph.rules.workers import keep_facts
from varuna.morph.state import Heartbeat, JobState, ManagerSettings, Outcome, WorkerProgress
from varuna.observe.ledger import Ledger
from varuna.simulate.costs import Costs
from varuna.simulate.planner import CachedPlanner
from varuna.simulate.traces import MachineChange, MarketTrace

NEVER = 1e18
SIMULATED_SETTINGS = ManagerSettings(
    start_seconds=NEVER,  # like machines of a scheduler: an agent starts when its machine comes
    lost_seconds=NEVER,  # the simulation reports a loss after `detect_seconds`
    end_seconds=NEVER,
    save_seconds=NEVER,
    begin_seconds=NEVER,
    hang_seconds=NEVER,
    idle_seconds=NEVER,
    first_step_seconds=NEVER,
)
"""Time limits for machines that do not answer: simulated ones always do, or are gone."""
STORE = "simulated"
DISMISS_SECONDS = 0.1
SAVED = (Outcome(None, on_demand=True),)
EPSILON = 1e-9


class Training:
    """The steps and automatic saves of one generation."""

    def __init__(
        self, number: int, begins: float, step_seconds: float, *, first_iteration: int, saves_at: float
    ) -> None:
        self.number = number  # of the generation
        self.step_seconds = step_seconds
        self.first_iteration = first_iteration
        self.iteration = first_iteration
        self.boundary = begins  # end of the last step, or of the save after it
        self.saves_at = saves_at  # the first step that ends after this time is saved
        self.last_end = begins  # end of the last step
        self.reported = first_iteration  # the manager knows of this one
        self.stops = False  # the step that runs is the last one

    def next_save(self) -> tuple[int, float]:
        """Return the number of steps until the next save, and its time."""
        steps = max(1, math.ceil((self.saves_at - self.boundary) / self.step_seconds - EPSILON))
        return steps, self.boundary + steps * self.step_seconds

    def advance(self, steps: int) -> float:
        if steps:
            self.iteration += steps
            self.last_end = self.boundary = self.boundary + steps * self.step_seconds
        return self.boundary

    def steps_until(self, time: float) -> int:
        return max(0, math.floor((time - self.boundary) / self.step_seconds + EPSILON))


class SimulatedMachines:
    """The machines of a market, their agents, and the queue of what happens next."""

    def __init__(
        self,
        trace: MarketTrace,
        planner: CachedPlanner,
        costs: Costs,
        *,
        devices_per_machine: int,
        notice_seconds: float = 0.0,
        save_every_seconds: float | None = None,
        hot: bool = False,
    ) -> None:
        """`notice_seconds`: a removal is announced this long before; 0: machines vanish.

        `hot`: workers morph in place, as with `varuna run --hot`.
        """
        self._trace = trace
        self._planner = planner
        self._costs = costs
        self._notice_seconds = notice_seconds
        self._save_every_seconds = save_every_seconds
        self.state = JobState(settings=msgspec.structs.replace(SIMULATED_SETTINGS, hot=hot))
        self.ledger = Ledger()
        self._accountant = Accountant(self.ledger, devices_per_machine=devices_per_machine)
        self._queue: list[tuple[float, int, Callable[[float], Sequence[events.Event]], bool]] = []
        self._num_queued = 0
        self._woken: set[float] = set()
        self._listed: dict[str, None] = {}
        self._sent_list: tuple[str, ...] = ()
        self._live: dict[str, float] = {}  # machines of the market, since when
        self._agents: dict[str, str] = {}  # connected agents
        self._starting: set[str] = set()  # machines that the manager starts an agent on
        self._num_agents = 0
        self._training: Training | None = None
        self._written_step = -1  # newest complete checkpoint
        self.log: list[tuple[float, str]] = []

    def _push(
        self, at: float, then: Callable[[float], Sequence[events.Event]], *, ends_steps: bool = False
    ) -> None:
        """Call `then` at that time. `ends_steps`: the step that runs then is lost."""
        self._num_queued += 1
        heapq.heappush(self._queue, (at, self._num_queued, then, ends_steps))

    def _happen(self, batch: Sequence[events.Event], now: float) -> None:
        self.state, found = decide_all(self.state, batch, now)
        self._accountant.observe(self.state, now)
        for command in found:
            self._carry_out(command, now)
        self._wake(now)

    def _wake(self, now: float) -> None:
        """Schedule ticks for the times at which a rule of the manager becomes true by itself."""
        state, settings = self.state, self.state.settings
        times = [state.changed_at + settings.settle_seconds, state.present_at + settings.settle_seconds]
        times += [state.wait_until, state.retry_change_at, state.retry_join_at]
        if state.generation is None:
            times.append(state.since + settings.gather_seconds)
        if state.phase in ("saving", "ending"):
            times.append(state.deadline)
        for member in state.members.values():
            if member.welcome_at > now:
                times.append(member.welcome_at)
            if member.retry_at > now:
                times.append(member.retry_at)
            if member.leave_by is not None:
                times.append(member.leave_by)
        for time in times:
            if now < time < NEVER and time not in self._woken:
                self._woken.add(time)
                self._push(time, self._tick)

    def _tick(self, now: float) -> Sequence[events.Event]:
        self._woken.discard(now)
        return [events.Tick()]

    def _carry_out(self, command: commands.Command, now: float) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------ the market

    def _push_trace(self) -> None:
        noticed: set[str] = set()
        added_at: dict[str, float] = {}
        for change in self._trace.changes:
            for name in change.removed:
                if self._notice_seconds and name not in noticed:
                    at = max(change.at - self._notice_seconds, added_at.get(name, 0.0))
                    self._push(at, self._notice_of(name, change.at))
                noticed.discard(name)
            noticed.update(change.noticed)
            added_at |= dict.fromkeys(change.added, change.at)
            self._push(change.at, self._change_of(change), ends_steps=bool(change.removed))

    def _notice_of(self, machine: str, deadline: float) -> Callable[[float], Sequence[events.Event]]:
        return lambda now: [events.NoticeReceived(machine, deadline, "the market takes it back")]

    def _change_of(self, change: MachineChange) -> Callable[[float], Sequence[events.Event]]:
        def happen(now: float) -> Sequence[events.Event]:
            found: list[events.Event] = []
            for name in change.removed:
                self._live.pop(name, None)
                found += self._lose(name, now)
            for name in change.added:
                self._live[name] = now
                self._listed[name] = None
                if name in self._starting:  # the manager has tried before
                    self._push_join(name, now)
            for name in change.noticed:
                deadline = self._removal_of(name, now)
                found.append(events.NoticeReceived(name, deadline, "the trace announces its removal"))
            return [*found, *self._list()]

        return happen

    def _removal_of(self, machine: str, now: float) -> float:
        times = (c.at for c in self._trace.changes if c.at > now and machine in c.removed)
        return next(times, self._trace.end)

    def _lose(self, machine: str, now: float) -> list[events.Event]:
        """A machine is gone. The manager learns of it at once if it expects it, else a little later."""
        member, agent = self.state.members.get(machine), self._agents.get(machine)
        if agent is None:
            self._listed.pop(machine, None)
            if machine in self._starting:
                self._starting.discard(machine)
                return [events.AgentNotStarted(machine, "the machine is gone")]
            return []
        if member is not None and member.leaves:
            return self._disconnect(machine, agent)
        if self._training is not None and self.state.phase in ("running", "saving"):
            generation = self.state.generation
            if generation is not None and machine in generation.machines:
                self._training.stops = True  # no step ends without it
        self._push(
            now + self._costs.detect_seconds, lambda _: [*self._disconnect(machine, agent), *self._list()]
        )
        return []

    def _disconnect(self, machine: str, agent: str) -> list[events.Event]:
        if self._agents.get(machine) != agent:
            return []
        del self._agents[machine]
        if machine not in self._live:
            self._listed.pop(machine, None)
        return [events.AgentLeft(machine, agent, "the market took it back")]

    def _list(self) -> list[events.Event]:
        """Return the machine list if it has changed; while it is empty, the last one stays."""
        listed = tuple(self._listed)
        if not listed or listed == self._sent_list:
            return []
        self._sent_list = listed
        return [events.MachineListRead(listed)]

    # ------------------------------------------------------------ agents

    def _start_agent(self, machine: str, now: float) -> None:
        """Start an agent. On a machine that is gone, the first start fails; the next one waits for it."""
        if machine in self._live:
            self._starting.add(machine)
            self._push_join(machine, now)
        elif self.state.members[machine].start_failures:
            self._starting.add(machine)
        else:
            failed = events.AgentNotStarted(machine, "the machine is gone")
            self._push(now + DISMISS_SECONDS, lambda _: [failed])

    def _push_join(self, machine: str, now: float) -> None:
        since = self._live[machine]

        def join(_: float) -> Sequence[events.Event]:
            if self._live.get(machine) != since or machine not in self._starting or machine in self._agents:
                return ()
            self._starting.discard(machine)
            self._num_agents += 1
            self._agents[machine] = agent = f"agent {self._num_agents}"
            return [events.AgentJoined(machine, agent, None, machine, store_port=1)]

        self._push(now + self._costs.join_seconds, join)

    def _end_agent(self, machine: str, now: float) -> None:
        self._starting.discard(machine)
        if (agent := self._agents.get(machine)) is not None:
            self._push(now + DISMISS_SECONDS, lambda _: self._disconnect(machine, agent))


class SimulatedJob(SimulatedMachines):
    """A job on these machines: its manager, its steps and its saves."""

    def run(self) -> Ledger:
        """Play the whole trace."""
        self._push_trace()
        self._push(self._trace.end, lambda _: ())
        while self._queue:
            at, _, _, ends_steps = self._queue[0]
            ends_steps = ends_steps or not self._costs.saves_on_request  # any change may end them
            at = min(at, self._trace.end)
            if self._report_save(at) or (ends_steps and self._report_steps(at)):
                continue
            if at >= self._trace.end:
                break
            batch: list[events.Event] = []
            while self._queue and self._queue[0][0] <= at:
                batch += heapq.heappop(self._queue)[2](at)
            lists = [event for event in batch if isinstance(event, events.MachineListRead)]
            if len(lists) > 1:  # many machines are lost at once: only the last list counts
                batch = [event for event in batch if not isinstance(event, events.MachineListRead)]
                batch.append(lists[-1])
            if batch:
                self._happen(batch, at)
        self._report_steps(self._trace.end)
        self._accountant.observe(self.state, self._trace.end)
        return self.ledger

    # ------------------------------------------------------------ training

    def _report_save(self, until: float) -> bool:
        """Begin the next automatic save, if it is before `until`."""
        training = self._training
        if training is None or training.stops or training.saves_at > until:
            return False
        steps, saves_at = training.next_save()
        if saves_at > until:
            return False
        training.advance(steps)
        training.boundary += self._costs.save_seconds
        training.saves_at = training.boundary + self._interval(training.boundary)
        step = training.iteration
        self._push(training.boundary + self._costs.write_seconds, lambda now: self._written(step, now))
        return True

    def _report_steps(self, until: float) -> bool:
        """Report the last step that ends before `until`. Return False if it is known."""
        training = self._training
        if training is None or training.stops:
            return False
        training.advance(training.steps_until(until))
        if training.iteration == training.reported:
            return False
        training.reported = training.iteration
        self._happen(self._progress(), max(training.last_end, self.ledger.at))
        return True

    def _written(self, step: int, now: float) -> Sequence[events.Event]:
        """A save is complete. While the job trains, this changes facts and decides nothing."""
        self._written_step = max(self._written_step, step)
        if self._training is None or self.state.phase != "running" or self.state.saved_step < 0:
            return self._progress()
        decision = Decision(self.state, now)
        keep_facts(decision, [self._worker(self._training)])
        self.state = decision.state
        self._accountant.observe(self.state, now)
        return ()

    def _interval(self, now: float) -> float:
        rhythm = SaveRhythm(
            every_seconds=self._save_every_seconds,
            failures=self.state.losses,
            observed_seconds=now,
            save_seconds=self._costs.save_seconds,
        )
        interval = rhythm.interval(save_seconds=self._costs.save_seconds, more_seconds=0.0)
        return NEVER if interval is None else interval

    def _progress(self, *, of_all: bool = False) -> list[events.Event]:
        """Return the heartbeat of one machine with workers, or of all."""
        training, generation = self._training, self.state.generation
        if training is None or generation is None:
            return []
        worker = self._worker(training)
        beats: dict[str, Heartbeat] = {}
        for machine, ranks in zip(generation.machines, generation.ranks, strict=True):
            if agent := self._agents.get(machine):
                workers = tuple(msgspec.structs.replace(worker, rank=rank) for rank in ranks)
                beats[machine] = (agent, generation.number, workers)
                if not of_all:
                    break
        return [events.Tick(beats)] if beats else []

    def _worker(self, training: Training) -> WorkerProgress:
        steps = training.reported - training.first_iteration
        return WorkerProgress(
            0,
            iteration=training.reported,
            steps=steps,
            activity=training.reported,
            step_seconds=training.step_seconds if steps else 0.0,
            saved_step=self._written_step,
            save_seconds=self._costs.save_seconds,
            store=STORE,
            generation=training.number,
            hot=self.state.settings.hot,
            morph_seconds=self._costs.morph_seconds,
        )

    # ------------------------------------------------------------ commands

    def _carry_out(self, command: commands.Command, now: float) -> None:
        if isinstance(command, commands.StartAgent):
            self._start_agent(command.machine, now)
        elif isinstance(command, commands.EndAgent):
            self._end_agent(command.machine, now)
        elif isinstance(command, commands.MakePlan):
            plan = self._planner.plan(command.machines)
            self._push(now + self._costs.gather_seconds / 2, lambda _: [events.PlanReady(plan)])
        elif isinstance(command, commands.FindCheckpoint):
            self._push(now + self._costs.gather_seconds / 2, self._find_checkpoint)
        elif isinstance(command, commands.Launch):
            self._launch(command, now)
        elif isinstance(command, commands.SaveAndEnd):
            self._save_and_end(command, now)
        elif isinstance(command, commands.Prepare):
            self._push(now + self._costs.start_seconds, lambda _: self._prepared(command))
        elif isinstance(command, commands.Morph):
            self._morph(command, now)
        elif isinstance(command, commands.KillWorkers):
            if self.state.generation is not None and command.generation == self.state.generation.number:
                self._training = None  # else joiners that are not needed
            self._push(now + self._costs.end_seconds, lambda _: self._workers_end(command, ()))
        elif isinstance(command, commands.LogEvent):
            self.log.append((now, f"{command.what}: {command.why}"))
        elif not isinstance(command, commands.ReleaseMachines):
            raise AssertionError(f"a simulated job cannot carry out {command}")

    def _find_checkpoint(self, now: float) -> Sequence[events.Event]:
        return [events.CheckpointFound(self._written_step if self._written_step >= 0 else None)]

    def _launch(self, command: commands.Launch, now: float) -> None:
        generation = command.generation
        step_seconds = self._planner.size(len(self.state.proposal.machines)).step_seconds  # type: ignore[union-attr]
        begins = now + self._costs.start_seconds
        first_save = 0.0 if self._written_step < 0 else begins + self._interval(begins)
        if self._save_every_seconds == 0:
            first_save = NEVER
        self._training = training = Training(
            generation.number,
            begins,
            step_seconds,
            first_iteration=generation.resume_step or 0,
            saves_at=first_save,
        )

        def finish_first_step(now: float) -> Sequence[events.Event]:
            if self._training is not training or training.stops:
                return ()
            training.advance(training.steps_until(now))
            training.reported = training.iteration
            if not self.state.settings.hot:
                return self._progress()
            return [*self._store_ready(), *self._progress(of_all=True)]

        self._push(begins + step_seconds, finish_first_step)

    def _prepared(self, command: commands.Prepare) -> Sequence[events.Event]:
        """The joiners have built their model, and wait for the others."""
        found, beats = command.generation, {}
        for machine, ranks in zip(found.machines, found.ranks, strict=True):
            if machine in command.joiners and (agent := self._agents.get(machine)):
                waiting = tuple(WorkerProgress(rank, generation=found.number, waits=True) for rank in ranks)
                beats[machine] = (agent, found.number, waiting)
        return [events.Tick(beats)] if beats else []

    def _morph(self, command: commands.Morph, now: float) -> None:
        """Continue in the next generation: after the step that runs, or, if a rank was lost, at once."""
        before, generation = self._training, command.generation
        if before is None:
            return
        finishes_step = not command.lost and not before.stops
        before.stops = True
        before.advance(before.steps_until(now) if finishes_step else 0)
        ends = max(now, before.boundary + before.step_seconds) if finishes_step else now
        begins = ends + self._costs.morph_seconds
        gone = tuple(name for name in command.last.machines if name not in generation.machines)

        def finish_step(_: float) -> Sequence[events.Event]:
            if self._training is not before or not finishes_step:
                return ()
            before.advance(1)
            before.reported = before.iteration
            return self._progress()

        def enter(_: float) -> Sequence[events.Event]:
            if self._training is not before or self.state.generation is not generation:
                return ()
            proposal = self.state.proposal
            size = len(proposal.machines) if proposal is not None else len(generation.machines)
            self._training = training = Training(
                generation.number,
                begins,
                self._planner.size(size).step_seconds,
                first_iteration=before.first_iteration,
                saves_at=max(begins, before.saves_at),
            )
            training.iteration = training.reported = before.iteration
            left = commands.KillWorkers(command.last.number, gone, "")
            return [*self._workers_end(left, ()), *self._progress(of_all=True)]

        self._push(ends, finish_step)
        self._push(begins, enter)

    def _save_and_end(self, command: commands.SaveAndEnd, now: float) -> None:
        training = self._training
        if training is None:
            return
        if not self._costs.saves_on_request:
            self._training = None
            self._push(now + self._costs.end_seconds, lambda _: self._workers_end(command, SAVED))
            return
        if training.stops:  # a machine that is lost does not save
            return
        training.stops = True
        training.advance(training.steps_until(now))
        ends = max(now, training.boundary + training.step_seconds)

        def finish_step(_: float) -> Sequence[events.Event]:
            if self._training is not training:
                return ()
            training.advance(1)
            training.reported = training.iteration
            return self._progress()

        def finish_save(_: float) -> Sequence[events.Event]:
            if self._training is not training:
                return ()
            self._written_step = max(self._written_step, training.iteration)
            found = self._workers_end(command, SAVED)
            last = self._worker(training)
            assert all(isinstance(one, events.WorkersEnded) for one in found[:1])
            found[:1] = [msgspec.structs.replace(one, progress=(last,)) for one in found[:1]]
            self._training = None
            return found

        self._push(ends, finish_step)
        self._push(ends + self._costs.leave_seconds, finish_save)

    def _workers_end(
        self,
        command: commands.SaveAndEnd | commands.KillWorkers,
        outcomes: tuple[Outcome, ...],
    ) -> list[events.Event]:
        ended: list[events.Event] = [
            events.WorkersEnded(machine, agent, command.generation, outcomes)
            for machine in command.machines
            if (agent := self._agents.get(machine)) is not None
        ]
        return [*ended, *self._store_ready()]

    def _store_ready(self) -> list[events.Event]:
        """The first machine has opened a store in place of the one that the generation uses."""
        generation = self.state.generation
        if generation is None or (master := generation.machines[0]) not in self._agents:
            return []
        return [events.StoreReady(master, self._agents[master], 1)]
