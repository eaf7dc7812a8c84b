"""LoRA: adapters of peft on a frozen Llama, over any number of stages; nothing is downloaded.

    python examples/lora.py
    torchrun --nproc_per_node 2 examples/lora.py --stages 2 --out adapter
    torchrun --nproc_per_node 2 examples/lora.py --stages 2 --four-bit

The model is built from a small config. With --out, the adapters are saved as peft does, loaded into the base
model again, and merged. With --four-bit, bitsandbytes quantizes the base to NF4 (QLoRA).
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import peft
import torch
from torch import Tensor

import varuna
from varuna.hf import save_adapter

TOKENS, VOCABULARY, SEED = 12, 64, 1


def make_base(*, four_bit: bool = False) -> Any:
    import transformers as hf

    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": TOKENS, "num_hidden_layers": 4}
    heads = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    torch.manual_seed(SEED)
    base = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads))
    if not four_bit:
        return base
    nf4 = hf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    with tempfile.TemporaryDirectory() as folder:  # stands for a downloaded model
        base.save_pretrained(folder)
        return hf.LlamaForCausalLM.from_pretrained(folder, quantization_config=nf4, dtype=torch.float32)


def make_model(*, four_bit: bool = False) -> Any:
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    base = make_base(four_bit=four_bit)
    torch.manual_seed(SEED)
    return peft.get_peft_model(base, lora).train()


def make_data() -> dict[str, Tensor]:
    tokens = (torch.arange(48)[:, None] + 3 * torch.arange(TOKENS)) % VOCABULARY
    return {"input_ids": tokens, "labels": tokens}


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train_plainly(batch_size: int, steps: int, *, four_bit: bool = False) -> Iterator[float]:
    """Train in one process, with peft alone."""
    model, data = make_model(four_bit=four_bit), make_data()
    optimizer, order = make_optimizer(model), varuna.SampleOrder(48, batch_size=batch_size, seed=SEED)
    for step in range(steps):
        with varuna.plain_randomness(seed=SEED, step=step, batch_size=batch_size):
            loss = model(**{key: value[order.step(step)] for key, value in data.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--stages", type=int)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--store", help="folder of checkpoints to continue from")
    parser.add_argument("--out", help="folder for the adapters")
    parser.add_argument("--four-bit", action="store_true", help="quantize the base to NF4")
    args = parser.parse_args()

    plain, data = make_model(four_bit=args.four_bit), make_data()
    optimizer = make_optimizer(plain)
    sample = {key: value[:2] for key, value in data.items()}
    model = varuna.wrap(
        plain, optimizer, batch_size=args.batch_size, sample=sample, stages=args.stages, seed=SEED
    )
    if args.store:
        model.resume(args.store)
    order = varuna.SampleOrder(48, batch_size=args.batch_size, seed=SEED)
    while model.iteration < args.steps:
        step, share = model.iteration, order.share(model)
        loss, _ = model.step({key: value[share] for key, value in data.items()})
        optimizer.step()
        model.zero_grad()
        if model.rank == 0:
            print(f"step {step} loss {loss:.9g}")
    if args.store:
        model.checkpoint(args.store)  # the adapters and their optimizer state
    if args.out:
        save_adapter(model, args.out, overwrite=True)
        if model.rank == 0:
            merged = peft.PeftModel.from_pretrained(make_base(), args.out).merge_and_unload().eval()
            print(f"merged: evaluation loss {float(merged(**data).loss):.6g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
