"""`Decision`: one call of `decide`, with the commands so far and the transitions between phases.

The transitions launch a generation, save and end it, kill it, or finish the job.
"""

from itertools import filterfalse
from typing import Any

import msgspec

from varuna.morph import commands
from varuna.morph.failures import shorten_reason
from varuna.morph.members import Members, unsteady_members
from varuna.morph.state import Generation, JobState, JobVerdict, MachinePlan, ManagerSettings, Member, Phase


class Decision:
    def __init__(self, state: JobState, now: float) -> None:
        self.state = state
        self.now = now
        self.commands: list[commands.Command] = []
        self._copies: dict[str, dict[str, Any]] = {}  # mappings of the state that this decision has copied

    def do(self, command: commands.Command) -> None:
        self.commands.append(command)

    def log(self, what: str, why: str) -> None:
        self.do(commands.LogEvent(what, why))

    def report_problem(self, topic: str, why: str) -> None:
        """Log a problem once, and keep it for `varuna status`; an empty `why` says that it is solved."""
        if self.state.problems.get(topic, "") == why:
            return
        others = {name: known for name, known in self.state.problems.items() if name != topic}
        self.set(problems={**others, topic: why} if why else others)
        self.log(topic, why or "solved")

    def set(self, **fields: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **fields)

    def set_member(self, name: str, **fields: Any) -> None:
        self.put("members", name, msgspec.structs.replace(self.state.members[name], **fields))

    def put(self, field: str, key: str, value: object) -> None:
        """Set one key of a mapping of the state. The mapping is copied once, not for each of its keys."""
        self._copy_of(field)[key] = value

    def drop(self, field: str, key: str) -> None:
        """Remove one key of a mapping of the state, if it is there."""
        mapping = self._copy_of(field)
        if isinstance(mapping, Members):
            mapping.drop(key)
        else:
            mapping.pop(key, None)

    def _copy_of(self, field: str) -> dict[str, Any]:
        mapping = self._copies.get(field)
        if mapping is None or mapping is not getattr(self.state, field):
            known = getattr(self.state, field)
            mapping = self._copies[field] = Members(known) if field == "members" else dict(known)
            self.set(**{field: mapping})
        return mapping

    def enter(self, phase: Phase, reason: str, **fields: Any) -> None:
        if phase not in ("running", "morphing", "over"):
            self.drop_preparation(reason)
        self.set(phase=phase, since=self.now, reason=reason, **fields)

    def drop_preparation(self, why: str) -> None:
        """Kill the joiners of the next generation. The current one does not notice."""
        preparation = self.state.preparation
        if preparation is None:
            return
        machines = tuple(name for name in preparation.joiners if name in self.state.members)
        self.set(preparation=None, joiners={})
        self.add_leaving(machines)
        self.log("join failed", f"{', '.join(preparation.joiners)}: {why}")
        self.do(commands.KillWorkers(preparation.generation.number, machines, why))

    def add_leaving(self, machines: tuple[str, ...]) -> None:
        """Note machines whose workers end soon, outside the generation."""
        others = tuple(name for name in self.leavers() if name not in machines)
        self.set(leaving=(*others, *machines), leaving_since=self.now)

    def leavers(self) -> tuple[str, ...]:
        """Return the connected machines that still have workers outside the generation."""
        members = self.state.members
        found = (members[name] for name in self.state.leaving if name in members)
        return tuple(member.name for member in found if member.agent and member.workers is not None)

    @property
    def settings(self) -> ManagerSettings:
        return self.state.settings

    @property
    def generation(self) -> Generation:
        assert self.state.generation is not None
        return self.state.generation

    def is_working(self, machine: str, generation: int | None = None) -> bool:
        """Return True while the machine has workers in the current generation (which is `generation`)."""
        if not self.state.active or generation not in (None, self.generation.number):
            return False
        return machine in self.generation.machine_set and machine not in self.state.ended

    def all_ended(self) -> bool:
        """Return True when the workers of all machines of the generation have ended."""
        return len(self.state.ended) == len(self.generation.machines)  # only these are noted

    def member_of_agent(self, machine: str, agent: str) -> Member | None:
        """Return the machine, or None if this is not its current agent."""
        member = self.state.members.get(machine)
        return member if member is not None and member.agent == agent else None

    def next_generation(self, proposal: MachinePlan, resume_step: int | None) -> Generation:
        assert proposal.layout is not None
        members = self.state.members
        master = members[proposal.used[0]]
        return Generation(
            number=self.state.next_number,
            machines=proposal.used,
            ranks=proposal.ranks,
            agents=tuple([members[name].agent for name in proposal.used]),
            layout=proposal.layout,
            resume_step=resume_step,
            master_addr=master.address or master.name,
            master_port=master.store_port,
            plan=proposal.plan,
            environment=proposal.environment,
        )

    def launch(self, proposal: MachinePlan, resume_step: int | None) -> None:
        generation, why = self.next_generation(proposal, resume_step), self.state.reason
        first = resume_step or 0
        self.set(iteration=first, first_iteration=first, missing_samples=0, step_seconds=0.0, join_failures=0)
        self.begin_generation("running", generation, why)
        self.do(commands.Launch(generation, shorten_reason(why), proposal.reasons))

    def begin_generation(self, phase: Phase, generation: Generation, why: str) -> None:
        """Replace the current generation, and forget what belongs to it."""
        members = Members(self.state.members)
        master = members[generation.machines[0]]
        members[master.name] = msgspec.structs.replace(master, store_port=0)
        for member in unsteady_members(members):
            if member.kept and member.name not in generation.machine_set:
                members[member.name] = msgspec.structs.replace(member, kept=False)
        known = self.state.generation.machine_set if self.state.generation is not None else frozenset()
        for name in filterfalse(known.__contains__, generation.machines):  # its work begins
            members[name] = msgspec.structs.replace(members[name], ready_at=self.now)
        members.start_workers(generation.machines, generation.number)
        self.report_problem("change postponed", "")
        self.enter(
            phase,
            why,
            generation=generation,
            members=members,
            next_number=max(self.state.next_number, generation.number + 1),
            ended={},
            failures=(),
            save_requested=False,
            saving_now=False,
            failed_saves=0,
            failed_before=0,
            postponed="",
            postponements=0,
            progress={},
            activity=0,
            in_step=False,
            progressed_at=self.now,
            preparation=None,
            joiners={},
            leaving=tuple(name for name in self.leavers() if name not in generation.machine_set),
            lost={},
            joined=(),
            holding=False,
            morph_begun_at=0.0,
            morph_broken="",
        )

    def save_and_end(self, why: str) -> None:
        """Make all workers save and exit, within the save limit and the deadlines of all notices."""
        self.enter(
            "saving",
            why,
            deadline=save_deadline(self),
            save_requested=True,
            failed_before=self.state.failed_saves,
        )
        self.do(commands.SaveAndEnd(self.generation.number, self.generation.machines, why))

    def leave_by(self, *, due: bool = False) -> float:
        """Return the earliest deadline of a notice for a machine of the generation (that must leave now)."""
        members = [m for m in unsteady_members(self.state.members) if m.name in self.generation.machine_set]
        deadlines = (m.leave_by for m in members if not (due and self.now < m.leave_at))
        return min((deadline for deadline in deadlines if deadline is not None), default=float("inf"))

    def end_generation(self, why: str) -> None:
        """Kill all workers of the generation."""
        number = self.generation.number
        if not self.settings.morphs and self.state.verdict is None:
            self.set(verdict=JobVerdict("failed", 1, why))
        # Show a traceback once: the verdict shows it, and a repeated reason was shown before.
        shown_elsewhere = self.state.verdict is not None or why == self.state.reason
        self.enter("ending", why, deadline=self.now + self.settings.end_seconds)
        self.log("generation ended", f"{number}: {shorten_reason(why) if shown_elsewhere else why}")
        if machines := tuple(member.name for member in members_with_workers(self)):
            self.do(commands.KillWorkers(number, machines, why))

    def finish(self, verdict: JobVerdict) -> None:
        self.enter("over", verdict.reason, verdict=verdict)
        for name, member in self.state.members.items():
            if member.agent or member.starting is not None:
                self.do(commands.EndAgent(name, "the job is over"))
        self.do(commands.Finish(verdict))


def members_with_workers(decision: Decision) -> list[Member]:
    """Return the connected machines that may still have workers of the generation, or leaving ones."""
    state, generation = decision.state, decision.generation
    members = [state.members.get(name) for name in generation.machines]
    ours = [member for member in members if member and member.agent and member.workers == generation.number]
    leaving = (name for name in decision.leavers() if name not in generation.machine_set)
    return [*ours, *(state.members[name] for name in leaving)]


def save_deadline(decision: Decision) -> float:
    return min(decision.now + decision.settings.save_seconds, decision.leave_by())


def request_plan(decision: Decision, machines: tuple[str, ...], devices: int = 0) -> None:
    """Request a plan for these machines, unless another request runs. `devices` of each; 0: all."""
    if decision.state.planning_for is None:
        decision.set(planning_for=machines, planning_devices=devices)
        decision.do(commands.MakePlan(machines, devices))
