"""Optimizers that need all parameters are refused over stages; groups are divided with their lists."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import varuna
from tests.pool import Pool
from tests.tasks import stage_map
from varuna import CutPoint, Varuna
from varuna.execute.update.optimizers import parameter_lists, refuse_coupled_update
from varuna.train.hot.eligible import why_not_hot

COUPLED_NAMES = ["Prodigy", "ProdigyPlusScheduleFree", "DAdaptAdam", "DAdaptSGD", "DAdaptAdan", "DoG", "SAM"]
COUPLED_NAMES += ["GrokAdamW", "Ranger21", "AdaLomo"]
SEPARATE = [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Rprop]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut, self.last = nn.Linear(6, 8), CutPoint(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.cut(torch.relu(self.first(x)))) - x[:, :3]).square().mean()


class GatheringMuon(torch.optim.SGD):
    """Deals its parameters to all ranks, as some versions of Muon do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter)


def optimizer_named(name: str, parameters: Any, **group: Any) -> torch.optim.Optimizer:
    """Make an optimizer of a class with this name, such as one of a package that is not installed."""
    if name == "LBFGS":
        return torch.optim.LBFGS(parameters)
    kind = type(name, (torch.optim.SGD,), {})
    made: torch.optim.Optimizer = kind([{"params": list(parameters), **group}], lr=0.1)
    return made


@pytest.mark.parametrize("name", ["LBFGS", *COUPLED_NAMES])
def test_an_update_from_all_parameters_is_refused_where_a_rank_has_some(name: str) -> None:
    optimizer = optimizer_named(name, Net().parameters())
    subclass: Any = type("Own", (type(optimizer),), {})
    for refused in (optimizer, subclass([nn.Parameter(torch.ones(2))], lr=0.1)):
        for depth, shards in [(2, False), (1, True)]:
            with pytest.raises(ValueError, match=f"^{type(refused).__name__} .*AdamW"):
                refuse_coupled_update(refused, depth=depth, shards=shards)
        refuse_coupled_update(refused, depth=1, shards=False)


@pytest.mark.parametrize("name", ["RiemannianPreconditionedOptimizer", "LoraFAOptimizer"])
def test_optimizers_of_the_plain_models_parameters_are_refused_with_one_stage_too(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} .*AdamW"):
        refuse_coupled_update(optimizer_named(name, Net().parameters()), depth=1, shards=False)


@pytest.mark.parametrize("kind", SEPARATE)
def test_updates_of_separate_parameters_are_allowed(kind: Any) -> None:
    refuse_coupled_update(kind(Net().parameters()), depth=2, shards=True)
    muon = torch.optim.Muon([nn.Parameter(torch.ones(2, 2))])
    refuse_coupled_update(muon, depth=2, shards=True)
    for name in ("AdamWScheduleFree", "StableAdamW", "LDoG", "Muon"):
        refuse_coupled_update(optimizer_named(name, Net().parameters()), depth=2, shards=True)


def test_a_norm_inside_of_the_optimizer_is_refused_until_it_is_off() -> None:
    """As in FusedLAMB of apex, Lamb of timm and Adan: its default is a norm of all gradients."""
    for off in (None, 0.0, float("inf")):
        lamb = optimizer_named("FusedLAMB", Net().parameters(), max_grad_norm=off)
        refuse_coupled_update(lamb, depth=2, shards=False)
    lamb = optimizer_named("FusedLAMB", Net().parameters(), max_grad_norm=1.0)
    with pytest.raises(ValueError, match=r"FusedLAMB with max_grad_norm=1 .*float\('inf'\), and clip"):
        refuse_coupled_update(lamb, depth=2, shards=False)


def test_an_optimizer_that_deals_its_work_to_all_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"GatheringMuon deals its work to all ranks \(all_reduce\)"):
        refuse_coupled_update(GatheringMuon(Net().parameters(), lr=0.1), depth=2, shards=False)


