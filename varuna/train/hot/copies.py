"""Copies of the state in the host memory of another rank, so that a stage without replicas survives a loss.

    every N steps: gather ──► the last copies are whole on all ranks: they count ──► copy the state
                                                              train on, a thread sends it ◄──┘

The first copy of a generation is made before its first step, and the ranks look in each step if it counts.
A rank tells the manager that it has a copy as soon as the first one has arrived, within that step.
All ranks copy their state before the same step. The copies of a step count once all ranks know that all of
them are whole; until then the last ones stay. If one arrives damaged, all ranks copy again. So after a loss,
all survivors have a copy of the same step, and one of them has that of the lost rank. N is chosen from
measured times: the copies cost at most 1 % of the steps between them. The first copy is a rehearsal: what it
costs more than others (new memory, imports) must not decide N. So the second one follows after a few steps.
"""

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from varuna.execute.comm.address import connect_sockets, job_key, own_address
from varuna.execute.comm.session import Session
from varuna.execute.device.facts import available_bytes
from varuna.execute.rebuild.handover import Unit
from varuna.execute.rebuild.snapshot import Mirror, Snapshot, choose_holders, take_snapshot
from varuna.morph.run.progress_page import ProgressWriter
from varuna.train.hot.eligible import why_not_hot
from varuna.train.process_rank import find_local_size
from varuna.units import format_bytes

if TYPE_CHECKING:
    from varuna.train.varuna import Varuna

log = logging.getLogger("varuna")

MOST_COST = 0.01
"""The share of the step time that copies may take."""
REHEARSAL_STEPS = 16
"""Steps after which the second copy is made, if not earlier."""
LOOKS = 2
"""Gathers for a copy: one finds it whole and chooses the interval, the other one begins the next copy."""
COPIES_IN_MEMORY = 4
"""Own copy and that of another rank; each twice, since the last ones stay until the next ones count."""


class ExchangeState(IntEnum):
    """The last exchange of copies, as one rank sees it."""

    UNDER_WAY = 0
    WHOLE = 1
    DAMAGED = 2  # the copy has arrived with another hash
    FAILED = 3  # no exchange is possible any more


@dataclass
class CopyPair:
    """The copies of one step on this rank: its own, and that of another rank once it is whole."""

    own: Snapshot
    other: Snapshot | None = None

    @property
    def is_whole(self) -> bool:
        return self.other is not None and self.other.step == self.own.step


def choose_interval(cost_seconds: float, step_seconds: float) -> int:
    """Return the number of steps between two copies."""
    return max(1, math.ceil(cost_seconds / (MOST_COST * max(step_seconds, 1e-9))))


LOOP = (
    "a rank holds state that no other one has, and only a loop over model.batches can go back to copies of "
    "it (for step, inputs in model.batches(fetch, order): loss, overflow = model.step(inputs))"
)


def needs_copies(model: "Varuna") -> bool:
    """Return whether a rank of this layout holds state that no other rank has. The same on all ranks.

    Going back some steps needs `batches`: another loop would count them itself.
    """
    return _holds_state_alone(model) and model._hot.in_batches


def _holds_state_alone(model: "Varuna") -> bool:
    session = model._session
    alone = any(len(row) == 1 for row in session.stage_map) or model._options.shard_optimizer
    return alone and session.num_ranks > 1 and model._hot.waits_for_orders


def explain_missing_copies(model: "Varuna") -> None:
    """Warn on the first rank if this job can morph in place, but its loop cannot go back after a loss."""
    is_first, hot = model._session.rank == model._session.ranks[0], model._hot
    if is_first and not hot.reported and not hot.in_batches and _holds_state_alone(model):
        log.warning("after a loss, this job restarts from a checkpoint: %s", LOOP)


