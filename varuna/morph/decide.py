"""`decide`: the pure function that maps a job's state and an event to the next state and commands.

                   morphing                                    machines join, leave or are lost, and the
                    ▲    │                                     workers can morph in place
                    │    ▼
    gathering ──► running ──► saving ──► gathering ──► ...     machines join or leave as planned
        ▲            │           │
        │            ▼           ▼
        └───────── ending ◄──────┘                             a machine was lost or a worker failed

An event only changes the known facts. Every consequence is then derived from the whole state, so the
order of events does not matter. The rules are in `varuna.morph.rules`.
"""

from collections.abc import Callable, Iterable
from typing import Any

from varuna.morph import commands, events
from varuna.morph.rules import hot, membership, phases, workers
from varuna.morph.rules.decision import Decision
from varuna.morph.rules.history import measure_changes
from varuna.morph.state import JobState, Phase

EVENT_RULES: dict[type[events.Event], Callable[[Decision, Any], None]] = {
    events.MachineListRead: membership.machine_list_read,
    events.AgentJoined: membership.agent_joined,
    events.AgentLeft: membership.agent_left,
    events.AgentNotStarted: membership.agent_not_started,
    events.StoreReady: membership.store_ready,
    events.StoreEnded: workers.store_ended,
    events.NoticeReceived: membership.notice_received,
    events.NoticeWithdrawn: membership.notice_withdrawn,
    events.WorkerFailed: hot.worker_failed,
    events.LeaverFailed: hot.leaver_failed,
    events.WorkersEnded: hot.workers_ended,
    events.ProblemChanged: lambda decision, event: decision.report_problem(event.topic, event.why),
    events.Tick: workers.tick,
    events.PlanReady: phases.plan_ready,
    events.CheckpointFound: phases.checkpoint_found,
    events.StopRequested: phases.stop_requested,
}

PHASE_RULES: dict[Phase, Callable[[Decision], None]] = {
    "gathering": phases.gather,
    "running": phases.run,
    "morphing": phases.wait_for_morph,
    "saving": phases.wait_for_save,
    "ending": phases.wait_for_end,
}


def decide(state: JobState, event: events.Event, now: float) -> tuple[JobState, tuple[commands.Command, ...]]:
    return decide_all(state, (event,), now)


def decide_all(
    state: JobState, batch: Iterable[events.Event], now: float
) -> tuple[JobState, tuple[commands.Command, ...]]:
    """Like `decide` for several events that arrived together; the consequences are derived once.

    Deriving them takes time in proportion to the number of machines. So a thousand machines can join at once.
    """
    decision = Decision(state, now)
    for event in batch:
        if decision.state.phase != "over":
            EVENT_RULES[type(event)](decision, event)
        elif isinstance(event, events.AgentJoined):
            decision.do(commands.EndAgent(event.machine, "the job is over"))
    if state.phase != "over":
        hot.end_leavers(decision)
        membership.start_and_end_agents(decision)
        membership.note_usable_machines(decision)
        before: Phase = "over"
        while before != decision.state.phase != "over":
            before = decision.state.phase
            PHASE_RULES[before](decision)
        membership.release_machines(decision)
        measure_changes(decision, state)
    return decision.state, tuple(decision.commands)
