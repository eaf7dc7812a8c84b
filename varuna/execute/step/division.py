"""How a step's batch lies over stages and replicas, seen from one rank. Pure.

The replicas of a stage hold the batch one after the other. Where all stages have as many, each replica runs
its samples in order, as its neighbours do. Where they differ, every stage runs the same micro-batches in the
same order, each of its replicas its own samples of every one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from varuna.execute.step.spans import PeerSlice, Runs, Span, divide, size, slice_for_peers, spans, within
from varuna.types import StageMap, format_stage_map

Given = tuple[tuple[int, ...], ...]
"""By stage and replica, the samples that each rank was given."""
Pieces = tuple[PeerSlice, ...]


@dataclass(frozen=True)
class Division:
    """One rank's micro-batches: which samples, and with whom their values are exchanged."""

    own: Span
    runs: tuple[Runs, ...]  # the rank's samples of each micro-batch; there may be none
    before: tuple[Pieces, ...]  # of each micro-batch, with the replicas of the stage before
    after: tuple[Pieces, ...]
    num_samples: int  # of the whole batch
    num_microbatches: tuple[int, ...]  # of each replica of this stage, those in which it has samples


@lru_cache(maxsize=64)
def divide_batch(given: Given, *, stage: int, replica: int, microbatch_size: int) -> Division:
    """No rank runs more than `microbatch_size` samples at once."""
    sides = tuple(spans(counts) for counts in given)
    largest = max(count for counts in given for count in counts)
    microbatches = divide(sides, ceil(largest / microbatch_size)) if largest else ()
    own = sides[stage][replica]

    def with_stage(other: int) -> tuple[Pieces, ...]:
        if not 0 <= other < len(sides):
            return ((),) * len(microbatches)
        return tuple(slice_for_peers(runs, own, sides[other]) for runs in microbatches)

    return Division(
        own,
        tuple(within(runs, own) for runs in microbatches),
        with_stage(stage - 1),
        with_stage(stage + 1),
        sum(given[stage]),
        tuple(sum(size(within(runs, span)) > 0 for runs in microbatches) for span in sides[stage]),
    )


def divide_alike(shares: Sequence[Span], *, replica: int, microbatch_sizes: Sequence[int]) -> Division:
    """Where all stages have as many replicas, which hold `shares` and run so many samples at once each."""
    own, length = shares[replica], microbatch_sizes[replica]
    runs = tuple(((first, min(first + length, own[1])),) for first in range(*own, length))
    nobody: Pieces = ()  # a replica has one neighbour before and after it, who runs the same micro-batches
    return Division(
        own,
        runs,
        (nobody,) * len(runs),
        (nobody,) * len(runs),
        sum(stop - first for first, stop in shares),
        tuple(len(range(*span, each)) for span, each in zip(shares, microbatch_sizes, strict=True)),
    )


def linked_ranks(stage_map: StageMap, stage: int, replica: int, other: int) -> dict[int, int]:
    """Of the neighbouring stage `other` those a rank exchanges values with: replica → rank.

    Its own replica where both have equally many, else all: how many samples each is given shows only later.
    """
    if not 0 <= other < len(stage_map):
        return {}
    theirs = dict(enumerate(stage_map[other]))
    return {replica: theirs[replica]} if len(theirs) == len(stage_map[stage]) else theirs


def refuse_other_batches(given: Given, stage_map: StageMap) -> None:
    """All stages must have been given one and the same batch; equal numbers of replicas, equal shares."""
    totals = {sum(counts) for counts in given}
    by_width = {len(counts): counts for counts in given}
    if len(totals) > 1 or any(by_width[len(counts)] != counts for counts in given):
        found = "; ".join(f"stage {stage}: {list(counts)}" for stage, counts in enumerate(given))
        raise ValueError(
            f"the stages of {format_stage_map(stage_map)!r} were given different batches, in samples by "
            f"replica: {found} (give each rank its part of the same batch, by its place among its own "
            "stage's replicas: varuna.SampleOrder with replica=model.rank_within_stage, "
            "num_replicas=model.data_depth)"
        )
