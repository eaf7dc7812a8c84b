"""Policies by expected samples: when a change of machines is worth its pause, from the job's own history.

A change stops all machines that train. Its cost in machine-seconds is the measured pause times their number.
The policies compare it with what the change brings, at the rates at which machines have come and gone so far.
Without a measurement they do as `varuna run --greedy`: change at once. All functions are pure.

| question | rule |
|---|---|
| when does a machine with a notice leave? | as late as is safe: `seconds_to_leave` before its deadline |
| is a machine that joins worth a change? | `joins_per_change`: the batch with the least expected cost |
| is a machine that tends to leave again worth a change? | `trial_seconds`: once it stays as long as pays |
| does a restart wait for a machine that starts? | `worth_waiting`: if it comes sooner than a change takes |
"""

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import TypeVar

import msgspec

T = TypeVar("T")

MEASUREMENTS = 8
"""The last pauses of each kind that are kept: enough for a median, few enough to follow a changing job."""
EVENTS = 16
"""The last joins and losses that are kept. The rate of 16 Poisson events is known within about 25 %."""
FEWEST = 3
"""Fewer joins of the job, or stays of a machine, say nothing about later ones."""
RATE_ERROR = 2.0
"""Wait for joiners only if that is this much better: two rates and a pause are each known within 25 %."""
STAY_ERROR = 2.0
"""The same for how long a machine stays, which is known from FEWEST stays on."""
SAME_SECONDS = 5.0
"""Machines that become ready within this time came together: they are one event."""
MOST_JOINS = 64
"""Largest batch of joiners that is considered."""
SPARE_SECONDS = 5.0
"""Machines with a notice leave at least this long before their deadline: clouds are polled every 5 s."""
STEP_ERROR = 1.5
"""Plan for a step that takes this many times as long as the last one: a change waits for its end."""
SAFETY = 3.0
"""Plan for a pause that takes this many times as long as the slowest of the last ones."""
REPORT_SECONDS = 0.75
"""The manager knows what workers do this much later: agents report every 0.5 s, it decides every 0.25 s."""


class MachineStay(msgspec.Struct, frozen=True):
    """One stay of a machine in the job: its length and its end."""

    ended_at: float
    seconds: float
    was_lost: bool  # while it trained; False: it had left before


class ChangeHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of machines that a job has seen, and what they took."""

    change_seconds: tuple[float, ...] = ()  # pauses of changes without a loss: all machines stand still
    loss_seconds: tuple[float, ...] = ()  # pauses and repeated steps after a loss, per machine that was lost
    leave_seconds: tuple[float, ...] = ()  # until machines that leave are free, beyond the end of the step
    save_seconds: tuple[float, ...] = ()  # those of them in which all workers saved and ended
    join_seconds: tuple[float, ...] = ()  # from the start of an agent until its machine is ready
    since: float | None = None  # the job trains since then
    joins: tuple[tuple[float, int], ...] = ()  # times at which machines became ready since, and how many
    forced: tuple[float, ...] = ()  # times of changes that did not depend on joiners: losses and leaves
    held: int = 0  # machines that left as late as is safe
    early: int = 0  # those of them that were gone before
    stopped_at: float | None = None  # training stands still since then; None: it does not, or it is unknown
    stopped_by_loss: bool = False
    num_stops: int = 0  # generations that ended since then: more changes can come before a step
    num_lost: int = 0  # machines that were lost since the job last trained
    order_seconds: float = 0.0  # the change that runs was ordered this long after a machine had to leave
    save_began_at: float | None = None  # the requested save that runs; None: none runs, or it is not known
    hold_seconds: float = 0.0  # survivors held their state for this long before the morph that runs
    survived: int = 0  # losses after which the others went on in place, without the store


def append(values: Sequence[T], value: T, *, most: int) -> tuple[T, ...]:
    return (*values[max(0, len(values) + 1 - most) :], value)


def rate(times: Sequence[float], *, since: float, now: float) -> float:
    """Return the events per second: all since the job began, or the last EVENTS.

    It falls while nothing happens.
    """
    if len(times) == EVENTS:
        since, times = times[0], times[1:]
    return len(times) / (now - since) if now > since else 0.0


# ---------------------------------------------------------------- leaves


def slowest_leave(history: ChangeHistory, *, all_leave: bool = False) -> float | None:
    """Return what the slowest of the last leaves took; None: not known.

    Where all machines leave, the job saves and ends, which takes longer than a morph in place.
    """
    if all_leave and not history.save_seconds:
        return None
    return max((*history.leave_seconds, *(history.save_seconds if all_leave else ())), default=None)


def seconds_to_leave(history: ChangeHistory, *, step_seconds: float, all_leave: bool = False) -> float | None:
    """Return how long before its deadline a machine begins to leave; None: at once, nothing is known yet.

    The step that runs must end first. Then all machines stand still until the one that leaves is free.
    """
    slowest = slowest_leave(history, all_leave=all_leave)
    if slowest is None:
        return None
    return SPARE_SECONDS + STEP_ERROR * step_seconds + SAFETY * slowest


def fits_before(history: ChangeHistory, seconds: float, *, step_seconds: float) -> bool:
    """Return True if another change can come before the one by which a machine leaves in `seconds`.

    Each of the two waits for the end of a step.
    """
    slowest = max((*history.leave_seconds, *history.change_seconds), default=0.0)
    return seconds >= 2 * (STEP_ERROR * step_seconds + slowest)


def worth_staying(history: ChangeHistory, *, seconds: float, num_machines: int) -> bool:
    """Return True if a machine with a notice should train for these `seconds` more.

    It adds its share of the work. Machines that were gone before their deadline have cost a loss each.
    """
    if seconds <= 0:
        return False
    risk = history.early / history.held if history.held else 0.0
    loss = median(history.loss_seconds) if history.loss_seconds else 0.0
    return seconds > risk * loss * num_machines


# ---------------------------------------------------------------- joins


def joins_per_change(cost: float, *, joins: float, forced: float) -> int:
    """Return the number of joins that are worth a change of this cost in machine-seconds; 1: each one.

    Joiners wait as idle spares until enough have come, or until a change happens anyway and takes them along.
    With joins at the rate `joins` and other changes at the rate `forced`, both Poisson, a batch of K costs

        (idle time until the batch is complete or taken along + P(complete) x cost of the change)
        / time until then

    machine-seconds per second. The K with the least cost is returned.
    """
    every = joins + forced
    if joins <= 0 or cost <= 0:
        return 1
    chance = joins / every
    best, best_cost, first_cost = 1, math.inf, joins * cost
    seconds = idle = 0.0  # until the batch ends, and the idle machine-seconds in it
    reached = 1.0  # probability that this many joiners have come
    for size in range(1, MOST_JOINS + 1):
        seconds += reached / every
        idle += (size - 1) * reached / every
        reached *= chance
        found = (idle + reached * cost) / seconds
        if found < best_cost:
            best, best_cost = size, found
    return best if best_cost * RATE_ERROR < first_cost else 1


def trial_seconds(lives: Sequence[float], *, cost: float) -> float:
    """Return how long a machine must stay before it is used, from how long it worked before.

    `cost`: machine-seconds that its join and its loss take from the others. If it works for less than this on
    average, it is not worth them. Then it must first stay for as long: what stays tends to stay on.
    """
    if len(lives) < FEWEST or fmean(lives) * STAY_ERROR >= cost:
        return 0.0
    return cost


def worth_waiting(history: ChangeHistory, waits: Sequence[float], *, later_seconds: float) -> float:
    """Return how long a restart should wait for machines that are starting, by their seconds since then.

    A machine that comes after the restart costs a change of `later_seconds`. So waiting pays if less time is
    left. Machines that take much longer than others are not waited for.
    """
    if not history.join_seconds:
        return 0.0
    usual = median(history.join_seconds)
    left = [usual - since for since in waits if since < usual]
    return max((seconds for seconds in left if seconds < later_seconds), default=0.0)
