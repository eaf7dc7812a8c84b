"""LoRA over a base of 4-bit weights on a GPU. Several stages share the one GPU as processes:

pytest -m gpu tests/gpu/test_quantized.py
"""

from typing import Any

import pytest
import torch

from tests.hf.adapters import BATCH, SEED
from tests.hf.models import make_batch
from tests.hf.test_quantized import make_quantized
from tests.pool import Pool
from tests.tasks import stage_map
from varuna import Varuna, plain_randomness

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
STEPS = 4


def train_on_cuda(depth: int) -> list[float]:
    """Return the losses over `depth` stages; 0: of the plain model."""
    model: Any = make_quantized().to(DEVICE)
    if depth:
        options: dict[str, Any] = {"device": DEVICE, "seed": SEED, "timeout_seconds": 60}
        model = Varuna(model, stage_map(depth, 1), make_batch("llama", 2), BATCH, 2, **options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    if depth:
        model.set_optimizer(optimizer)
    losses = []
    for step in range(STEPS):
        batch = make_batch("llama", BATCH, step)
        if depth:
            losses.append(model.step(batch)[0])
        else:
            with plain_randomness(seed=SEED, step=step, batch_size=BATCH):
                loss = model(**{name: value.to(DEVICE) for name, value in batch.items()}).loss
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        model.zero_grad()
    if depth:
        model.close()
    return losses


@pytest.mark.parametrize("depth", [1, 2])
def test_a_quantized_base_on_cuda_trains_as_one_process(depth: int, pool: Pool) -> None:
    """TRA-2, V21: NF4 with double quantization."""
    (expected,) = pool.run(train_on_cuda, 1, 0)
    assert expected[-1] != pytest.approx(expected[0], rel=1e-3), "the adapters train"
    for found in pool.run(train_on_cuda, depth, depth):
        assert found == pytest.approx(expected, rel=1e-3)
