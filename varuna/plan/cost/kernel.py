"""Inner loop of the simulator: plays the pipeline of one replica, one decision at a time.

The code uses only numbers and indexing. The same lines run over lists in plain Python and over arrays
when numba compiles them, and give the same bits. They call no logarithm and no cosine, because
libraries disagree on the last digit.

`varuna.schedule.rule.choose` decides what a stage runs next, here as in the engine.
"""

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from types import FunctionType
from typing import Any, NamedTuple

from varuna.schedule.rule import BACKWARD, FORWARD, WAIT, choose

F, R, B, I, W = (ord(op) for op in "FRBIW")  # noqa: E741 - the letters of the instructions
KINDS = "FRBIW"  # the order of the costs of a stage
NEVER = float("inf")


class KernelRows(NamedTuple):
    """Order of the instructions. Brackets name the dimensions of a flat list."""

    letters: Any  # of all stages, one after the other
    firsts: Any  # [stage]: position of its first letter; and the end of all
    limits: Any  # [stage]
    microbatches: int
    opportunistic: bool


class KernelTimes(NamedTuple):
    """Seconds. Size 0 is every micro-batch but the last, size 1 the last. Direction 0 is forward."""

    seconds: Any  # [size][stage][kind]
    spreads: Any  # [stage][kind]
    links: Any  # [field][direction][stage]: fields of LinkTimes, then the share lost to an opposite message
    seed: int  # 0: nothing varies


class KernelState(NamedTuple):
    """Everything that `play` writes."""

    starts: Any  # [position]
    stops: Any  # [position]
    numbers: Any  # [position]: micro-batch
    clocks: Any  # [stage]: time of its next decision; zero at first
    arrivals: Any  # [direction][stage][micro-batch]; NEVER at first
    heads: Any  # [F, B, W][stage]: position of the next one
    counts: Any  # [F, B, deferred W, waiting][stage]: taken so far; whether the stage waits
    busy: Any  # [from, until, last arrival][direction][stage]: the link out of that stage


def play(rows: KernelRows, times: KernelTimes, state: KernelState) -> int:
    """Return how many instructions ran: all of them, unless the rows deadlock."""
    letters, firsts, limits, microbatches, opportunistic = rows
    seconds, spreads, links, seed = times
    starts, stops, numbers, clocks, arrivals, heads, counts, busy = state
    stages = len(limits)
    prepare(letters, firsts, numbers, heads, stages)
    num_run = 0
    while num_run < firsts[stages]:
        # The earliest stage decides. All messages that can have arrived by then are known: they come
        # from instructions that started earlier.
        stage = 0
        now = clocks[0]
        for other in range(1, stages):
            if clocks[other] < now:
                now = clocks[other]
                stage = other
        if now == NEVER:
            return num_run

        end = firsts[stage + 1]
        forward, backward = heads[stage], heads[stages + stage]
        num_forwards = counts[stage]
        num_backwards = counts[stages + stage]
        deferred = counts[2 * stages + stage]
        activation = gradient = 0.0
        if stage > 0 and forward < end:
            activation = arrivals[stage * microbatches + num_forwards]
        if stage < stages - 1 and num_backwards < microbatches:
            gradient = arrivals[(stages + stage) * microbatches + num_backwards]
        choice = choose(
            forward,
            backward,
            heads[2 * stages + stage],
            end,
            activation <= now,
            gradient <= now,
            backward < end and letters[backward] == R,
            opportunistic,
            num_forwards - num_backwards,
            limits[stage],
            deferred,
        )
        if choice == WAIT:
            clocks[stage] = wake_time(now, activation, gradient)
            counts[3 * stages + stage] = 1
            continue

        position = heads[choice * stages + stage]
        heads[choice * stages + stage] = next_position(letters, position, end, choice)
        op = letters[position]
        number = numbers[position]
        size = 0
        if number == microbatches - 1:
            size = 1
        cost = stage * 5 + kind_of(op)
        taken = seconds[size * stages * 5 + cost]
        if seed != 0 and spreads[cost] > 0.0:
            taken = vary(taken, spreads[cost], 0.0, noise(seed, cost * 2, number))
        stop = now + taken
        starts[position] = now
        stops[position] = stop
        clocks[stage] = stop
        counts[3 * stages + stage] = 0
        num_run += 1

        direction = 2  # of the message: none so far
        if choice == FORWARD:
            counts[stage] = num_forwards + 1
            if stage < stages - 1:
                direction = 0
        elif choice != BACKWARD:
            counts[2 * stages + stage] = deferred - 1
        elif op != R:
            counts[stages + stage] = num_backwards + 1
            if op == I:
                counts[2 * stages + stage] = deferred + 1
            if stage > 0:
                direction = 1
        if direction < 2:
            to = stage + 1 - 2 * direction
            arrival = deliver(links, busy, stages, direction * stages + stage, to, size, stop, seed, number)
            arrivals[(direction * stages + to) * microbatches + number] = arrival
            # A stage that runs finds the message at its next decision; one that waits is woken.
            waits = counts[3 * stages + to] == 1 and counts[direction * stages + to] == number
            if waits and clocks[to] > arrival:
                clocks[to] = arrival
    return num_run


