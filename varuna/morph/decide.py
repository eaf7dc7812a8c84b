"""What the manager does when something happens: a pure function, with the reason in the answer.

    gathering ──► running ──► saving ──► gathering ──► ...     machines come and go by plan
        ▲            │           │
        │            ▼           ▼
        └───────── ending ◄──────┘                             something was lost, or crashed

Events only change what is known; what follows from it is looked at anew after each of them. So the
order in which news arrives decides nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from varuna.morph.failures import describe, find_cause, in_short
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
    Outcome,
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


def decide(state: JobState, event: Event, now: float) -> tuple[JobState, tuple[Command, ...]]:
    thought = Thought(state, now)
    if state.phase != "over":
        thought.take_in(event)
        thought.follow()
    elif isinstance(event, AgentJoined):
        thought.do(EndAgent(event.machine, "the job is over"))
    return thought.state, tuple(thought.commands)


class Thought:
    """One decision under way."""

    def __init__(self, state: JobState, now: float) -> None:
        self.state = state
        self.now = now
        self.commands: list[Command] = []

    # ------------------------------------------------------------ small steps

    def do(self, command: Command) -> None:
        self.commands.append(command)

    def tell(self, what: str, why: str) -> None:
        self.do(Tell(what, why))

    def set(self, **fields: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **fields)

    def set_member(self, name: str, **fields: Any) -> None:
        member = msgspec.structs.replace(self.state.members[name], **fields)
        self.set(members={**self.state.members, name: member})

    def enter(self, phase: str, reason: str, **fields: Any) -> None:
        self.set(phase=phase, since=self.now, reason=reason, **fields)

    @property
    def generation(self) -> Generation:
        assert self.state.generation is not None
        return self.state.generation

    def at_work(self, machine: str) -> bool:
        """Whether it has a part in the generation that runs, and has not ended it."""
        return self.state.active and machine in self.generation.machines and machine not in self.state.ended

    def agent_of(self, machine: str, agent: str) -> Member | None:
        """The member, if the news is of the agent that it has now."""
        member = self.state.members.get(machine)
        return member if member is not None and member.agent == agent else None

    # ------------------------------------------------------------ taking in what has happened

    def take_in(self, event: Event) -> None:
        handlers: dict[type[Event], Callable[[Any], None]] = {
            ListRead: self.read_list,
            AgentJoined: self.join,
            AgentLeft: self.leave,
            AgentNotStarted: self.not_started,
            StoreReady: self.store_ready,
            WorkerFailed: self.worker_failed,
            WorkersEnded: self.workers_ended,
            Planned: self.planned,
            CheckpointFound: self.checkpoint_found,
            Notice: self.notice,
            Recalled: self.recalled,
            StopAsked: self.stop_asked,
            Tick: self.tick,
        }
        handlers[type(event)](event)

    def read_list(self, event: ListRead) -> None:
        if not event.machines:
            self.tell("list ignored", "it names no machine; all stays as it is (`varuna stop` ends the job)")
            return
        members = dict(self.state.members)
        for name in event.machines:
            known = members.get(name)
            if known is None:
                members[name] = Member(name, retry_at=self.state.attach_until)
                self.tell("machine listed", name)
            elif not known.listed:
                members[name] = msgspec.structs.replace(known, listed=True, leave_by=None, drained=False)
                self.tell("machine listed", name)
        for name, member in members.items():
            if member.listed and name not in event.machines:
                members[name] = msgspec.structs.replace(member, listed=False)
                self.tell("machine unlisted", name)
        self.set(members=members)

    def join(self, event: AgentJoined) -> None:
        name = event.machine
        member = self.state.members.get(name)
        if member is None or not (member.listed or self.at_work(name)):
            self.do(EndAgent(name, "the machine is not in the list"))
            return
        if member.agent and member.agent != event.agent:
            self.lose(member, "its agent was replaced by another")
        goes_on = self.at_work(name) and (event.agent, event.generation) == (
            self.generation.agents[self.generation.machines.index(name)],
            self.generation.number,
        )
        self.set_member(
            name,
            agent=event.agent,
            address=event.address or name,
            leave_by=member.leave_by if member.agent == event.agent else None,
            seen=self.now,
            starting=None,
            start_failures=0,
            warm=event.store_port > 0 or event.generation is not None,
            store_port=event.store_port,
            workers=event.generation,
            released=False,
        )
        self.tell("agent joined", name + (f", with generation {event.generation}" if goes_on else ""))
        if event.generation is not None and not goes_on:
            why = f"generation {event.generation} is not the one at work"
            self.do(KillWorkers(name, event.generation, why))
        if goes_on and self.state.phase == "saving":  # it may not have heard that it is asked to
            self.do(SaveAndEnd(self.generation.number, (name,), self.state.reason))
        if self.at_work(name) and not goes_on and self.state.phase != "ending":
            self.end(f"{name} came back without its workers")

    def leave(self, event: AgentLeft) -> None:
        if member := self.agent_of(event.machine, event.agent):
            self.lose(member, event.why)

    def lose(self, member: Member, why: str) -> None:
        """Whatever it still does is not this job's any more: it will be told so when it comes back."""
        part = self.at_work(member.name)
        recent = tuple(at for at in member.lost_at if at > self.now - self.state.settings.flap_seconds)
        patience = 10.0 * 2 ** min(len(recent), 5) if recent else 0.0
        self.set_member(
            member.name,
            agent="",
            workers=None,
            warm=False,
            store_port=0,
            starting=None,
            retry_at=self.now + (2.0 ** min(len(recent), 5) if recent else 0.0),
            lost_at=(*recent, self.now),
            welcome_at=self.now + patience,
        )
        again = f" (lost {len(recent) + 1} times lately: it rejoins no sooner than in {patience:.0f} s)"
        self.tell("machine lost", f"{member.name}: {why}{again if recent else ''}")
        if part:
            self.set(losses=self.state.losses + 1)
            if self.state.phase != "ending":
                self.end(f"{member.name} was lost: {why}")

    def not_started(self, event: AgentNotStarted) -> None:
        member = self.state.members.get(event.machine)
        if member is None or member.agent:
            return
        failures = member.start_failures + 1
        wait = min(60.0, 2.0**failures)
        self.set_member(event.machine, starting=None, start_failures=failures, retry_at=self.now + wait)
        self.tell("agent not started", f"{event.machine}: {event.why} (next try in {wait:.0f} s)")

    def store_ready(self, event: StoreReady) -> None:
        if self.agent_of(event.machine, event.agent):
            self.set_member(event.machine, store_port=event.port, warm=True)

    def worker_failed(self, event: WorkerFailed) -> None:
        if self.agent_of(event.machine, event.agent) and self.is_at_work(event.machine, event.generation):
            self.add_failure(event.outcome)

    def add_failure(self, outcome: Outcome) -> None:
        assert outcome.failure is not None
        told = {known.failure.rank for known in self.state.failures if known.failure is not None}
        if outcome.failure.rank in told:
            return
        failed_at = self.state.failed_at if self.state.failures else self.now
        self.set(failures=(*self.state.failures, outcome), failed_at=failed_at)

    def is_at_work(self, machine: str, generation: int) -> bool:
        return self.at_work(machine) and self.generation.number == generation

    def workers_ended(self, event: WorkersEnded) -> None:
        member = self.agent_of(event.machine, event.agent)
        if member is None:
            return
        if self.is_at_work(event.machine, event.generation):
            if self.state.phase != "ending":  # what dies by our hand is no failure
                for outcome in event.outcomes:
                    if outcome.failure is not None:
                        self.add_failure(outcome)
            self.set(ended={**self.state.ended, event.machine: event.outcomes})
            if event.pulses:
                self.learn(event.pulses)
        if member.workers == event.generation:
            self.set_member(event.machine, workers=None)

    def planned(self, event: Planned) -> None:
        if event.proposal.machines != self.state.asked_plan:
            return
        self.set(asked_plan=None, proposal=event.proposal)
        layout = event.proposal.layout
        if layout is None:
            self.tell("no plan", f"{', '.join(event.proposal.machines)}: {event.proposal.problem}")
        elif self.state.phase == "running" and event.proposal.same_as(self.generation):
            self.tell("plan unchanged", f"{layout}; nothing restarts")

    def checkpoint_found(self, event: CheckpointFound) -> None:
        self.set(asked_checkpoint=False)
        if event.problem:
            self.tell("no checkpoint", event.problem)
        proposal = self.state.proposal
        if self.state.phase != "gathering" or self.state.asked_plan is not None or proposal is None:
            return
        if proposal.layout is None or proposal.machines != self.ready():
            return
        if self.state.members[proposal.used[0]].store_port:
            self.launch(proposal, event.step)

    def notice(self, event: Notice) -> None:
        if event.machine not in self.state.members:
            self.tell("notice ignored", f"{event.machine} is not in the list: {event.why}")
            return
        if event.deadline is None:
            self.set_member(event.machine, drained=True, released=False)
        else:
            self.set_member(event.machine, leave_by=event.deadline, released=False)
        self.tell("notice", f"{event.machine}: {event.why}")

    def recalled(self, event: Recalled) -> None:
        if event.machine in self.state.members:
            self.set_member(event.machine, leave_by=None, released=False)
            self.tell("notice withdrawn", event.machine)

    def stop_asked(self, event: StopAsked) -> None:
        self.set(verdict=Verdict("stopped", event.exit_code, event.why))
        if self.state.phase == "running" and event.save:
            self.save(event.why)
        elif self.state.active and not event.save:
            self.end(event.why)

    def tick(self, event: Tick) -> None:
        members = dict(self.state.members)
        pulses: list[Pulse] = []
        for name, (agent, generation, found) in event.beats.items():
            if self.agent_of(name, agent):
                members[name] = msgspec.structs.replace(members[name], seen=self.now)
                if self.state.active and generation == self.generation.number:
                    pulses += found
        self.set(members=members)
        if pulses:
            self.feel(pulses)
        for member in list(self.state.members.values()):
            silence = self.now - member.seen
            if member.agent and silence > self.state.settings.lost_seconds:
                self.do(EndAgent(member.name, "it is silent", deaf=True))
                self.lose(member, f"no heartbeat for {silence:.1f} s")

    def feel(self, pulses: list[Pulse]) -> None:
        """Progress, or that there is none."""
        activity = sum(pulse.activity for pulse in pulses)
        if activity != self.state.activity:
            self.set(activity=activity, progressed_at=self.now)
        self.set(
            in_step=any(pulse.in_step for pulse in pulses),
            step_seconds=max((pulse.step_seconds for pulse in pulses), default=0.0),
        )
        self.learn(pulses)

    def learn(self, pulses: Sequence[Pulse]) -> None:
        """What stays true of a worker when it is gone."""
        trained = [pulse.iteration for pulse in pulses if pulse.steps]
        saved = max(pulses, key=lambda pulse: pulse.saved_step)
        self.set(
            best_iteration=max([self.state.best_iteration, *trained]),
            store=next((pulse.store for pulse in pulses if pulse.store), self.state.store),
            saved_step=max(self.state.saved_step, saved.saved_step),
            save_seconds=saved.save_seconds or self.state.save_seconds,
            save_every_seconds=max(pulse.save_every_seconds for pulse in pulses)
            or self.state.save_every_seconds,
        )

    # ------------------------------------------------------------ what follows

    def follow(self) -> None:
        self.start_agents()
        self.note_usable()
        before = None
        while self.state.phase != before:
            before = self.state.phase
            if before == "gathering":
                self.gather()
            elif before == "running":
                self.run()
            elif before == "saving":
                self.wait_for_save()
            elif before == "ending":
                self.wait_for_end()
        self.release_machines()

    def release_machines(self) -> None:
        """Those that leave and have no part any more: whoever wants them need not wait for the deadline."""
        for name, member in list(self.state.members.items()):
            if member.agent and member.leaves and not member.released and not self.at_work(name):
                self.set_member(name, released=True)
                self.do(ReleaseMachine(name))

    def start_agents(self) -> None:
        for name, member in list(self.state.members.items()):
            if member.agent:
                if not member.listed and not self.at_work(name) and member.workers is None:
                    self.do(EndAgent(name, "the machine is not in the list any more"))
                    self.forget(name)
            elif member.starting is not None:
                if self.now - member.starting > self.state.settings.start_seconds:
                    self.do(EndAgent(name, "it did not dial in"))
                    self.not_started(
                        AgentNotStarted(
                            name,
                            f"no word from it within {self.state.settings.start_seconds:.0f} s "
                            "(can it reach the manager's address?)",
                        )
                    )
            elif not member.listed:
                self.forget(name)
            elif self.now >= max(member.retry_at, member.leave_by or 0.0) and not self.state.verdict:
                self.set_member(name, starting=self.now)
                self.do(StartAgent(name))

    def forget(self, name: str) -> None:
        self.set(members={other: m for other, m in self.state.members.items() if other != name})

    def ready(self, *, patient: bool = False) -> tuple[str, ...]:
        """The machines that can take part now: those of the last generation first, in its order.

        With `patient` those that come and go too often stay out for a while.
        """
        known = dict.fromkeys(self.state.generation.machines if self.state.generation is not None else ())
        names = [*known, *(name for name in self.state.members if name not in known)]
        current = self.generation.number if self.state.active else None
        return tuple(
            name
            for name in names
            if (member := self.state.members.get(name)) is not None
            and member.listed
            and member.agent
            and not member.leaves
            and (member.workers is None or member.workers == current)
            and member.warm
            and (not patient or self.now >= member.welcome_at or self.at_work(name))
        )

    def note_usable(self) -> None:
        members = self.state.members.items()
        present = tuple(name for name, m in members if m.listed and m.agent and not m.leaves)
        if present != self.state.present:
            self.set(present=present, present_at=self.now)
        usable = self.ready(patient=True)
        if usable != self.state.usable:
            self.set(usable=usable, changed_at=self.now)

    # ------------------------------------------------------------ gathering

    def gather(self) -> None:
        if self.state.verdict is not None:
            self.finish(self.state.verdict)
            return
        ready = self.ready()
        if not ready or self.now < self.state.wait_until or not self.enough(ready):
            return
        proposal = self.state.proposal
        if proposal is None or proposal.machines != ready:
            self.ask_for_plan(ready)
        elif (
            proposal.layout is not None
            and self.state.asked_plan is None
            and self.state.members[proposal.used[0]].store_port
        ):
            first = self.state.generation is None
            if first and self.state.resume_step is not None:
                self.launch(proposal, self.state.resume_step)
            elif not self.state.store:
                self.launch(proposal, None)
            elif not self.state.asked_checkpoint:
                self.set(asked_checkpoint=True)
                self.do(FindCheckpoint(self.state.store))

    def enough(self, ready: tuple[str, ...]) -> bool:
        """A job that starts waits for all its machines, for a while; one that was running does not."""
        if self.state.generation is not None:
            return True
        waited = self.now - self.state.since >= self.state.settings.gather_seconds
        expected = [m.name for m in self.state.members.values() if m.listed and not m.leaves]
        return waited or set(expected) <= set(ready)

    def ask_for_plan(self, machines: tuple[str, ...]) -> None:
        if self.state.asked_plan is None:
            self.set(asked_plan=machines)
            self.do(MakePlan(machines))

    def launch(self, proposal: Proposal, resume_step: int | None) -> None:
        assert proposal.layout is not None
        members = dict(self.state.members)
        master = members[proposal.used[0]]
        generation = Generation(
            number=self.state.next_number,
            machines=proposal.used,
            ranks=proposal.ranks,
            agents=tuple(members[name].agent for name in proposal.used),
            layout=proposal.layout,
            resume_step=resume_step,
            master_addr=master.address or master.name,
            master_port=master.store_port,
            plan=proposal.plan,
            environment=proposal.environment,
        )
        members[master.name] = msgspec.structs.replace(master, store_port=0)
        for name in proposal.used:
            members[name] = msgspec.structs.replace(members[name], workers=generation.number)
        why = self.state.reason
        self.enter(
            "running",
            why,
            generation=generation,
            members=members,
            next_number=generation.number + 1,
            ended={},
            failures=(),
            activity=0,
            in_step=False,
            progressed_at=self.now,
        )
        self.do(Launch(generation, in_short(why), proposal.reasons))

    # ------------------------------------------------------------ running

    def run(self) -> None:
        if self.state.failures:
            if self.cause_is_known():
                self.crash()
        elif set(self.state.ended) == set(self.generation.machines):
            self.ended_by_itself()
        elif self.hangs():
            self.end_hang()
        elif self.state.settings.morphs:
            self.consider_change()

    def end_hang(self) -> None:
        """Where each worker hangs goes to its log first, which takes a moment."""
        if self.state.stacks_at < self.state.progressed_at:
            self.set(stacks_at=self.now)
            self.do(DumpStacks(self.generation.number, self.generation.machines))
        elif self.now - self.state.stacks_at >= self.state.settings.stacks_seconds:
            silence = self.state.stacks_at - self.state.progressed_at
            self.end(f"no progress for {silence:.0f} s (a step takes {self.state.step_seconds:.2g} s)")

    def cause_is_known(self) -> bool:
        """One worker's failure takes the others down, and theirs may be told first."""
        first_hand = any(
            outcome.failure is not None and not outcome.failure.second_hand for outcome in self.state.failures
        )
        waited = self.now - self.state.failed_at >= self.state.settings.second_hand_seconds
        return first_hand or waited or set(self.state.ended) == set(self.generation.machines)

    def ended_by_itself(self) -> None:
        outcomes = [outcome for found in self.state.ended.values() for outcome in found]
        if any(outcome.on_demand for outcome in outcomes):
            why = "all workers have saved and ended, as they were asked to by SIGUSR1"
            self.finish(self.state.verdict or Verdict("stopped", 0, why))
        else:
            self.finish(Verdict("finished", 0, "every worker ended normally"))

    def hangs(self) -> bool:
        settings, step = self.state.settings, self.state.step_seconds
        if not step:
            return False  # not one step yet: loading and compiling take what they take
        if self.state.in_step:
            limit = max(settings.hang_seconds, settings.hang_steps * step)
        else:
            limit = max(settings.idle_seconds, 10 * settings.hang_steps * step)
        return self.now - self.state.progressed_at > limit

    def consider_change(self) -> None:
        """Machines have come or gone by plan: is there a better layout, and must one be left?"""
        wanted = self.state.usable
        usable = set(wanted)
        leaving = [name for name in self.generation.machines if name not in usable]
        settled = self.settled()
        pressed = any(name in self.state.members and self.state.members[name].leaves for name in leaving)
        proposal = self.state.proposal
        if not wanted:
            if leaving and (settled or pressed):
                self.save(f"{', '.join(leaving)} must be left, and no other machine is there")
        elif proposal is None or proposal.machines != wanted:
            if settled or pressed:
                self.ask_for_plan(wanted)
        elif proposal.layout is None:
            if leaving:
                self.save(f"{', '.join(leaving)} must be left; {proposal.problem}")
        elif not proposal.same_as(self.generation):
            joining = [name for name in proposal.used if name not in self.generation.machines]
            gone = [name for name in self.generation.machines if name not in proposal.used]
            parts = [f"{', '.join(joining)} joins"] if joining else []
            parts += [f"{', '.join(gone)} leaves"] if gone else []
            self.save("; ".join(parts) or f"a better plan: {proposal.layout}")

    def settled(self) -> bool:
        """Whether machines have been the same for a while; where others are on their way, the usable ones."""
        members, usable = self.state.members.items(), set(self.state.usable)
        on_the_way = any(m.listed and not m.leaves and name not in usable for name, m in members)
        last = self.state.changed_at if on_the_way else self.state.present_at
        return self.now - last >= self.state.settings.settle_seconds

    def deadline_of(self, name: str) -> float | None:
        member = self.state.members.get(name)
        return None if member is None else member.leave_by

    # ------------------------------------------------------------ saving and ending

    def save(self, why: str) -> None:
        settings = self.state.settings
        deadlines = [d for name in self.generation.machines if (d := self.deadline_of(name)) is not None]
        self.enter("saving", why, deadline=min([self.now + settings.save_seconds, *deadlines]))
        self.do(SaveAndEnd(self.generation.number, self.generation.machines, why))

    def wait_for_save(self) -> None:
        if self.state.failures:
            if self.cause_is_known():
                self.crash()
        elif set(self.state.ended) == set(self.generation.machines):
            outcomes = [outcome for found in self.state.ended.values() for outcome in found]
            if not any(outcome.on_demand for outcome in outcomes) and self.state.best_iteration:
                self.finish(Verdict("finished", 0, "every worker ended normally"))
            else:
                self.enter("gathering", self.state.reason)
        elif self.state.in_step and self.hangs():  # it will never come to the save
            self.end_hang()
        elif self.now >= self.state.deadline:
            self.end(f"{self.state.reason}; but the workers did not save and end in time")

    def end(self, why: str) -> None:
        number = self.generation.number
        if not self.state.settings.morphs and self.state.verdict is None:
            self.set(verdict=Verdict("failed", 1, why))
        # A traceback is told once: not where the verdict will tell it, nor where it is the one of before.
        told_elsewhere = self.state.verdict is not None or why == self.state.reason
        self.enter("ending", why, deadline=self.now + self.state.settings.end_seconds)
        self.tell("generation ended", f"{number}: {in_short(why) if told_elsewhere else why}")
        for name in self.generation.machines:
            member = self.state.members.get(name)  # one whose workers had ended may have left for good
            if member is not None and member.agent and member.workers == number:
                self.do(KillWorkers(name, number, why))

    def wait_for_end(self) -> None:
        number = self.generation.number
        waiting = [
            member
            for name in self.generation.machines
            if (member := self.state.members.get(name)) is not None
            and member.agent
            and member.workers == number
        ]
        if waiting and self.now < self.state.deadline:
            return
        for member in waiting:
            self.do(EndAgent(member.name, "it does not end its workers", deaf=True))
            self.lose(member, "it did not end its workers in time")
        self.enter("gathering", self.state.reason)

    def crash(self) -> None:
        """A worker failed, on machines that all live."""
        failures = [outcome.failure for outcome in self.state.failures if outcome.failure is not None]
        cause = find_cause(failures)
        last_lines = next(
            (outcome.last_lines for outcome in self.state.failures if outcome.failure == cause), ""
        )
        reason = describe(cause, self.generation.layout, last_lines=last_lines)
        progressed = self.state.best_iteration > self.state.iteration_at_crash
        crashes = 1 if progressed else self.state.crashes + 1
        self.set(
            crashes=crashes,
            losses=self.state.losses + 1,
            iteration_at_crash=self.state.best_iteration,
            wait_until=self.now + (0.0 if crashes == 1 else min(60.0, 2.0 ** (crashes - 2))),
        )
        if cause.by_its_own_hand and not self.state.best_iteration:
            self.set(verdict=Verdict("failed", 1, f"before its first step, {reason}"))
        elif crashes > self.state.settings.crash_limit:
            self.set(
                verdict=Verdict("failed", 1, f"{crashes} times without progress in between; last, {reason}")
            )
        self.end(reason)

    def finish(self, verdict: Verdict) -> None:
        self.enter("over", verdict.reason, verdict=verdict)
        for name, member in self.state.members.items():
            if member.agent or member.starting is not None:
                self.do(EndAgent(name, "the job is over"))
        self.do(Finish(verdict))
