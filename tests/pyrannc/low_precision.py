"""Training in half precision with a gradient scaler, and the same by one plain process."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyrannc import RaNNCModule
from tests.pyrannc.jobs import make
from tests.pyrannc.models import WIDTH

STEPS, OVERFLOWING, SIZE = 5, 2, 8
MAX_NORM = 0.5


def batch(step: int, device: str) -> Tensor:
    """One step's samples of all ranks; in one step a sample that fp16 cannot hold, on the last rank alone."""
    x = torch.randn(SIZE, WIDTH, generator=torch.Generator().manual_seed(step))
    if step == OVERFLOWING:
        x[-1] = 1e30
    return x.to(device)


def steps(precision: str, device: str) -> Iterator[tuple[int, torch.amp.GradScaler]]:
    """Without the step that overflows, where nobody would leave it out."""
    scales = precision == "fp16"
    scaler = torch.amp.GradScaler(device.split(":")[0], init_scale=2.0**9, growth_interval=2, enabled=scales)
    for step in range(STEPS):
        if scales or step != OVERFLOWING:
            yield step, scaler


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)


def train_low(precision: str, stages: int, device: str = "cpu", **options: Any) -> dict[str, Any]:
    """With micro-batches of 2 samples at every layout of up to 4 ranks."""
    usual = (precision == "bf16") == (device == "cpu")  # what one gets by the short way
    low: dict[str, Any] = {"use_amp_master_params": True} if usual else {"precision": precision}
    model = make("Simple")
    optimizer = optimizer_of(model)
    world, rank = dist.get_world_size(), dist.get_rank()
    width = world // stages
    wrapped = RaNNCModule(
        model,
        optimizer,
        device=device,
        partition_num=stages,
        pipeline_num=SIZE // 2 // width,
        timeout_seconds=60,
        **low,
        **options,
    )
    scales = []
    for step, scaler in steps(precision, device):
        out = wrapped(batch(step, device).chunk(world)[rank])
        assert out.device == torch.device(device)
        scaler.scale(out.float().square().sum(1).mean()).backward()
        scaler.unscale_(optimizer)
        if step == 1:
            wrapped.clip_grad_norm(MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    found = {
        "dtype": out.dtype,
        "scales": scales,
        "state": _on_host(wrapped.state_dict()),
        "moments": {n: s["exp_avg"].cpu() for n, s in optimizer.state_dict()["state"].items()},
        "held": len(optimizer.state_dict(from_global=False)["state"]),  # type: ignore[call-arg]
    }
    wrapped.undeploy()
    return found


def train_low_plainly(precision: str, device: str = "cpu") -> dict[str, Any]:
    model = make("Simple").to(device)
    optimizer = optimizer_of(model)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    scales = []
    for step, scaler in steps(precision, device):
        for part in batch(step, device).split(2):
            with torch.autocast(device.split(":")[0], dtype=dtype):
                out = model(part)
            scaler.scale(out.float().square().sum(1).mean() * (len(part) / SIZE)).backward()
        scaler.unscale_(optimizer)
        if step == 1:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return {
        "dtype": dtype,
        "scales": scales,
        "state": _on_host(model.state_dict()),
        "moments": {n: s["exp_avg"].cpu() for n, s in optimizer.state_dict()["state"].items()},
    }


def _on_host(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in state.items()}


def compare_low(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert (found["dtype"], found["scales"]) == (expected["dtype"], expected["scales"])
    for part in ("state", "moments"):
        for name, value in expected[part].items():
            torch.testing.assert_close(found[part][name], value, rtol=1e-4, atol=1e-6)
