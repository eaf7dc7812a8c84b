"""Builds the view of a job from the manager's state, the history and the ledger."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from varuna.morph.state import Generation, JobState, WorkerProgress
from varuna.observe.history import JobHistory
from varuna.observe.job_view import EventView, JobView, LayoutView, MachineView
from varuna.observe.ledger import LedgerReport


class ViewSource(NamedTuple):
    """Facts that the manager keeps beside its state."""

    job: str
    log_dir: str
    history: JobHistory
    ledger: LedgerReport
    events: Sequence[EventView]
    slow: Collection[str]
    saved_at: float | None  # manager's clock at the last new checkpoint


def job_view(state: JobState, source: ViewSource, *, now: float, wall: float) -> JobView:
    """Return the view at `now` on the manager's clock, which is `wall` seconds after 1970."""
    history = source.history
    workers = [worker for progress in state.progress.values() for worker in progress]
    newest = history.newest
    step = max(state.iteration, newest.step if newest is not None else 0)
    num_steps = max((worker.facts.num_steps for worker in workers), default=0) or None
    seconds = history.step_seconds
    remaining = None if num_steps is None else max(0, num_steps - step)
    running = state.phase in ("running", "morphing", "saving")
    return JobView(
        job=source.job,
        at=wall,
        begun_at=source.ledger.begun_at,
        phase=state.phase,
        phase_seconds=round(now - state.since, 3),
        reason=state.reason,
        step=step,
        num_steps=num_steps,
        loss=newest.loss if newest is not None else None,
        has_loss=newest is None or newest.has_loss,
        step_seconds=seconds,
        samples_per_second=history.samples_per_second if running else None,
        tokens_per_second=history.tokens_per_second if running else None,
        mfu=model_flop_utilisation(history, workers) if running else None,
        layout=None if state.generation is None else layout_view(state.generation),
        machines=tuple(machine_view(state, name, now=now, slow=source.slow) for name in state.members),
        eta_seconds=remaining * seconds if running and remaining is not None and seconds else None,
        store=state.store,
        saved_step=state.saved_step if state.saved_step >= 0 else None,
        save_seconds=state.save_seconds,
        save_every_seconds=state.save_every_seconds,
        next_save_seconds=next_save(state, source.saved_at, now=now),
        morphs=max(0, source.ledger.generations - 1),
        losses=state.losses,
        last_event=source.events[-1] if source.events else None,
        events=tuple(source.events),
        ledger=source.ledger,
        problems=state.problems,
        scalars=history.last_scalars(),
        dropped_records=history.dropped,
        log_dir=source.log_dir,
    )


def layout_view(generation: Generation) -> LayoutView:
    layout = generation.layout
    return LayoutView(
        generation=generation.number,
        stage_map=tuple(map(tuple, layout.stage_map)),
        depth=layout.depth,
        widths=layout.widths,
        batch_size=layout.batch_size,
        microbatch_size=layout.microbatch_size,
        text=str(layout),
    )


def machine_view(state: JobState, machine: str, *, now: float, slow: Collection[str]) -> MachineView:
    member = state.members[machine]
    workers = state.progress.get(machine, ())
    trained = [worker for worker in workers if worker.steps]
    slowest = max(trained, key=lambda worker: worker.compute_seconds, default=None)
    is_measured = any(worker.compute_seconds for worker in trained)  # not by RaNNCModule
    has_device = any(worker.facts.memory_limit for worker in workers)
    memory = [worker.facts.memory_bytes for worker in workers]
    return MachineView(
        name=machine,
        state=describe_member(state, machine, now=now),
        ranks=tuple(worker.rank for worker in workers),
        step=max((worker.iteration for worker in trained), default=None),
        step_seconds=slowest.step_seconds if slowest is not None else None,
        compute_seconds=slowest.compute_seconds if is_measured and slowest is not None else None,
        wait_seconds=(
            max(0.0, slowest.step_seconds - slowest.compute_seconds)
            if is_measured and slowest is not None
            else None
        ),
        memory_bytes=(max(memory) if has_device else sum(memory)) or None if memory else None,
        memory_limit=max((worker.facts.memory_limit for worker in workers), default=0) or None,
        device=next((worker.facts.device for worker in workers if worker.facts.device), ""),
        slow=machine in slow,
        seen_seconds_ago=round(now - member.seen, 3) if member.agent else None,
    )


def next_save(state: JobState, saved_at: float | None, *, now: float) -> float | None:
    """Return the seconds until the next automatic save; None: there is none, or it is unknown."""
    if state.phase != "running" or not state.save_every_seconds or saved_at is None:
        return None
    return max(0.0, saved_at + state.save_every_seconds - now)


def model_flop_utilisation(history: JobHistory, workers: Sequence[WorkerProgress]) -> float | None:
    """Return the share of the devices' peak that the model's own operations use."""
    flops = max((worker.facts.flops_per_sample for worker in workers), default=0.0)
    peaks = [worker.facts.peak_flops for worker in workers]
    rate = history.samples_per_second
    if not flops or not peaks or not all(peaks) or rate is None:
        return None
    return flops * rate / sum(peaks)


def describe_member(state: JobState, machine: str, *, now: float) -> str:
    """Return the state of a machine as `varuna status` shows it."""
    member = state.members[machine]
    if member.dismissed_at is not None:
        return "ending"
    if not member.agent:
        return (
            "starting" if member.starting is not None else "lost" if machine in state.absences else "absent"
        )
    if member.leaves:
        return "leaving"
    if state.active and state.generation is not None and machine in state.generation.machines:
        return "at work, not listed" if member.kept else "at work"
    if now < member.welcome_at:
        return f"waits {member.welcome_at - now:.0f} s: it left or was lost repeatedly"
    return "spare" if member.warm else "warming up"
