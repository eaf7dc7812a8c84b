"""Stages with their own number of replicas: forced, chosen, kept in a file, refused; the same training."""

from collections.abc import Iterator
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pyrannc import RaNNCModule, deployment
from pyrannc.configuration import Configuration, read_configuration
from pyrannc.layouts import DeploymentTask, LayoutChoices, stage_map_of
from tests.plan.profiles import MB, machines, profile, segment
from tests.pool import Pool
from tests.pyrannc.jobs import SEED, batch_of, make, train
from tests.pyrannc.models import WIDTH
from tests.pyrannc.test_training import CLOSE, batches, check, plain
from varuna import plain_randomness
from varuna.capture import Source
from varuna.capture.model.call_convention import StructuredCall
from varuna.errors import PlanError
from varuna.execute.step.division import divide_batch
from varuna.plan.cost.costs import CostTable
from varuna.plan.cost.forecast import forecast_plan
from varuna.plan.cut.blocks import partition
from varuna.plan.cut.partition import all_cuts
from varuna.plan.cut.place import ClusterMap
from varuna.plan.plan_file import read_plan
from varuna.plan.search.uneven import UnevenRequest, best_uneven
from varuna.types import Cluster, Plan, Profile, StagePlan, Work, spread_evenly

Layout = tuple[str | tuple[int, ...], int]
"""The replicas of each stage, and the micro-batches."""


def several(name: str, layouts: list[Layout], counts: list[list[int]]) -> list[dict[str, Any]]:
    return [
        train(name, counts=counts, options={"replica_num": replicas, "pipeline_num": number})
        for replicas, number in layouts
    ]


@pytest.mark.parametrize(
    ("world", "name", "layouts"),
    [
        (3, "Everything", [("2+1", 2), ((1, 2), 4), ("3", 8)]),
        (4, "Everything", [("1+3", 2), ("3+1", 3), ((2, 1, 1), 5)]),
        (5, "Simple", [("1+2+2", 2), ("3+2", 4), ("1+4", 8)]),
        (6, "Simple", [("2+2+2", 2), ("1+5", 4), ("3+2+1", 8)]),
        (7, "Simple", [("3+4", 2), ("2+1+4", 4), ("1+1+3+2", 8)]),
        (8, "Everything", [("3+1+4", 3)]),
    ],
)
def test_training_is_the_same_with_any_numbers_of_replicas(
    pool: Pool, world: int, name: str, layouts: list[Layout]
) -> None:
    """R1, R3, R4: a tie and a skip over the stages, dropout, a buffer, a loss inside and outside; five steps
    of Adam with batches that are uneven, empty on most ranks, or fewer than replicas."""
    counts = batches(world)
    for rank, found in enumerate(pool.run(several, world, name, layouts, counts, timeout=150)):
        for its, (replicas, _) in zip(found, layouts, strict=True):
            check(its, plain(name, world), counts, rank)
            widths = tuple(map(len, its["stages"]))
            assert replicas in (widths, "+".join(map(str, widths)))


# ---------------------------------------------------------------- BatchNorm


