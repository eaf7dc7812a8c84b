"""Random graphs: modules of random operations on random values."""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.trial import Call, Case

WIDTH = 6
Values = list[Tensor]


class Graph(nn.Module):
    """Every step takes some earlier values of shape [batch, WIDTH] and adds one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(self.rng.randint(1, 4)))
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.same = self.layers[0]  # under two names
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        kinds = list(KINDS)
        self.steps = [
            (
                self.rng.choice(kinds),
                self.rng.random(),
                self.rng.random(),
                self.rng.randrange(len(self.layers)),
            )
            for _ in range(self.rng.randint(3, 14))
        ]
        self.wanted = [self.rng.random() for _ in range(self.rng.randint(1, 3))]
        self.extras = self.rng.random()
        self.counts = self.rng.random() < 0.3

    def forward(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> Any:
        values: Values = [x, x * scale]
        if self.counts:
            self.count += 1
        for kind, one, two, number in self.steps:
            a, b = (values[int(place * len(values))] for place in (one, two))
            values.append(KINDS[kind](self, a, b, mask, number))
        found: dict[str, Any] = {
            f"out{i}": values[-1 - int(place * min(4, len(values)))] for i, place in enumerate(self.wanted)
        }
        if self.extras < 0.5:
            found["extra"] = [(values[-1].argmax(1), values[0] > 0), {"none": None, "word": "w", "number": 2}]
        return found


def _in_place(net: Graph, a: Tensor, b: Tensor, mask: Tensor, number: int) -> Tensor:
    c = a.clone()
    c[:, 3:] += torch.tanh(b[:, :3])
    part = c[:, :3]
    part.mul_(0.5)
    return c + part.sum(1, keepdim=True)


def _no_grad(net: Graph, a: Tensor, b: Tensor, mask: Tensor, number: int) -> Tensor:
    with torch.no_grad():
        frozen = torch.sigmoid(net.layers[number](a))
    return frozen * b


def _of_lists(net: Graph, a: Tensor, b: Tensor, mask: Tensor, number: int) -> Tensor:
    left, right, rest = torch.cat([a, b], 1).split([4, 4, 4], 1)
    return torch.stack([left, right + rest], 1).flatten(1)[:, 1 : 1 + WIDTH]


def _by_sorting(net: Graph, a: Tensor, b: Tensor, mask: Tensor, number: int) -> Tensor:
    values, places = a.sort(1)
    return b.gather(1, places) + values


KINDS: dict[str, Callable[[Graph, Tensor, Tensor, Tensor, int], Tensor]] = {
    "layer": lambda net, a, b, mask, number: net.layers[number](a),
    "same": lambda net, a, b, mask, number: torch.tanh(net.same(a)) + b,
    "table": lambda net, a, b, mask, number: a @ net.table.t().softmax(-1),
    "tied": lambda net, a, b, mask, number: F.linear(a, net.table) * 0.5,
    "norm": lambda net, a, b, mask, number: net.norm(a),
    "drop": lambda net, a, b, mask, number: net.drop(a) + b,
    "add": lambda net, a, b, mask, number: a + b,
    "multiply": lambda net, a, b, mask, number: torch.tanh(a) * torch.sigmoid(b),
    "relu": lambda net, a, b, mask, number: F.relu(a * 1.5, inplace=True),
    "shift": lambda net, a, b, mask, number: a + net.shift + torch.arange(WIDTH) * 0.1,
    "masked": lambda net, a, b, mask, number: a.masked_fill(mask, 0.5),
    "where": lambda net, a, b, mask, number: torch.where(mask, a, b),
    "view": lambda net, a, b, mask, number: a.view(len(a), 2, 3).transpose(1, 2).reshape(-1, WIDTH),
    "rows": lambda net, a, b, mask, number: a.repeat_interleave(2, 0).view(a.shape[0], 2, WIDTH).amax(1),
    "detached": lambda net, a, b, mask, number: a.detach() + b,
    "mean": lambda net, a, b, mask, number: a - a.mean(1, keepdim=True),
    "einsum": lambda net, a, b, mask, number: torch.einsum("bi,bj->bij", a, b).diagonal(dim1=1, dim2=2) * 0.3,
    "in place": _in_place,
    "no grad": _no_grad,
    "lists": _of_lists,
    "sorting": _by_sorting,
}


def inputs(n: int, g: torch.Generator) -> Call:
    x = torch.randn(n, WIDTH, generator=g, dtype=torch.float64).to(torch.get_default_dtype())
    return (x,), {"mask": torch.rand(n, WIDTH, generator=g) > 0.6, "scale": 0.75}


def graph(seed: int) -> Case:
    last = f"out{len(Graph(seed).wanted) - 1}"  # what else comes out, no loss reaches

    def loss(out: Any) -> Tensor:
        return out["out0"].square().sum(1).mean() + out[last].sum(1).mean()

    return Case(lambda: Graph(seed), inputs, loss, by_microbatch=True)
