"""Which samples go from whom to whom, where two sides hold one batch in shares of their own.

A side holds the samples in order, each of its members a span of them: the ranks that were given the inputs,
the replicas of a stage, the ranks that want the outputs. What one member has for another is the samples
that lie in the spans of both. Any number of members, any sizes, empty ones too; nothing is padded.

    three replicas   0 . . . | 4 . . . | 8 . . .
    two replicas     0 . . . . . | 6 . . . . .      the second of three has 4-5 for one, 6-7 for the other

So that all members are at work at once, a micro-batch takes some samples of every span. Spans of all sides
together cut the batch into cells, and `divide` deals each cell out to the micro-batches in order:

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
"""The samples of one micro-batch: spans that ascend and do not overlap."""


class Piece(NamedTuple):
    """What is exchanged with one peer: samples `first` to `stop - 1` of what the member itself has."""

    peer: int
    first: int
    stop: int


def spans(counts: Iterable[int]) -> tuple[Span, ...]:
    """Of members that hold so many samples each, one after the other."""
    return tuple(pairwise(accumulate(counts, initial=0)))


def even_spans(num_samples: int, *, parts: int) -> tuple[Span, ...]:
    return spans(spread_evenly(num_samples, parts=parts))


def within(runs: Runs, span: Span) -> Runs:
    """Those samples of a micro-batch that a member holds."""
    clipped = ((max(first, span[0]), min(stop, span[1])) for first, stop in runs)
    return tuple((first, stop) for first, stop in clipped if first < stop)


def size(runs: Runs) -> int:
    return sum(stop - first for first, stop in runs)


def pieces(runs: Runs, own: Span, theirs: Sequence[Span]) -> tuple[Piece, ...]:
    """What of a micro-batch a member exchanges with each member of the other side; none where nothing.

    The same in both directions: the peer of a piece finds this member among its own, with as many samples.
    For a batch that is exchanged as a whole, `runs` is that one span.
    """
    held = within(runs, own)
    found = []
    for peer, span in enumerate(theirs):
        count = size(within(held, span))
        if count:  # what lies before it is one run of samples, for spans are
            first = size(within(held, (own[0], max(own[0], span[0]))))
            found.append(Piece(peer, first, first + count))
    return tuple(found)


@lru_cache(maxsize=64)
def divide(sides: tuple[tuple[Span, ...], ...], microbatches: int) -> tuple[Runs, ...]:
    """The samples of each micro-batch, so that every member of every side has equally many of each, give
    or take one.

    What is left over of a cell goes on from where the last cell's leftover ended, as cards are dealt. A
    span is a run of cells, so what is dealt of it differs by one at most.
    """
    bounds = sorted({bound for side in sides for span in side for bound in span})
    dealt: list[list[Span]] = [[] for _ in range(microbatches)]
    turn = 0
    for place, stop in pairwise(bounds):
        whole, left = divmod(stop - place, microbatches)
        for number, runs in enumerate(dealt):
            count = whole + ((number - turn) % microbatches < left)
            if count:
                runs.append((place, place + count))
            place += count
        turn = (turn + left) % microbatches
    return tuple(tuple(_joined(runs)) for runs in dealt)


def _joined(runs: Iterable[Span]) -> Iterable[Span]:
    """Neighbouring spans as one."""
    last: Span | None = None
    for span in runs:
        if last is not None and last[1] == span[0]:
            last = last[0], span[1]
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last
