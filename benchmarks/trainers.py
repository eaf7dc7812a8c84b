"""Seconds per update of VarunaTrainer, and of other ways to train the same model with transformers.

Every worker has one core. `device_map` keeps one device busy at a time, so its stages take as long as one
worker that runs all layers: this is measured, without the time for its transfers.
"""

import os
import tempfile
import time
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist

Kind = Literal["varuna", "transformers", "ddp", "fsdp2"]
BATCH, TOKENS, VOCABULARY = 16, 256, 512


def make_model(layers: int, width: int, tokens: int = TOKENS) -> Any:
    import transformers as hf

    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 4 * width, "vocab_size": VOCABULARY}
    return hf.LlamaForCausalLM(hf.LlamaConfig(max_position_embeddings=tokens, **sizes, **heads))


def make_rows(count: int, tokens: int = TOKENS) -> list[dict[str, Any]]:
    rows = torch.randint(VOCABULARY, (count, tokens), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def seconds_per_update(
    kind: Kind, updates: int, layers: int, width: int, stages: int = 1, on_gpu: bool = False
) -> list[float]:
    """Train on this rank; return the seconds of each update after the first three."""
    if kind == "fsdp2":
        return _fsdp2(updates, layers, width)
    if kind == "transformers":  # alone, also where the pool has started several processes
        hidden = {name: os.environ.pop(name, None) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        try:
            return _trainer(kind, updates, layers, width, 1, BATCH, on_gpu)
        finally:
            os.environ.update({name: value for name, value in hidden.items() if value is not None})
    share = BATCH // dist.get_world_size() if kind == "ddp" else BATCH
    return _trainer(kind, updates, layers, width, stages, share, on_gpu)


def _trainer(
    kind: Kind, updates: int, layers: int, width: int, stages: int, batch: int, on_gpu: bool
) -> list[float]:
    import transformers as hf
    from accelerate.state import AcceleratorState, PartialState

    from varuna.hf import VarunaTrainer

    class Stopwatch(hf.TrainerCallback):
        def on_step_end(self, *_args: Any, **_options: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    tokens = 4 * TOKENS if on_gpu else TOKENS
    ends: list[float] = []
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    arguments = hf.TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=batch,
        max_steps=updates + 3,
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        use_cpu=not on_gpu,
        bf16=on_gpu,
        disable_tqdm=True,
        log_level="error",
        dataloader_pin_memory=False,
    )
    layout: dict[str, Any] = {"stages": stages, "micro_batch": 1 if stages > 1 else None}
    trainer_class: Any = VarunaTrainer if kind == "varuna" else hf.Trainer
    trainer = trainer_class(
        make_model(layers, width, tokens),
        arguments,
        train_dataset=make_rows(4 * BATCH, tokens),
        callbacks=[Stopwatch()],
        **(layout if kind == "varuna" else {}),
    )
    trainer.train()
    return [after - before for before, after in pairwise(ends[2:])]


def _fsdp2(updates: int, layers: int, width: int) -> list[float]:
    """Train with torch's fully_shard in a plain loop."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model(layers, width)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    share = BATCH // dist.get_world_size()
    tokens = torch.stack([row["input_ids"] for row in make_rows(share)])
    times = []
    for _ in range(updates + 3):
        started = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    return times[3:]
