"""A GPT with CutPoints, trained as a user would: over stages and replicas, or in one plain process.

    python -m varuna.run_varuna --machine_list machines --gpus_per_node 4 \
        --batch_size 8 --nstages 2 --chunk_size 2 examples/gpt.py
    torchrun --nproc_per_node 4 examples/gpt.py --stage_to_rank_map "0,2;1,3;" --batch-size 4
    python examples/gpt.py                  # one process, the same losses
    python examples/gpt.py --plain          # one process without varuna: still the same losses
    python examples/gpt.py --store runs/7   # saves there, and goes on from there, at whatever layout

The launcher passes --stage_to_rank_map, --chunk_size and --batch-size, because this script names them.
"""

import argparse
import math
import os
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varuna import CutPoint, SampleOrder, Varuna, get_varuna_config, plain_randomness

VOCABULARY = 32
TOKENS = 16
SEED = 1


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, tokens, width)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Returns its loss. The head shares its weight with the embedding, which lies on another stage."""

    def __init__(self, layers: int = 4, width: int = 32, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.cutpoints = nn.ModuleList(CutPoint() for _ in range(layers - 1))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        for embedding in (self.embed, self.places):
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        seen, wanted = tokens[:, :-1], tokens[:, 1:]
        x = self.embed(seen) + self.places(torch.arange(seen.shape[1], device=seen.device))
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i < len(self.cutpoints):
                x = self.cutpoints[i](x)  # the model may be cut here
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())


def make_sequences(count: int, seed: int) -> Tensor:
    """Counting on by ones or by twos: something to learn, made in place."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCABULARY, (count, 1), generator=generator)
    stride = torch.randint(1, 3, (count, 1), generator=generator)
    return (start + stride * torch.arange(TOKENS + 1)) % VOCABULARY


def make_optimizer(
    parameters: Iterator[nn.Parameter], steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    warmup = 5

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def train(
    model: nn.Module,
    *,
    stage_to_rank_map: str,
    batch_size: int,
    chunk_size: int,
    local_rank: int = -1,
    steps: int,
    store: str | None = None,
    save_every: int = 5,
) -> Iterator[tuple[str, float]]:
    """Yields ("step 0", its loss) and so on, at the end ("held-out", loss): the same on all ranks."""
    data, held_out = make_sequences(512, seed=SEED), make_sequences(batch_size, seed=SEED + 1)
    wrapped = Varuna(
        model,
        stage_to_rank_map,
        {"tokens": data[:2]},
        batch_size,
        chunk_size,
        local_rank=local_rank,
        seed=SEED,
    )
    optimizer, scheduler = make_optimizer(wrapped.parameters(), steps)
    wrapped.set_optimizer(optimizer)
    wrapped.register("scheduler", scheduler)
    if store:
        wrapped.resume(store)
    order = SampleOrder(len(data), batch_size=batch_size, seed=SEED)
    for step, inputs in wrapped.batches(lambda samples: {"tokens": data[samples]}, order, steps=steps):
        loss, overflow = wrapped.step(inputs, clip_grad_max_norm=1.0)
        if not overflow:
            optimizer.step()
            scheduler.step()
        wrapped.zero_grad()
        if store and (step + 1) % save_every == 0:
            wrapped.checkpoint(store, tempdir="memory", keep_last=3)  # training goes on meanwhile
        yield f"step {step}", loss
    mine = {"replica": wrapped.rank_within_stage, "num_replicas": wrapped.data_depth}
    share = SampleOrder(batch_size, batch_size=batch_size, shuffle=False).replica(step=0, **mine)
    yield "held-out", wrapped.evaluate({"tokens": held_out[share]})


def train_plainly(model: nn.Module, *, batch_size: int, steps: int) -> Iterator[tuple[str, float]]:
    """The same training without varuna, on the whole batch at once; dropout by varuna's rule."""
    data, held_out = make_sequences(512, seed=SEED), make_sequences(batch_size, seed=SEED + 1)
    optimizer, scheduler = make_optimizer(model.parameters(), steps)
    order = SampleOrder(len(data), batch_size=batch_size, seed=SEED)
    for step in range(steps):
        tokens = data[order.step(step)]
        with plain_randomness(seed=SEED, step=step, batch_size=batch_size):  # around the forward alone
            loss = model(tokens=tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield f"step {step}", loss.item()
    model.eval()
    with torch.no_grad():
        yield "held-out", model(tokens=held_out).item()


def make_model() -> GPT:
    torch.manual_seed(SEED)  # every rank builds the same model, and keeps its part of it
    return GPT()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stage_to_rank_map", default="0;", help="passed by the launcher")
    parser.add_argument("--batch-size", type=int, default=8, help="this replica's samples per step")
    parser.add_argument("--chunk_size", type=int, default=2, help="samples in a micro-batch")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--store", help="folder or URL for checkpoints; goes on from the newest")
    parser.add_argument("--save_every", type=int, default=5, help="steps from checkpoint to checkpoint")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait after each step")
    parser.add_argument("--plain", action="store_true", help="one process, without varuna")
    args = parser.parse_args()

    _, num_replicas = get_varuna_config(args.stage_to_rank_map)
    # A launcher tells the whole job's batch too; the replicas' shares may differ by one sample.
    batch_size = int(os.environ.get("VARUNA_BATCH_SIZE", args.batch_size * num_replicas))
    if args.plain:
        progress = train_plainly(make_model(), batch_size=batch_size, steps=args.steps)
    else:
        progress = train(
            make_model(),
            stage_to_rank_map=args.stage_to_rank_map,
            batch_size=batch_size,
            chunk_size=args.chunk_size,
            local_rank=args.local_rank,
            steps=args.steps,
            store=args.store,
            save_every=args.save_every,
        )
    for what, loss in progress:
        if os.environ.get("RANK", "0") == "0":
            print(f"{what} loss {loss:.9g}")
        time.sleep(args.pause)


if __name__ == "__main__":
    main()
