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
        n_layer=2,
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


def classifier() -> transformers.BertForSequenceClassification:
    torch.manual_seed(3)
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        vocab_size=64,
        max_position_embeddings=16,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config)


def sentences_with_classes(count: int, seed: int = 1) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(64, (8,), generator=draw),
            "labels": int(torch.randint(3, (), generator=draw)),
        }
        for _ in range(count)
    ]


def share_of_right(predicted: transformers.EvalPrediction) -> dict[str, float]:
    return {"right": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


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
        return torch.stack(
            [torch.nn.functional.pad(row[name], (0, longest - len(row[name])), value=value) for row in rows]
        )

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
            assert math.isclose(entry[name], other[name], rel_tol=tolerance, abs_tol=1e-9), (
                name,
                entry,
                other,
            )


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[EOS]", *(f"w{number}" for number in range(62))]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[attr-defined]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]")


def prompts(count: int, seed: int) -> Any:
    import datasets

    draw = torch.Generator().manual_seed(seed)

    def text(words: int) -> str:
        return " ".join(f"w{int(word)}" for word in torch.randint(62, (words,), generator=draw))

    sizes = torch.randint(3, 9, (count,), generator=draw).tolist()
    return datasets.Dataset.from_list([{"prompt": text(3), "completion": " " + text(n)} for n in sizes])


def sft_arguments(folder: str | Path, **options: Any) -> Any:
    import trl

    usual = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "log_level": "error",
    }
    return trl.SFTConfig(str(folder), **{**usual, **options})
