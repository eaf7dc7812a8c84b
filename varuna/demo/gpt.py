"""The script of `varuna demo`: a small GPT with dropout, clipping and a learning rate schedule.

The workers of the demo run it under the launcher. With --plain it trains in one process, without Varuna.
"""

import argparse
import os
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varuna import CutPoint, SampleOrder, Varuna, plain_randomness
from varuna.environment import VarunaEnvironment

VOCABULARY, TOKENS, WIDTH, HEADS, LAYERS = 32, 16, 32, 4, 4
SEED = 1


class DemoBlock(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(-2)))
        changed: Tensor = x + self.dropout(self.mlp(self.norms[1](x)))
        return changed


class DemoGpt(nn.Module):
    """Returns its loss. The first and the last layer share a weight, though they are on two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(DemoBlock() for _ in range(LAYERS))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(LAYERS - 1))
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.embed.weight, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i < len(self.cuts):
                x = self.cuts[i](x)  # the model may be cut here
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_data() -> Tensor:
    """Return sequences that count by ones or by twos."""
    generator = torch.Generator().manual_seed(SEED)
    start = torch.randint(VOCABULARY, (512, 1), generator=generator)
    stride = torch.randint(1, 3, (512, 1), generator=generator)
    return (start + stride * torch.arange(TOKENS + 1)) % VOCABULARY


def train(stage_to_rank_map: str, *, batch_size: int, chunk_size: int, steps: int) -> Iterator[float]:
    """Train over all workers. Yield the loss of each step."""
    data, order = make_data(), SampleOrder(512, batch_size=batch_size, seed=SEED)
    sample = {"tokens": data[:2]}
    model = Varuna(DemoGpt(), stage_to_rank_map, sample, batch_size, chunk_size, device="cpu", seed=SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.set_optimizer(optimizer)
    for _, inputs in model.batches(lambda samples: {"tokens": data[samples]}, order, steps=steps):
        loss, _ = model.step(inputs, clip_grad_max_norm=1.0)
        optimizer.step()
        scheduler.step()
        model.zero_grad()
        yield loss


def train_plainly(*, batch_size: int, steps: int) -> Iterator[float]:
    """Train in this process, without Varuna. The dropout masks are Varuna's."""
    data, order = make_data(), SampleOrder(512, batch_size=batch_size, seed=SEED)
    model = DemoGpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        with plain_randomness(seed=SEED, step=step, batch_size=batch_size):
            loss = model(data[order.step(step)])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--plain", type=int, default=0, metavar="BATCH", help="train without Varuna")
    parser.add_argument("--stage_to_rank_map", default="0;", help="passed by the launcher")
    parser.add_argument("--chunk_size", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(SEED)  # every rank builds the same model and keeps its part of it
    torch.set_num_threads(1)
    if args.plain:
        losses = train_plainly(batch_size=args.plain, steps=args.steps)
    else:
        batch_size = VarunaEnvironment.read(os.environ).batch_size
        assert batch_size is not None, "the launcher sets it"
        losses = train(
            args.stage_to_rank_map, batch_size=batch_size, chunk_size=args.chunk_size, steps=args.steps
        )
    for step, loss in enumerate(losses):
        print(f"step {step} loss {loss:.9g}", flush=True)


if __name__ == "__main__":
    main()
