"""Computes which samples go from which rank to which, if two sides split one batch differently.

A side is a list of members that hold the batch in order, each a span of it: the ranks that have the inputs,
the replicas of a stage, the ranks that want the outputs. A member sends to another the samples that are in
the spans of both. Sides may have any number of members and any sizes, also empty ones; nothing is padded.

    three replicas   0 . . . | 4 . . . | 8 . . .
    two replicas     0 . . . . . | 6 . . . . .      the second of three has 4-5 for one, 6-7 for the other

A micro-batch takes some samples of every span, so that all members work at the same time. The spans of all
sides together cut the batch into cells, and `divide` splits each cell over the micro-batches in order:

    two micro-batches    0 0 1 1 | 0 1 | 0 1 | 0 0 1 1
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from varuna.types import spread_evenly

Span = tuple[int, int]
"""Samples `first` to `stop - 1` of the batch."""
Runs = tuple[Span, ...]
"""Samples of one micro-batch: ascending spans that do not overlap."""


class PeerSlice(NamedTuple):
    """Samples to exchange with one peer: `first` to `stop - 1` of what this member holds."""

    peer: int
    first: int
    stop: int


def spans(counts: Iterable[int]) -> tuple[Span, ...]:
    """Return the spans of members that hold these numbers of samples, one after the other."""
    return tuple(pairwise(accumulate(counts, initial=0)))


def even_spans(num_samples: int, *, parts: int) -> tuple[Span, ...]:
    return spans(spread_evenly(num_samples, parts=parts))


def within(runs: Runs, span: Span) -> Runs:
    """Return the samples of a micro-batch that are in the span."""
    clipped = ((max(first, span[0]), min(stop, span[1])) for first, stop in runs)
    return tuple((first, stop) for first, stop in clipped if first < stop)


def size(runs: Runs) -> int:
    return sum(stop - first for first, stop in runs)


def slice_for_peers(runs: Runs, own: Span, theirs: Sequence[Span]) -> tuple[PeerSlice, ...]:
    """Return which samples of a micro-batch this member exchanges with each peer; peers without any are left
    out.

    Both directions agree: the peer finds this member with the same number of samples. To exchange a whole
    batch, pass it as one run.
    """
    held = within(runs, own)
    found = []
    for peer, span in enumerate(theirs):
        count = size(within(held, span))
        if count:
            first = size(within(held, (own[0], max(own[0], span[0]))))
            found.append(PeerSlice(peer, first, first + count))
    return tuple(found)


@lru_cache(maxsize=64)
def divide(sides: tuple[tuple[Span, ...], ...], microbatches: int) -> tuple[Runs, ...]:
    """Return the samples of each micro-batch. Every member has equally many of each, plus or minus one.

    The remainder of a cell goes to the micro-batches after those that got the last cell's remainder. A span
    is a sequence of cells, so its shares differ by at most one.
    """
    bounds = sorted({bound for side in sides for span in side for bound in span})
    divided: list[list[Span]] = [[] for _ in range(microbatches)]
    turn = 0
    for place, stop in pairwise(bounds):
        whole, left = divmod(stop - place, microbatches)
        for number, runs in enumerate(divided):
            count = whole + ((number - turn) % microbatches < left)
            if count:
                if runs and runs[-1][1] == place:
                    runs[-1] = runs[-1][0], place + count
                else:
                    runs.append((place, place + count))
            place += count
        turn = (turn + left) % microbatches
    return tuple(map(tuple, divided))
