"""Training continues in any layout from a checkpoint of another."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.legs import STEPS, train_in_one_go, train_leg
from tests.checkpoint.s3 import BUCKET, S3Server
from tests.pool import Pool

GPT = {"dropout": 0.2}
CAREERS: dict[str, list[dict[str, Any]]] = {
    "deeper, wider, back to one": [
        {"depth": 2, "width": 2, "chunk": 2},
        {"depth": 4, "width": 1, "chunk": 1},
        {"depth": 1, "width": 1, "chunk": 4},
    ],
    "from one process to odd replicas": [
        {"depth": 1, "width": 1, "chunk": 6},
        {"depth": 1, "width": 4, "chunk": 2},
        {"depth": 3, "width": 1, "chunk": 5, "schedule": "1f1b"},
    ],
    "the optimizer sharded, then not": [
        {"depth": 1, "width": 3, "chunk": 2, "shard_optimizer": True},
        {"depth": 2, "width": 2, "chunk": 3, "shard_optimizer": True, "save": {"shard": True}},
        {"depth": 2, "width": 1, "chunk": 3},
    ],
    "in the background, shared among replicas": [
        {"depth": 1, "width": 2, "chunk": 3, "save": {"tempdir": "memory", "shard": True}},
        {"depth": 2, "width": 2, "chunk": 1, "save": {"tempdir": "memory"}},
        {"depth": 2, "width": 1, "chunk": 2, "recompute": True},
    ],
}


def go(pool: Pool, name: str, legs: list[dict[str, Any]], store: Path | str, **common: Any) -> dict[str, Any]:
    """All legs, two steps each; the losses of all and the state at the end."""
    losses: list[float] = []
    for number, leg in enumerate(legs):
        leg = {**common, **leg}
        world = leg["depth"] * leg["width"]
        bounds = {"first": 2 * number, "stop": 2 * number + 2, "store": str(store)}
        found = pool.run(train_leg, world, name, **leg, **bounds)
        losses += found[0]["losses"]
    return {**found[0], "losses": losses}


@pytest.mark.parametrize("career", CAREERS)
def test_training_goes_on_in_any_other_layout(career: str, pool: Pool, tmp_path: Path) -> None:
    """V36: losses, dropout, AdamW, the learning rate and the weights at the end are those of one process."""
    assert len(CAREERS[career]) * 2 == STEPS
    found = go(pool, "GPT", CAREERS[career], tmp_path, model_options=GPT)
    expected = train_in_one_go("GPT", model_options=GPT)
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-10, atol=0)
    torch.testing.assert_close(found["state"], dict(expected["state"]), rtol=1e-8, atol=1e-12)


def test_buffers_of_batch_norm_go_along(pool: Pool, tmp_path: Path) -> None:
    """V36: with the micro-batches of one process, at each layout."""
    legs = [
        {"depth": 2, "width": 1, "chunk": 3},
        {"depth": 1, "width": 2, "chunk": 3},
        {"depth": 3, "width": 1, "chunk": 3},
    ]
    found = go(pool, "Conv", legs, tmp_path)
    expected = train_in_one_go("Conv", chunk=3)
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-10, atol=0)
    torch.testing.assert_close(found["state"], dict(expected["state"]), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_goes_on_bit_for_bit_at_the_same_layout(
    precision: str, pool: Pool, tmp_path: Path
) -> None:
    """V36: with the loss scale, and dropout; at another layout as close as half precision is."""
    same = {"depth": 2, "width": 1, "chunk": 2, "precision": precision, "dtype": torch.float32}
    common = {"model_options": GPT, **same}
    (uninterrupted, _) = pool.run(
        train_leg, 2, "GPT", **common, first=0, stop=STEPS, store=str(tmp_path / "whole")
    )
    resumed = go(pool, "GPT", [same, same, same], tmp_path / "legs", model_options=GPT)
    assert resumed["losses"] == uninterrupted["losses"]
    assert resumed["scale"] == uninterrupted["scale"]
    torch.testing.assert_close(resumed["state"], uninterrupted["state"], rtol=0, atol=0)
    other = {**same, "depth": 1, "width": 2, "chunk": 1}
    moved = go(pool, "GPT", [same, other, same], tmp_path / "moved", model_options=GPT)
    torch.testing.assert_close(moved["losses"], uninterrupted["losses"], rtol=2e-2, atol=0)


@pytest.mark.timeout(300)
def test_an_object_store_serves_as_any_other(pool: Pool) -> None:
    """V35, V36: a real S3 server, given by the environment; saves at once and in the background."""
    legs = [
        {"depth": 2, "width": 1, "chunk": 3, "save": {"keep_last": 1}},
        {"depth": 1, "width": 2, "chunk": 3, "save": {"tempdir": "memory", "shard": True, "keep_last": 1}},
        {"depth": 1, "width": 1, "chunk": 6},
    ]
    with closing(S3Server()) as server:
        at = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        found = go(pool, "GPT", legs, f"s3://{BUCKET}/run", model_options=GPT, environment=at)
    expected = train_in_one_go("GPT", model_options=GPT)
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-10, atol=0)
