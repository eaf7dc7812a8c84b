"""The inner loop of the simulator: plays one replica's pipeline, one decision at a time.

Written with nothing but numbers and indexing, so that the very same lines run over lists in plain
Python and over arrays when numba is there, to the same bits. No logarithm, no cosine: libraries
disagree on their last digit.

The rule of what comes next is `varuna.schedule.Cursor`'s, told in pointers; a test plays both.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

F, R, B, I, W = (ord(op) for op in "FRBIW")  # noqa: E741 - the letters of the instructions
KINDS = "FRBIW"  # the order of the costs of a stage
NEVER = float("inf")


def play(
    rows: Any,  # the stages' letters, one after the other
    firsts: Any,  # where each stage's row begins; and the end of all
    microbatches: int,
    limits: Any,
    opportunistic: bool,
    seconds: Any,  # [size][stage][kind]: size 0 of every micro-batch but the last, size 1 of the last
    spreads: Any,  # [stage][kind]
    leaving: Any,  # [direction][stage]: of an instruction's seconds, those after its message has left
    sending: Any,  # [size][direction][stage]: for which a message keeps the way busy
    latency: Any,  # [direction][stage]: until it arrives, after that
    wavering: Any,  # [direction][stage]: the spread of both together
    sharing: Any,  # [stage]: how much of the time that a message to or from s+1 meets another it loses
    clocks: Any,  # when each stage decides next; zero at first
    seed: int,  # 0: nothing varies
    starts: Any,  # out, as all that follow: by place in `rows`
    stops: Any,
    numbers: Any,  # the micro-batch of each instruction
    activations: Any,  # [stage][microbatch]: arrivals, NEVER at first
    gradients: Any,
    heads: Any,  # eight by stage: the next F, B and W; how many F, B, I and W were taken; whether it waits
    ways: Any,  # three by direction and stage: busy from, busy until, last arrival
) -> int:
    """How many instructions ran: all of them, or the rows deadlock."""
    stages = len(limits)
    for stage in range(stages):
        number_instructions(rows, firsts[stage], firsts[stage + 1], numbers)
        for pointer in range(3):
            heads[pointer * stages + stage] = next_place(rows, firsts[stage] - 1, firsts[stage + 1], pointer)

    num_run = 0
    total = firsts[stages]
    while num_run < total:
        # The stage that decides next: whatever may have arrived by then is known by now, for it was
        # sent by an instruction that began earlier.
        stage = 0
        now = clocks[0]
        for other in range(1, stages):
            if clocks[other] < now:
                now = clocks[other]
                stage = other
        if now == NEVER:
            return num_run

        end = firsts[stage + 1]
        forward = heads[stage]
        backward = heads[stages + stage]
        weight = heads[2 * stages + stage]
        num_forwards = heads[3 * stages + stage]
        num_backwards = heads[4 * stages + stage]
        num_splits = heads[5 * stages + stage]
        num_weights = heads[6 * stages + stage]
        activation = gradient = 0.0
        if stage > 0 and forward < end:
            activation = activations[stage * microbatches + num_forwards]
        if stage < stages - 1 and num_backwards < microbatches:
            gradient = gradients[stage * microbatches + num_backwards]
        has_activation = activation <= now
        has_gradient = gradient <= now

        # 0 forward, 1 backward or recompute, 2 weight, 3 wait: Cursor.next, line by line
        choice = 3
        if forward < backward and forward < weight:
            if has_activation:
                choice = 0
        elif backward < weight:
            if has_gradient or (rows[backward] == R and not opportunistic):
                choice = 1
        elif weight < end:
            choice = 2
        if choice == 3 and opportunistic:
            ready = num_forwards > num_backwards and backward < end
            if ready and has_gradient:
                choice = 1
            elif forward < end and has_activation and num_forwards - num_backwards < limits[stage]:
                choice = 0
            elif weight < end and num_weights < num_splits:
                choice = 2
            elif ready and rows[backward] == R:
                choice = 1

        if choice == 3:
            wake = NEVER
            if not has_activation:
                wake = activation
            if not has_gradient and gradient < wake:
                wake = gradient
            clocks[stage] = wake
            heads[7 * stages + stage] = 1
            continue

        place = forward
        if choice == 1:
            place = backward
        elif choice == 2:
            place = weight
        op = rows[place]
        number = numbers[place]
        size = 0
        if number == microbatches - 1:
            size = 1
        kind = 0
        if op == R:
            kind = 1
        elif op == B:
            kind = 2
        elif op == I:
            kind = 3
        elif op == W:
            kind = 4
        cost = stage * 5 + kind
        taken = seconds[size * stages * 5 + cost]
        if seed != 0 and spreads[cost] > 0.0:
            taken = taken + spreads[cost] * noise(seed, cost * 2, number)
            if taken < 0.0:
                taken = 0.0
        stop = now + taken
        starts[place] = now
        stops[place] = stop
        clocks[stage] = stop
        heads[7 * stages + stage] = 0
        num_run += 1
        heads[choice * stages + stage] = next_place(rows, place, end, choice)
        if choice == 0:
            heads[3 * stages + stage] = num_forwards + 1
        elif choice == 2:
            heads[6 * stages + stage] = num_weights + 1
        elif op != R:
            heads[4 * stages + stage] = num_backwards + 1
            if op == I:
                heads[5 * stages + stage] = num_splits + 1

        # What it made leaves for a neighbour: one queue for each direction, and what meets a message
        # that comes the other way loses time by it.
        direction = 2
        if op == F and stage < stages - 1:
            direction = 0
            to = stage + 1
            link = stage
        elif choice == 1 and op != R and stage > 0:
            direction = 1
            to = stage - 1
            link = stage - 1
        if direction == 2:
            continue
        way = direction * stages + stage
        busy = sending[size * 2 * stages + way]
        leaves = stop - leaving[way]
        if ways[stages * 2 + way] > leaves:
            leaves = ways[stages * 2 + way]
        against = (1 - direction) * stages + to
        met_from = ways[against]
        met_until = ways[stages * 2 + against]
        if met_from < leaves:
            met_from = leaves
        if met_until > leaves + busy:
            met_until = leaves + busy
        if met_until > met_from:
            busy = busy + sharing[link] * (met_until - met_from)
        ways[way] = leaves
        ways[stages * 2 + way] = leaves + busy
        arrival = leaves + busy + latency[way]
        if seed != 0 and wavering[way] > 0.0:
            arrival = arrival + wavering[way] * noise(seed, way * 2 + 1, number)
            if arrival < leaves:
                arrival = leaves
        if arrival < ways[stages * 4 + way]:
            arrival = ways[stages * 4 + way]
        ways[stages * 4 + way] = arrival
        if direction == 0:
            activations[to * microbatches + number] = arrival
            awaited = heads[3 * stages + to]
        else:
            gradients[to * microbatches + number] = arrival
            awaited = heads[4 * stages + to]
        # A stage that runs has its clock at its end, and will find the message then.
        if heads[7 * stages + to] == 1 and awaited == number and clocks[to] > arrival:
            clocks[to] = arrival
    return num_run


def number_instructions(rows: Any, first: int, stop: int, numbers: Any) -> None:
    """Which micro-batch each letter of a row means: forwards and backwards count up, a W follows its I."""
    forwards = 0
    backwards = 0
    for place in range(first, stop):
        if rows[place] == F:
            numbers[place] = forwards
            forwards += 1
        elif rows[place] != W:
            numbers[place] = backwards
            if rows[place] != R:
                backwards += 1
    split = first - 1
    for place in range(first, stop):
        if rows[place] == W:
            split += 1
            while rows[split] != I:
                split += 1
            numbers[place] = numbers[split]


def next_place(rows: Any, place: int, stop: int, pointer: int) -> int:
    """The next forward (0), backward or recompute (1) or weight part (2) after a place; else `stop`."""
    place += 1
    while place < stop:
        op = rows[place]
        if op == F:
            if pointer == 0:
                return place
        elif op == W:
            if pointer == 2:
                return place
        elif pointer == 1:
            return place
        place += 1
    return stop


def noise(seed: int, lane: int, number: int) -> float:
    """A sum of four uniforms, scaled to a mean of 0 and a variance of 1; the same for the same three."""
    first = mix(mix(mix(seed) ^ lane) ^ number)
    second = mix(first ^ 0x9E3779B9)
    total = (first & 0xFFFF) + (first >> 16) + (second & 0xFFFF) + (second >> 16)
    return (total / 65536.0 - 1.999969482421875) * 1.7320508075688772


def mix(value: int) -> int:
    """A bijection of 32 bits that leaves no pattern (constants by C. Wellons' hash prospector)."""
    value = value ^ (value >> 16)
    value = (value * 0x7FEB352D) & 0xFFFFFFFF
    value = value ^ (value >> 15)
    value = (value * 0x846CA68B) & 0xFFFFFFFF
    return value ^ (value >> 16)


@cache
def compiled_play() -> Callable[..., int] | None:
    """`play` by way of numba, from its cache on disk where it has been made before; None without numba."""
    try:
        from numba import njit
    except ImportError:
        return None
    # Compiled functions can call only compiled ones: so each gets a twin whose globals hold the twins.
    twins = dict(globals())
    for function in (mix, noise, next_place, number_instructions, play):
        twin = FunctionType(function.__code__, twins, function.__name__)
        twins[function.__name__] = njit(cache=True)(twin)
    found: Callable[..., int] = twins["play"]
    return found
