"""A training run in legs, each at a layout of its own, from checkpoint to checkpoint."""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import varuna.train.build
from tests.tasks import SEED, RememberingSource, global_batch, stage_map, take
from tests.toys import make_inputs, make_model
from varuna import SampleOrder, Varuna, get_this_rank_config_varuna, plain_randomness
from varuna.capture import Source

STEPS = 6


def make_optimizer(parameters: Any) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=STEPS)


def train_leg(
    name: str,
    depth: int,
    width: int,
    *,
    chunk: int,
    first: int,
    stop: int,
    store: str,
    batch: int = 6,
    dtype: torch.dtype = torch.float64,
    model_options: Mapping[str, Any] | None = None,
    save: Mapping[str, Any] | None = None,
    load: Mapping[str, Any] | None = None,
    seed: int = SEED,
    device: str = "cpu",
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Steps `first..stop-1`: from the checkpoint of `first`, unless that is 0, to one of `stop`."""
    os.environ.update(environment or {})
    mapping = stage_map(depth, width)
    rank = dist.get_rank() if dist.is_initialized() else 0
    replica = get_this_rank_config_varuna(mapping, rank)[1]
    varuna.train.build.Source = RememberingSource  # type: ignore[misc]
    RememberingSource.toy = (name, dtype, str(model_options))
    # Another start, so that whatever is not loaded shows.
    model = make_model(name, dtype=dtype, **(model_options or {}))
    if first:
        with torch.no_grad():
            for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
                tensor.add_(1)
    sample = make_inputs(name, 2, torch.Generator().manual_seed(1), dtype)
    wrapped = Varuna(
        model,
        mapping,
        sample,
        batch,
        chunk,
        device=device,
        seed=seed + (first > 0),
        timeout_seconds=30,
        **options,
    )
    optimizer, scheduler = make_optimizer(wrapped.parameters())
    wrapped.set_optimizer(optimizer, init_loss_scale=1024)
    wrapped.register("scheduler", scheduler)
    if first:
        assert wrapped.load_checkpoint(store, first, **(load or {})) == first
    losses = []
    for step in range(wrapped.iteration, stop):
        inputs = global_batch(name, step, batch, dtype)
        share = SampleOrder(batch, batch_size=batch, shuffle=False).replica(
            step=0, replica=replica, num_replicas=width
        )
        loss, overflow = wrapped.step(take(inputs, share, batch), clip_grad_max_norm=1.0)
        assert not overflow
        losses.append(loss)
        optimizer.step()
        scheduler.step()
        wrapped.zero_grad()
    wrapped.checkpoint(store, **(save or {})).result()
    found = {"losses": losses, "state": wrapped.full_state_dict(), "scale": wrapped.get_loss_scale()}
    wrapped.close()
    varuna.train.build.Source = Source  # type: ignore[misc]
    return found


def train_in_one_go(
    name: str,
    *,
    batch: int = 6,
    dtype: torch.dtype = torch.float64,
    model_options: Mapping[str, Any] | None = None,
    chunk: int | None = None,
) -> dict[str, Any]:
    """The same steps in one plain process, without varuna and without a break."""
    model = make_model(name, dtype=dtype, **(model_options or {}))
    optimizer, scheduler = make_optimizer(model.parameters())
    losses = []
    for step in range(STEPS):
        inputs = global_batch(name, step, batch, dtype)
        total = 0.0
        for first in range(0, batch, chunk or batch):
            size = min(chunk or batch, batch - first)
            with plain_randomness(seed=SEED, step=step, batch_size=size, first_sample=first):
                loss = model(**take(inputs, range(first, first + size), batch)) * (size / batch)
            loss.backward()
            total += loss.item()
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {"losses": losses, "state": model.state_dict()}
