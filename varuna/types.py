"""The nouns of the library: frozen, plain values that pass between its rooms.

Knowing this file is knowing the library. Nothing here imports torch, so that planning,
scheduling and drawing run anywhere. Every noun reads and writes JSON through `varuna.codec`.

    ModelGraph   what a model is          (capture makes it)
    Profile      what its parts cost      (measure makes it)
    Cluster      what there is to run on  (the user or the manager makes it)
    Plan         who does what            (plan or the user makes it)
    Forecast     what that will cost      (plan makes it)
    Schedule     in which order           (schedule makes it)
    Timeline     what happened, and when  (execute records it, simulate predicts it)
    StepReport   both, side by side       (observe makes it)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from varuna.environment import variable_name
from varuna.units import count, duration

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
    moved_bytes: Dim = Dim(0, 0)  # read and written by a forward, by micro-batch size; an estimate too
    kept_bytes: Dim = Dim(0, 0)  # made by a forward for its backward


class ModelGraph(msgspec.Struct, frozen=True):
    """A model as cut: its segments in order, which names share one tensor, and who it is."""

    segments: tuple[Segment, ...]
    ties: tuple[tuple[str, ...], ...]  # each a group of names for one tensor, canonical name first
    fingerprint: str


class Operation(msgspec.Struct, frozen=True):
    """A step of a model that no cut may part, and what its forward costs for one sample, by its shapes."""

    flops: int
    moved_bytes: int  # read and written


class Value(msgspec.Struct, frozen=True):
    """What one operation makes and others use."""

    made_by: int
    used_by: tuple[int, ...]
    num_bytes: int  # of one sample, over a cut and back; zero where the other side makes it again


class OperationGraph(msgspec.Struct, frozen=True):
    """A model before it is cut: its operations in an order in which they can run."""

    operations: tuple[Operation, ...]
    values: tuple[Value, ...]


Partition = Callable[[OperationGraph], Sequence[int]]
"""Tells for each operation its segment; none uses what a later segment makes."""


# ---------------------------------------------------------------- the layout

ScheduleName = Literal["varuna", "1f1b", "gpipe", "zero-bubble", "zero-bubble-2x"]
PrecisionName = Literal["fp32", "bf16", "fp16"]
ChannelName = Literal["shared", "group", "host"]
"""How tensors go between stages: GPU memory that both see, a library's group (NCCL), or the host's memory."""


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
    microbatch_size: int  # the most samples that any rank runs at once
    schedule: ScheduleName = "varuna"
    precision: PrecisionName = "fp32"
    fingerprint: str = ""

    @property
    def depth(self) -> int:
        return len(self.stages)

    @property
    def widths(self) -> tuple[int, ...]:
        """The replicas of each stage."""
        return tuple(len(stage.ranks) for stage in self.stages)

    @property
    def width(self) -> int:
        """The replicas of every stage; where stages differ, of that with fewest."""
        return min(self.widths)

    @property
    def uneven(self) -> bool:
        return len(set(self.widths)) > 1

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for stage in self.stages for rank in stage.ranks}))


StageMap = tuple[tuple[int, ...], ...]


def parse_stage_map(text: str) -> StageMap:
    """Reads "0,1;2,3;": stages parted by `;`, the ranks of each by `,`, as many as it has replicas."""
    form = 'the map is written "0,1;2,3;": stages parted by ";", the ranks of each by ","'
    if not isinstance(text, str):
        raise TypeError(
            f"stage_to_rank_map must be a string, not {text!r} ({form}; the launcher sets it as "
            f"{variable_name('stage_to_rank_map')})"
        )
    rows = [row for row in text.strip().split(";") if row.strip()]
    if not rows:
        raise ValueError(f"stage_to_rank_map {text!r} names no stage ({form})")
    try:
        stage_map = tuple(tuple(int(rank) for rank in row.split(",") if rank.strip()) for row in rows)
    except ValueError:
        raise ValueError(f"stage_to_rank_map {text!r} holds something that is no rank ({form})") from None
    ranks = [rank for row in stage_map for rank in row]
    if not all(stage_map):
        raise ValueError(f"stage_to_rank_map {text!r} has a stage without a rank ({form})")
    if len(set(ranks)) != len(ranks) or min(ranks) < 0:
        raise ValueError(f"stage_to_rank_map {text!r} names a rank twice, or a negative one ({form})")
    return stage_map


def format_stage_map(stage_map: Iterable[Iterable[int]]) -> str:
    return "".join(",".join(map(str, ranks)) + ";" for ranks in stage_map)


def in_few(widths: Sequence[int]) -> str:
    """ "2", or "3+1" where stages differ in their number of replicas."""
    return str(widths[0]) if len(set(widths)) == 1 else "+".join(map(str, widths))


def format_widths(widths: Sequence[int]) -> str:
    """ "2 replicas", or "3+1 replicas"."""
    return f"{in_few(widths)} {'replica' if set(widths) == {1} else 'replicas'}"


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


# ---------------------------------------------------------------- the costs
#
# Bounds are checked wherever a profile is read, and the error names the key: what took no time was not
# measured (a part with nothing to do still takes some microseconds), and a day is a wrong unit.

DAY = 86_400.0
Count = Annotated[int, Meta(ge=1, le=1 << 40)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]
PositiveSeconds = Annotated[float, Meta(gt=0, le=DAY)]
Seconds = Annotated[float, Meta(ge=0, le=DAY)]

PROFILE_VERSION = 1


class Duration(msgspec.Struct, frozen=True, array_like=True):
    """How long something takes: the median of several runs, and the standard deviation of a single one.

    Written [median, spread], in seconds.
    """

    seconds: PositiveSeconds
    spread: Seconds = 0.0


class SizeCost(msgspec.Struct, frozen=True):
    """One segment at one micro-batch size, run alone."""

    microbatch_size: Count
    forward: Duration  # keeping the graph for a backward
    forward_only: Duration  # keeping nothing, as where the stage recomputes
    backward: Duration
    backward_inputs: Duration  # the backward in two parts: this one is waited for by the stage before,
    backward_weights: Duration  # ... this one by nobody
    activation_bytes: Bytes  # held from its forward to its backward, what it was given included
    working_bytes: Bytes  # the most in use besides what is held, in forward or backward
    split_bytes: Bytes = 0  # held more, from the first part of a backward to the second
    entry_seconds: Seconds = 0.0  # more, in each forward of a stage that begins here: to make values again


class SegmentCost(msgspec.Struct, frozen=True):
    """What a segment costs; segments that are alike share one."""

    sizes: tuple[SizeCost, ...]  # by micro-batch size, ascending
    parameter_bytes: Bytes  # with buffers
    gradient_bytes: Bytes  # of the parameters that train
    num_trained: Annotated[int, Meta(ge=0)]  # elements that the optimizer updates

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ValueError("sizes holds no micro-batch size (measure at least one)")
        _refuse_disorder("sizes", [size.microbatch_size for size in self.sizes])


class CutCost(msgspec.Struct, frozen=True):
    """What crosses the cut after a segment, in bytes, by micro-batch size."""

    sent: Dim  # with a forward
    returned: Dim  # with a backward


class TieCost(msgspec.Struct, frozen=True):
    """A tensor that several segments use; a stage holds it once, stages that share it sum its gradient."""

    segments: tuple[int, ...]
    num_bytes: Bytes
    num_elements: Count


class MessageCost(msgspec.Struct, frozen=True):
    """One message of one size from a stage to its neighbour."""

    num_bytes: Bytes
    one_way: Duration  # from `send` until it can be taken
    both_ways: Duration  # the same while as much goes the other way
    sender_seconds: Seconds  # of these, those in which the sender cannot compute
    receiver_seconds: Seconds  # for which the receiver cannot compute, when it takes the message


class LinkCost(msgspec.Struct, frozen=True):
    """The way between two devices, at several message sizes, ascending."""

    messages: tuple[MessageCost, ...]

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("messages is empty (measure at least one size)")
        _refuse_disorder("messages", [message.num_bytes for message in self.messages])


class ReduceCost(msgspec.Struct, frozen=True):
    """One all-reduce over a group of ranks, within one machine or over several."""

    group_size: Annotated[int, Meta(ge=2)]
    num_bytes: Bytes
    between_machines: bool
    duration: Duration
    sharing: Duration | None = None  # as many bytes in equal shares, each sent to all by its owner


class OptimizerCost(msgspec.Struct, frozen=True):
    """An optimizer's step, gradients set to zero included: `fixed + per element`; and what it keeps."""

    name: str
    fixed_seconds: Seconds
    seconds_per_element: Seconds
    state_bytes_per_element: Annotated[float, Meta(ge=0, le=1024)]


