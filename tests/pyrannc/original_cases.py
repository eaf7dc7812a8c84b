"""Small models of the kinds that RaNNC's own tests use, and a training loop written as they are."""

import copy
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler, TensorDataset

import pyrannc
from pyrannc import RaNNCModule

WIDTH = 6
VOCABULARY = 12
BATCH = 4
STEPS = 2


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return 3 * (self.up(self.down(x)) + 1)


class Diamond(nn.Module):
    """Two branches from one value, joined again; the value itself is added at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        return self.head(self.left(stem) + 2 * self.right(stem)) + stem


class SharedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) / 2


class OwnNorm(nn.Module):
    """A norm written by hand, which converts to the dtype of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).to(self.scale.dtype)
        centred = hidden - hidden.mean(-1, keepdim=True)
        deviation = centred.square().mean(-1, keepdim=True)
        return self.last((centred * torch.rsqrt(deviation + 1e-12) * self.scale + self.shift).to(x.dtype))


class Normed(nn.Module):
    def __init__(self, affine: bool, tracks: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, affine=affine, track_running_stats=tracks)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(1, 3, 3), nn.Linear(3 * 3 * 3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        pooled = nn.functional.max_pool2d(torch.relu(self.convolution(x)), 2)
        return self.head(pooled.view(-1, pooled.size()[1:].numel()))


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class TimesConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.tensor([2.0])  # neither a parameter nor a buffer

    def forward(self, x: Tensor) -> Tensor:
        return torch.mul(x, self.factor)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


class LossInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.second(self.first(x)), y)


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (WIDTH,)
    target: tuple[int, ...] = (WIDTH,)
    tokens: bool = False
    loss_inside: bool = False
    over_samples: bool = False  # the result depends on which samples are computed together
    stages: int = 2  # at most


CASES = {
    "Bottleneck": Case(Bottleneck),
    "Diamond": Case(Diamond),
    "SharedWeight": Case(SharedWeight),
    "OwnNorm": Case(OwnNorm),
    "Normed, plain": Case(lambda: Normed(False, False), over_samples=True),
    "Normed, affine": Case(lambda: Normed(True, False), over_samples=True),
    "Normed, tracking": Case(lambda: Normed(False, True), over_samples=True),
    "Images": Case(Images, shape=(1, 8, 8)),
    "Doubled": Case(Doubled, stages=1),
    "TimesConstant": Case(TimesConstant, stages=1),
    "Embedded": Case(Embedded, shape=(5,), target=(5, WIDTH), tokens=True, stages=1),
    "LossInside": Case(LossInside, loss_inside=True),
}


def loader(case: Case, gather_inputs: bool) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    size = pyrannc.get_world_size() * BATCH * STEPS if gather_inputs else BATCH * STEPS
    x = torch.randn(size, *case.shape, generator=generator)
    if case.tokens:
        x = torch.randint(VOCABULARY, (size, *case.shape), generator=generator)
    data = TensorDataset(x, torch.randn(size, *case.target, generator=generator))
    ranks = {"num_replicas": pyrannc.get_world_size(), "rank": pyrannc.get_rank(), "shuffle": False}
    sampler: Any = DistributedSampler(data, **ranks) if gather_inputs else SequentialSampler(data)
    return DataLoader(data, batch_size=BATCH, sampler=sampler)


def forward(model: Any, case: Case, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the loss."""
    out = model(x, y) if case.loss_inside else model(x)
    return out, out if case.loss_inside else nn.functional.mse_loss(out, y)


def all_samples(x: Tensor, gather_inputs: bool) -> Tensor:
    """Return the batch of all ranks, which one process computes at once."""
    if not gather_inputs or pyrannc.get_world_size() == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(pyrannc.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def check_parameters(plain: nn.Module, wrapped: Any) -> None:
    expected = dict(plain.named_parameters())
    assert wrapped.name_to_param.keys() == expected.keys()
    assert dict(wrapped.named_parameters(from_global=True)).keys() == expected.keys()
    assert sum(p.numel() for p in wrapped.parameters(from_global=True)) == sum(
        p.numel() for p in expected.values()
    )
    for name, parameter in wrapped.named_parameters():  # this rank's
        torch.testing.assert_close(parameter, expected[name])
    for name in wrapped.name_to_param:
        torch.testing.assert_close(wrapped.get_param(name, False), expected[name].detach())


def check_gradients(plain: nn.Module, wrapped: Any) -> None:
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(wrapped.get_param_grad(name, False), parameter.grad)


def match(name: str, depth: int, microbatches: int, gather_inputs: bool = True) -> None:
    """Train a wrapped model and a plain one side by side; save and load both states."""
    case = CASES[name]
    torch.manual_seed(2)
    plain = case.make()
    model = copy.deepcopy(plain)
    has_parameters = len(list(model.parameters())) > 0
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.01) if has_parameters else None
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01) if has_parameters else None
    wrapped = RaNNCModule(
        model,
        optimizer,
        gather_inputs=gather_inputs,
        enable_apex_amp=False,
        check_unused_values=True,
        partition_num=min(depth, case.stages),
        pipeline_num=microbatches,
        measure=False,
        device="cpu",
        timeout_seconds=30,
    )
    check_parameters(plain, wrapped)
    for x, y in loader(case, gather_inputs):
        out, loss = forward(wrapped, case, x, y)
        whole_x, whole_y = all_samples(x, gather_inputs), all_samples(y, gather_inputs)
        expected, expected_loss = forward(plain, case, whole_x, whole_y)
        if not case.loss_inside and gather_inputs:
            first = pyrannc.get_rank() * BATCH
            expected = expected[first : first + BATCH]
        torch.testing.assert_close(out, expected)
        if optimizer is None or plain_optimizer is None:
            continue
        loss.backward()
        expected_loss.backward()
        check_gradients(plain, wrapped)
        for one in (optimizer, plain_optimizer):
            one.step()
            one.zero_grad()
        check_parameters(plain, wrapped)
    if optimizer is not None and plain_optimizer is not None:
        check_saved_state(plain, wrapped, plain_optimizer, optimizer)
    pyrannc.clear()


def check_saved_state(
    plain: nn.Module, wrapped: Any, plain_optimizer: torch.optim.Optimizer, optimizer: torch.optim.Optimizer
) -> None:
    gathered: Any = optimizer.state_dict
    state, optimizer_state = wrapped.state_dict(), gathered(from_global=True)
    file = io.BytesIO()
    torch.save({"model": state, "optimizer": optimizer_state}, file)
    file.seek(0)
    loaded = torch.load(file)
    fresh = copy.deepcopy(plain)
    fresh.load_state_dict(loaded["model"])
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(fresh.state_dict()[name], value)
    expected = plain_optimizer.state_dict()
    assert loaded["optimizer"]["param_groups"] == expected["param_groups"]
    for number, values in expected["state"].items():
        torch.testing.assert_close(loaded["optimizer"]["state"][number], values)
    load: Any = optimizer.load_state_dict
    load(loaded["optimizer"], from_global=True)


def match_all(names: list[str], depth: int, microbatches: int, gather_inputs: bool = True) -> list[str]:
    """Return the cases that do not match, with their errors."""
    torch.set_default_dtype(torch.float64)
    try:
        for name in names:
            match(name, depth, microbatches, gather_inputs)
    except BaseException as error:
        error.add_note(f"in case {name}")
        raise
    finally:
        torch.set_default_dtype(torch.float32)
    return names