def test_a_list_for_each_parameter_is_not_sharded() -> None:
    model = Net()
    optimizer = optimizer_named("Scaled", model.parameters(), scales=[1.0, 2.0, 3.0, 4.0])
    assert list(parameter_lists(optimizer)) == [(0, "scales")]
    refuse_coupled_update(optimizer, depth=2, shards=False)
    with pytest.raises(ValueError, match="'scales', which cannot be sharded"):
        refuse_coupled_update(optimizer, depth=1, shards=True)


def message_of(face: str, name: str, depth: int, width: int) -> str:
    """Return the error of training with an optimizer of this name; "" if there is none."""
    model, sample = Net(), {"x": torch.randn(2, 6)}
    options: dict[str, Any] = {"device": "cpu", "timeout_seconds": 30}
    try:
        if face == "pyrannc":
            from pyrannc import RaNNCModule

            optimizer = optimizer_named(name, model.parameters())
            RaNNCModule(model, optimizer, partition_num=depth, pipeline_num=2, **options)(torch.randn(4, 6))
            return ""
        if face == "wrap":
            optimizer = optimizer_named(name, model.parameters())
            wrapped = varuna.wrap(model, optimizer, batch_size=8, sample=sample, stages=depth, **options)
        else:
            wrapped = Varuna(model, stage_map(depth, width), sample, 8, 2, **options)
            wrapped.set_optimizer(optimizer_named(name, wrapped.parameters()))
    except Exception as error:  # of this rank, or of another one that was first
        return str(error)
    wrapped._hot.fetches = True  # as with a loop over model.batches
    assert name in why_not_hot(wrapped)
    wrapped.close()
    return ""


@pytest.mark.parametrize("face", ["varuna", "wrap", "pyrannc"])
@pytest.mark.parametrize("name", ["LBFGS", "Prodigy"])
def test_every_interface_refuses_such_an_optimizer_over_stages(pool: Pool, face: str, name: str) -> None:
    """EXA-2: it would take other steps than in one process."""
    for refused in pool.run(message_of, 2, face, name, 2, 1):
        assert f"{name} computes one" in refused
    if face != "pyrannc":
        assert pool.run(message_of, 2, face, name, 1, 2) == ["", ""]


def train_named(folder: str, stages: int, steps: int) -> tuple[list[float], bool]:
    """Continue with named parameters and a list of scales; return the losses, and if the lists still fit."""
    torch.manual_seed(1)
    model = Net()
    wanted = {name: float(index) for index, (name, _) in enumerate(model.named_parameters())}
    optimizer = torch.optim.Adam(model.named_parameters(), lr=0.1)
    data = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    optimizer.param_groups[0]["numbers"] = list(wanted.values())
    wrapped = varuna.wrap(
        model,
        optimizer,
        batch_size=8,
        sample={"x": data[:2]},
        stages=stages,
        device="cpu",
        timeout_seconds=30,
    )
    held = [name for name, _ in wrapped.named_parameters() if name in wanted]
    group = optimizer.param_groups[0]
    fit = group["param_names"] == held and group["numbers"] == [wanted[name] for name in held]
    del group["numbers"]
    wrapped.resume(folder)
    losses = []
    for _ in range(steps):
        losses.append(wrapped.step({"x": data})[0])
        optimizer.step()
        optimizer.zero_grad()
    wrapped.checkpoint(folder)
    wrapped.close()
    return losses, fit


def test_lists_of_a_group_follow_their_parameters_to_any_layout(pool: Pool, tmp_path: Path) -> None:
    [(expected, fits)] = pool.run(train_named, 1, str(tmp_path / "one"), 1, 4)
    assert fits
    store, found = str(tmp_path / "two"), list[float]()
    for stages in (2, 1):
        results = pool.run(train_named, stages, store, stages, 2)
        assert all(fits for _, fits in results)
        found += results[0][0]
    assert found == pytest.approx(expected, rel=1e-5)
