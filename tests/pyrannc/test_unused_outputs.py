"""Outputs that only some ranks use, or none: the same parameters get gradients as in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pyrannc
from pyrannc import RaNNCModule
from tests.pool import Pool


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


@pytest.mark.parametrize("stages", [1, 2])
def test_each_rank_may_use_different_outputs(pool: Pool, stages: int) -> None:
    """R2, R7: what no rank has a gradient for has none; and it takes no other one with it."""
    pool.run(use_heads, 2, stages)


def use_heads(stages: int) -> None:
    rank = dist.get_rank()
    torch.manual_seed(3)
    plain = Heads()
    model = Heads()
    model.load_state_dict(plain.state_dict())
    wrapped = RaNNCModule(model, device="cpu", partition_num=stages, timeout_seconds=30)
    x = torch.randn(4, 3)
    own = x.chunk(2)[rank]

    def compare() -> None:
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(wrapped.get_param_grad(name), parameter.grad)
        wrapped.zero_grad()
        plain.zero_grad()

    wrapped(own)[rank].sum().backward()
    left, right = plain(x)
    ((left[:2].sum() + right[2:].sum()) / 2).backward()
    compare()
    # Reduced, then delayed: the reduced gradient lives where the next reduction happens.
    wrapped(own)[0].sum().backward()
    pyrannc.delay_grad_allreduce(True)
    wrapped(own)[0].sum().backward()
    pyrannc.delay_grad_allreduce(False)
    wrapped.allreduce_grads()
    plain(x)[0].sum().backward()
    assert plain.right.weight.grad is None
    compare()
    wrapped.undeploy()
