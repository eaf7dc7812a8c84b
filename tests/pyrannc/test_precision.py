"""Half precision, and an optimizer whose state is spread over the replicas."""

import pytest

from tests.pool import Pool
from tests.pyrannc.low import compare_low, train_low, train_low_plainly

NUM_PARAMETERS = 6


@pytest.mark.parametrize(
    ("world", "stages", "precision", "sharded"),
    [(1, 1, "fp16", False), (2, 2, "bf16", False), (4, 1, "bf16", True), (4, 2, "fp16", True)],
)
def test_low_precision_and_a_sharded_optimizer_update_as_one_process_does(
    pool: Pool, world: int, stages: int, precision: str, sharded: bool
) -> None:
    """R16: bf16 by `use_amp_master_params`, fp16 with a gradient scaler, an overflow on a rank, clipping."""
    ranks = pool.run(train_low, world, precision, stages, shard_optimizer=sharded)
    expected = train_low_plainly(precision)
    for found in ranks:
        compare_low(found, expected)
    held = sum(found["held"] for found in ranks)
    assert held == NUM_PARAMETERS * (1 if sharded else world // stages)
