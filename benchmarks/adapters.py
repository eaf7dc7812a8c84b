"""LoRA on a Llama: a wrapped model against peft alone in one process, and the bytes of its checkpoints."""

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.measure import Contender, Sample, Settings, take_turns
from benchmarks.sides import Side
from varuna import Varuna

TOKENS, MICROBATCH, MICROBATCHES, SEED = 64, 4, 4, 3
TARGETS = ["q_proj", "v_proj"]


class CheckpointBytes(msgspec.Struct, frozen=True):
    """Bytes of a checkpoint after a step with Adam, and of the trained tensors with their state."""

    saved: int
    trained: int


def make_model(width: int, *, lora: bool) -> Any:
    import peft
    import transformers as hf

    heads: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": width, "intermediate_size": 4 * width}
    torch.manual_seed(SEED)
    model: Any = hf.LlamaForCausalLM(hf.LlamaConfig(max_position_embeddings=TOKENS, **sizes, **heads))
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=TARGETS))
    return model.train()


def make_batch(count: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(512, (count, TOKENS), generator=torch.Generator().manual_seed(SEED))
    return {"input_ids": tokens, "labels": tokens}


def wrap(model: Any) -> Varuna:
    wrapped = Varuna(
        model, "0;", make_batch(2), MICROBATCHES * MICROBATCH, MICROBATCH, device="cpu", seed=SEED
    )
    wrapped.set_optimizer(torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-4))
    return wrapped


class WrappedLora(Side):
    """`Varuna` around a peft model."""

    def __init__(self, width: int) -> None:
        self.model, self.inputs = wrap(make_model(width, lora=True)), make_batch(MICROBATCHES * MICROBATCH)

    def step(self) -> float:
        loss, _ = self.model.step(self.inputs)
        assert self.model.optimizer is not None
        self.model.optimizer.step()
        self.model.zero_grad()
        return loss

    def close(self) -> None:
        self.model.close()


class PlainLora(Side):
    """peft alone, gradients accumulated over the same micro-batches."""

    def __init__(self, width: int) -> None:
        self.model, self.inputs = make_model(width, lora=True), make_batch(MICROBATCHES * MICROBATCH)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def step(self) -> float:
        total = torch.zeros(())
        for first in range(0, MICROBATCHES * MICROBATCH, MICROBATCH):
            part = {key: value[first : first + MICROBATCH] for key, value in self.inputs.items()}
            loss = self.model(**part).loss / MICROBATCHES
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total)

    def close(self) -> None:
        pass


def lora_turns(settings: Settings, width: int) -> list[list[Sample]]:
    contenders = [Contender("wrapped", {"width": width}), Contender("peft", {"width": width})]
    return take_turns(contenders, settings, sides={"wrapped": WrappedLora, "peft": PlainLora})


def checkpoint_bytes(width: int, lora: bool) -> CheckpointBytes:
    """Save a checkpoint after one step, and count its bytes."""
    model = wrap(make_model(width, lora=lora))
    model.step(make_batch(MICROBATCHES * MICROBATCH))
    assert model.optimizer is not None
    model.optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        model.checkpoint(folder)
        saved = sum(file.stat().st_size for file in Path(folder, "varuna_ckpt_1").iterdir())
    trained = 3 * sum(p.nbytes for p in model.parameters() if p.requires_grad)
    model.close()
    return CheckpointBytes(saved, trained)