def prepare(letters: Any, firsts: Any, numbers: Any, heads: Any, stages: int) -> None:
    """Number the instructions of all rows and find the first of each sequence."""
    for stage in range(stages):
        first, stop = firsts[stage], firsts[stage + 1]
        number_instructions(letters, first, stop, numbers)
        for sequence in range(3):
            heads[sequence * stages + stage] = next_position(letters, first - 1, stop, sequence)


def wake_time(now: float, activation: float, gradient: float) -> float:
    """Return the first arrival after now; NEVER if none is known yet."""
    wake = NEVER
    if activation > now:
        wake = activation
    if now < gradient < wake:
        wake = gradient
    return wake


def kind_of(op: int) -> int:
    """Return the index of a letter in KINDS."""
    if op == F:
        return 0
    if op == R:
        return 1
    if op == B:
        return 2
    if op == I:
        return 3
    return 4


def vary(seconds: float, spread: float, least: float, noise: float) -> float:
    seconds = seconds + spread * noise
    return least if seconds < least else seconds


def deliver(
    links: Any, busy: Any, stages: int, link: int, to: int, size: int, stop: float, seed: int, number: int
) -> float:
    """Return the arrival of the message that an instruction which ends at `stop` sends.

    `link` is direction * stages + stage. Each direction is one queue. A message that meets one in the
    other direction loses time.
    """
    ways = stages * 2
    occupied = links[size * ways + link]
    leaves = stop - links[4 * ways + link]
    if busy[ways + link] > leaves:
        leaves = busy[ways + link]
    opposite = to
    if link < stages:
        opposite = stages + to
    met_from = busy[opposite]
    met_until = busy[ways + opposite]
    if met_from < leaves:
        met_from = leaves
    if met_until > leaves + occupied:
        met_until = leaves + occupied
    if met_until > met_from:
        occupied = occupied + links[5 * ways + link] * (met_until - met_from)
    busy[link] = leaves
    busy[ways + link] = leaves + occupied
    arrival: float = leaves + occupied + links[2 * ways + link]
    jitter = links[3 * ways + link]
    if seed != 0 and jitter > 0.0:
        arrival = vary(arrival, jitter, leaves, noise(seed, link * 2 + 1, number))
    if arrival < busy[2 * ways + link]:
        arrival = busy[2 * ways + link]
    busy[2 * ways + link] = arrival
    return arrival


def number_instructions(letters: Any, first: int, stop: int, numbers: Any) -> None:
    """Number the micro-batch of each letter: forwards and backwards count up; a W has that of its I."""
    forwards = 0
    backwards = 0
    for position in range(first, stop):
        if letters[position] == F:
            numbers[position] = forwards
            forwards += 1
        elif letters[position] != W:
            numbers[position] = backwards
            if letters[position] != R:
                backwards += 1
    split = first - 1
    for position in range(first, stop):
        if letters[position] == W:
            split += 1
            while letters[split] != I:
                split += 1
            numbers[position] = numbers[split]


def next_position(letters: Any, position: int, stop: int, sequence: int) -> int:
    """Return the next FORWARD, BACKWARD or WEIGHT after a position; `stop` when none is left."""
    position += 1
    while position < stop:
        op = letters[position]
        if op == F:
            if sequence == 0:
                return position
        elif op == W:
            if sequence == 2:
                return position
        elif sequence == 1:
            return position
        position += 1
    return stop


def noise(seed: int, lane: int, number: int) -> float:
    """Return a sum of four uniforms with mean 0 and variance 1; equal arguments give equal results."""
    first = mix(mix(mix(seed) ^ lane) ^ number)
    second = mix(first ^ 0x9E3779B9)
    total = (first & 0xFFFF) + (first >> 16) + (second & 0xFFFF) + (second >> 16)
    return (total / 65536.0 - 1.999969482421875) * 1.7320508075688772


def mix(value: int) -> int:
    """Hash 32 bits to 32 bits without collisions (constants by C. Wellons' hash prospector)."""
    value = value ^ (value >> 16)
    value = (value * 0x7FEB352D) & 0xFFFFFFFF
    value = value ^ (value >> 15)
    value = (value * 0x846CA68B) & 0xFFFFFFFF
    return value ^ (value >> 16)


@cache
def compiled_play() -> Callable[..., int] | None:
    """Return `play` compiled by numba, or loaded from numba's cache on disk; None without numba."""
    try:
        from numba import njit
    except ImportError:
        return None
    # Numba's cache notices changes of this file only, so the names of its files contain the rule.
    rule = sha256(choose.__code__.co_code + repr(choose.__code__.co_consts).encode()).hexdigest()[:16]
    # Compiled functions call only compiled ones: each gets a twin whose globals hold the twins.
    # Inlining the two large ones saves 6 % of the time.
    twins = globals() | {"choose": njit(cache=True, inline="always")(choose)}
    helpers = (mix, noise, vary, kind_of, next_position, number_instructions, prepare, wake_time, deliver)
    for function in (*helpers, play):
        twin = FunctionType(function.__code__, twins, function.__name__)
        twin.__qualname__ = f"{function.__name__}_{rule}"
        options: Any = {"inline": "always"} if function is deliver else {}
        twins[function.__name__] = njit(cache=True, **options)(twin)
    found: Callable[..., int] = twins["play"]
    return found