class StateCopies:
    """The copies of one generation on this rank."""

    def __init__(self, session: Session, machines: Sequence[str]) -> None:
        self._session = session
        self._machines = machines
        self._mirror: Mirror | None = None
        self._held: int | None = None  # rank whose copy is here
        self._counted: CopyPair | None = None  # all ranks have copies of this step
        self._pending: CopyPair | None = None
        self._spare: CopyPair | None = None  # memory for the next copies
        self._visit_at = -1  # step; -1: the next one
        self._num_copies = 0
        self._since = (0, 0.0)  # step of the last copy, and the time after it
        self._copy_seconds = 0.0  # in which the last copy stopped the training
        self._look_seconds = math.inf  # the shortest gather so far
        self._has_failed = False  # an exchange, on any rank, as all ranks know
        self.interval = 0  # steps between two copies; 0: not measured yet
        self.is_off = False

    def steps(self) -> list[int]:
        """Return the steps whose copies are whole on this rank, its own and that of the other rank."""
        self._note_arrival()
        pairs = [pair for pair in (self._counted, self._pending) if pair is not None]
        return [pair.own.step for pair in pairs if pair.is_whole]

    def units_at(self, step: int) -> dict[str, Unit]:
        """Return the state before a step: that of the other rank, and this rank's own."""
        for pair in (self._counted, self._pending):
            if pair is not None and pair.own.step == step and pair.other is not None:
                return {**pair.other.units(), **pair.own.units()}
        raise LookupError(f"no whole copy of step {step} is here")

    def drop(self, progress: ProgressWriter) -> None:
        """Drop all copies: the script has replaced the state. All ranks call this; they copy at once."""
        self._counted = self._pending = self._spare = None
        self._visit_at = -1
        progress.holds_copy_of(None)

    def visit(self, model: "Varuna") -> None:
        """Count copies that are whole on all ranks, and copy the state if it is time. All ranks call this."""
        step = model._trainer.iteration
        if self.is_off or step < self._visit_at:
            return
        if self._mirror is None and not self._connect(model):
            self.is_off = True
            return
        if self._agree(step, model._progress):
            started = time.perf_counter()
            self._copy(model, step)
            ended = time.perf_counter()
            self._since, self._copy_seconds = (step, ended), ended - started
            self._num_copies += 1

    def _connect(self, model: "Varuna") -> bool:
        """Connect to the rank that holds this rank's copy, and to the one whose copy this rank holds."""
        found = [reason for reason in self._session.gather(_why_no_copies(model), str) if reason]
        if found:
            if self._session.rank == self._session.ranks[0]:
                log.warning("after a loss, this job restarts from a checkpoint: %s", found[0])
            return False
        holders = choose_holders(self._machines)
        place = self._session.ranks.index(self._session.rank)
        holder = self._session.ranks[holders[place]]
        self._held = held = self._session.ranks[holders.index(place)]
        sockets = connect_sockets(
            self._session.rank,
            {holder, held},
            lambda own: self._session.gather(own, str),
            host=own_address(),
            key=job_key("copies"),
            has_order=lambda: model._orders.abandons,
        )
        self._mirror = Mirror(sockets[holder], sockets[held])
        self._session.closers.append(self._mirror.close)
        return True

    def _note_arrival(self) -> None:
        if self._mirror is not None and self._pending is not None and self._pending.other is None:
            self._pending.other = self._mirror.arrived

    def _exchange_state(self) -> ExchangeState:
        assert self._mirror is not None
        is_busy = self._mirror.is_busy  # before the arrival is noted, which ends it
        self._note_arrival()
        if self._mirror.problem:
            return ExchangeState.FAILED
        if is_busy:
            return ExchangeState.UNDER_WAY
        is_whole = self._pending is not None and self._pending.is_whole
        return ExchangeState.WHOLE if is_whole else ExchangeState.DAMAGED

    def _measured_interval(self, numbers: Sequence[Sequence[float]]) -> int:
        """Return the number of steps between two copies, from the seconds of all ranks.

        The last rank to arrive at a gather does not wait in it: the shortest one is the cost of the message.
        Its cost does not depend on how often the ranks look, or each look would put the next copy off.
        """
        copy_seconds, step_seconds, look_seconds = zip(*numbers, strict=True)
        interval = choose_interval(max(copy_seconds) + LOOKS * min(look_seconds), min(step_seconds))
        return min(interval, REHEARSAL_STEPS) if self._num_copies == 1 else interval

    def _agree(self, step: int, progress: ProgressWriter) -> bool:
        """Count whole copies, choose the interval, and return whether to copy the state now."""
        assert self._mirror is not None
        own = self._exchange_state()
        since, began = self._since
        started = time.perf_counter()
        cost = self._copy_seconds + self._mirror.thread_seconds
        seconds = (started - began) / max(step - since, 1)
        numbers = self._session.gather_numbers([own, cost, seconds, self._look_seconds])
        self._look_seconds = min(self._look_seconds, time.perf_counter() - started)
        states = [ExchangeState(int(number)) for number, *_ in numbers]
        if ExchangeState.FAILED in states:
            self._note_failure(step, states, progress)
            return False
        if ExchangeState.UNDER_WAY in states:
            self._visit_at = step + max(1, max(self.interval, step - since) // 4)
            return False
        if self._pending is None:
            self._visit_at = step + 1
            return True
        is_damaged = ExchangeState.DAMAGED in states
        if is_damaged:
            if own is ExchangeState.DAMAGED:
                what = f"the copy of rank {self._held}'s state before step {self._pending.own.step}"
                log.warning("%s arrived with other bytes than were sent; all ranks copy again", what)
            self._spare = self._pending
            if self._counted is None:
                progress.holds_copy_of(None)
        elif self._counted is None or self._counted.own.step < self._pending.own.step:
            self._spare, self._counted = self._counted, self._pending
        self.interval = self._measured_interval([one[1:] for one in numbers])
        due = since + self.interval
        is_due = is_damaged or step >= due
        self._visit_at = step + max(1, self.interval // 2) if is_due else due
        return is_due

    def _note_failure(self, step: int, states: Sequence[ExchangeState], progress: ProgressWriter) -> None:
        """Switch the copies off; but first see if a rank is gone, which the next step notices."""
        assert self._mirror is not None
        if not self._has_failed:
            self._has_failed, self._visit_at = True, step + 1
            return
        self.is_off = True
        if self._mirror.problem:
            log.warning("this rank cannot exchange copies of the state: %s", self._mirror.problem)
        if self._session.rank == self._session.ranks[0]:
            pairs = zip(self._session.ranks, states, strict=True)
            failed = [rank for rank, state in pairs if state is ExchangeState.FAILED]
            why = f"ranks {failed} cannot exchange copies of the state"
            log.warning("after a loss, this job restarts from a checkpoint: %s", why)
        self._mirror.close()
        self._counted = self._pending = self._spare = None
        progress.holds_copy_of(None)

    def _copy(self, model: "Varuna", step: int) -> None:
        assert self._mirror is not None
        spare = self._spare
        own = take_snapshot(step, state_units(model), None if spare is None else spare.own.memory)
        self._pending, self._spare = (pair := CopyPair(own)), None
        other = None if spare is None or spare.other is None else spare.other.memory

        def note() -> None:
            if self._pending is pair:  # not dropped
                model._progress.holds_copy_of(self._held)

        self._mirror.start(own, other, on_arrival=note)


def _why_no_copies(model: "Varuna") -> str:
    if why_not := why_not_hot(model):
        return why_not
    optimizer = model._optimizer
    registered = model._checkpoints.training.registered.values()
    if hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched") and not any(
        getattr(one, "optimizer", None) is optimizer for one in registered
    ):
        return "the learning rate scheduler is not registered: model.register('schedule', scheduler)"
    needed = COPIES_IN_MEMORY * model._checkpoints.training.num_bytes
    needed *= find_local_size(os.environ)
    free = available_bytes(torch.device("cpu"))
    if free is not None and needed > free:
        return (
            f"copies of the state need {format_bytes(needed)} of host memory; {format_bytes(free)} are free"
        )
    return ""


def state_units(model: "Varuna") -> Mapping[str, Unit]:
    """Return all state of this rank, which is not copied yet, as it gives it to others in a morph."""
    from varuna.train.hot.morph import moving_state  # it imports this module

    moving = moving_state(model, None)
    return moving.all_units()
