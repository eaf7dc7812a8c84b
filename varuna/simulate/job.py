"""A simulated job: machines and workers that follow the manager's commands, in simulated time.

All decisions are those of `varuna.morph.decide`. A command takes the time that `Costs` says, and then becomes
the event that a real machine would send. Time jumps from event to event; training in between is computed.
"""

import gc
import heapq
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from varuna.morph import commands, events
from varuna.morph.accounting import Accountant
from varuna.morph.decide import decide_all
from varuna.morph.interval import SaveRhythm, count_failures
from varuna.morph.members import unsteady_members
from varuna.morph.reports import SameReports, merge_reports
from varuna.morph.rules.decision import Decision
from varuna.morph.rules.workers import keep_facts
from varuna.morph.state import (
    Generation,
    Heartbeat,
    JobState,
    ManagerSettings,
    Member,
    Outcome,
    WorkerProgress,
)
from varuna.observe.ledger import Ledger
from varuna.simulate.costs import Costs
from varuna.simulate.planner import CachedPlanner
from varuna.simulate.traces import MachineChange, MarketTrace, RemovalNotice

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
WARM_SECONDS = 1.0
"""An agent imports torch for at least this long after it has connected."""
SAVED = (Outcome(None, on_demand=True),)
EPSILON = 1e-9


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switch Python's cyclic garbage collector off.

    Each decision replaces the states of thousands of machines, which makes the collector run again and again.
    It finds nothing: they have no cycles.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


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
        self.saves = False  # a requested save runs

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
        greedy: bool = False,
        prices: Mapping[str, float] | None = None,
    ) -> None:
        """`notice_seconds`: a removal is announced this long before; 0: machines vanish.

        `hot`: workers morph in place, as with `varuna run --hot`.
        """
        self._trace = trace
        self._planner = planner
        self._costs = costs
        self._notice_seconds = notice_seconds
        self._save_every_seconds = save_every_seconds
        self.state = JobState(settings=msgspec.structs.replace(SIMULATED_SETTINGS, hot=hot, greedy=greedy))
        self.ledger = Ledger(prices=dict(prices or {}))
        self._accountant = Accountant(self.ledger, devices_per_machine=devices_per_machine)
        self._queue: list[tuple[float, int, Callable[[float], Sequence[events.Event]], bool]] = []
        self._num_queued = 0
        self._woken: set[float] = set()
        self._scanned: Mapping[str, Member] = {}  # members whose times are in the queue
        self._listed: dict[str, None] = {}
        self._sent_list: tuple[str, ...] = ()
        self._list_changed = False
        self._live: dict[str, float] = {}  # machines of the market, since when
        self._paid_before: dict[str, float] = {}  # seconds that the ledger had for a machine when it came
        self._agents: dict[str, str] = {}  # connected agents
        self._alive: set[str] = set()  # agents whose machines are there: the manager detects a loss later
        self._starting: set[str] = set()  # machines that the manager starts an agent on
        self._num_agents = 0
        self._training: Training | None = None
        self._written_step = -1  # newest complete checkpoint
        self._num_kills = 0  # of all workers: a checkpoint that they were writing stays incomplete
        self._has_launched = False
        self._rhythm = SaveRhythm()
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
        times = self._times_of_state()
        if self.state.members is not self._scanned:  # a thousand machines
            self._scanned = self.state.members
            times += self._times_of_members(now)
        for time in times:
            if now < time < NEVER and time not in self._woken:
                self._woken.add(time)
                self._push(time, self._tick)

    def _times_of_state(self) -> list[float]:
        state, settings = self.state, self.state.settings
        times = [state.changed_at + settings.settle_seconds, state.present_at + settings.settle_seconds]
        times += [state.wait_until, state.retry_change_at, state.retry_join_at, state.wait_over_at]
        if state.generation is None:
            times.append(state.since + settings.gather_seconds)
        if state.phase in ("morphing", "saving", "ending"):
            times += [state.deadline, state.stacks_at + settings.stacks_seconds]
        if state.lost or state.failures:  # survivors wait for reports, a plan, or another machine
            waits = (settings.report_seconds, settings.replan_seconds, settings.hold_seconds)
            times += [state.failed_at + seconds for seconds in waits]
        return times

    def _times_of_members(self, now: float) -> list[float]:
        """Return the times from now on at which a rule about one machine becomes true."""
        times: list[float] = []
        for member in unsteady_members(self.state.members):
            if member.welcome_at >= now:
                times.append(member.welcome_at)
            if member.trial_until >= now:
                times.append(member.trial_until)
            if member.retry_at >= now:
                times.append(member.retry_at)
            if member.leave_by is not None:
                times += [member.leave_by, member.leave_at]
        return times

    def _tick(self, now: float) -> Sequence[events.Event]:
        """Let the manager decide, if no later event has made the reason for this tick obsolete."""
        self._woken.discard(now)
        is_needed = now in self._times_of_state() or now in self._times_of_members(now)
        return [events.Tick()] if is_needed else ()

    def _carry_out(self, command: commands.Command, now: float) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------ the market

    def _push_trace(self) -> None:
        for change in self._trace.changes:
            self._push(change.at, self._change_of(change), ends_steps=bool(change.removed))
        for notice in self._trace.announced():
            self._push(notice.at, self._notice_of(notice, "the trace announces its removal"))
        for notice in self._trace.notices(self._notice_seconds):
            self._push(notice.at, self._notice_of(notice, "the market takes it back"))

    def _notice_of(self, notice: RemovalNotice, why: str) -> Callable[[float], Sequence[events.Event]]:
        return lambda now: [events.NoticeReceived(notice.machine, notice.deadline, why)]

    def _change_of(self, change: MachineChange) -> Callable[[float], Sequence[events.Event]]:
        def happen(now: float) -> Sequence[events.Event]:
            found: list[events.Event] = []
            for name in change.removed:
                self._pay_stay(name, now)
                found += self._lose(name, now)
            for name in change.added:
                self._live[name], self._paid_before[name] = now, self._paid_seconds(name, now)
                self._listed[name], self._list_changed = None, True
                if name in self._starting:  # the manager has tried before
                    self._push_join(name, now)
            return found

        return happen

    def _pay_stay(self, machine: str, now: float) -> None:
        """The stay of a machine is over. The market bills all of it, also if no agent was started there."""
        if (since := self._live.pop(machine, None)) is not None:
            paid = self._paid_seconds(machine, now) - self._paid_before.pop(machine)
            if (unused := now - since - paid) > EPSILON:
                self._accountant.pay_unused(machine, unused)

    def _paid_seconds(self, machine: str, now: float) -> float:
        paid = self.ledger.machines.get(machine, 0.0)
        return paid + now - self.ledger.paid_since.get(machine, now)

    def _lose(self, machine: str, now: float) -> list[events.Event]:
        """A machine is gone. The manager learns of it later, but at once if its workers have left."""
        member, agent = self.state.members.get(machine), self._agents.get(machine)
        if agent is None:
            self._unlist(machine)
            if machine in self._starting:
                self._starting.discard(machine)
                return [events.AgentNotStarted(machine, "the machine is gone")]
            return []
        if member is not None and member.leaves and member.workers is None:
            return self._disconnect(machine, agent)
        self._alive.discard(agent)
        training, generation = self._training, self.state.generation
        steps = training is not None and not training.stops and self.state.phase in ("running", "saving")
        if steps and generation is not None and machine in generation.machines:
            assert training is not None
            training.stops = True  # no step ends without it
        self._push(now + self._costs.detect_seconds, lambda _: self._disconnect(machine, agent))
        return []

    def _disconnect(self, machine: str, agent: str) -> list[events.Event]:
        if self._agents.get(machine) != agent:
            return []
        del self._agents[machine]
        self._alive.discard(agent)
        if machine not in self._live:
            self._unlist(machine)
        left = events.AgentLeft(machine, agent, "the market took it back")
        # An agent opens the next store as soon as it has an order. It counts here once a loss needs it.
        return [left, *self._store_ready()] if self.state.phase == "morphing" else [left]

    def _unlist(self, machine: str) -> None:
        self._listed.pop(machine, None)
        self._list_changed = True

    def _reachable(self, machine: str) -> str | None:
        """Return the agent of a machine; None: it has none, or the machine is gone."""
        agent = self._agents.get(machine)
        return agent if agent in self._alive else None

    def _is_whole(self, generation: Generation, lost: Collection[int] = ()) -> bool:
        """Return True if all machines of a generation are there, but those of its `lost` ranks."""
        gone, needed = frozenset(lost), generation.agents
        if gone:
            places = zip(generation.agents, generation.ranks, strict=True)
            needed = tuple(agent for agent, ranks in places if not gone.issuperset(ranks))
        return self._alive.issuperset(needed)

    def _store_ready(self) -> list[events.Event]:
        """The first machine has opened a store in place of the one that the generation uses."""
        generation = self.state.generation
        if generation is None or (agent := self._reachable(generation.machines[0])) is None:
            return []
        return [events.StoreReady(generation.machines[0], agent, 1)]

    def _list(self) -> list[events.Event]:
        """Return the machine list if it has changed; while it is empty, the last one stays."""
        if not self._list_changed:  # ten thousand machines
            return []
        self._list_changed, listed = False, tuple(self._listed)
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
        """An agent connects, and its machine is ready once it has imported torch."""
        since, agents = self._live[machine], list[str]()

        def connect(_: float) -> Sequence[events.Event]:
            if self._live.get(machine) != since or machine not in self._starting or machine in self._agents:
                return ()
            self._starting.discard(machine)
            self._num_agents += 1
            self._agents[machine] = agent = f"agent {self._num_agents}"
            self._alive.add(agent)
            agents.append(agent)
            return [events.AgentJoined(machine, agent, None, machine)]

        def become_ready(_: float) -> Sequence[events.Event]:
            if not agents or self._reachable(machine) != agents[0]:
                return ()
            return [events.StoreReady(machine, agents[0], 1)]

        ready = now + (self._costs.join_seconds if self._has_launched else self._costs.first_join)
        self._push(max(now, ready - WARM_SECONDS), connect)
        self._push(ready, become_ready)

    def _end_agent(self, machine: str, now: float) -> None:
        self._starting.discard(machine)
        if (agent := self._agents.get(machine)) is not None:
            self._push(now + DISMISS_SECONDS, lambda _: self._disconnect(machine, agent))