def train_norm_plainly(counts: list[int], parts: list[list[int]]) -> dict[str, Tensor]:
    """One process that runs the parts of each batch one after the other."""
    torch.set_default_dtype(torch.float64)
    model = make("Norm")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step, size in enumerate(counts):
        (x,), _ = batch_of("Norm", step, size)
        for samples in parts:
            work = Work(SEED, step, samples[0], spans=tuple((sample, sample + 1) for sample in samples))
            with plain_randomness.of(work, batch_size=len(samples), first_ordinal=0):
                (model(x[samples]).square().sum() / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_default_dtype(torch.float32)
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("recompute", [False, True])
def test_batch_norm_sees_each_replicas_part_of_every_microbatch(pool: Pool, recompute: bool) -> None:
    """R9: in the order of replicas, as documented; dropout by sample; recomputed or not."""
    counts = [[6, 0, 2], [1, 3, 4]]
    options = {"replica_num": "1+2", "pipeline_num": 2, "checkpointing": recompute}
    results = pool.run(train, 3, "Norm", counts=counts, options=options)
    holders = [rank for rank, found in enumerate(results) if "norm.weight" in found["local"]]
    stage = results[0]["stages"].index(tuple(holders))
    given_to = tuple(spread_evenly(8, parts=width) for width in (1, 2))
    parts = []
    for replica in range(len(holders)):
        division = divide_batch(given_to, stage=stage, replica=replica, microbatch_size=4)
        parts += [[sample for span in runs for sample in range(*span)] for runs in division.runs]
    expected = train_norm_plainly([8, 8], parts)
    for found in results:
        for name, value in expected.items():
            torch.testing.assert_close(found["state"][name], value, **CLOSE)


# ---------------------------------------------------------------- kept in a file, with a sharded optimizer


def keep(file: str) -> list[dict[str, Any]]:
    """Forced and kept; then from the file, each replica with a share of the optimizer's state."""
    counts = batches(4)
    found = []
    for options in (
        {"replica_num": "3+1", "save_deployment": True, "deployment_file": file},
        {"load_deployment": file, "shard_optimizer": True},
    ):
        found.append(train("Everything", counts=counts, options={**options, "pipeline_num": 2}))
    return found


def test_an_uneven_layout_is_saved_and_its_optimizer_is_sharded(pool: Pool, tmp_path: Path) -> None:
    """R14, R16: state of model and optimizer whole on all ranks, though shares differ by stage."""
    file = tmp_path / "deployment.json"
    for rank, found in enumerate(pool.run(keep, 4, str(file), timeout=150)):
        for its in found:
            check(its, plain("Everything", 4), batches(4), rank)
            assert its["stages"] == [(0, 1, 2), (3,)]
    assert read_plan(file).plan.widths == (3, 1)


# ---------------------------------------------------------------- chosen


class ThreeToOne(nn.Module):
    """Two layers of one size, of which the first has three times as much to do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1024, 1024)
        self.second = nn.Linear(1024, 1024)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.relu(self.first(x)).select(1, 0))
        return y


class Summing(nn.Module):
    """A mean over the batch goes through all of it: no cut can be parted by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0, keepdim=True)
        for layer in self.layers:
            mean = torch.tanh(layer(mean))
            x = x + mean
        return x


def subject_of(model: nn.Module, x: Tensor, world: int) -> DeploymentTask:
    source = Source(model, precision="fp32", device_type="cpu", partition=partition)
    calling, inputs = StructuredCall.of(model, (x,), {}, grad_enabled=True)
    captured = source.capture(inputs, training=True, convention=calling)
    return DeploymentTask(source, captured, 96, x[0].nbytes, ["here"] * world, torch.device("cpu"))


def chosen(world: int, **options: Any) -> Plan:
    with torch.device("meta"):
        subject = subject_of(ThreeToOne(), torch.empty(2, 3, 1024), world)
    return deployment.choose(subject, Configuration(**options)).plan


def test_a_stage_with_three_times_the_work_gets_three_times_the_replicas() -> None:
    """R10: where no device holds both layers; any number of ranks; the same plan every time."""
    full = {"mem_limit_gb": 0.04, "min_pipeline": 8}  # a layer with its gradients and optimizer needs 16 MiB
    plan = chosen(4, **full)
    assert plan.widths == (3, 1) and plan.ranks == (0, 1, 2, 3) and plan == chosen(4, **full)
    assert chosen(5, **full).widths in ((4, 1), (3, 2)) and chosen(7, **full).widths == (5, 2)
    # Where stages are asked for that do not part the ranks, the replicas are found.
    assert chosen(3, partition_num=2, pipeline_num=4).widths == (2, 1)
    # One that fits has one stage, whatever its parts cost.
    assert chosen(4).widths == (4,)


def brute_force(model: Profile, cluster: Cluster, world: int, numbers: list[int], batch: int) -> float:
    """Every number of replicas, cut, micro-batch and recompute, with all devices in use."""
    memory = cluster.machines[0].memory_bytes * 0.9

    def all_widths(devices: int) -> Iterator[tuple[int, ...]]:
        yield (devices,)
        for first in range(1, devices):
            yield from ((first, *others) for others in all_widths(devices - first))

    found = [float("inf")]
    for widths in all_widths(world):
        if len(set(widths)) == 1 or len(widths) > len(model.segments):
            continue
        for spans, number, flags in product(
            all_cuts(len(model.segments), len(widths)), numbers, product([False, True], repeat=len(widths))
        ):
            share = ceil(batch / min(widths))
            stages = tuple(
                StagePlan(*span, ranks, flag)
                for span, ranks, flag in zip(spans, stage_map_of(widths), flags, strict=True)
            )
            plan = Plan(stages, batch, ceil(share / number), "gpipe", "bf16")
            forecast, _ = forecast_plan(model, cluster, plan)
            if all(stage.memory.total <= memory for stage in forecast.stages):
                found.append(forecast.seconds)
    return min(found)


