"""One training script with both interfaces, `varuna` and `pyrannc`, and with the plain model."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyrannc import RaNNCModule
from tests.tasks import SEED, stage_map
from varuna import Varuna

FACES = ["varuna", "pyrannc"]
LAYOUTS = [(2, 1), (1, 2), (2, 2)]
BATCH = 8

Script = Callable[[Any, torch.optim.Optimizer, Callable[[int], float]], Any]
"""A script is given the model, its optimizer, and a function that runs forward and backward of a step."""


def batch_of(step: int) -> Tensor:
    return torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def play(
    face: str,
    depth: int,
    width: int,
    make: Callable[[], nn.Module],
    script: Script,
    options: dict[str, Any] | None = None,
) -> tuple[Any, dict[str, Tensor]]:
    """Run a script; return its result and the state of the whole model. `face` "plain": in one process."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(SEED)
        model = make()
        wrapped: Any = model
        if face == "varuna":
            sample, mapping = {"x": batch_of(0)[:2]}, stage_map(depth, width)
            wrapped = Varuna(
                model, mapping, sample, BATCH, 2, device="cpu", timeout_seconds=30, **options or {}
            )
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
        if face == "pyrannc":
            options = {"partition_num": depth, "pipeline_num": 2, **(options or {})}
            wrapped = RaNNCModule(model, optimizer, device="cpu", timeout_seconds=30, **options)
        if face == "varuna":
            wrapped.set_optimizer(optimizer)

        def run(step: int) -> float:
            x = batch_of(step)
            if face == "varuna":
                loss, _ = wrapped.step({"x": x.chunk(width)[wrapped.rank_within_stage]})
                return float(loss)
            if face == "pyrannc":
                x = x.chunk(depth * width)[dist.get_rank()]
            loss = wrapped(x)
            loss.backward()
            return float(loss.detach())

        result = script(wrapped, optimizer, run)
        state = wrapped.full_state_dict() if face == "varuna" else wrapped.state_dict()
        if face == "varuna":
            wrapped.close()
        elif face == "pyrannc":
            assert len(wrapped.plan.stages) == depth
            wrapped.undeploy()
        return result, {name: value.detach().clone() for name, value in state.items()}
    finally:
        torch.set_default_dtype(torch.float32)


def check_state(found: dict[str, Tensor], expected: dict[str, Tensor], context: str = "") -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{context} {n}: {m}"
        )
