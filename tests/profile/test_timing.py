"""Measuring kinds of segments one at a time: a kind that cannot run is left out, the others are measured."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from varuna.capture import Source
from varuna.capture.cuts.segment_kinds import find_kinds
from varuna.measure.stopwatch import Effort
from varuna.plan.cut.blocks import partition
from varuna.profile.runnable import SegmentFactory
from varuna.profile.timing import (
    RankResult,
    SegmentBench,
    SizeBatch,
    held_at_once,
    random_tensors,
    shortened,
)
from varuna.types import Dim, TensorSpec

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


def bench(model: nn.Module, ids: Tensor) -> tuple[SegmentBench, SizeBatch, int]:
    source = Source(model, partition=partition)
    captured = source.capture({"ids": torch.zeros(2, 5, dtype=torch.long)}, training=True)
    kinds = find_kinds(source, captured)
    factory = SegmentFactory(source, kinds, device=torch.device("cpu"))
    batch = SizeBatch(len(ids), captured, {"ids": ids})
    return SegmentBench(factory, torch.device("cpu"), QUICK, in_two_parts=False), batch, max(kinds) + 1


def measure(model: nn.Module, ids: Tensor, **options: Any) -> tuple[RankResult, int]:
    segments, batch, num_kinds = bench(model, ids)
    given = {"with_overheads": False, "refuse": lambda _: None, "all_or_nothing": False, **options}
    return segments.measure_separately(batch, range(num_kinds), **given), num_kinds


def test_a_refused_kind_is_left_out_and_later_kinds_run_on_random_tensors() -> None:
    found, num_kinds = measure(
        Ladder(),
        torch.ones(3, 5, dtype=torch.long),
        refuse=lambda kind: "no memory" if kind == 1 else None,
    )
    assert num_kinds > 2
    assert found.left_out == {1: "no memory"}
    assert found.costs.keys() == set(range(num_kinds)) - {1}
    assert all(cost.microbatch_size == 3 and cost.forward.seconds > 0 for cost in found.costs.values())


WRONG_IDS = torch.full((3, 5), 99)  # the vocabulary has 10 entries


def test_an_error_in_one_kind_is_recorded_and_the_others_are_measured() -> None:
    found, num_kinds = measure(Ladder(), WRONG_IDS)
    assert list(found.left_out) == [0] and "index out of range" in found.left_out[0]
    assert found.costs.keys() == set(range(1, num_kinds))


def test_all_or_nothing_raises_an_error_that_is_not_about_memory() -> None:
    with pytest.raises(IndexError, match="index out of range"):
        measure(Ladder(), WRONG_IDS, all_or_nothing=True)


def test_all_or_nothing_drops_every_kind_when_one_does_not_fit() -> None:
    found, num_kinds = measure(
        Ladder(),
        torch.ones(3, 5, dtype=torch.long),
        all_or_nothing=True,
        refuse=lambda kind: "no memory" if kind == 1 else None,
    )
    assert found.costs == {} and found.left_out == dict.fromkeys(range(num_kinds), "no memory")


def test_overheads_are_measured_once_with_the_first_kind() -> None:
    found, _ = measure(Ladder(), torch.ones(3, 5, dtype=torch.long), with_overheads=True)
    assert found.overheads is not None and found.overheads.step_seconds > 0
    without, _ = measure(Ladder(), torch.ones(3, 5, dtype=torch.long))
    assert without.overheads is None


@pytest.mark.parametrize(
    ("segments", "kinds", "held"), [(3, 3, 1), (6, 3, 2), (24, 3, 4), (1, 1, 1), (2, 3, 1)]
)
def test_a_chain_holds_about_one_microbatch_for_each_segment(segments: int, kinds: int, held: int) -> None:
    assert held_at_once(segments, kinds) == held


def test_random_tensors_have_the_shapes_and_dtypes_of_the_outputs_that_they_replace() -> None:
    specs = [
        TensorSpec("x", "float32", (Dim(1, 0), Dim(0, 4)), needs_grad=True),
        TensorSpec("ids", "int64", (Dim(2, 1),), needs_grad=False),
        TensorSpec("chosen", "float32", (None, Dim(0, 2)), needs_grad=True),
    ]
    x, ids, chosen = random_tensors(specs, 3, torch.device("cpu"))
    assert x.shape == (3, 4) and x.dtype == torch.float32 and x.std() > 0
    assert ids.shape == (7,) and ids.dtype == torch.int64 and not ids.any()
    assert chosen.shape == (1, 2)
    assert torch.equal(x, random_tensors(specs, 3, torch.device("cpu"))[0]), "not the same on every rank"


def test_an_error_is_shortened_to_one_line_and_memory_errors_are_named() -> None:
    assert shortened(RuntimeError("first\nsecond")) == "first"
    assert shortened(RuntimeError()) == "RuntimeError"
    assert shortened(torch.OutOfMemoryError("no room\nsee docs")) == "out of memory (no room)"
    assert len(shortened(ValueError("x" * 1000))) == 200
