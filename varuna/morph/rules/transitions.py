"""Transitions between phases: launch a generation, save, end the generation, finish the job."""

import msgspec

from varuna.morph import commands
from varuna.morph.failures import shorten_reason
from varuna.morph.rules.decision import Decision
from varuna.morph.state import Generation, JobVerdict, MachinePlan, Member


def launch(decision: Decision, proposal: MachinePlan, resume_step: int | None) -> None:
    assert proposal.layout is not None
    members = dict(decision.state.members)
    master = members[proposal.used[0]]
    generation = Generation(
        number=decision.state.next_number,
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
    why = decision.state.reason
    decision.enter(
        "running",
        why,
        generation=generation,
        members=members,
        next_number=generation.number + 1,
        ended={},
        failures=(),
        activity=0,
        in_step=False,
        progressed_at=decision.now,
    )
    decision.do(commands.Launch(generation, shorten_reason(why), proposal.reasons))


def save_and_end(decision: Decision, why: str) -> None:
    """Make all workers save and exit, within the save limit and the deadlines of all notices."""
    machines = decision.generation.machines
    members = [decision.state.members[name] for name in machines if name in decision.state.members]
    deadlines = [member.leave_by for member in members if member.leave_by is not None]
    limit = decision.now + decision.settings.save_seconds
    decision.enter("saving", why, deadline=min([limit, *deadlines]))
    decision.do(commands.SaveAndEnd(decision.generation.number, machines, why))


def end_generation(decision: Decision, why: str) -> None:
    """Kill all workers of the generation."""
    number = decision.generation.number
    if not decision.settings.morphs and decision.state.verdict is None:
        decision.set(verdict=JobVerdict("failed", 1, why))
    # Show a traceback once: the verdict shows it, and a repeated reason was shown before.
    shown_elsewhere = decision.state.verdict is not None or why == decision.state.reason
    decision.enter("ending", why, deadline=decision.now + decision.settings.end_seconds)
    decision.log("generation ended", f"{number}: {shorten_reason(why) if shown_elsewhere else why}")
    if machines := tuple(member.name for member in members_with_workers(decision)):
        decision.do(commands.KillWorkers(number, machines, why))


def members_with_workers(decision: Decision) -> list[Member]:
    """Return the connected machines that may still have workers of the generation."""
    members = [decision.state.members.get(name) for name in decision.generation.machines]
    number = decision.generation.number
    return [member for member in members if member and member.agent and member.workers == number]


def finish(decision: Decision, verdict: JobVerdict) -> None:
    decision.enter("over", verdict.reason, verdict=verdict)
    for name, member in decision.state.members.items():
        if member.agent or member.starting is not None:
            decision.do(commands.EndAgent(name, "the job is over"))
    decision.do(commands.Finish(verdict))
