"""The calls that all ranks must make in the same order, and how a difference is noticed.

A script that calls `evaluate` on one rank only would wait until the timeout. Each rank counts its calls.
Calls other than `step` start with a small message, in which a negative number names the call. A step has no
such message: a rank that waits for longer than a second compares its call with those of other waiting ranks,
by one key of the store for each call (`StatusBoard.compare_call`).
"""

from collections.abc import Sequence
from zlib import crc32

import msgspec

from varuna.errors import CallMismatch

CHANGED = "step() after a change of the model's attributes"
CALLS = (
    "step",
    "evaluate",
    "checkpoint",
    "load_checkpoint",
    "resume",
    "timeline",
    "report",
    "full_state_dict",
    "forward",
    "backward",
    "allreduce_grads",
    "clip_grad_norm",
    "state_dict",
    "get_param",
    "get_param_grad",
    "optimizer.state_dict",
    "clip_grad_norm_",
    "gather_model",
    "DataLoader",
    "save_pretrained",
    "save_adapter",
    "strategy.barrier",
    "strategy.broadcast",
    "strategy.reduce",
    "next_epoch",
    "predict",
    CHANGED,
)
FIRST_CODE = -1000.0
"""Codes of calls lie below all numbers that other messages start with."""


class RankCall(msgspec.Struct, frozen=True):
    """The call that a rank is in."""

    rank: int
    name: str


def announcement(name: str, argument: str = "") -> list[float]:
    """Return three numbers, as in other messages that may meet this one: gloo needs equal lengths."""
    return [FIRST_CODE - CALLS.index(name), float(crc32(argument.encode())), 0.0]


def announced_argument(numbers: Sequence[float]) -> float:
    """Return a code of the call's argument, which differs if the argument does."""
    return numbers[1]


def announced_call(numbers: Sequence[float]) -> str | None:
    """Return the call that a message announces; None if it is another message."""
    index = int(FIRST_CODE - numbers[0]) if numbers[0] <= FIRST_CODE else -1
    return CALLS[index] if 0 <= index < len(CALLS) else None


def argument_mismatch(name: str, arguments: Sequence[tuple[int, str]]) -> CallMismatch:
    """Return the error for ranks that make one call with different arguments, given as (rank, argument)."""
    (first, argument), *others = arguments
    differing = [(rank, theirs) for rank, theirs in others if theirs != argument]
    found = ", ".join(f"rank {rank} {name}({theirs!r})" for rank, theirs in differing[:4])
    return CallMismatch(
        f"rank {first} calls {name}({argument!r}), {found}: pass the same argument on all ranks (loop over "
        "the names of the whole model, in the same order: a rank holds only some of the parameters)"
    )


def mismatch(calls: Sequence[RankCall]) -> CallMismatch:
    """Return the error for ranks in different calls."""
    first = calls[0]
    others = [call for call in calls if call.name != first.name]
    found = (
        ", ".join(f"rank {call.rank} in {_shown(call)}" for call in others[:4]) or "others in another call"
    )
    if any("() after " in call.name for call in calls):
        return CallMismatch(
            f"rank {first.rank} is in {_shown(first)}, {found}: change the model on all ranks, before the "
            "same step (does the script change it only `if rank == 0`?)"
        )
    return CallMismatch(
        f"rank {first.rank} is in {_shown(first)}, {found}: call it on all ranks (all ranks must make the "
        "same calls in the same order; does the script make one only `if rank == 0`?)"
    )


def _shown(call: RankCall) -> str:
    return call.name if "()" in call.name else f"{call.name}()"
