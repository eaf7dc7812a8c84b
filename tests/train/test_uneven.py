"""A stage may have its own number of replicas: the same training, whatever the map."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.pool import Pool
from tests.tasks import SEED, compare, global_batch, make_optimizer, take, train, train_plainly
from tests.toys import make_inputs, make_model
from varuna import SampleOrder, Varuna, get_varuna_config
from varuna.errors import CaptureError
from varuna.execute.step.division import divide_batch
from varuna.schedule import NAMES

F64 = {"rtol": 1e-10, "atol": 1e-12}
MAPS = ["0,1,2;3;", "0;1,2,3;", "1;0,2;", "0,1;2;3;", "0;1,2;3;", "3,1;0,2;4;", "0,1,2;3,4;"]


def num_ranks(mapping: str) -> int:
    return 1 + max(int(rank) for rank in mapping.replace(";", ",").split(",") if rank)


@cache
def plain(name: str, **options: Any) -> dict[str, Any]:
    return train_plainly(name, dtype=torch.float64, **options)


def run(pool: Pool, name: str, mapping: str, **options: Any) -> list[dict[str, Any]]:
    world = num_ranks(mapping)
    return pool.run(train, world, name, 0, 0, mapping=mapping, dtype=torch.float64, **options)


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    mapping=st.sampled_from(MAPS),
    batches=st.lists(st.integers(1, 13), min_size=2, max_size=2),
    chunk=st.integers(1, 5),
    schedule=st.sampled_from(NAMES),
    recompute=st.lists(st.booleans(), min_size=3, max_size=3),
    clip=st.sampled_from([None, 0.05]),
    accumulate=st.sampled_from([1, 2]),
)
def test_any_stage_map_is_the_same_training(
    pool: Pool,
    mapping: str,
    batches: list[int],
    chunk: int,
    schedule: str,
    recompute: list[bool],
    clip: float | None,
    accumulate: int,
) -> None:
    """V2, V10, V19: a tie over stages, dropout, odd and empty shares, every schedule, the whole norm."""
    shared: dict[str, Any] = {"accumulate": accumulate, "clip": clip, "steps": 2}
    options = {"model_options": {"dropout": 0.2}, "batch": 13, "batches": batches}
    for found in run(
        pool,
        "GPT",
        mapping,
        chunk=chunk,
        schedule=schedule,
        recompute=recompute[: mapping.count(";")],
        **options,
        **shared,
    ):
        compare(found, train_plainly("GPT", dtype=torch.float64, random=True, **options, **shared), **F64)


@pytest.mark.parametrize(
    ("name", "mapping", "options"),
    [
        ("Odd", "0,1;2,3,4;", {"optimizer": "adam", "evaluate_between": True}),
        ("Odd", "0;1,2;3;", {"optimizer": "adam", "evaluate_between": True}),
        ("Shared", "0,1;2;3,4;", {}),
        ("Reused", "0,1;2;3,4;", {"optimizer": "adam", "shard_optimizer": True}),
    ],
)
def test_anything_crosses_a_cut_between_unequal_stages(
    pool: Pool, name: str, mapping: str, options: dict[str, Any]
) -> None:
    """V3, V12: several tensors, [s, b, h], integers, skips, a value without a batch and its gradient."""
    expected = plain(name, batch=7, **{k: v for k, v in options.items() if k != "shard_optimizer"})
    for found in run(pool, name, mapping, batch=7, chunk=2, **options):
        compare(found, expected, **F64)
        torch.testing.assert_close(found["evaluations"], expected["evaluations"], **F64)


def count_positive(inputs: Any) -> float:
    return float((inputs["y"][:, 0] > 0).sum())


def save_and_go_on(folder: str, first: str, second: str) -> dict[str, Any]:
    """Two steps at one map, a checkpoint, and two more at another."""
    result: dict[str, Any] = {"losses": []}
    for mapping, steps in ((first, (0, 1)), (second, (2, 3))):
        model = make_model("Reused", dtype=torch.float64, seed=steps[0])  # of the second, all is loaded
        sample = make_inputs("Reused", 2, torch.Generator().manual_seed(1), torch.float64)
        wrapped = Varuna(
            model, mapping, sample, 8, 2, device="cpu", seed=SEED, shard_optimizer=mapping == first
        )
        opt = make_optimizer("adam", wrapped.parameters())
        wrapped.set_optimizer(opt)
        wrapped.resume(folder)
        for step in steps:
            order = SampleOrder(8, batch_size=8, shuffle=False)
            replica, replicas = wrapped.rank_within_stage, wrapped.data_depth
            own = order.replica(step=0, replica=replica, num_replicas=replicas)
            loss, _ = wrapped.step(take(global_batch("Reused", step, 8, torch.float64), own, 8))
            result["losses"].append(loss)
            opt.step()
            wrapped.zero_grad()
        wrapped.checkpoint(folder, shard=True)
        result["state"] = wrapped.full_state_dict()
        wrapped.close()
    return result


def test_what_one_map_has_saved_another_goes_on_with(pool: Pool, tmp_path: Path) -> None:
    """V26, V30: sharded state of three replicas and one, read by one and three."""
    results = pool.run(save_and_go_on, 4, str(tmp_path), "0,1,2;3;", "0;1,2;3;")
    for found in results:
        compare(found, plain("Reused", batch=8, steps=4, optimizer="adam"), **F64)


def weigh_and_refuse() -> dict[str, Any]:
    """Weights with zeros; then three kinds of shares that are not parts of one batch."""
    sample = make_inputs("Plain", 2, torch.Generator().manual_seed(1), torch.float64)
    batch = global_batch("Plain", 0, 9, torch.float64)
    result: dict[str, Any] = {}
    for case in ("weighted", "dealt in turn", "too few", "another order"):
        wrapped = Varuna(
            make_model("Plain", dtype=torch.float64),
            "0,1;2;",
            sample,
            9,
            2,
            device="cpu",
            loss_weight=count_positive if case == "weighted" else None,
        )
        wrapped.set_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))
        replica, replicas = wrapped.rank_within_stage, wrapped.data_depth
        own = list(
            SampleOrder(9, batch_size=9, shuffle=False).replica(
                step=0, replica=replica, num_replicas=replicas
            )
        )
        if case == "dealt in turn":
            own = list(range(replica, 9, replicas))
        elif case == "too few":
            own = own[:3]
        elif case == "another order" and dist.get_rank() == 2:
            own = own[::-1]
        try:
            result[case] = wrapped.step(take(batch, own, 9))[0]
        except Exception as error:
            result[case] = str(error)
        wrapped.close()
    return result


def test_loss_weights_are_used_and_shares_of_different_batches_are_refused(pool: Pool) -> None:
    """Features of one sample must not meet the label of another, unnoticed."""
    for found in pool.run(weigh_and_refuse, 3):
        assert found["weighted"] == pytest.approx(weighted_loss(), rel=1e-10)
        assert "differs between stages 0 and 1" in found["dealt in turn"]
        assert "SampleOrder" in found["dealt in turn"]
        assert "were given different batches" in found["too few"] and "stage 1: [3]" in found["too few"]
        assert "different 'x'" in found["another order"]


def weighted_loss() -> float:
    """Micro-batches as the last stage has them: five of two samples at most, dealt out over both shares."""
    model = make_model("Plain", dtype=torch.float64)
    batch = global_batch("Plain", 0, 9, torch.float64)
    division = divide_batch(((5, 4), (9,)), stage=1, replica=0, microbatch_size=2)
    total = weights = 0.0
    for runs in division.runs:
        part = take(batch, [sample for first, stop in runs for sample in range(first, stop)], 9)
        weight = count_positive(part)
        total += weight * model(**part).item()
        weights += weight
    return total / weights


def refusal(name: str, mapping: str, **options: Any) -> str:
    try:
        train(name, 0, 0, mapping=mapping, batch=4, chunk=2, **options)
    except CaptureError as error:
        return str(error)
    return "trained"


def test_a_value_that_sums_up_samples_is_refused_between_unequal_stages(pool: Pool) -> None:
    for expected_text in pool.run(refusal, 3, "Shared", "0,1;2;", model_options={"sums_up": True}):
        assert "cannot be split by sample: mean [] sums up all samples of a micro-batch" in expected_text
    with pytest.raises(ValueError, match=r"different numbers of replicas: \[2, 1\]"):
        get_varuna_config("0,1;2;")
