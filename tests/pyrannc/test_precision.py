"""Half precision, and an optimizer whose state is spread over the replicas."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyrannc import RaNNCModule
from tests.pool import Pool
from tests.pyrannc.low_precision import batch, compare_low, steps, train_low, train_low_plainly
from tests.pyrannc.models import WIDTH

NUM_PARAMETERS = 6


@pytest.mark.parametrize(
    ("world", "stages", "precision", "sharded"),
    [(1, 1, "fp16", False), (2, 2, "bf16", False), (4, 1, "bf16", True), (4, 2, "fp16", True)],
)
def test_low_precision_and_a_sharded_optimizer_match_one_process(
    pool: Pool, world: int, stages: int, precision: str, sharded: bool
) -> None:
    """R16: bf16 by `use_amp_master_params`, fp16 with a gradient scaler, an overflow on a rank, clipping."""
    ranks = pool.run(train_low, world, precision, stages, shard_optimizer=sharded)
    expected = train_low_plainly(precision)
    for found in ranks:
        compare_low(found, expected)
    held = sum(found["held"] for found in ranks)
    assert held == NUM_PARAMETERS * (1 if sharded else world // stages)


def scale_with_little() -> None:
    """Rank 1 has a stage without parameters, at times no samples, and once the only ones that overflow."""
    rank = dist.get_rank()
    torch.manual_seed(3)
    plain, model = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Softmax(-1)) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    optimizer, plain_optimizer = (torch.optim.AdamW(m.parameters(), eps=1e-3) for m in (model, plain))
    wrapped = RaNNCModule(
        model, optimizer, device="cpu", precision="fp16", partition_num=2, pipeline_num=2, timeout_seconds=60
    )
    both = zip(steps("fp16", "cpu"), steps("fp16", "cpu"), strict=True)
    for (step, scaler), (_, plain_scaler) in both:
        x = batch(step, "cpu")
        parts = x[:4], x[4:]
        if step % 2:
            parts = x, x[:0]
        scaler.scale(wrapped(parts[rank]).float().square().sum(1).mean()).backward()
        with torch.autocast("cpu", torch.float16):
            out = plain(x)
        plain_scaler.scale(out.float().square().sum(1).mean()).backward()
        for each, its_optimizer in ((scaler, optimizer), (plain_scaler, plain_optimizer)):
            each.step(its_optimizer)
            each.update()
            its_optimizer.zero_grad()
        assert scaler.get_scale() == plain_scaler.get_scale()
    for name, value in wrapped.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)
    assert len(optimizer.state_dict()["param_groups"][0]["params"]) == 2
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == (2 if rank == 0 else 0)
    wrapped.undeploy()


def test_a_gradient_scaler_works_on_ranks_without_parameters_or_samples(pool: Pool) -> None:
    """R16: its scale is that of one process, also where another rank's samples overflow."""
    pool.run(scale_with_little, 2)
