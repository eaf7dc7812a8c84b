"""The short form `varuna.wrap`, and the whole model after training, against one plain process."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import varuna
from tests.pool import Pool
from tests.ports import free_port
from tests.train.faces import check_state
from varuna import SampleOrder
from varuna.train import wrap as wrapping
from varuna.train.process_rank import find_local_rank, find_local_size
from varuna.train.wrap import default_microbatch_size

BATCH, DATA = 8, 40


class Tied(nn.Module):
    """Has a tied and an unused weight, a frozen bias, a buffer that is not saved, and no CutPoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.middle.bias.requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6), persistent=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x))) * self.scale)).square().mean()


def groups_of(model: nn.Module) -> torch.optim.Optimizer:
    """As people write it: no weight decay for biases."""
    weights = [p for name, p in model.named_parameters() if "bias" not in name]
    biases = [p for name, p in model.named_parameters() if "bias" in name]
    settings = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(settings, lr=0.05)


def train(wraps: bool, makes: bool, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], Any]:
    """Train four steps; return losses, the model's state and the stage map. `makes`: the optimizer later."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(3)
        plain = Tied()
        data = torch.randn(DATA, 6)
        order, layout = SampleOrder(DATA, batch_size=BATCH, seed=1), None
        model: Any = plain
        make: Callable[[Any], torch.optim.Optimizer] = functools.partial(torch.optim.Adam, lr=0.05)
        optimizer = make(plain.parameters()) if makes else groups_of(plain)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        if wraps:
            settings = {"batch_size": BATCH, "sample": {"x": data[:2]}, "device": "cpu", **options}
            model = varuna.wrap(plain, make if makes else optimizer, **settings)
            layout = [stage.ranks for stage in model.plan.stages]
            if makes:
                optimizer = model.optimizer
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        losses = []
        for step in range(4):
            if wraps:
                losses.append(model.step({"x": data[order.share(model)]})[0])
            else:
                loss = model(data[order.step(step)])
                loss.backward()
                losses.append(float(loss.detach()))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if wraps:
            whole = model.gather_model()
            assert (whole is None) == (model.rank != 0)
            model.close()
            if whole is None:
                return losses, {}, layout
            assert type(whole) is Tied and whole.last.weight is whole.first.weight and whole.training
            assert not whole.middle.bias.requires_grad and whole.middle.weight.requires_grad
            assert float(whole(data).detach()) == pytest.approx(float(expected_loss(whole, data)))
            plain = whole
        return losses, {**plain.state_dict(), "scale": plain.scale.clone()}, layout
    finally:
        torch.set_default_dtype(torch.float32)


def expected_loss(model: Tied, data: Tensor) -> Tensor:
    fresh = Tied()
    fresh.load_state_dict(model.state_dict())
    return fresh(data).detach()


@pytest.mark.parametrize("makes", [False, True])
@pytest.mark.parametrize(
    ("world", "options", "layout"),
    [
        (1, {}, [(0,)]),
        (2, {}, [(0, 1)]),
        (2, {"stages": 2}, [(0,), (1,)]),
        (4, {"stages": 2, "microbatch_size": 2}, [(0, 2), (1, 3)]),
    ],
)
def test_a_wrapped_model_and_optimizer_train_like_one_process(
    pool: Pool, world: int, options: dict[str, Any], layout: list[tuple[int, ...]], makes: bool
) -> None:
    """TRA-6: also with parameter groups and a scheduler made before; afterwards one rank has the model."""
    losses, state, _ = train(False, makes, {})
    ranks = pool.run(train, world, True, makes, options)
    for found, _, used in ranks:
        assert found == pytest.approx(losses, rel=1e-10) and used == layout
    check_state(ranks[0][1], state)


def train_with_map(stage_map: str) -> tuple[list[float], dict[str, Tensor], Any]:
    os.environ.update(VARUNA_STAGE_TO_RANK_MAP=stage_map, VARUNA_CHUNK_SIZE="3")
    try:
        return train(True, False, {})
    finally:
        del os.environ["VARUNA_STAGE_TO_RANK_MAP"], os.environ["VARUNA_CHUNK_SIZE"]


def train_with_little_memory(num_bytes: int) -> Any:
    space = wrapping._space
    wrapping._space = lambda device: num_bytes
    try:
        return train(True, False, {})[2]
    except MemoryError as error:
        return str(error)
    finally:
        wrapping._space = space


def test_the_layout_comes_from_the_launcher_or_from_the_memory(pool: Pool) -> None:
    """TRA-6: nobody writes a map."""
    losses, state, _ = train(False, False, {})
    ranks = pool.run(train_with_map, 2, "1;0;")
    assert all(found == pytest.approx(losses, rel=1e-10) for found, _, _ in ranks)
    assert ranks[0][2] == [(1,), (0,)]
    check_state(ranks[0][1], state)
    need = wrapping.training_state_bytes(Tied().double())
    assert (
        pool.run(train_with_little_memory, 2, int(need / wrapping.STATE_SHARE / 2) + 8) == [[(0,), (1,)]] * 2
    )
    for said in pool.run(train_with_little_memory, 2, need // 2):
        assert "2 processes have space for" in said and "more processes" in said


def train_in_another_world(folder: str, backend: str | None, **variables: str) -> Any:
    """Train after the script's own init_process_group, or with other variables than torchrun's."""
    rank, world, kept = dist.get_rank(), dist.get_world_size(), dict(os.environ)
    dist.destroy_process_group()
    join = functools.partial(dist.init_process_group, rank=rank, world_size=world)
    try:
        if backend is not None:
            join(backend, init_method=f"file://{folder}/own")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
        os.environ.update({name: value.format(rank=rank, world=world) for name, value in variables.items()})
        losses, _, layout = train(True, False, {})
        return losses, layout
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(kept)
        join("gloo", init_method=f"file://{folder}/pool")


def test_nccl_alone_and_the_variables_of_mpirun_and_srun_are_enough(pool: Pool, tmp_path: Path) -> None:
    """TRA-6: every process joins the others, whoever has started it; no CPU tensor needs NCCL."""
    losses, _, _ = train(False, False, {})
    mpi = {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "{world}"}
    slurm = {"SLURM_PROCID": "{rank}", "SLURM_STEP_NUM_TASKS": "{world}"}
    for number, (backend, variables) in enumerate((("cuda:gloo", {}), (None, mpi), (None, slurm))):
        folder = tmp_path / str(number)
        folder.mkdir()
        own = {**variables, "MASTER_PORT": str(free_port())}
        for found, layout in pool.run(train_in_another_world, 2, str(folder), backend, **own):
            assert found == pytest.approx(losses, rel=1e-10) and layout == [(0, 1)]


def test_the_processes_of_a_machine_share_its_memory() -> None:
    """TRA-6"""
    assert find_local_size({}) == 1 and find_local_rank({}) == -1
    assert find_local_size({"LOCAL_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}) == 4
    assert find_local_size({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}) == 3
    assert find_local_size({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}) == 4
    slurm = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
    assert find_local_rank(slurm) == 1, "also without MASTER_ADDR: the script may have joined the others"


def test_an_optimizer_that_cannot_be_taken_over_is_refused() -> None:
    model, x = Tied(), torch.randn(4, 6)
    settings: dict[str, Any] = {"batch_size": 4, "sample": {"x": x}, "device": "cpu"}
    with pytest.raises(ValueError, match="6 of the optimizer's parameters do not belong to the model"):
        varuna.wrap(model, torch.optim.SGD(Tied().parameters(), lr=0.1), **settings)
    names = {value: name for name, value in model.named_parameters()}
    with pytest.raises(ValueError, match="evaluated over several stages has other parameters"):
        wrapping.hand_over(torch.optim.SGD(Tied().parameters(), lr=0.1), names, model)
    optimizer = torch.optim.Adam(model.parameters())
    model(x).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="has made steps before the model was wrapped"):
        varuna.wrap(model, optimizer, **settings)
    with pytest.raises(ValueError, match="divides the 1 processes, not 2"):
        varuna.wrap(model, functools.partial(torch.optim.SGD, lr=0.1), stages=2, **settings)


def test_long_samples_get_smaller_micro_batches() -> None:
    """TRA-7: on a CPU, the wait of a pipeline costs more than the accumulation of long micro-batches."""
    assert default_microbatch_size("0;1;", 16) == 2
    assert default_microbatch_size("0;1;", 16, tokens=64) == 2
    assert default_microbatch_size("0;1;", 16, tokens=256) == 1
    assert default_microbatch_size("0;1;2;3;", 64) == 4
    assert default_microbatch_size("0;1;2;3;", 64, tokens=256) == 2
    assert default_microbatch_size("0,1;", 16, tokens=256) == 8, "no pipeline, nothing to wait for"
