"""Hugging Face models, unedited, over up to five stages; built from a small config, nothing is downloaded.

    python -m varuna.run_varuna --machine_list machines --gpus_per_node 4 \
        --batch_size 6 --nstages 4 --chunk_size 2 examples/huggingface.py --model llama --compare
    VARUNA_STAGE_TO_RANK_MAP="0;1;" torchrun --nproc_per_node 2 examples/huggingface.py --model bert

With --compare, rank 0 then trains the same model in plain PyTorch and prints the largest difference of the
losses. Dropout is on in GPT-2 and BERT, as their configs have it.
"""

import argparse
import os
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import varuna

VOCABULARY = 64
TOKENS = 12
SEED = 1
TOLERANCE = 1e-5

BLOCKS = {"gpt2": "transformer.h.*", "bert": "bert.encoder.layer.*", "llama": "model.layers.*"}


def make_model(name: str) -> nn.Module:
    # Its models are imported when they are named, which takes seconds and draws from torch's generator.
    import transformers as hf

    small = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": TOKENS}
    if name == "gpt2":
        own = {"n_embd": 32, "n_layer": 4, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
        kind, config = hf.GPT2LMHeadModel, hf.GPT2Config(vocab_size=VOCABULARY, n_positions=TOKENS, **own)
    elif name == "bert":
        kind, config = hf.BertForMaskedLM, hf.BertConfig(**sizes, **small)
    else:
        kind, config = hf.LlamaForCausalLM, hf.LlamaConfig(num_key_value_heads=2, **sizes, **small)
    torch.manual_seed(SEED)
    return kind(config)


def make_inputs(name: str, count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    start = torch.randint(VOCABULARY, (count, 1), generator=generator)
    tokens = (start + 3 * torch.arange(TOKENS)) % VOCABULARY
    if name != "bert":
        return {"input_ids": tokens, "labels": tokens}
    hidden = torch.rand(count, TOKENS, generator=generator) < 0.3
    hidden[:, 0] = True  # every sample has something to guess
    return {"input_ids": tokens.masked_fill(hidden, 0), "labels": tokens.masked_fill(~hidden, -100)}


def train(
    name: str, *, stage_to_rank_map: str, batch_size: int, chunk_size: int, steps: int
) -> Iterator[float]:
    data = make_inputs(name, 48)
    model = make_model(name)
    varuna.cut_after(model, BLOCKS[name])
    wrapped = varuna.Varuna(
        model,
        stage_to_rank_map,
        {key: value[:2] for key, value in data.items()},
        batch_size,
        chunk_size,
        seed=SEED,
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    wrapped.set_optimizer(optimizer)
    order = varuna.SampleOrder(48, batch_size=batch_size, seed=SEED)
    mine = {"replica": wrapped.rank_within_stage, "num_replicas": wrapped.data_depth}
    for indices in order.batches(**mine, num_steps=steps):
        loss, _ = wrapped.step({key: value[indices] for key, value in data.items()}, clip_grad_max_norm=1.0)
        optimizer.step()
        wrapped.zero_grad()
        yield loss


def train_plainly(name: str, *, batch_size: int, steps: int) -> Iterator[float]:
    data = make_inputs(name, 48)
    model = make_model(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = varuna.SampleOrder(48, batch_size=batch_size, seed=SEED)
    for step in range(steps):
        inputs = {key: value[order.step(step)] for key, value in data.items()}
        with varuna.plain_randomness(seed=SEED, step=step, batch_size=batch_size):
            loss = model(**inputs).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=sorted(BLOCKS), default="gpt2")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--compare", action="store_true", help="with one plain process")
    args = parser.parse_args()

    # Set by varuna's launcher; without them, every process is a replica of the whole model.
    ranks = range(int(os.environ.get("WORLD_SIZE", "1")))
    stage_map = os.environ.get("VARUNA_STAGE_TO_RANK_MAP", ",".join(map(str, ranks)) + ";")
    batch_size = int(os.environ.get("VARUNA_BATCH_SIZE", "6"))
    chunk_size = int(os.environ.get("VARUNA_CHUNK_SIZE", "2"))
    is_first = os.environ.get("RANK", "0") == "0"
    losses = []
    for step, loss in enumerate(
        train(
            args.model,
            stage_to_rank_map=stage_map,
            batch_size=batch_size,
            chunk_size=chunk_size,
            steps=args.steps,
        )
    ):
        losses.append(loss)
        if is_first:
            print(f"step {step} loss {loss:.9g}")
    if not args.compare or not is_first:
        return 0
    plain = list(train_plainly(args.model, batch_size=batch_size, steps=args.steps))
    worst = max(abs(loss - other) / abs(other) for loss, other in zip(losses, plain, strict=True))
    print(f"largest relative difference from one plain process: {worst:.2g}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