class Overheads(msgspec.Struct, frozen=True):
    """What the engine adds to what its segments cost."""

    instruction_seconds: Seconds  # for each F, R, B, I, W
    step_seconds: Seconds  # once a step: the batch cut up, the gradients scaled


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What one model costs on one kind of device, measured once. Segment i costs `kinds[segments[i]]`."""

    version: int = PROFILE_VERSION
    fingerprint: str  # of the ModelGraph
    device: str  # "cpu", or what CUDA calls it
    device_memory_bytes: Count
    precision: PrecisionName
    kinds: tuple[SegmentCost, ...]
    segments: tuple[int, ...]
    cuts: tuple[CutCost, ...]  # one fewer than segments
    ties: tuple[TieCost, ...]
    sample_bytes: Bytes  # a sample of the inputs, which every stage is given
    fixed_bytes: Bytes  # in use before any model is there: the device's own, the library's
    optimizer: OptimizerCost
    overheads: Overheads
    within: LinkCost | None  # neighbours on one machine; None: not measured, so none can be planned
    between: LinkCost | None  # neighbours on two machines
    reductions: tuple[ReduceCost, ...]
    notes: tuple[str, ...] = ()  # what could not be measured, and why

    def __post_init__(self) -> None:
        if self.version != PROFILE_VERSION:
            raise ValueError(
                f"version is {self.version}, this library reads {PROFILE_VERSION} (profile the model again)"
            )
        if not self.segments:
            raise ValueError("segments is empty (a model has at least one)")
        if len(self.cuts) != len(self.segments) - 1:
            raise ValueError(
                f"{len(self.segments)} segments have {len(self.segments) - 1} cuts between them, "
                f"not {len(self.cuts)}"
            )
        for index, kind in enumerate(self.segments):
            if not 0 <= kind < len(self.kinds):
                raise ValueError(f"segments[{index}] is {kind}, but there are {len(self.kinds)} kinds")
        for index, tie in enumerate(self.ties):
            if len(tie.segments) < 2 or not all(0 <= s < len(self.segments) for s in tie.segments):
                raise ValueError(f"ties[{index}] must name two or more of the segments, not {tie.segments}")

    def segment(self, index: int) -> SegmentCost:
        return self.kinds[self.segments[index]]


def _refuse_disorder(key: str, sizes: Sequence[int]) -> None:
    if any(left >= right for left, right in pairwise(sizes)):
        raise ValueError(f"{key} must ascend without repetition, but are of size {list(sizes)}")


# ---------------------------------------------------------------- the machines


class Machine(msgspec.Struct, frozen=True):
    """Devices that share one box: near to each other, and alike."""

    name: str
    devices: Count
    memory_bytes: Count  # of each device
    speed: Annotated[float, Meta(gt=0, le=1000)] = 1.0  # against the device that was profiled
    cards: Count = 1  # ways to other machines that carry the measured bandwidth each, shared by all devices


class Cluster(msgspec.Struct, frozen=True):
    """The machines in the order in which their devices are counted."""

    machines: tuple[Machine, ...]

    @property
    def num_devices(self) -> int:
        return sum(machine.devices for machine in self.machines)

    def __str__(self) -> str:
        return f"{count(self.num_devices, 'device')} on {count(len(self.machines), 'machine')}"


# ---------------------------------------------------------------- the forecast


class MemoryForecast(msgspec.Struct, frozen=True):
    """The bytes of one device at the fullest moment of a step, by what they hold."""

    fixed: int
    parameters: int
    gradients: int
    buckets: int  # gradients on their way over the replicas
    optimizer: int
    activations: int  # of the micro-batches held
    boundaries: int  # received or sent, and not yet used up
    working: int

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))


class StageTime(msgspec.Struct, frozen=True):
    """Where the step's time goes on one stage; the parts sum to the step."""

    compute_seconds: float  # recompute included
    waiting_seconds: float  # for neighbours
    reduce_seconds: float  # for the all-reduce, as far as no backward hides it, and for the others' losses
    optimizer_seconds: float  # with what else is done once a step

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.waiting_seconds + self.reduce_seconds + self.optimizer_seconds

    @property
    def bubble(self) -> float:
        """The share of the step, 0 to 1, in which the stage does not compute."""
        return 1.0 - self.compute_seconds / self.seconds if self.seconds else 0.0


