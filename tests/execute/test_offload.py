"""An optimizer with its state on the host makes the same updates."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from varuna.execute.update.offload import chunks, keep_state_on_host

Make = Callable[[Any], torch.optim.Optimizer]


def weights() -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(size, 3)) for size in (5, 2, 7, 1)]


def train(make: Make, *, keeps: bool) -> tuple[list[nn.Parameter], torch.optim.Optimizer, list[str]]:
    parameters = weights()
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.05}]
    optimizer = make(groups)
    if keeps:
        keep_state_on_host(optimizer, chunk_bytes=100)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    hooks: list[str] = []
    optimizer.register_step_post_hook(lambda *_: hooks.append("after"))
    for step in range(5):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.1 * step - 0.2)
        parameters[1].grad = None if step == 3 else parameters[1].grad
        optimizer.step()
        scheduler.step()
    return parameters, optimizer, hooks


@pytest.mark.parametrize(
    "make",
    [
        lambda groups: torch.optim.AdamW(groups, lr=0.1),
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        lambda groups: torch.optim.RMSprop(groups, lr=0.1),
    ],
)
def test_updates_are_equal_bit_for_bit_and_hooks_run_once_per_step(make: Make) -> None:
    kept, optimizer, hooks = train(make, keeps=True)
    usual, other, _ = train(make, keeps=False)
    assert all(map(torch.equal, kept, usual))
    assert hooks == ["after"] * 5
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in other.param_groups]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]


def test_parameters_come_in_chunks_of_limited_size() -> None:
    def sizes(found: Iterable[list[Tensor]]) -> list[list[int]]:
        return [[p.nbytes for p in run] for run in found]

    parameters = weights()
    for parameter in parameters[:3]:
        parameter.grad = torch.zeros_like(parameter)
    assert sizes(chunks([{"params": parameters}], 90)) == [[60, 24], [84]]
    assert sizes(chunks([{"params": parameters}], 1)) == [[60], [24], [84]]


def test_a_closure_is_refused() -> None:
    optimizer = torch.optim.AdamW(weights())
    keep_state_on_host(optimizer)
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
