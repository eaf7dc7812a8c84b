"""The types that the packages share: frozen values that read and write JSON through `varuna.codec`.

Nothing here imports torch, so planning, scheduling and drawing run anywhere.

    ModelGraph   segments of a model                  (capture makes it)
    Profile      measured costs of a model            (measure makes it)
    Cluster      machines and devices                 (the user or the manager makes it)
    Plan         stages, ranks, batch and schedule    (plan or the user makes it)
    Forecast     predicted time and memory of a plan  (plan makes it)
    Schedule     order of the instructions            (schedule makes it)
    Timeline     events of a step, with times         (execute records it, plan simulates it)
    StepReport   measured and predicted times         (observe makes it)
    JobSpec      script, machines and options         (cli makes it)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from varuna.environment import variable_name
from varuna.units import count, duration

# ---------------------------------------------------------------- the model

LOSS_TOTALS = "(loss totals)"
"""Name of the input with the totals of the whole batch. No model has an input of this name."""


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
    """A tensor that crosses a cut. A dimension is None if only the receiver learns its size."""

    name: str
    dtype: str  # as torch prints it, without "torch.": "float32", "bool"
    dims: tuple[Dim | None, ...]
    needs_grad: bool

    def __str__(self) -> str:
        shape = ", ".join("?" if dim is None else str(dim) for dim in self.dims)
        return f"{self.name}: {self.dtype}[{shape}]" + (" with gradient" if self.needs_grad else "")


class Segment(msgspec.Struct, frozen=True):
    """The operations between two adjacent cut positions. A stage is a range of segments."""

    index: int
    parameters: tuple[str, ...]  # canonical names of those used here
    buffers: tuple[str, ...]
    num_operations: int
    flops_per_sample: float  # estimated from shapes, to balance stages before measuring
    parameter_bytes: int
    moved_bytes: Dim = Dim(0, 0)  # read and written by a forward, per micro-batch size; estimated too
    kept_bytes: Dim = Dim(0, 0)  # kept by a forward for its backward


class ModelGraph(msgspec.Struct, frozen=True):
    """A model that is cut: its segments in order, its tied parameters, and its fingerprint."""

    segments: tuple[Segment, ...]
    ties: tuple[tuple[str, ...], ...]  # groups of names for one tensor, canonical name first
    fingerprint: str


class Operation(msgspec.Struct, frozen=True):
    """A part of a model that no cut divides, and the cost of its forward for one sample."""

    flops: int
    moved_bytes: int  # read and written


class Value(msgspec.Struct, frozen=True):
    """The result of one operation that other operations use."""

    made_by: int
    used_by: tuple[int, ...]
    num_bytes: int  # per sample, sent over a cut and back; 0 if the receiver recomputes it


class OperationGraph(msgspec.Struct, frozen=True):
    """A model before it is cut: its operations in execution order."""

    operations: tuple[Operation, ...]
    values: tuple[Value, ...]


Partition = Callable[[OperationGraph], Sequence[int]]
"""Returns the segment of each operation. An operation must not use results of a later segment."""


# ---------------------------------------------------------------- the layout

ScheduleName = Literal["varuna", "1f1b", "gpipe", "zero-bubble", "zero-bubble-2x"]
PrecisionName = Literal["fp32", "bf16", "fp16"]
OnNan = Literal["warn", "stop", "skip"]
"""Reaction to a loss that is NaN or infinite."""
ChannelName = Literal["shared", "group", "host"]
"""Transport between stages: shared GPU memory, a process group (NCCL), or host memory."""


class StagePlan(msgspec.Struct, frozen=True):
    """One pipeline stage: the segments `first` to `stop - 1`, and one rank per replica."""

    first: int
    stop: int
    ranks: tuple[int, ...]
    recompute: bool = False


class Plan(msgspec.Struct, frozen=True):
    """The complete layout of a training step: stages, ranks, batch, schedule and precision."""

    stages: tuple[StagePlan, ...]
    batch_size: int  # samples per step of the whole job
    microbatch_size: int  # maximum number of samples that a rank runs at once
    schedule: ScheduleName = "varuna"
    precision: PrecisionName = "fp32"
    fingerprint: str = ""

    @property
    def depth(self) -> int:
        return len(self.stages)

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the number of replicas of each stage."""
        return tuple(len(stage.ranks) for stage in self.stages)

    @property
    def width(self) -> int:
        """Return the number of replicas; if stages differ, the smallest."""
        return min(self.widths)

    @property
    def uneven(self) -> bool:
        return len(set(self.widths)) > 1

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for stage in self.stages for rank in stage.ranks}))


