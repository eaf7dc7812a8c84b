"""Segments are of one kind if they cost the same, and only then."""

import pytest
import torch
from torch import Tensor, nn

from tests.profile.ladders import Ladder, get_batch
from tests.toys import make_inputs, make_model
from varuna import CutPoint, opaque
from varuna.capture import Source
from varuna.capture.cuts.segment_kinds import entry, find_kinds


def kinds_of(model: nn.Module, inputs: dict[str, object] | None = None, **options: object) -> list[int]:
    source = Source(model, **options)  # type: ignore[arg-type]
    return find_kinds(source, source.capture(inputs or dict(get_batch(3)), training=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_segments_that_differ_in_their_random_numbers_alone_are_one_kind(precision: str) -> None:
    assert kinds_of(Ladder(6, dropout=0.2), precision=precision) == [0, 1, 1, 1, 1, 2]


def test_the_blocks_of_a_transformer_are_one_kind() -> None:
    inputs = make_inputs("GPT", 3, torch.Generator().manual_seed(0), torch.float32)
    kinds = kinds_of(make_model("GPT", layers=5, dropout=0.1), inputs)
    assert kinds == [0, 1, 1, 1, 1, 2]


def differing(change: str) -> nn.Module:
    model = Ladder(6)
    step = model.steps[3]
    if change == "frozen":
        step.requires_grad_(False)
    elif change == "no bias":
        model.steps[3] = nn.Linear(step.in_features, step.out_features, bias=False)
    elif change == "opaque":
        for each in model.steps:
            opaque(each)
    elif change == "constant":
        model.steps[3] = nn.Sequential(step, Plus())
        model.steps[4] = nn.Sequential(model.steps[4], Plus(2.0))
    return model


class Plus(nn.Module):
    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.value = torch.full((3,), value)  # no parameter, no buffer: a constant of the graph

    def forward(self, x: Tensor) -> Tensor:
        return x + self.value.sum()


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ("nothing", [0, 1, 1, 1, 1, 2]),
        ("frozen", [0, 1, 1, 2, 1, 3]),
        ("no bias", [0, 1, 1, 2, 1, 3]),
        ("opaque", [0, 1, 2, 3, 4, 5]),
        ("constant", [0, 1, 1, 2, 3, 4]),
    ],
)
def test_a_different_segment_is_another_kind(change: str, kinds: list[int]) -> None:
    assert kinds_of(differing(change)) == kinds


class Masked(nn.Module):
    """Every segment needs a mask, which each stage recomputes from the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = (y > 0).float()
        for i, step in enumerate(self.steps):
            x = step(x) * mask
            x = self.cuts[i](x) if i < 2 else x
        return x.square().mean()


def test_the_entry_recomputes_earlier_values() -> None:
    captured = Source(Masked()).capture(dict(get_batch(3)), training=True)
    assert entry(captured.carve(0, 1), 0) is None
    again = entry(captured.carve(1, 2), 1)
    assert again is not None
    inputs = get_batch(3)
    made = again([torch.empty(0)] * len(again.state), [torch.empty(0)], inputs, None)  # type: ignore[arg-type]
    assert any(torch.equal(value, (inputs["y"] > 0).float()) for value in made if isinstance(value, Tensor))