class SimulatedJob(SimulatedMachines):
    """A job on these machines: its manager, its steps and its saves."""

    def run(self) -> Ledger:
        """Play the whole trace."""
        with no_garbage_collection():
            return self._play()

    def _play(self) -> Ledger:
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
            if changed := self._list():  # machines come before their notices
                notices = [event for event in batch if isinstance(event, events.NoticeReceived)]
                batch = [event for event in batch if not isinstance(event, events.NoticeReceived)]
                batch += [*changed, *notices]
            if batch:
                self._happen(batch, at)
        self._report_steps(self._trace.end)
        self._accountant.observe(self.state, self._trace.end)
        for name in tuple(self._live):
            self._pay_stay(name, self._trace.end)
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
        step, kills = training.iteration, self._num_kills

        def written(now: float) -> Sequence[events.Event]:
            return self._written(step, now) if self._num_kills == kills else ()

        self._push(training.boundary + self._costs.write_seconds, written)
        return True

    def _report_steps(self, until: float) -> bool:
        """Report the last step that ends before `until`. Return False if it is known."""
        training = self._training
        if training is None:
            return False
        if not training.stops:  # else it has counted its steps when it was told to stop
            training.advance(training.steps_until(until))
        if training.iteration == training.reported:
            return False
        training.reported = training.iteration
        now = max(training.last_end, self.ledger.at)
        if beats := self._steps_beat(now):
            self._happen(beats, now)
        return True

    def _steps_beat(self, now: float) -> Sequence[events.Event]:
        """Return the heartbeat with the last step. If it only changes facts, note them and return none.

        The manager decides nothing when a step of known duration ends; a decision looks at all machines.
        """
        training, state = self._training, self.state
        if training is None or state.phase not in ("running", "morphing"):
            return self._progress(now)
        if state.step_seconds != training.step_seconds or not state.best_iteration:
            return self._progress(now)
        for beat in self._progress(now):
            assert isinstance(beat, events.Tick)
            found = {machine: workers for machine, (_, _, workers) in beat.heartbeats.items()}
            self._keep_facts(now, progress=merge_reports(state.progress, found))
        return ()

    def _keep_facts(self, now: float, **fields: Any) -> None:
        """Change the state by what the workers report, and decide nothing."""
        assert self._training is not None
        decision = Decision(self.state, now)
        decision.set(**fields)
        keep_facts(decision, [self._worker(self._training, now)])
        self.state = decision.state
        self._accountant.observe(self.state, now)

    def _written(self, step: int, now: float) -> Sequence[events.Event]:
        """A save is complete. While the job trains, this changes facts and decides nothing."""
        self._written_step = max(self._written_step, step)
        if self._training is None or self.state.phase != "running" or self.state.saved_step < 0:
            return self._progress(now)
        self._keep_facts(now)
        return ()

    def _interval(self, now: float, *, starts: bool = False) -> float:
        """Return the time to the next save. Workers know the failures up to their start, as real ones do."""
        if starts:
            self._rhythm = SaveRhythm(
                every_seconds=self._save_every_seconds,
                failures=count_failures(self.state.losses, self.state.history.survived),
                observed_seconds=now,
                save_seconds=self._costs.save_seconds,
            )
        interval = self._rhythm.interval(
            save_seconds=self._costs.save_seconds, more_seconds=now - self._rhythm.observed_seconds
        )
        return NEVER if interval is None else interval

    def _progress(self, now: float) -> list[events.Event]:
        """Return the heartbeat of one machine with workers."""
        training, generation = self._training, self.state.generation
        if training is None or generation is None:
            return []
        worker, beats = self._worker(training, now), dict[str, Heartbeat]()
        for machine, ranks in zip(generation.machines, generation.ranks, strict=True):
            if agent := self._reachable(machine):
                workers = tuple([msgspec.structs.replace(worker, rank=rank) for rank in ranks])
                beats[machine] = (agent, generation.number, workers)
                return [events.Tick(beats)]
        return []

    def _report_all(self, now: float) -> list[events.Event]:
        """Report the workers of all machines. Their heartbeats would only change when they were last seen."""
        training, generation = self._training, self.state.generation
        if training is None or generation is None:
            return []
        here = {machine for machine, agent in self._agents.items() if agent in self._alive}
        found = SameReports(self._worker(training, now), generation, missing=generation.machine_set - here)
        self.state = msgspec.structs.replace(self.state, progress=found)
        return [events.Tick()]

    def _worker(self, training: Training, now: float) -> WorkerProgress:
        steps = training.reported - training.first_iteration
        return WorkerProgress(
            0,
            iteration=training.reported,
            steps=steps,
            activity=training.reported,
            step_age=max(0.0, now - training.last_end),
            step_seconds=training.step_seconds if steps else 0.0,
            saved_step=self._written_step,
            save_seconds=self._costs.save_seconds,
            write_seconds=self._costs.write_seconds,
            store=STORE,
            generation=training.number,
            taken=training.number,
            hot=self.state.settings.hot,
            morph_seconds=self._costs.morph_seconds,
            saving=training.saves,
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
            self._push(now + self._costs.prepare, lambda _: self._prepared(command))
        elif isinstance(command, commands.Morph):
            self._morph(command, now)
        elif isinstance(command, commands.KillWorkers):
            if self.state.generation is not None and command.generation == self.state.generation.number:
                self._training = None  # else joiners that are not needed
                self._num_kills += 1
            self._push(now + self._costs.end_seconds, lambda _: self._workers_end(command, ()))
        elif isinstance(command, commands.LogEvent):
            self.log.append((now, f"{command.what}: {command.why}"))
        elif not isinstance(command, commands.ReleaseMachines | commands.DumpStacks | commands.RepeatOrders):
            raise AssertionError(f"a simulated job cannot carry out {command}")

    def _find_checkpoint(self, now: float) -> Sequence[events.Event]:
        return [events.CheckpointFound(self._written_step if self._written_step >= 0 else None)]

    def _launch(self, command: commands.Launch, now: float) -> None:
        generation = command.generation
        step_seconds = self._planner.size(len(self.state.proposal.machines)).step_seconds  # type: ignore[union-attr]
        is_first, self._has_launched = not self._has_launched, True
        begins = now + (self._costs.first_start if is_first else self._costs.start_seconds)
        next_save = begins + self._interval(begins, starts=True)
        first_save = 0.0 if self._written_step < 0 else next_save
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
                return self._progress(now)
            return [*self._store_ready(), *self._report_all(now)]

        self._push(begins + step_seconds, finish_first_step)

    def _prepared(self, command: commands.Prepare) -> Sequence[events.Event]:
        """The joiners have built their model, and wait for the others."""
        found, beats, joiners = command.generation, {}, frozenset(command.joiners)
        for machine, ranks in zip(found.machines, found.ranks, strict=True):
            if machine in joiners and (agent := self._reachable(machine)):
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
        staying = frozenset(generation.machines)
        gone = tuple(name for name in command.last.machines if name not in staying)

        def finish_step(now: float) -> Sequence[events.Event]:
            if self._training is not before or not finishes_step or not self._is_whole(command.last):
                return ()
            before.advance(1)
            before.reported = before.iteration
            return self._steps_beat(now)

        def enter(now: float) -> Sequence[events.Event]:
            if self._training is not before or self.state.generation is not generation:
                return ()
            if not (self._is_whole(command.last, command.lost) and self._is_whole(generation)):
                return ()  # the others wait for the order that follows the loss
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
            return [*self._workers_end(left, ()), *self._report_all(now)]

        self._push(ends, finish_step)
        self._push(begins, enter)

    def _save_and_end(self, command: commands.SaveAndEnd, now: float) -> None:
        training = self._training
        if training is None:
            return
        if not self._costs.saves_on_request:
            self._training = None
            self._num_kills += 1
            self._push(now + self._costs.end_seconds, lambda _: self._workers_end(command, SAVED))
            return
        generation = self.state.generation
        if training.stops or generation is None:  # a machine that is lost does not save
            return
        training.stops = True
        training.advance(training.steps_until(now))
        ends = max(now, training.boundary + training.step_seconds)

        def finish_step(now: float) -> Sequence[events.Event]:
            if self._training is not training or not self._is_whole(generation):
                return ()
            training.advance(1)
            training.reported = training.iteration
            training.saves = True
            return self._progress(now)

        def finish_save(now: float) -> Sequence[events.Event]:
            if self._training is not training or not self._is_whole(generation):
                return ()
            self._written_step = max(self._written_step, training.iteration)
            found = self._workers_end(command, SAVED)
            last = self._worker(training, now)
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
            if (agent := self._reachable(machine)) is not None
        ]
        return [*ended, *self._store_ready()]