StageMap = tuple[tuple[int, ...], ...]


def parse_stage_map(text: str) -> StageMap:
    """Parse "0,1;2,3;": stages separated by `;`, and the ranks of the replicas of a stage by `,`."""
    form = 'write it as "0,1;2,3;": stages separated by ";", the ranks of each by ","'
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
        raise ValueError(f"stage_to_rank_map {text!r} has an entry that is not a rank ({form})") from None
    ranks = [rank for row in stage_map for rank in row]
    if not all(stage_map):
        raise ValueError(f"stage_to_rank_map {text!r} has a stage without ranks ({form})")
    if len(set(ranks)) != len(ranks) or min(ranks) < 0:
        raise ValueError(f"stage_to_rank_map {text!r} has a duplicate or negative rank ({form})")
    return stage_map


def format_stage_map(stage_map: Iterable[Iterable[int]]) -> str:
    return "".join(",".join(map(str, ranks)) + ";" for ranks in stage_map)


def show_widths(widths: Sequence[int]) -> str:
    """Return "2", or "3+1" if stages differ in their number of replicas."""
    return str(widths[0]) if len(set(widths)) == 1 else "+".join(map(str, widths))


def format_widths(widths: Sequence[int]) -> str:
    """Return "2 replicas", or "3+1 replicas"."""
    return f"{show_widths(widths)} {'replica' if set(widths) == {1} else 'replicas'}"


def place_in_map(stage_map: StageMap, rank: int) -> tuple[int, int]:
    """Return the (stage, replica) of a rank."""
    for stage, ranks in enumerate(stage_map):
        if rank in ranks:
            return stage, ranks.index(rank)
    raise ValueError(
        f"rank {rank} is not in the stage_to_rank_map {format_stage_map(stage_map)!r} "
        "(start as many workers as the map has ranks, or pass the map of the launcher)"
    )


