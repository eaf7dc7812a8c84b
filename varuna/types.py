"""The nouns of the library: frozen, plain values that pass between its rooms.

Knowing this file is knowing the library. Nothing here imports torch, so that planning,
scheduling and drawing run anywhere. Every noun reads and writes JSON through `varuna.codec`.

    ModelGraph   what a model is          (capture makes it)
    Plan         who does what            (plan or the user makes it)
    Schedule     in which order           (schedule makes it)
    Timeline     what happened, and when  (execute records it, simulate predicts it)
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

# ---------------------------------------------------------------- the model


class Dim(msgspec.Struct, frozen=True):
    """One dimension of a tensor: `per_sample * batch + fixed`."""

    per_sample: int
    fixed: int

    def size(self, batch: int) -> int:
        return self.per_sample * batch + self.fixed

    def __str__(self) -> str:
        if not self.per_sample:
            return str(self.fixed)
        scaled = "b" if self.per_sample == 1 else f"{self.per_sample}b"
        return f"{scaled}+{self.fixed}" if self.fixed else scaled


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor that crosses a cut; `None` stands for a dimension only known when it arrives."""

    name: str
    dtype: str  # as torch prints it, without "torch.": "float32", "bool"
    dims: tuple[Dim | None, ...]
    needs_grad: bool

    def __str__(self) -> str:
        shape = ", ".join("?" if dim is None else str(dim) for dim in self.dims)
        return f"{self.name}: {self.dtype}[{shape}]" + (" with gradient" if self.needs_grad else "")


class Segment(msgspec.Struct, frozen=True):
    """What lies between two neighbouring cuts: the smallest thing that a stage is made of."""

    index: int
    parameters: tuple[str, ...]  # canonical names, those used here
    buffers: tuple[str, ...]
    num_operations: int
    flops_per_sample: float  # an estimate from the shapes, for balancing before anything is measured
    parameter_bytes: int


class ModelGraph(msgspec.Struct, frozen=True):
    """A model as cut: its segments in order, which names share one tensor, and who it is."""

    segments: tuple[Segment, ...]
    ties: tuple[tuple[str, ...], ...]  # each a group of names for one tensor, canonical name first
    fingerprint: str


# ---------------------------------------------------------------- the layout

ScheduleName = Literal["varuna", "1f1b", "gpipe", "zero-bubble"]
PrecisionName = Literal["fp32", "bf16", "fp16"]


class StagePlan(msgspec.Struct, frozen=True):
    """One pipeline stage: the segments `first..stop-1`, and the ranks that each hold a replica."""

    first: int
    stop: int
    ranks: tuple[int, ...]
    recompute: bool = False


class Plan(msgspec.Struct, frozen=True):
    """Who does what: everything that the engine must be told."""

    stages: tuple[StagePlan, ...]
    batch_size: int  # the whole job's, per step
    microbatch_size: int
    schedule: ScheduleName = "varuna"
    precision: PrecisionName = "fp32"
    fingerprint: str = ""

    @property
    def depth(self) -> int:
        return len(self.stages)

    @property
    def width(self) -> int:
        return len(self.stages[0].ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for stage in self.stages for rank in stage.ranks}))


StageMap = tuple[tuple[int, ...], ...]


def parse_stage_map(text: str) -> StageMap:
    """Reads "0,1;2,3;": stages parted by `;`, the ranks of each by `,`."""
    form = 'the map is written "0,1;2,3;": stages parted by ";", the ranks of each by ","'
    rows = [row for row in text.strip().split(";") if row.strip()]
    if not rows:
        raise ValueError(f"stage_to_rank_map {text!r} names no stage ({form})")
    try:
        stage_map = tuple(tuple(int(rank) for rank in row.split(",") if rank.strip()) for row in rows)
    except ValueError:
        raise ValueError(f"stage_to_rank_map {text!r} holds something that is no rank ({form})") from None
    ranks = [rank for row in stage_map for rank in row]
    if not all(stage_map) or len({len(row) for row in stage_map}) != 1:
        raise ValueError(f"stage_to_rank_map {text!r} gives its stages unequal numbers of replicas ({form})")
    if len(set(ranks)) != len(ranks) or min(ranks) < 0:
        raise ValueError(f"stage_to_rank_map {text!r} names a rank twice, or a negative one ({form})")
    return stage_map


def format_stage_map(stage_map: Iterable[Iterable[int]]) -> str:
    return "".join(",".join(map(str, ranks)) + ";" for ranks in stage_map)


def place_in_map(stage_map: StageMap, rank: int) -> tuple[int, int]:
    """The (stage, replica) of a rank."""
    for stage, ranks in enumerate(stage_map):
        if rank in ranks:
            return stage, ranks.index(rank)
    raise ValueError(
        f"rank {rank} is not in the stage_to_rank_map {format_stage_map(stage_map)!r} "
        "(start as many workers as the map has ranks, or pass the launcher's own map)"
    )


def spread_evenly(total: int, *, parts: int) -> tuple[int, ...]:
    """Splits a count so that no part is more than one larger than another, larger parts first.

    So a global batch lies over the replicas.
    """
    return tuple(total // parts + (part < total % parts) for part in range(parts))


def spread_by_size(sizes: Sequence[int], *, parts: int) -> tuple[int, ...]:
    """For each size the part that takes it: largest first, each to the part with least so far.

    Even by bytes, and the same on every rank. So tensors lie over the replicas where each keeps a share.
    """
    loads = [0] * parts
    chosen = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        part = loads.index(min(loads))
        chosen[index] = part
        loads[part] += sizes[index]
    return tuple(chosen)


# ---------------------------------------------------------------- the order

Op = Literal["F", "R", "B", "I", "W"]
"""Forward, recompute, backward; or backward in two parts: for the inputs, for the weights."""


class Instruction(msgspec.Struct, frozen=True):
    """One thing a stage does; prints as torch's pipeline CSV writes it: "2F0"."""

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


class Schedule(msgspec.Struct, frozen=True):
    """For each stage its instructions in order, and how far it may run ahead.

    `limits[s]` bounds the micro-batches that stage s holds at once, between their forward and
    their backward: the activation memory. Where `opportunistic`, the order is a preference:
    a stage whose next instruction waits for a peer runs another one that is ready.
    """

    name: str
    rows: tuple[tuple[Instruction, ...], ...]
    limits: tuple[int, ...]
    opportunistic: bool


# ---------------------------------------------------------------- the work


class Work(msgspec.Struct, frozen=True):
    """Which samples of which step: all that randomness may depend on.

    `first_sample` counts within the global batch, so that it is the same whatever the layout.
    """

    seed: int
    step: int
    first_sample: int


class Interval(msgspec.Struct, frozen=True):
    """One thing that took time on one rank: an instruction ("F", "B", ...) or "reduce", "wait", ..."""

    rank: int
    stage: int
    what: str
    microbatch: int  # -1 where none is meant
    start_seconds: float
    stop_seconds: float


class Timeline(msgspec.Struct, frozen=True):
    """What happened in one step, or what a simulation says will happen; starts at zero."""

    intervals: tuple[Interval, ...]

    @property
    def seconds(self) -> float:
        return max((interval.stop_seconds for interval in self.intervals), default=0.0)
