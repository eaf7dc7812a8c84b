"""Scripts in the style of RaNNC's own tests run, and give the results of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pyrannc
from pyrannc import RaNNCModule
from tests.pool import Pool
from tests.pyrannc.original_cases import CASES, WIDTH, Diamond, match_all
from varuna.errors import CallMismatch

BY_SAMPLE = [name for name, case in CASES.items() if not case.over_samples]


@pytest.mark.parametrize(
    ("depth", "width", "microbatches", "names"),
    [(2, 1, 1, list(CASES)), (1, 2, 2, BY_SAMPLE[:4]), (2, 2, 2, BY_SAMPLE[:3])],
)
def test_all_cases_match(pool: Pool, depth: int, width: int, microbatches: int, names: list[str]) -> None:
    """R1, R5, R7, R8: name_to_param, get_param, get_param_grad, from_global and clear included."""
    assert pool.run(match_all, depth * width, names, depth, microbatches)[0] == names


def test_cases_match_if_only_rank_0_has_inputs(pool: Pool) -> None:
    """R4: `gather_inputs=False`."""
    names = ["Bottleneck", "LossInside"]
    assert pool.run(match_all, 2, names, 2, 1, gather_inputs=False)[0] == names


def different_names() -> tuple[str, str]:
    model = RaNNCModule(Diamond(), partition_num=2, measure=False, device="cpu", timeout_seconds=30)
    model(torch.randn(2, WIDTH)).sum().backward()
    with pytest.raises(CallMismatch) as names:
        for name, _ in model.named_parameters():  # differs from rank to rank
            model.get_param(name)
    model = RaNNCModule(Diamond(), partition_num=2, measure=False, device="cpu", timeout_seconds=30)
    model(torch.randn(2, WIDTH)).sum().backward()
    with pytest.raises(CallMismatch) as calls:
        if dist.get_rank() == 0:
            model.get_param("stem.weight")
        else:
            model.get_param_grad("stem.weight")
    return str(names.value), str(calls.value)


def test_ranks_that_ask_for_different_parameters_are_named(pool: Pool) -> None:
    """EXA-9: within seconds, with the argument of each rank."""
    for names, calls in pool.run(different_names, 2):
        assert "rank 0 calls get_param('stem.weight'), rank 1 get_param('" in names
        assert "rank 0 is in get_param(), rank 1 in get_param_grad()" in calls


def test_arguments_of_all_versions_of_rannc_are_understood(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """R1: nothing is called an unknown option, and what is not supported is refused."""
    model = RaNNCModule(
        nn.Linear(2, 2),
        enable_apex_amp=True,
        enable_zero=True,
        allreduce_amp_master_params=True,
        check_unused_values=False,
        offload_params=False,
        device="cpu",
    )
    assert model._precision == "bf16"
    assert model._options.shard_optimizer
    assert RaNNCModule(nn.Linear(2, 2), None, True, "plan.json", device="cpu")._options.deployment_file
    assert not caplog.records
    with pytest.raises(ValueError, match="offload_params=True is not supported"):
        RaNNCModule(nn.Linear(2, 2), offload_params=True, device="cpu")
    with pytest.raises(AttributeError, match=r"use train\(\) and eval\(\)"):
        model.enable_dropout(False)
    pyrannc.clear()
    with pytest.raises(RuntimeError, match="undeployed"):
        model(torch.randn(2, 2))