def spread_evenly(total: int, *, parts: int) -> tuple[int, ...]:
    """Divide a count, such as a global batch, into parts that differ by at most one, larger parts first."""
    return tuple(total // parts + (part < total % parts) for part in range(parts))


def spread_by_size(sizes: Sequence[int], *, parts: int) -> tuple[int, ...]:
    """Return the part of each item: largest items first, each to the part with the smallest sum so far.

    This divides tensors among replicas evenly by bytes, and equally on every rank.
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
# Bounds are checked whenever a profile is read, and the error names the key. A time of zero was not measured
# (even an empty segment takes microseconds), and a time above a day has a wrong unit.

DAY = 86_400.0
Count = Annotated[int, Meta(ge=1, le=1 << 40)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]
PositiveSeconds = Annotated[float, Meta(gt=0, le=DAY)]
Seconds = Annotated[float, Meta(ge=0, le=DAY)]

PROFILE_VERSION = 1
FIRST_BUCKET_BYTES = 1 << 20
"""Size of the first bucket of gradients; small, so that the first all-reduce starts early."""
BUCKET_BYTES = 25 << 20
"""Size of the other buckets."""


class Duration(msgspec.Struct, frozen=True, array_like=True):
    """Median of several runs, and standard deviation of one run, encoded as [seconds, spread]."""

    seconds: PositiveSeconds
    spread: Seconds = 0.0


class SizeCost(msgspec.Struct, frozen=True):
    """Cost of one segment at one micro-batch size, measured alone."""

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
    """Cost of a segment. Identical segments share one."""

    sizes: tuple[SizeCost, ...]  # by micro-batch size, ascending
    parameter_bytes: Bytes  # with buffers
    gradient_bytes: Bytes  # of the parameters that train
    num_trained: Annotated[int, Meta(ge=0)]  # elements that the optimizer updates

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ValueError("sizes is empty (measure at least one micro-batch size)")
        _check_ascending("sizes", [size.microbatch_size for size in self.sizes])


class CutCost(msgspec.Struct, frozen=True):
    """Bytes that cross the cut after a segment, per micro-batch size."""

    sent: Dim  # with a forward
    returned: Dim  # with a backward


class TieCost(msgspec.Struct, frozen=True):
    """A tensor that several segments use. A stage holds it once; stages that share it sum its gradient."""

    segments: tuple[int, ...]
    num_bytes: Bytes
    num_elements: Count


class MessageCost(msgspec.Struct, frozen=True):
    """Cost of one message of one size between adjacent stages."""

    num_bytes: Bytes
    one_way: Duration  # from `send` until the receiver can take it
    both_ways: Duration  # the same while a message of this size travels in the other direction
    sender_seconds: Seconds  # part of that time in which the sender cannot compute
    receiver_seconds: Seconds  # time in which the receiver cannot compute while it takes the message


class LinkCost(msgspec.Struct, frozen=True):
    """Costs of messages between two devices, by message size, ascending."""

    messages: tuple[MessageCost, ...]

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("messages is empty (measure at least one size)")
        _check_ascending("messages", [message.num_bytes for message in self.messages])


class ReduceCost(msgspec.Struct, frozen=True):
    """Cost of one all-reduce over a group of ranks, within one machine or over several."""

    group_size: Annotated[int, Meta(ge=2)]
    num_bytes: Bytes
    between_machines: bool
    duration: Duration
    sharing: Duration | None = None  # an all-gather of the same bytes in equal shares


class OptimizerCost(msgspec.Struct, frozen=True):
    """Cost of an optimizer step and zero_grad, `fixed + per element`, and the size of its state."""

    name: str
    fixed_seconds: Seconds
    seconds_per_element: Seconds
    state_bytes_per_element: Annotated[float, Meta(ge=0, le=1024)]


class Overheads(msgspec.Struct, frozen=True):
    """Time that the engine adds to the costs of the segments."""

    instruction_seconds: Seconds  # for each F, R, B, I, W
    step_seconds: Seconds  # per step: dividing the batch, scaling the gradients


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Measured costs of a model on one kind of device. Segment i costs `kinds[segments[i]]`."""

    version: int = PROFILE_VERSION
    fingerprint: str  # of the ModelGraph
    device: str  # "cpu", or the name that CUDA reports
    device_memory_bytes: Count
    precision: PrecisionName
    kinds: tuple[SegmentCost, ...]
    segments: tuple[int, ...]
    cuts: tuple[CutCost, ...]  # one fewer than segments
    ties: tuple[TieCost, ...]
    sample_bytes: Bytes  # one sample of the inputs, which every stage receives
    fixed_bytes: Bytes  # in use before a model is loaded
    optimizer: OptimizerCost
    overheads: Overheads
    within: LinkCost | None  # stages on one machine; None: not measured
    between: LinkCost | None  # stages on two machines
    reductions: tuple[ReduceCost, ...]
    notes: tuple[str, ...] = ()  # measurements that failed, and why

    def __post_init__(self) -> None:
        if self.version != PROFILE_VERSION:
            raise ValueError(
                f"version is {self.version}, this library reads {PROFILE_VERSION} (profile the model again)"
            )
        if not self.segments:
            raise ValueError("segments is empty (a model has at least one)")
        if len(self.cuts) != len(self.segments) - 1:
            raise ValueError(
                f"{len(self.segments)} segments need {len(self.segments) - 1} cuts, not {len(self.cuts)}"
            )
        for index, kind in enumerate(self.segments):
            if not 0 <= kind < len(self.kinds):
                raise ValueError(f"segments[{index}] is {kind}, but there are {len(self.kinds)} kinds")
        for index, tie in enumerate(self.ties):
            if len(tie.segments) < 2 or not all(0 <= s < len(self.segments) for s in tie.segments):
                raise ValueError(f"ties[{index}] must name two or more of the segments, not {tie.segments}")

    def segment(self, index: int) -> SegmentCost:
        return self.kinds[self.segments[index]]


def _check_ascending(key: str, sizes: Sequence[int]) -> None:
    if any(left >= right for left, right in pairwise(sizes)):
        raise ValueError(f"{key} must be in ascending order without duplicates, not {list(sizes)}")


# ---------------------------------------------------------------- the machines


class Machine(msgspec.Struct, frozen=True):
    """A machine with equal devices."""

    name: str
    devices: Count
    memory_bytes: Count  # of each device
    speed: Annotated[float, Meta(gt=0, le=1000)] = 1.0  # relative to the profiled device
    cards: Count = 1  # network cards with the measured bandwidth each, shared by all devices


class Cluster(msgspec.Struct, frozen=True):
    """The machines, in the order that numbers their devices."""

    machines: tuple[Machine, ...]

    @property
    def num_devices(self) -> int:
        return sum(machine.devices for machine in self.machines)

    def __str__(self) -> str:
        return f"{count(self.num_devices, 'device')} on {count(len(self.machines), 'machine')}"


# ---------------------------------------------------------------- the forecast


class MemoryForecast(msgspec.Struct, frozen=True):
    """Peak memory of one device in a step, in bytes, by use."""

    fixed: int
    parameters: int
    gradients: int
    buckets: int  # buffers of the gradient all-reduce
    optimizer: int
    activations: int  # of all micro-batches in flight
    boundaries: int  # tensors received or sent, and still in use
    working: int

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))


