"""Computes which samples of a batch one rank runs in which micro-batch. Pure functions.

The replicas of a stage hold the batch one after the other. If all stages have equally many replicas, each
replica runs its samples in order, like the same replica of the other stages. If they differ, every stage runs
the same micro-batches in the same order, and each replica runs its own samples of every micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from varuna.execute.step.spans import PeerSlice, Runs, Span, divide, size, slice_for_peers, spans, within
from varuna.types import StageMap, format_stage_map

SamplesByStage = tuple[tuple[int, ...], ...]
"""Number of samples that each rank was given, by stage and replica."""
Slices = tuple[PeerSlice, ...]


@dataclass(frozen=True)
class Division:
    """The micro-batches of one rank: their samples, and the replicas to exchange tensors with."""

    own: Span
    runs: tuple[Runs, ...]  # this rank's samples of each micro-batch; may be empty
    before: tuple[Slices, ...]  # for each micro-batch, what to exchange with the previous stage
    after: tuple[Slices, ...]
    num_samples: int  # of the whole batch
    num_microbatches: tuple[int, ...]  # by replica of this stage: micro-batches in which it has samples


@lru_cache(maxsize=64)
def divide_batch(given: SamplesByStage, *, stage: int, replica: int, microbatch_size: int) -> Division:
    """Divide a batch over stages of any widths. No rank runs more than `microbatch_size` samples at once."""
    sides = tuple(spans(counts) for counts in given)
    largest = max(count for counts in given for count in counts)
    microbatches = divide(sides, ceil(largest / microbatch_size)) if largest else ()
    own = sides[stage][replica]

    def with_stage(other: int) -> tuple[Slices, ...]:
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


def divide_equal_widths(shares: Sequence[Span], *, replica: int, microbatch_sizes: Sequence[int]) -> Division:
    """Divide a batch if all stages have equally many replicas. Shares and sizes are given by replica."""
    own, length = shares[replica], microbatch_sizes[replica]
    runs = tuple(((first, min(first + length, own[1])),) for first in range(*own, length))
    none: Slices = ()  # the one peer in each direction runs the same micro-batches
    return Division(
        own,
        runs,
        (none,) * len(runs),
        (none,) * len(runs),
        sum(stop - first for first, stop in shares),
        tuple(len(range(*span, each)) for span, each in zip(shares, microbatch_sizes, strict=True)),
    )


def linked_ranks(stage_map: StageMap, stage: int, replica: int, other: int) -> dict[int, int]:
    """Return the ranks of the adjacent stage `other` that a rank exchanges tensors with, by replica.

    The same replica, if both stages have equally many; else all, as the numbers of samples are not known yet.
    """
    if not 0 <= other < len(stage_map):
        return {}
    theirs = dict(enumerate(stage_map[other]))
    return {replica: theirs[replica]} if len(theirs) == len(stage_map[stage]) else theirs


def check_equal_batches(given: SamplesByStage, stage_map: StageMap) -> None:
    """Raise unless all stages were given one batch, and stages of equal width equal shares of it."""
    totals = {sum(counts) for counts in given}
    by_width = {len(counts): counts for counts in given}
    if len(totals) > 1 or any(by_width[len(counts)] != counts for counts in given):
        found = "; ".join(f"stage {stage}: {list(counts)}" for stage, counts in enumerate(given))
        raise ValueError(
            f"the stages of {format_stage_map(stage_map)!r} were given different batches; samples by "
            f"replica: {found} (give each rank its share of the same batch, by its place among its own "
            "stage's replicas: varuna.SampleOrder with replica=model.rank_within_stage, "
            "num_replicas=model.data_depth)"
        )
