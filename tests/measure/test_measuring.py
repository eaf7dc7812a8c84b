"""Kinds of segments, one at a time: what cannot run is left out, and the others are measured all the same."""

import torch
from torch import Tensor, nn

from varuna.capture import Captured, Source
from varuna.capture.cuts.segment_kinds import find_kinds
from varuna.measure.stopwatch import Effort
from varuna.plan.cut.blocks import partition
from varuna.profile.runnable import Parts
from varuna.profile.timing import Bench

QUICK = Effort(seconds=0.0, fewest=1, most=1, warmups=0)


class Ladder(nn.Module):
    """Three kinds of layers, the last of which reads what the first has chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.wide = nn.Linear(4, 32)
        self.narrow = nn.Linear(32, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.wide(self.words(ids)))
        loss: Tensor = self.narrow(x).square().mean()
        return loss


def bench(model: nn.Module) -> tuple[Bench, Captured, int]:
    source = Source(model, partition=partition)
    captured = source.capture({"ids": torch.zeros(2, 5, dtype=torch.long)}, training=True)
    kinds = find_kinds(source, captured)
    parts = Parts(source, kinds, device=torch.device("cpu"), initialize=None)
    return Bench(parts, torch.device("cpu"), QUICK, in_two_parts=False), captured, max(kinds) + 1


def test_a_kind_without_room_is_left_out_and_those_after_it_run_on_stand_ins() -> None:
    model = Ladder()
    measuring, captured, num_kinds = bench(model)
    assert num_kinds > 2
    found = measuring.one_by_one(
        3,
        captured,
        {"ids": torch.ones(3, 5, dtype=torch.long)},
        kinds=range(num_kinds),
        with_overheads=False,
        refuse=lambda kind: "no room" if kind == 1 else None,
    )
    assert found.left_out == {1: "no room"}
    assert found.costs.keys() == set(range(num_kinds)) - {1}
    assert all(cost.microbatch_size == 3 and cost.forward.seconds > 0 for cost in found.costs.values())


def test_an_error_of_one_kind_is_told_and_costs_the_others_nothing() -> None:
    model = Ladder()
    measuring, captured, num_kinds = bench(model)
    wrong = {"ids": torch.full((3, 5), 99)}  # no such word
    found = measuring.one_by_one(
        3, captured, wrong, kinds=range(num_kinds), with_overheads=False, refuse=lambda _: None
    )
    assert list(found.left_out) == [0] and "index out of range" in found.left_out[0]
    assert found.costs.keys() == set(range(1, num_kinds))
