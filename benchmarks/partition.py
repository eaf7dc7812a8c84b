"""Automatic cuts: the time to find a plan, and the step time of the plan against other cuts.

    python -m benchmarks partition

Needs no device: models are on `meta`, their costs are estimated from their shapes.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from benchmarks.coarsening import coarsen
from benchmarks.measure import spread
from benchmarks.partition_models import MODELS, Subject, llama, two_towers
from benchmarks.report import Row
from tests.plan.brute_force import every_uneven_plan, random_case
from varuna.capture import Captured, Source, cut_after
from varuna.plan.cost.costs import CostTable, assumed_link
from varuna.plan.cost.estimate import Speed
from varuna.plan.cut.blocks import partition
from varuna.plan.cut.place import ClusterMap
from varuna.plan.search.search import search
from varuna.plan.search.uneven import UnevenRequest, UnevenSearch, best_uneven
from varuna.profile.description import describe
from varuna.profile.estimate import estimate_described
from varuna.types import Cluster, Machine, OperationGraph, Partition, Profile

GB = 1 << 30
A_GPU = Speed(
    flops_per_second=60e12, bytes_per_second=1.2e12, seconds_per_operation=4e-6, memory_bytes=24 * GB
)
WITHIN, BETWEEN = assumed_link(1e-5, 20e9), assumed_link(3e-5, 3e9)
BATCH_SIZE, DEVICES_PER_MACHINE = 128, 4
MICROBATCH_SIZES = (1, 2, 4, 8)
DEVICES = (8, 12, 16, 24)
LAYERS, SECONDS = 256, 30.0
CASES = 200
Made = TypeVar("Made")


def partition_rows(*, quick: bool) -> list[Row]:
    subjects = [two_towers(1)] if quick else list(MODELS.values())
    rows = [row for subject in subjects for row in _steps(subject, DEVICES[:1] if quick else DEVICES)]
    deep = two_towers(1) if quick else llama(LAYERS)
    return [*rows, *_times(deep), _against_everything(2 if quick else CASES)]


# ---------------------------------------------------------------- what a plan is worth


def _steps(subject: Subject, devices: Sequence[int]) -> Iterator[Row]:
    """The step of the best plan, against the best plan over other cuts of the same model."""
    ours = _profile(subject, partition)
    by_hand = _profile(subject, None)
    coarsened = _profile(subject, coarsen)
    for number in devices:
        case = f"step of the best plan, {subject.name}, {number} devices"
        seconds = _best(ours, number)
        yield _row(case, "CutPoints after every block", "ms", 1e3 * seconds, 1e3 * _best(by_hand, number))
        yield _row(
            case, "multilevel coarsening", "ms", 1e3 * seconds, 1e3 * _best(coarsened, number), judged=False
        )


def _profile(subject: Subject, cut: Partition | None) -> Profile:
    """None: cut by hand. Every other uniform cut is made of these segments, and so is its best plan."""
    model = subject.on_meta()
    if cut is None:
        cut_after(model, *subject.blocks)
    source = Source(model, precision="bf16", partition=cut)
    inputs = subject.get_batch(2)
    return _estimated(source, source.capture(inputs, training=True), inputs)


def _estimated(source: Source, captured: Captured, inputs: dict[str, Tensor]) -> Profile:
    sample_bytes = sum(value[:1].nbytes for value in inputs.values())
    cpu = torch.device("cpu")
    return estimate_described(
        describe(source, captured, sample_bytes=sample_bytes, device=cpu, devices_per_machine=1),
        captured.graph.segments,
        MICROBATCH_SIZES,
        speed=A_GPU,
        within=WITHIN,
        between=BETWEEN,
    )


def _cluster(devices: int) -> Cluster:
    machines = devices // DEVICES_PER_MACHINE
    return Cluster(
        tuple(Machine(f"node{i}", DEVICES_PER_MACHINE, A_GPU.memory_bytes) for i in range(machines))
    )


def _best(profile: Profile, devices: int) -> float:
    return search(profile, _cluster(devices), batch_size=BATCH_SIZE).best.forecast.seconds


# ---------------------------------------------------------------- how long it takes to find


class Taken(NamedTuple):
    """CPU seconds of one core."""

    capture: float
    cut: float
    telling: float
    search: float


def _times(subject: Subject) -> Iterator[Row]:
    num_operations, taken = time_partition(subject)
    what = f"{subject.name}, {num_operations} operations, CPU"
    yield _row(f"{what}: cut, tell equal segments, plan for 64 devices", "30 s", "s", sum(taken[1:]), SECONDS)
    yield _row(f"{what}: the same with capture", "30 s", "s", sum(taken), SECONDS)
    for part, seconds in taken._asdict().items():
        yield _row(f"{what}: {part} alone", "all of it", "s", seconds, sum(taken), judged=False)


def time_partition(subject: Subject, devices: int = 64) -> tuple[int, Taken]:
    cutting = [0.0]
    num_operations = [0]

    def timed(graph: OperationGraph) -> Sequence[int]:
        num_operations[0] = len(graph.operations)
        seconds, blocks = _timed(lambda: partition(graph))
        cutting[0] += seconds
        return blocks

    source = Source(subject.on_meta(), precision="bf16", partition=timed)
    inputs = subject.get_batch(2)
    gc.collect()
    capturing, captured = _timed(lambda: source.capture(inputs, training=True))
    telling, profile = _timed(lambda: _estimated(source, captured, inputs))
    searching, _ = _timed(lambda: search(profile, _cluster(devices), batch_size=4 * devices))
    return num_operations[0], Taken(capturing - cutting[0], cutting[0], telling, searching)


def _timed(do: Callable[[], Made]) -> tuple[float, Made]:
    started = time.process_time()
    made = do()
    return time.process_time() - started, made


# ---------------------------------------------------------------- against trying everything


def _against_everything(cases: int) -> Row:
    """Compare layouts with unequal replicas of up to 6 segments on 5 devices; in some cases nothing fits."""
    worst = 1.0
    for seed in range(cases):
        profile, cluster, batch_size, counts = random_case(seed, most_segments=6, most_devices=5)
        costs, cluster_map = CostTable(profile), ClusterMap(cluster)
        request = UnevenRequest(batch_size, range(2, 6), ("1f1b",), microbatch_counts=counts)
        found = best_uneven(costs, cluster_map, request)
        tried = UnevenSearch(costs, cluster_map, request).counts
        every = [forecast.seconds for _, forecast in every_uneven_plan(costs, cluster_map, batch_size, tried)]
        assert (found is None) == (not every)
        if found is not None:
            worst = max(worst, found.forecast.seconds / min(every))
    return _row(f"worst of {cases} random plans", "trying everything", "of the best", worst, 1.0)


def _row(case: str, against: str, unit: str, ours: float, other: float, *, judged: bool = True) -> Row:
    return Row(
        benchmark="partition",
        case=case,
        against=against,
        unit=unit,
        ours=spread([ours]),
        other=spread([other]),
        ratio=spread([ours / other]),
        target=1.0 if judged else None,
    )