class StageTime(msgspec.Struct, frozen=True):
    """Time of one stage in a step, by activity. The parts sum to the step time."""

    compute_seconds: float  # recompute included
    waiting_seconds: float  # for other stages
    reduce_seconds: float  # all-reduce that no backward overlaps, and exchange of losses
    optimizer_seconds: float  # and other work that runs once per step

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.waiting_seconds + self.reduce_seconds + self.optimizer_seconds

    @property
    def bubble(self) -> float:
        """Return the fraction of the step, 0 to 1, in which the stage does not compute."""
        return 1.0 - self.compute_seconds / self.seconds if self.seconds else 0.0


class StageForecast(StageTime, frozen=True):
    """Predicted time and memory of a stage."""

    memory: MemoryForecast


class Forecast(msgspec.Struct, frozen=True):
    """Predicted costs of a plan. `estimates` lists the inputs that were not measured."""

    seconds: float  # per step, with the optimizer
    stages: tuple[StageForecast, ...]
    estimates: tuple[str, ...] = ()


class Proposal(msgspec.Struct, frozen=True):
    """A plan, its predicted costs, its idle devices, and why it is or is not the best."""

    plan: Plan
    forecast: Forecast
    idle: tuple[str, ...]  # "node3:0"
    reason: str


# ---------------------------------------------------------------- the order

Op = Literal["F", "R", "B", "I", "W"]
"""Forward, recompute, backward; or backward in two parts: gradients of inputs, of weights."""


class Instruction(msgspec.Struct, frozen=True):
    """One operation of a stage. Prints in the format of torch's pipeline CSV: "2F0"."""

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


class Schedule(msgspec.Struct, frozen=True):
    """The instructions of each stage in order, and limits on micro-batches in flight.

    Stage s holds at most `limits[s]` micro-batches between their forward and their backward, which
    bounds its activation memory. If `opportunistic`, the order is a preference: if the next instruction
    of a stage waits for another stage, it runs another instruction that is ready.
    """

    name: str
    rows: tuple[tuple[Instruction, ...], ...]
    limits: tuple[int, ...]
    opportunistic: bool


# ---------------------------------------------------------------- the work


class Work(msgspec.Struct, frozen=True):
    """The samples and the step that a rank computes: all that random numbers may depend on.

    `first_sample` is an index in the global batch, so it does not depend on the layout.
    `first_ordinal` is added to the number that identifies each random operation of a program.
    """

    seed: int
    step: int
    first_sample: int
    first_ordinal: int = 0
    spans: tuple[tuple[int, int], ...] = ()  # (first, stop) of each span, if the samples are not contiguous

    def samples(self, count: int) -> Sequence[int]:
        """Return the indices of the first `count` samples in the global batch."""
        if not self.spans:
            return range(self.first_sample, self.first_sample + count)
        return [sample for span in self.spans for sample in range(*span)][:count]


class Interval(msgspec.Struct, frozen=True):
    """One activity of one rank: an instruction ("F", "B", ...) or "reduce", "wait", ..."""

    rank: int
    stage: int
    what: str
    microbatch: int  # -1: none
    start_seconds: float
    stop_seconds: float


class Timeline(msgspec.Struct, frozen=True):
    """The activities of one step, measured or simulated. Starts at zero."""

    intervals: tuple[Interval, ...]

    @property
    def seconds(self) -> float:
        return max((interval.stop_seconds for interval in self.intervals), default=0.0)


class StepReport(msgspec.Struct, frozen=True):
    """Measured times of a step, and the predicted ones if there is a forecast."""

    step: int  # last step, counted from the start of this process
    num_steps: int  # `seconds` is their median
    seconds: float  # from the start of a step to the start of the next
    stages: tuple[StageTime, ...]  # mean of the replicas
    forecast: Forecast | None = None

    @property
    def excess(self) -> float | None:
        """Return the relative difference to the prediction; positive: slower than predicted."""
        return None if self.forecast is None else self.seconds / self.forecast.seconds - 1

    def __str__(self) -> str:
        of = f"the median of {self.num_steps}" if self.num_steps > 1 else "one"
        head = f"step {self.step}: {duration(self.seconds)} measured, {of}"
        lines = [f"  stage {i}: {_parts(stage)}" for i, stage in enumerate(self.stages)]
        if self.forecast is not None:
            head += f"; {duration(self.forecast.seconds)} predicted ({self.excess:+.1%})"
            pairs = zip(lines, self.forecast.stages, strict=True)
            lines = [f"{line}; predicted {_parts(stage)}" for line, stage in pairs]
        return "\n".join([head, *lines])