class StageForecast(StageTime, frozen=True):
    """What a stage's part of a step will take, in seconds and bytes."""

    memory: MemoryForecast


class Forecast(msgspec.Struct, frozen=True):
    """What a plan will cost, and what of that rests on an estimate rather than a measurement."""

    seconds: float  # of a whole step, optimizer included
    stages: tuple[StageForecast, ...]
    estimates: tuple[str, ...] = ()


class Proposal(msgspec.Struct, frozen=True):
    """A plan with what it will cost, the devices that it leaves idle, and why it won or lost."""

    plan: Plan
    forecast: Forecast
    idle: tuple[str, ...]  # "node3:0"
    reason: str


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

    `first_sample` counts within the global batch, so that it is the same whatever the layout;
    `first_ordinal` is added to the number under which a program's operations draw.
    """

    seed: int
    step: int
    first_sample: int
    first_ordinal: int = 0
    spans: tuple[tuple[int, int], ...] = ()  # first, stop of each, where the samples are not one span

    def samples(self, count: int) -> Sequence[int]:
        """The first so many, within the global batch."""
        if not self.spans:
            return range(self.first_sample, self.first_sample + count)
        return [sample for span in self.spans for sample in range(*span)][:count]


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


class StepReport(msgspec.Struct, frozen=True):
    """What a step took, beside what was foretold of it, as far as anything was."""

    step: int  # the last one, counted from the start of this process
    num_steps: int  # of which `seconds` is the median
    seconds: float  # from the beginning of one step to that of the next
    stages: tuple[StageTime, ...]  # each the mean of its replicas
    forecast: Forecast | None = None

    @property
    def excess(self) -> float | None:
        """By which share it took longer than foretold; negative where it was quicker."""
        return None if self.forecast is None else self.seconds / self.forecast.seconds - 1

    def __str__(self) -> str:
        of = f"the median of {self.num_steps}" if self.num_steps > 1 else "one"
        head = f"step {self.step}: {duration(self.seconds)} measured, {of}"
        if self.forecast is None:
            return "\n".join(
                [head, *(f"  stage {i}: {_parts(stage)}" for i, stage in enumerate(self.stages))]
            )
        head += f"; {duration(self.forecast.seconds)} predicted ({self.excess:+.1%})"
        pairs = zip(self.stages, self.forecast.stages, strict=True)
        return "\n".join(
            [head]
            + [
                f"  stage {i}: {_parts(measured)}; predicted {_parts(predicted)}"
                for i, (measured, predicted) in enumerate(pairs)
            ]
        )


def _parts(stage: StageTime) -> str:
    return (
        f"compute {duration(stage.compute_seconds)}, waiting {duration(stage.waiting_seconds)}, "
        f"bubble {stage.bubble:.0%}"
    )


class Layout(msgspec.Struct, frozen=True):
    """A job over all its machines: the stages' ranks, and the batch that they share."""

    stage_map: StageMap
    batch_size: int  # the whole job's, per step
    microbatch_size: int
    idle: tuple[int, ...] = ()  # devices without a rank, counted over all machines in order

    @property
    def depth(self) -> int:
        return len(self.stage_map)

    @property
    def widths(self) -> tuple[int, ...]:
        """The replicas of each stage."""
        return tuple(map(len, self.stage_map))

    @property
    def num_ranks(self) -> int:
        return sum(self.widths)

    def place(self, rank: int) -> tuple[int, int]:
        """The (stage, replica) of a rank."""
        return place_in_map(self.stage_map, rank)

    def replica_batch(self, rank: int) -> int:
        """How many of the global batch's samples this rank takes, by its place in its stage."""
        stage, replica = self.place(rank)
        return spread_evenly(self.batch_size, parts=self.widths[stage])[replica]

    def __str__(self) -> str:
        return (
            f"{count(self.depth, 'stage')} x {format_widths(self.widths)}, "
            f"batch {self.batch_size} in micro-batches of {self.microbatch_size}"
        )


