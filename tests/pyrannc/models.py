"""Test models like those of RaNNC, and their inputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 6


class Simple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, WIDTH)
        self.register_buffer("shift", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) + self.shift
        x = torch.relu(self.second(x))
        y: Tensor = self.third(x)
        return y


class Shared(nn.Module):
    """One weight used at both ends, and one under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.same = self.inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.same(torch.tanh(self.middle(torch.tanh(self.inner(x)))))
        return y


class Branching(nn.Module):
    """Branches, joins, a skip over everything, and results made in several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.join = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        left, right = torch.tanh(self.left(x)), torch.sigmoid(self.right(y))
        joined = self.join(torch.cat([left, right], 1))
        return {"out": joined + x, "parts": (left, [right * 2]), "what": "branches", "none": None}


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Simple()

    def forward(
        self, x: Tensor, target: Tensor | None = None, *, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        out = self.net(x) * scale
        assert target is not None
        return F.mse_loss(out, target), out


class Bert(nn.Module):
    """Embeddings, attention with a mask of bools, dropout, a tied head and its loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(17, 8)
        self.places = nn.Parameter(torch.randn(5, 8) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.words.weight

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x = self.words(batch["ids"]) + self.places
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=batch["mask"])
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), "logits": logits}


class Norm(nn.Module):
    """BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.drop(torch.tanh(self.norm(self.first(x)))))
        return y


class Everything(nn.Module):
    """A weight used at both ends, a skip over all of it, dropout, a buffer, a loss and results on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, 8)
        self.back = nn.Linear(8, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("shift", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        early = torch.tanh(self.inner(x))
        middle = self.drop(torch.relu(self.middle(early))) + self.shift
        out = F.linear(torch.tanh(self.back(middle)), self.inner.weight) + x
        return {"loss": F.mse_loss(out, target), "out": out, "early": early}


class Identity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class OneOperation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], tuple[tuple[Any, ...], dict[str, Any]]]
    loss: Callable[[Any, tuple[Any, ...], dict[str, Any]], Tensor]


def _x(n: int, g: torch.Generator) -> Tensor:
    return torch.randn(n, WIDTH, generator=g, dtype=torch.float64).to(torch.get_default_dtype())


def _bert(n: int, g: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    mask = torch.rand(n, 5, generator=g) > 0.7
    mask[:, 0] = False
    return (
        {
            "ids": torch.randint(0, 17, (n, 5), generator=g),
            "mask": mask,
            "labels": torch.randint(0, 17, (n, 5), generator=g),
        },
    ), {}


def _mean_square(out: Tensor, args: Any, kwargs: Any) -> Tensor:
    return out.square().sum(1).mean()


CASES: dict[str, Case] = {
    "Simple": Case(Simple, lambda n, g: ((_x(n, g),), {}), _mean_square),
    "Shared": Case(Shared, lambda n, g: ((_x(n, g),), {}), _mean_square),
    "Branching": Case(
        Branching,
        lambda n, g: ((_x(n, g),), {"y": _x(n, g)}),
        lambda out, args, kwargs: out["out"].square().sum(1).mean() + out["parts"][1][0].sum(1).mean(),
    ),
    "WithLoss": Case(
        WithLoss,
        lambda n, g: ((_x(n, g),), {"target": _x(n, g), "scale": 1.5}),
        lambda out, args, kwargs: out[0] + 0.1 * out[1].square().sum(1).mean(),
    ),
    "Bert": Case(Bert, _bert, lambda out, args, kwargs: out["loss"]),
    "Norm": Case(Norm, lambda n, g: ((_x(n, g),), {}), _mean_square),
    "Everything": Case(
        Everything,
        lambda n, g: ((_x(n, g), _x(n, g)), {}),
        lambda out, args, kwargs: (
            out["loss"] + out["out"].square().sum(1).mean() + 0.1 * out["early"].sum(1).mean()
        ),
    ),
    "Identity": Case(Identity, lambda n, g: ((_x(n, g),), {}), _mean_square),
    "OneOperation": Case(OneOperation, lambda n, g: ((_x(n, g),), {}), _mean_square),
}
