"""What crosses a cut can be parted by sample, or is refused where stages have unequal numbers of replicas."""

import pytest
import torch
from torch import Tensor, nn

from varuna import CutPoint
from varuna.capture import Source


class Crossing(nn.Module):
    """Sends over its cut what `way` makes of [b, 4, 3]."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.cut = CutPoint()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        x = torch.tanh(self.first(x))
        if self.way == "as it is":
            return self.last(self.cut(x)).mean()
        if self.way == "flat":  # as linear layers of many models have it
            return self.last(self.cut(x.reshape(b * s, h))).view(b, s, h).mean()
        if self.way == "sequence first":
            return self.last(self.cut(x.transpose(0, 1).contiguous())).mean()
        if self.way == "windows":
            return self.last(self.cut(x.view(b, 2, 2, h).permute(0, 2, 1, 3).reshape(2 * b, 2, h))).mean()
        if self.way == "sequence first, flat":
            return self.last(self.cut(x.transpose(0, 1).reshape(s * b, h))).mean()
        if self.way == "attention":
            heads = x.transpose(0, 1).reshape(s, b * 3, 1).transpose(0, 1)
            again = self.first(torch.tanh(heads).transpose(0, 1).reshape(s * b, h))
            return self.last(self.cut(again.view(s, b, h).transpose(0, 1))).mean()
        if "sorted" in self.way:
            rows = x.reshape(b * s, h)
            order = rows[:, 0].argsort()
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order))
            if self.way == "sorted":
                return self.last(self.cut(rows[order]))[back].mean()
            return self.last(self.cut(torch.tanh(rows[order])[back])).mean()
        if self.way == "over again":
            return self.last(self.cut(x.repeat(2, 1, 1))).mean()
        if self.way == "over again, and summed":
            return self.last(self.cut(x.repeat(2, 1, 1).view(2, b, s, h).sum(0))).mean()
        if self.way == "two views":
            return self.last(self.cut(torch.cat([x, 2 * x]))).mean()
        return self.last(self.cut(x.mean((0, 1), keepdim=True))).mean()


def told(way: str) -> list[str]:
    inputs = {"x": torch.randn(2, 4, 3)}
    return Source(Crossing(way)).capture(inputs, training=True).inseparable(1)


@pytest.mark.parametrize(
    "way",
    [
        "as it is",
        "flat",
        "sequence first",
        "windows",
        "attention",
        "over again, and summed",
        "sorted, and back",
    ],
)
def test_samples_in_order_can_be_parted(way: str) -> None:
    assert told(way) == []


@pytest.mark.parametrize("way", ["sequence first, flat", "two views", "over again"])
def test_samples_in_disorder_cannot(way: str) -> None:
    assert len(told(way)) == 1 and "does not hold the samples in order" in told(way)[0]


def test_what_is_in_the_order_of_a_sort_cannot() -> None:
    """Nor the places by which it is brought back: they are those of another micro-batch."""
    assert len(told("sorted")) >= 2 and all("in the order of a sort" in why for why in told("sorted"))


def test_what_sums_up_samples_cannot() -> None:
    assert len(told("mean")) == 1 and "sums up all samples" in told("mean")[0]
