"""A job that uses every feature of a wrapped model, and the same steps with a plain model."""

import warnings
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pyrannc
from pyrannc import RaNNCModule
from tests.pyrannc.jobs import make, own_rows
from tests.pyrannc.models import WIDTH


def data(step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, WIDTH, generator=generator), torch.randn(size, WIDTH, generator=generator)


class Pair:
    """A wrapped model and a plain one, which must stay equal."""

    def __init__(self, name: str, replicas: tuple[int, ...], **options: Any) -> None:
        self.plain = make(name)
        model = make(name)
        if dist.get_rank() == 1:  # values are rank 0's
            nn.init.zeros_(next(model.parameters()))
        self.plain_optimizer = torch.optim.Adam(self.plain.parameters(), lr=0.01)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        self.options = {"replica_num": replicas, "pipeline_num": 2, "device": "cpu", "timeout_seconds": 30}
        self.model = RaNNCModule(model, self.optimizer, **self.options, **options)  # type: ignore[arg-type]
        self.size = 3 * dist.get_world_size()
        self.first, self.stop = own_rows([3] * dist.get_world_size())

    def losses(self, step: int) -> tuple[Tensor, Tensor]:
        x, y = data(step, self.size)
        mine = slice(self.first, self.stop)
        own = (self.model(x[mine]) - y[mine]).square().sum(1).mean()
        return own, (self.plain(x) - y).square().sum(1).mean()

    def backward(self, step: int) -> None:
        own, whole = self.losses(step)
        own.backward()
        whole.backward()

    def same_gradients(self) -> None:
        for name, parameter in self.plain.named_parameters():
            close(self.model.get_param_grad(name), parameter.grad)

    def same_state(self) -> None:
        state = self.model.state_dict()
        assert list(state) == list(self.plain.state_dict())
        for name, value in self.plain.state_dict().items():
            close(state[name], value)
            close(self.model.get_param(name), value)

    def step(self) -> None:
        for optimizer in (self.optimizer, self.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def use(name: str, replicas: tuple[int, ...]) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        _use(name, replicas)
    finally:
        torch.set_default_dtype(torch.float32)


def _use(name: str, replicas: tuple[int, ...]) -> None:
    pair = Pair(name, replicas)
    model, plain = pair.model, pair.plain
    assert (pyrannc.get_rank(), pyrannc.get_world_size()) == (dist.get_rank(), dist.get_world_size())
    pair.backward(0)
    pair.same_gradients()
    # Clipping is of the whole model's norm.
    norm = model.clip_grad_norm(0.5)
    close(torch.tensor(norm), nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
    for clipped, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_param_grad(clipped), parameter.grad, rtol=1e-5, atol=1e-7)
    model.zero_grad()
    plain.zero_grad()
    # Reduced, then delayed, then reduced by hand: as if all had been one backward.
    pair.backward(1)
    pyrannc.delay_grad_allreduce(True)
    pair.backward(2)
    pair.backward(3)
    pyrannc.delay_grad_allreduce(False)
    model.allreduce_grads()
    pair.same_gradients()
    # Delayed, then a backward that is not: it reduces what is left.
    pyrannc.delay_grad_allreduce(True)
    pair.backward(4)
    pyrannc.delay_grad_allreduce(False)
    pair.backward(5)
    pair.same_gradients()
    pair.step()
    pair.same_state()
    # Two forwards before their backwards; several backwards of one forward.
    (a, c), (b, d) = pair.losses(6), pair.losses(7)
    (a + b).backward()
    (c + d).backward()
    pair.same_gradients()
    pyrannc.keep_graph(True)
    own, whole = pair.losses(8)
    own.backward(retain_graph=True)
    pyrannc.keep_graph(False)
    own.backward()
    (2 * whole).backward()
    pair.same_gradients()
    pair.step()
    # Without gradients, and in evaluation.
    x, _ = data(9, pair.size)
    with torch.no_grad():
        out = model(x[pair.first : pair.stop])
    assert not out.requires_grad
    close(out, plain(x)[pair.first : pair.stop].detach())
    model.eval()
    close(model(x[pair.first : pair.stop]).detach(), plain(x)[pair.first : pair.stop].detach())
    model.train()
    pair.same_state()
    # The state of both fits a plain model and a plain optimizer, and comes back.
    saved, optimizer = model.state_dict(), pair.optimizer.state_dict()
    fresh = make(name)
    fresh.load_state_dict(saved)
    fresh_optimizer = torch.optim.Adam(fresh.parameters(), lr=0.5)
    fresh_optimizer.load_state_dict(deepcopy(optimizer))
    for index, state in pair.plain_optimizer.state_dict()["state"].items():
        close(fresh_optimizer.state_dict()["state"][index]["exp_avg"], state["exp_avg"])
    pair.backward(10)
    pair.step()
    model.load_state_dict(saved)
    pair.optimizer.load_state_dict(deepcopy(optimizer))
    plain.load_state_dict(saved)
    pair.plain_optimizer.load_state_dict(deepcopy(optimizer))
    pair.backward(11)
    pair.step()
    pair.same_state()
    saved, optimizer = model.state_dict(), pair.optimizer.state_dict()
    model.undeploy()
    # Into another layout, before its first call.
    other = Pair(name, (sum(replicas),) if len(replicas) > 1 else (1,) * sum(replicas))
    for each, its_optimizer in ((other.model, other.optimizer), (other.plain, other.plain_optimizer)):
        each.load_state_dict(saved)
        its_optimizer.load_state_dict(deepcopy(optimizer))
    other.backward(12)
    other.step()
    other.same_state()
    other.model.undeploy()
    _as_part_of_a_larger_model(name, replicas)
    _rank_0_has_all_samples(name, replicas)
    pyrannc.barrier()


def _as_part_of_a_larger_model(name: str, replicas: tuple[int, ...]) -> None:
    """Gradients go through it to what is before; its outputs, to what comes after."""
    pair = Pair(name, replicas)
    torch.manual_seed(5)
    before, after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    outer = nn.Sequential(before, pair.model, after)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), pair.plain, nn.Linear(WIDTH, 1))
    plain[0].load_state_dict(before.state_dict())
    plain[2].load_state_dict(after.state_dict())
    x, _ = data(1, pair.size)
    outer(x[pair.first : pair.stop]).square().mean().backward()
    plain(x).square().mean().backward()
    for own, other in ((before, plain[0]), (after, plain[2])):
        gradient = own.weight.grad.clone()
        dist.all_reduce(gradient)
        close(gradient / dist.get_world_size(), other.weight.grad)
    pair.same_gradients()
    state = outer.state_dict()
    assert list(state) == list(plain.state_dict())
    with warnings.catch_warnings():  # torch remarks that what other ranks hold is a shell here
        warnings.simplefilter("ignore")
        outer.load_state_dict(plain.state_dict())
    pair.model.undeploy()


def _rank_0_has_all_samples(name: str, replicas: tuple[int, ...]) -> None:
    pair = Pair(name, replicas, gather_inputs=False)
    for step in range(2):
        x, y = data(step, pair.size + step)
        out = pair.model(x) if dist.get_rank() == 0 else pair.model()
        close(out.detach(), pair.plain(x).detach())
        (out - y).square().sum(1).mean().backward()
        (pair.plain(x) - y).square().sum(1).mean().backward()
        pair.same_gradients()
        pair.step()
    pair.same_state()
    pair.model.undeploy()
