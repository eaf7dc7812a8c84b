"""Seconds per update of VarunaTrainer, and of other ways to train the same model with transformers.

Every worker has one core. `device_map` keeps one device busy at a time, so its stages take as long as one
worker that runs all layers: this is measured, without the time for its transfers.

On a machine with fewer cores than stages, the time of an update is computed: the schedule is played with the
CPU time of each forward and backward. The CPU time that a rank needs beside them is added.
"""

import os
import tempfile
import time
from itertools import pairwise
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist

from benchmarks.makespan import play
from varuna.schedule import build
from varuna.types import Instruction, Op

Kind = Literal["varuna", "transformers", "ddp", "fsdp2"]
BATCH, TOKENS, VOCABULARY = 16, 256, 512
SKIPPED = 2
"""Updates at the start that do not count."""


class UpdateTimes(msgspec.Struct, frozen=True):
    """One update on one rank: CPU seconds of each forward and backward, and of everything."""

    operations: list[tuple[Op, int, float]]
    cpu: float
    wall: float


def computed_seconds(ranks: list[UpdateTimes]) -> float:
    """Return the time of an update if every stage, one for each rank, had a core of its own."""
    durations = {
        Instruction(stage, op, microbatch): seconds
        for stage, times in enumerate(ranks)
        for op, microbatch, seconds in times.operations
    }
    count = sum(op == "F" for op, _, _ in ranks[0].operations)
    beside = max(times.cpu - sum(seconds for _, _, seconds in times.operations) for times in ranks)
    return play(build("varuna", stages=len(ranks), microbatches=count).rows, durations) + beside


def tokens_per_second(milliseconds: float, samples: int = BATCH) -> float:
    """Return the speed of updates of `samples` samples, of all workers together."""
    return 1000 * samples * TOKENS / milliseconds


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
    """Train on this rank; return the seconds of each update after the first ones."""
    return [times.wall for times in times_of_updates(kind, updates, layers, width, stages, on_gpu)]


def times_of_updates(
    kind: Kind,
    updates: int,
    layers: int,
    width: int,
    stages: int = 1,
    on_gpu: bool = False,
    accumulated: int = 1,
) -> list[UpdateTimes]:
    """Train on this rank; return the times of each update after the first ones."""
    if kind == "fsdp2":
        return [UpdateTimes([], 0.0, wall) for wall in _fsdp2(updates, layers, width)]
    share = BATCH // dist.get_world_size() if kind == "ddp" else BATCH
    options = {
        "per_device_train_batch_size": share,
        "gradient_accumulation_steps": accumulated,
        "max_steps": updates + SKIPPED,
        "use_cpu": not on_gpu,
        "bf16": on_gpu,
    }
    hidden = {}
    if kind == "transformers":  # alone, also where the pool has started several processes
        hidden = {name: os.environ.pop(name, None) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    try:
        return _trainer(kind, layers, width, stages, options)
    finally:
        os.environ.update({name: value for name, value in hidden.items() if value is not None})


def _trainer(kind: Kind, layers: int, width: int, stages: int, options: dict[str, Any]) -> list[UpdateTimes]:
    import transformers as hf
    from accelerate.state import AcceleratorState, PartialState

    from varuna.hf import VarunaTrainer

    class Stopwatch(hf.TrainerCallback):
        def on_step_end(self, *_args: Any, **_options: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            ends.append((list(operations), time.process_time(), time.perf_counter()))
            operations.clear()
            if kind == "varuna" and len(ends) == 1:  # the model is wrapped
                _note_operations(trainer.pipeline.wrapped._trainer.engine, operations)

    on_gpu = bool(options["bf16"])
    tokens = 4 * TOKENS if on_gpu else TOKENS
    ends: list[tuple[list[tuple[Op, int, float]], float, float]] = []
    operations: list[tuple[Op, int, float]] = []
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    arguments = hf.TrainingArguments(
        tempfile.mkdtemp(),
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        dataloader_pin_memory=False,
        **options,
    )
    trainer_class: Any = VarunaTrainer if kind == "varuna" else hf.Trainer
    trainer = trainer_class(
        make_model(layers, width, tokens),
        arguments,
        train_dataset=make_rows(4 * BATCH, tokens),
        callbacks=[Stopwatch()],
        **({"stages": stages} if kind == "varuna" else {}),
    )
    trainer.train()
    return [
        UpdateTimes(found, cpu - cpu_before, wall - wall_before)
        for (_, cpu_before, wall_before), (found, cpu, wall) in pairwise(ends[SKIPPED - 1 :])
    ]


def _note_operations(engine: Any, operations: list[tuple[Op, int, float]]) -> None:
    """Note the CPU seconds of every operation of the engine."""
    run = engine._run

    def timed(step: Any, op: Op, number: int) -> None:
        started = time.thread_time()
        run(step, op, number)
        operations.append((op, number, time.thread_time() - started))

    engine._run = timed


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
    for _ in range(updates + SKIPPED):
        started = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    return times[SKIPPED:]
