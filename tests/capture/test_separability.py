"""Values that cross a cut can be divided by sample, or the reason is named."""

import pytest
import torch
from torch import Tensor, nn

from varuna import CutPoint
from varuna.capture import Source


class Crossing(nn.Module):
    """Sends a value of shape [b, 4, 3] over its cut in another form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.cut = CutPoint()
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        x = torch.tanh(self.first(x))
        if self.form == "as it is":
            return self.last(self.cut(x)).mean()
        if self.form == "flat":  # as linear layers of many models have it
            return self.last(self.cut(x.reshape(b * s, h))).view(b, s, h).mean()
        if self.form == "sequence first":
            return self.last(self.cut(x.transpose(0, 1).contiguous())).mean()
        if self.form == "windows":
            return self.last(self.cut(x.view(b, 2, 2, h).permute(0, 2, 1, 3).reshape(2 * b, 2, h))).mean()
        if self.form == "sequence first, flat":
            return self.last(self.cut(x.transpose(0, 1).reshape(s * b, h))).mean()
        if self.form == "attention":
            heads = x.transpose(0, 1).reshape(s, b * 3, 1).transpose(0, 1)
            again = self.first(torch.tanh(heads).transpose(0, 1).reshape(s * b, h))
            return self.last(self.cut(again.view(s, b, h).transpose(0, 1))).mean()
        if "sorted" in self.form:
            rows = x.reshape(b * s, h)
            order = rows[:, 0].argsort()
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order))
            if self.form == "sorted":
                return self.last(self.cut(rows[order]))[back].mean()
            return self.last(self.cut(torch.tanh(rows[order])[back])).mean()
        if self.form == "over again":
            return self.last(self.cut(x.repeat(2, 1, 1))).mean()
        if self.form == "over again, and summed":
            return self.last(self.cut(x.repeat(2, 1, 1).view(2, b, s, h).sum(0))).mean()
        if self.form == "two views":
            return self.last(self.cut(torch.cat([x, 2 * x]))).mean()
        return self.last(self.cut(x.mean((0, 1), keepdim=True))).mean()


def reasons(form: str) -> list[str]:
    inputs = {"x": torch.randn(2, 4, 3)}
    return Source(Crossing(form)).capture(inputs, training=True).inseparable(1)


@pytest.mark.parametrize(
    "form",
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
def test_samples_in_order_can_be_divided(form: str) -> None:
    assert reasons(form) == []


@pytest.mark.parametrize("form", ["sequence first, flat", "two views", "over again"])
def test_samples_out_of_order_cannot_be_divided(form: str) -> None:
    assert len(reasons(form)) == 1 and "does not hold the samples in order" in reasons(form)[0]


def test_sorted_samples_cannot_be_divided() -> None:
    """Nor the indices that restore the order: they belong to the whole micro-batch."""
    assert len(reasons("sorted")) >= 2 and all("in the order of a sort" in why for why in reasons("sorted"))


def test_a_sum_over_samples_cannot_be_divided() -> None:
    assert len(reasons("mean")) == 1 and "sums up all samples" in reasons("mean")[0]
