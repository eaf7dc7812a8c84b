"""Ranks that start with different weights train from the first rank's, in both interfaces."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyrannc import RaNNCModule
from tests.pool import Pool
from tests.tasks import logged, stage_map
from varuna import CutPoint, Varuna

LAYOUTS = [(2, 1), (1, 2), (2, 2)]


class Net(nn.Module):
    """Random weights, a random buffer in each half, and a weight that both halves use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.cut = nn.Linear(6, 6), nn.Linear(6, 6), CutPoint()
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.register_buffer("early", torch.randn(6))
        self.register_buffer("late", torch.randn(6), persistent=False)

    def reset_parameters(self) -> None:
        for buffer in (self.early, self.late):
            buffer.normal_()

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(torch.tanh(self.middle(torch.tanh(self.first(x)) + self.early)))
        return (self.last(x) * self.late).square().mean()


def build(seed: int, where: str) -> Net:
    torch.manual_seed(seed)
    with torch.device("meta" if where == "meta" else "cpu"):
        return Net()


def shared(wrapped: Any, own: dict[str, Tensor], num_ranks: int) -> list[dict[str, Tensor]]:
    gathered: list[dict[str, Tensor]] = [{} for _ in range(num_ranks)]
    dist.all_gather_object(gathered, {name: tensor.detach().clone() for name, tensor in own.items()})
    return gathered


def wrap(face: str, depth: int, width: int, case: str) -> tuple[list[dict[str, Tensor]], list[str]]:
    """Return the values of each rank after wrapping, and the log."""
    rank = dist.get_rank()
    model = build(rank, {"rank 0 only": "cpu" if rank == 0 else "meta", "filled": "meta"}.get(case, case))
    x = torch.randn(2, 6)
    options: dict[str, Any] = {}
    if case == "filled":
        generator = torch.Generator().manual_seed(rank)
        options["initialize"] = lambda name, tensor: tensor.normal_(generator=generator)
    with logged(face) as lines:
        if face == "varuna":
            wrapped: Any = Varuna(model, stage_map(depth, width), {"x": x}, 4, 2, device="cpu", **options)
            state = wrapped._state
        else:
            wrapped = RaNNCModule(model, device="cpu", partition_num=depth)
            wrapped(x)
            state = wrapped._partitioned.state
            assert len(wrapped.plan.stages) == depth
    own = {name: state.tensor(name) for name in state.canonical}
    found = shared(wrapped, own, depth * width)
    wrapped.close() if face == "varuna" else wrapped.undeploy()
    return found, [line for line in lines if "different initial values" in line]


@pytest.mark.parametrize("face", ["varuna", "pyrannc"])
@pytest.mark.parametrize(("depth", "width"), LAYOUTS)
def test_all_ranks_start_with_the_first_ranks_weights(pool: Pool, face: str, depth: int, width: int) -> None:
    """EXA-1: with a seed per rank, and with values on rank 0 only; buffers and tied weights too."""
    expected = {**dict(build(0, "cpu").named_parameters()), **dict(build(0, "cpu").named_buffers())}
    for case in ("cpu", "rank 0 only"):
        results = pool.run(wrap, depth * width, face, depth, width, case)
        values, lines = results[0]
        assert {name for own in values for name in own} >= {"first.weight", "last.bias", "early", "late"}
        for own in values:
            for name, value in own.items():
                assert torch.equal(value, expected[name].detach()), (case, name)
        assert len(lines) == 1 and not any(lines for _, lines in results[1:])


@pytest.mark.parametrize(("depth", "width"), LAYOUTS)
def test_what_a_function_fills_differently_on_each_rank_ends_equal(
    pool: Pool, depth: int, width: int
) -> None:
    """EXA-1: `initialize=` with a generator per rank; each tensor has the values of its first rank."""
    values, lines = pool.run(wrap, depth * width, "varuna", depth, width, "filled")[0]
    merged: dict[str, Tensor] = {}
    for own in values:
        for name, value in own.items():
            assert torch.equal(merged.setdefault(name, value), value), name
    assert lines


@pytest.mark.parametrize("face", ["varuna", "pyrannc"])
def test_ranks_that_agree_send_only_hashes(pool: Pool, face: str) -> None:
    """EXA-1: models on meta are drawn by the same seed on every rank."""
    for _, lines in pool.run(wrap, 4, face, 2, 2, "meta"):
        assert not lines


def fill_with_global_randomness(depth: int) -> dict[str, Tensor]:
    def fill(name: str, tensor: Tensor) -> None:
        tensor.normal_()

    wrapped = Varuna(
        build(0, "meta"),
        stage_map(depth, 1),
        {"x": torch.ones(2, 6)},
        4,
        2,
        device="cpu",
        seed=5,
        initialize=fill,
    )
    found = wrapped.full_state_dict()
    wrapped.close()
    return found


def test_a_function_that_draws_gives_the_same_values_at_every_depth(pool: Pool) -> None:
    """EXA-1: the generator is seeded by the tensor's name, so stages do not draw the same numbers."""
    one, two = (pool.run(fill_with_global_randomness, depth, depth)[0] for depth in (1, 2))
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), name
    assert not torch.equal(one["first.bias"], one["last.bias"])