def _parts(stage: StageTime) -> str:
    return (
        f"compute {duration(stage.compute_seconds)}, waiting {duration(stage.waiting_seconds)}, "
        f"bubble {stage.bubble:.0%}"
    )


class Layout(msgspec.Struct, frozen=True):
    """Ranks of each stage over all machines of a job, and the batch."""

    stage_map: StageMap
    batch_size: int  # samples per step of the whole job
    microbatch_size: int
    idle: tuple[int, ...] = ()  # devices without a rank, numbered over all machines

    @property
    def depth(self) -> int:
        return len(self.stage_map)

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(map(len, self.stage_map))

    @property
    def num_ranks(self) -> int:
        return sum(self.widths)

    def place(self, rank: int) -> tuple[int, int]:
        return place_in_map(self.stage_map, rank)

    def replica_batch(self, rank: int) -> int:
        """Return the number of samples per step of a rank."""
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
    offers_flags: bool = False  # pass the others, too, to an argparse parser that takes them
    code_dir: str  # working directory of the workers
    log_dir: str
    environment: Mapping[str, str] = {}  # variables that the user sets for the workers
    devices_per_machine: int
    resume_step: int | None = None  # checkpoint to load first
    force: bool = False  # take the store of checkpoints over from another job

    # Read by the manager.
    machine_list: str = ""
    slow_file: str = ""  # list of slow machines, written by the manager
    exclude_slow: bool = False
    morphing: bool = True  # False: end with the first failure
    hot: bool = True  # workers that can morph in place do so
    greedy: bool = False  # change at every chance; False: only if it is worth it
    hang_seconds: float | None = None  # None: default
    save_every_seconds: float | None = None  # 0: never; None: automatic
    manager_ip: str = ""
    starter: StarterName = "ssh"  # starts agents on other machines
    starter_options: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ("ssh",)  # client and its options
    python: str = ""  # interpreter on other machines
    cloud: str = ""  # aws, azure, gcp: watch for preemption notices
    cloud_url: str = ""  # metadata service, if not at the cloud's own address
    prices: Mapping[str, float] = {}  # per machine-hour, by name or pattern
    on_demand_price: float = 0.0  # per machine-hour; 0: unknown

    def __repr__(self) -> str:
        return repr_without_values(self)


def repr_without_values(value: msgspec.Struct) -> str:
    """Return the repr with the names of environment variables only: their values may be secrets."""
    fields = {name: getattr(value, name) for name in value.__struct_fields__}
    fields["environment"] = sorted(fields["environment"])
    return f"{type(value).__name__}({', '.join(f'{name}={field!r}' for name, field in fields.items())})"


class MachineWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of a job on one machine, under one layout."""

    job: JobSpec
    layout: Layout
    ranks: tuple[int, ...]
    master_addr: str
    master_port: int
    resume_step: int | None = None
    environment: Mapping[str, str] = {}  # variables that the planner and the manager set


class MorphOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order to one worker: enter the next generation in place. Ranks of the last generation are old ranks.

    All new ranks and the old ranks in `leaving` meet at the store, hand tensors over, and go on.
    """

    generation: int  # the next one
    layout: Layout  # of the next generation
    last_layout: Layout  # of the last one
    rank: int | None  # of this worker in the next generation; None: it hands tensors over, then exits with 0
    previous: tuple[int | None, ...]  # old rank of each new rank; None: a joiner, which has no state
    leaving: tuple[int, ...] = ()  # old ranks that hand their tensors over, then exit
    lost: tuple[int, ...] = ()  # old ranks that are gone: the others may be in different steps (or a number
    # that no old rank has: all live, but must abandon an earlier order)
    old_rank: int | None = None  # of this worker; None: it joins
    master_addr: str  # store of the next generation
    master_port: int
    environment: Mapping[str, str] = {}  # all variables of this worker that change: RANK, the plan, ...
    why: str = ""

    def __repr__(self) -> str:
        return repr_without_values(self)