# ---------------------------------------------------------------- the job

StarterName = Literal["ssh", "slurm", "ray"]


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A job: its script, its machines, and how it runs. All paths are absolute."""

    script: str
    arguments: tuple[str, ...] = ()  # of the script
    worker_flags: tuple[str, ...] = ()  # flags such as --rank that workers pass to the script
    code_dir: str  # working directory of the workers
    log_dir: str
    environment: Mapping[str, str] = {}  # variables that the user sets for the workers
    devices_per_machine: int
    resume_step: int | None = None  # checkpoint to load first

    # Read by the manager.
    machine_list: str = ""
    slow_file: str = ""  # list of slow machines, written by the manager
    exclude_slow: bool = False
    morphing: bool = True  # False: end with the first failure
    hang_seconds: float | None = None  # None: default
    save_every_seconds: float | None = None  # 0: never; None: automatic
    manager_ip: str = ""
    starter: StarterName = "ssh"  # starts agents on other machines
    starter_options: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ("ssh",)  # client and its options
    python: str = ""  # interpreter on other machines
    cloud: str = ""  # aws, azure, gcp: watch for preemption notices
    cloud_url: str = ""  # metadata service, if not at the cloud's own address


class MachineWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of a job on one machine, under one layout."""

    job: JobSpec
    layout: Layout
    ranks: tuple[int, ...]
    master_addr: str
    master_port: int
    resume_step: int | None = None
    environment: Mapping[str, str] = {}  # variables that the planner and the manager set
