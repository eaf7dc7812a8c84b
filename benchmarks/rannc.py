"""`RaNNCModule` against what a user would write without it.

One replica on every rank against DistributedDataParallel; one rank against the plain loop; two stages against
`Varuna` with the same cut. All sides are given the same batch, and take the same step of the same optimizer.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import Contender, Sample, Settings, take_turns
from benchmarks.models import SEED, Block
from benchmarks.sides import Side, make_optimizer
from pyrannc import RaNNCModule
from varuna import CutPoint, Varuna

Kind = Literal["mlp", "transformer", "convolutions"]
TOKENS, VOCAB, PIXELS, CLASSES = 64, 512, 24, 10


@dataclass(frozen=True)
class Subject:
    """A model, and the samples that each rank has."""

    kind: Kind
    width: int
    layers: int
    samples: int
    loss_inside: bool = False  # the model gives its loss; otherwise the loop computes it

    @property
    def name(self) -> str:
        loss = ", loss in the model" if self.loss_inside else ""
        return f"{self.kind}, {self.layers} layers of {self.width}, {self.samples} samples a rank{loss}"


SUBJECTS = [
    Subject("mlp", width=1024, layers=6, samples=128),
    Subject("transformer", width=192, layers=4, samples=8),
    Subject("transformer", width=192, layers=4, samples=8, loss_inside=True),
    Subject("convolutions", width=48, layers=6, samples=16),
]
SMALL = [replace(subject, width=32, layers=2, samples=4) for subject in SUBJECTS]


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.inner(x)
        return result


class Net(nn.Module):
    """Its predictions; its loss, where it is given what they should be."""

    def __init__(self, subject: Subject, *, annotated: bool) -> None:
        super().__init__()
        width = subject.width
        self.kind = subject.kind
        self.first: nn.Module
        self.last: nn.Module
        layers: list[nn.Module]
        if subject.kind == "mlp":
            self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
            layers = [
                Residual(nn.Sequential(nn.Linear(width, width), nn.Tanh())) for _ in range(subject.layers)
            ]
        elif subject.kind == "transformer":
            self.first = nn.Embedding(VOCAB, width)
            self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCAB))
            layers = [Block(width) for _ in range(subject.layers)]
        else:  # with BatchNorm, whose statistics the ranks must share
            self.first = nn.Conv2d(3, width, 3, padding=1)
            self.last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))
            layers = [
                Residual(
                    nn.Sequential(
                        nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
                    )
                )
                for _ in range(subject.layers)
            ]
        self.layers = nn.ModuleList(layers)
        self.cut = CutPoint() if annotated else nn.Identity()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            x = layer(self.cut(x) if 2 * number == len(self.layers) else x)
        out: Tensor = self.last(x)
        return out if y is None else self.loss(out, y)

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) if self.kind == "mlp" else F.cross_entropy(out.flatten(0, -2), y.flatten())


def make_net(subject: Subject, *, annotated: bool = False) -> Net:
    torch.manual_seed(SEED)
    return Net(subject, annotated=annotated)


def make_batch(subject: Subject, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    if subject.kind == "mlp":
        x, y = torch.randn(2, samples, subject.width, generator=generator)
        return x, y
    if subject.kind == "transformer":
        x, y = torch.randint(VOCAB, (2, samples, TOKENS), generator=generator)
        return x, y
    pixels = torch.randn(samples, 3, PIXELS, PIXELS, generator=generator)
    return pixels, torch.randint(CLASSES, (samples,), generator=generator)


class Loop(Side):
    """The plain loop over one process's model, whatever wraps it; each rank has samples of its own."""

    optimizer: torch.optim.Optimizer

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        world, rank = dist.get_world_size(), dist.get_rank()
        x, y = make_batch(subject, subject.samples * world)
        self.x, self.y = (whole.chunk(world)[rank].clone() for whole in (x, y))
        self.net = make_net(subject)
        self.model: nn.Module = self.net

    def run(self) -> Tensor:
        if self.subject.loss_inside:
            loss: Tensor = self.model(self.x, self.y)
        else:
            loss = self.net.loss(self.model(self.x), self.y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def step(self) -> float | None:
        loss = self.whole_loss(self.run())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def whole_loss(self, loss: Tensor) -> Tensor:
        return loss.detach()


class Plain(Loop):
    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.optimizer = make_optimizer(self.model.parameters())


class DataParallel(Loop):
    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.model = DistributedDataParallel(self.net, gradient_as_bucket_view=True)
        self.optimizer = make_optimizer(self.model.parameters())

    def whole_loss(self, loss: Tensor) -> Tensor:
        loss = loss.detach()
        if self.subject.loss_inside:  # ours is the whole batch's too
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return loss


class Rannc(Loop):
    def __init__(self, subject: Subject, *, stages: int = 1, microbatches: int = 1) -> None:
        super().__init__(subject)
        self.net = make_net(subject, annotated=stages > 1)
        self.optimizer = make_optimizer(self.net.parameters())
        self.wrapped = RaNNCModule(
            self.net,
            self.optimizer,
            device="cpu",
            seed=SEED,
            partition_num=stages,
            pipeline_num=microbatches,
            checkpointing=False,
        )
        self.model = self.wrapped
        self.tells_loss = stages == 1 or subject.loss_inside

    def step(self) -> float | None:
        loss = super().step()
        return loss if self.tells_loss else None  # with a loss of its own samples alone

    def close(self) -> None:
        self.wrapped.undeploy()


class TwoStages(Side):
    """`Varuna` on the same cut. Its loss is in the model, and each rank is given all samples."""

    def __init__(self, subject: Subject, *, microbatches: int, **options: Any) -> None:
        samples = subject.samples * dist.get_world_size()
        x, y = make_batch(subject, samples)
        self.inputs = {"x": x, "y": y}
        self.model = Varuna(
            make_net(subject, annotated=True),
            "0;1",
            {"x": x[:2], "y": y[:2]},
            batch_size=samples,
            chunk_size=samples // microbatches,
            device="cpu",
            seed=SEED,
            from_cache=False,
            recompute=False,
            **options,
        )
        self.optimizer = make_optimizer(self.model.parameters())
        self.model.set_optimizer(self.optimizer)

    def step(self) -> float:
        loss, _ = self.model.step(self.inputs)
        self.optimizer.step()
        self.model.zero_grad()
        return loss

    def close(self) -> None:
        self.model.close()


SIDES: dict[str, type[Side]] = {
    "RaNNCModule": Rannc,
    "plain loop": Plain,
    "DistributedDataParallel": DataParallel,
    "Varuna": TwoStages,
}


def turns(contenders: Sequence[Contender], settings: Settings) -> list[list[Sample]]:
    return take_turns(contenders, settings, sides=SIDES)


def first_calls(contenders: Sequence[Contender], repeats: int) -> list[list[float]]:
    """Seconds of each contender from the plain model to the end of the first step, taken in turn."""
    found: list[list[float]] = [[] for _ in contenders]
    for _ in range(repeats):
        for contender, seconds in zip(contenders, found, strict=True):
            dist.barrier()
            started = time.perf_counter()
            side = SIDES[contender.side](**contender.arguments)
            side.step()
            seconds.append(time.perf_counter() - started)
            dist.barrier()
            side.close()
    return found
