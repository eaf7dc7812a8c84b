"""Fine-tune with transformers' Trainer, or trl's SFTTrainer, over pipeline stages; nothing is downloaded.

    python examples/trainer.py                                        # one process
    torchrun --nproc_per_node 2 examples/trainer.py --stages 2
    torchrun --nproc_per_node 4 examples/trainer.py --stages 2 --sft  # two stages, two replicas
    varuna run --machine-list machines --gpus-per-node 2 --batch-size 8 --nstages 2 --chunk-size 2 \
        examples/trainer.py

The losses do not depend on the number of processes. With `varuna run`, machines may join and leave.
"""

import argparse
from typing import Any

import torch
import transformers

from varuna.hf import VarunaTrainer as Trainer  # instead of: from transformers import Trainer

WORDS = [f"w{number}" for number in range(62)]


def make_model() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=64,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def make_rows(count: int) -> list[dict[str, Any]]:
    """Sequences that count up, of different lengths."""
    draw = torch.Generator().manual_seed(1)
    starts = torch.randint(2, 40, (count,), generator=draw).tolist()
    lengths = torch.randint(8, 16, (count,), generator=draw).tolist()
    return [
        {"input_ids": list(range(first, first + size))} for first, size in zip(starts, lengths, strict=True)
    ]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad the rows of a batch to the longest of them."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(value: int) -> torch.Tensor:
        return torch.tensor([row["input_ids"] + [value] * (longest - len(row["input_ids"])) for row in rows])

    tokens = padded(0)
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": padded(-100)}


def make_trainer(output: str, steps: int, stages: int | None) -> Trainer:
    arguments = transformers.TrainingArguments(
        output,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=steps,
        learning_rate=3e-3,
        warmup_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=steps,
        save_strategy="steps",
        save_steps=steps,
        report_to="none",
        disable_tqdm=True,
    )
    rows = make_rows(120)
    return Trainer(
        make_model(),
        arguments,
        train_dataset=rows[20:],
        eval_dataset=rows[:20],
        data_collator=collate,
        stages=stages,
        micro_batch=2,
    )


def make_sft_trainer(output: str, steps: int, stages: int | None) -> Trainer:
    import datasets
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers

    class SFTTrainer(Trainer, trl.SFTTrainer):
        """SFTTrainer over stages: nothing else changes."""

    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["[PAD]", "[EOS]", *WORDS])}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = [[WORDS[token - 2] for token in row["input_ids"]] for row in make_rows(100)]
    pairs = [{"prompt": " ".join(t[:4]), "completion": " " + " ".join(t[4:])} for t in texts]
    arguments = trl.SFTConfig(
        output,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=steps,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        bf16=False,
        report_to="none",
        disable_tqdm=True,
    )
    return SFTTrainer(
        make_model(),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]"
        ),
        stages=stages,
        micro_batch=2,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="trainer-output")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--stages", type=int)
    parser.add_argument("--sft", action="store_true")
    options = parser.parse_args()
    make = make_sft_trainer if options.sft else make_trainer
    trainer = make(options.output, options.steps, options.stages)
    trainer.train()
    trainer.save_model(f"{options.output}/final")  # on all ranks: each stage writes its own files
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']} loss {entry['loss']!r}", flush=True)