@settings(max_examples=12, deadline=None, derandomize=True)
@example(costs=[6, 6, 5, 6], world=5, batch=17, memory=90)  # in parts of 3, 3 and 3, where 4 were asked for
@given(
    costs=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    world=st.integers(3, 5),
    batch=st.integers(4, 24),
    memory=st.sampled_from([60, 90, 200]),
)
def test_no_layout_with_unequal_replicas_is_better(
    costs: list[int], world: int, batch: int, memory: int
) -> None:
    """R10: equal to brute force over cuts, replicas, micro-batches and recompute."""
    kinds = [
        segment(cost * 1e-3, sizes=(1, 2, 4, 8, 16, 32), parameter_bytes=4 * MB, activation_bytes=MB)
        for cost in costs
    ]
    model = profile(kinds, list(range(len(costs))))
    cluster = machines(1, world, memory_bytes=memory * MB)
    request = UnevenRequest(
        batch,
        range(2, world),
        ("gpipe",),
        headroom=0.1,
        uses_all_devices=True,
        microbatch_counts=[1, 2, 4],
        start_schedule="gpipe",
    )
    best = best_uneven(CostTable(model), ClusterMap(cluster), request)
    expected = brute_force(model, cluster, world, [1, 2, 4], batch)
    assert (best.forecast.seconds if best else float("inf")) == pytest.approx(expected, rel=1e-9)


# ---------------------------------------------------------------- asked for, and refused


def test_replicas_are_set_by_file_environment_and_argument(tmp_path: Path) -> None:
    """R15: beside the one number of RaNNC."""
    (tmp_path / "rannc_conf.toml").write_text("replica_num = [1, 3]\n")
    folder = {"RANNC_CONF_DIR": str(tmp_path)}
    assert read_configuration(folder, tmp_path, {}).replica_num == (1, 3)
    for given_as in ("2+1+1", [2, 1, 1], (2, 1, 1), "2 + 1 + 1"):
        assert read_configuration(folder, tmp_path, {"replica_num": given_as}).replica_num == (2, 1, 1)
    environment = {"RANNC_REPLICA_NUM": "3+1"}
    assert read_configuration(environment, tmp_path / "none", {}).replica_num == (3, 1)
    assert read_configuration({"RANNC_REPLICA_NUM": "2"}, tmp_path / "none", {}).replica_num == 2
    for wrong in ("1+0", "1+x", [], [2, -1], "+", 1.5):
        with pytest.raises(ValueError, match=r'replica_num.*\[1, 3\] or "1\+3"'):
            read_configuration({}, tmp_path / "none", {"replica_num": wrong})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replica_num": (1, 2)}, r"replica_num 1\+2 asks for 2 stages on 3 ranks, but there are 4 ranks"),
        ({"replica_num": (1, 3), "partition_num": 3}, r"1\+3 asks for 2 stages.*partition_num is 3"),
        ({"replica_num": (1, 1, 1, 1)}, "4 stages.*the model can be cut into 3 at most"),
        ({"replica_num": 3}, r'replica_num 3 do not fit 4 ranks.*replica_num="2\+1"'),
        ({"partition_num": 5}, "partition_num 5.*5 stages, but there are 4 ranks"),
    ],
)
def test_impossible_layouts_are_refused_with_a_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        LayoutChoices(4, 3, Configuration(**options))


class Twice(nn.Module):
    """Two views of the batch, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(x)))
        return torch.cat([y, -y])


def refusal(what: str) -> str:
    models = {"Summing": Summing, "Twice": Twice}
    model = models[what]() if what in models else make("Simple")
    replicas, x = "2+1" if what in models else "2+2", torch.randn(3, WIDTH)
    with pytest.raises(Exception) as refused:
        RaNNCModule(model, device="cpu", timeout_seconds=20, replica_num=replicas, pipeline_num=1)(x)
    return str(refused.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("Summing", ["replica_num 2+1", "divided by sample", "sums up all samples", "equally many replicas"]),
        ("Twice", ["does not hold the samples in order", "torch.stack([a, b], 1)"]),
        ("too many", ["replica_num 2+2", "4 ranks", "there are 3 ranks"]),
    ],
)
def test_a_refusal_reaches_every_rank(pool: Pool, what: str, words: list[str]) -> None:
    """R11, R17: also where results could not be put together again from the replicas'."""
    for message in pool.run(refusal, 3, what):
        for word in words:
            assert word in message, message
