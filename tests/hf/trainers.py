"""Small models and data for tests of VarunaTrainer, and the comparison of two logs."""

import math
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

Logs = list[dict[str, Any]]
TIMES = "runtime", "per_second", "preparation_time"


def language_model(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32,
        n_layer=3,
        n_head=2,
        vocab_size=64,
        n_positions=16,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def sentences(count: int, seed: int = 1, lengths: tuple[int, int] = (12, 12)) -> list[dict[str, Any]]:
    """Tokens, and labels of which some are -100."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(lengths[0], lengths[1] + 1, (1,), generator=draw))
        tokens = torch.randint(1, 64, (length,), generator=draw)
        labels = tokens.clone()
        labels[: int(torch.randint(length - 2, (1,), generator=draw))] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad rows to the longest of their batch, as a tokenizer's collator does."""
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(name: str, value: int) -> torch.Tensor:
        return torch.stack([
            torch.nn.functional.pad(row[name], (0, longest - len(row[name])), value=value) for row in rows
        ])

    mask = torch.tensor([[index < len(row["input_ids"]) for index in range(longest)] for row in rows]).long()
    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100), "attention_mask": mask}


def arguments(folder: str | Path, **options: Any) -> transformers.TrainingArguments:
    usual = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 20,
        "logging_steps": 1,
        "learning_rate": 3e-3,
        "warmup_steps": 4,
        "weight_decay": 0.1,
        "adam_epsilon": 1e-5,  # biases without gradient must not follow its rounding
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "cosine",
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
    }
    return transformers.TrainingArguments(output_dir=str(folder), **{**usual, **options})


def assert_same_logs(logs: Logs, expected: Logs, tolerance: float = 1e-5) -> None:
    """Losses, norms, learning rates, epochs and metrics are equal; times are not compared."""
    assert len(logs) == len(expected)
    for entry, other in zip(logs, expected, strict=True):
        names = {name for name in other if not any(part in name for part in TIMES)}
        assert {name for name in entry if not any(part in name for part in TIMES)} == names
        for name in names:
            assert math.isclose(entry[name], other[name], rel_tol=tolerance, abs_tol=1e-9), (name, entry, other)
