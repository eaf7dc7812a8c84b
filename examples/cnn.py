"""A CNN with BatchNorm, trained over stages and replicas; its layout comes from the environment alone.

    python -m varuna.run_varuna --machine_list machines --gpus_per_node 2 \
        --batch_size 12 --nstages 2 --chunk_size 4 examples/cnn.py
    VARUNA_STAGE_TO_RANK_MAP="0;1;" torchrun --nproc_per_node 2 examples/cnn.py
    python examples/cnn.py --plain          # one process without varuna: the same losses

BatchNorm sees one micro-batch at a time, so the plain process runs micro-batches of the same size, one
after the other. Then weights and running statistics are equal at every layout.
"""

import argparse
import os
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varuna import CutPoint, SampleOrder, Varuna

SEED = 1
SIDE = 12


class CNN(nn.Module):
    """The skip connection leaves before the first cut and is used behind the second."""

    def __init__(self, channels: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, channels, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(channels)
        self.third = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm3 = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, classes)
        self.cut1, self.cut2, self.cut3 = CutPoint(), CutPoint(), CutPoint()

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        skip = torch.relu(self.norm1(self.first(image)))
        x = self.cut1(skip)
        x = torch.relu(self.norm2(self.second(x)))
        x = self.cut2(x)
        x = torch.relu(self.norm3(self.third(x)) + skip)
        x = self.cut3(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), label)


def make_images(count: int) -> tuple[Tensor, Tensor]:
    """Stripes in one of four directions, with noise."""
    generator = torch.Generator().manual_seed(SEED)
    label = torch.randint(4, (count,), generator=generator)
    row, column = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    stripes = torch.stack([row, column, row + column, row - column]) % 3
    noise = torch.randn(count, 1, SIDE, SIDE, generator=generator)
    return stripes[label].unsqueeze(1) + 0.3 * noise, label


def make_model() -> CNN:
    torch.manual_seed(SEED)
    return CNN()


def make_optimizer(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def train(*, stage_to_rank_map: str, batch_size: int, chunk_size: int, steps: int) -> Iterator[str]:
    images, labels = make_images(120)
    sample = {"image": images[:2], "label": labels[:2]}
    model = Varuna(make_model(), stage_to_rank_map, sample, batch_size, chunk_size)
    optimizer = make_optimizer(model.parameters())
    model.set_optimizer(optimizer)
    order = SampleOrder(len(images), batch_size=batch_size, seed=SEED)
    for step in range(steps):
        mine = order.replica(step=step, replica=model.rank_within_stage, num_replicas=model.data_depth)
        loss, _ = model.step({"image": images[mine], "label": labels[mine]})
        optimizer.step()
        model.zero_grad()
        yield f"step {step} loss {loss:.9g}"
    # In evaluation BatchNorm uses its running statistics, so this shows that they are right too.
    mine = order.replica(step=0, replica=model.rank_within_stage, num_replicas=model.data_depth)
    yield f"evaluated loss {model.evaluate({'image': images[mine], 'label': labels[mine]}):.9g}"


def train_plainly(*, batch_size: int, chunk_size: int, steps: int) -> Iterator[str]:
    images, labels = make_images(120)
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    order = SampleOrder(len(images), batch_size=batch_size, seed=SEED)
    for step in range(steps):
        total = 0.0
        for indices in torch.tensor(order.step(step)).split(chunk_size):
            loss = model(image=images[indices], label=labels[indices]) * (len(indices) / batch_size)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        yield f"step {step} loss {total:.9g}"
    model.eval()
    with torch.no_grad():
        indices = torch.tensor(order.step(0))
        yield f"evaluated loss {model(image=images[indices], label=labels[indices]).item():.9g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--plain", action="store_true", help="one process, without varuna")
    args = parser.parse_args()

    # Set by varuna's launcher; without them, every process is a replica of the whole model.
    ranks = range(int(os.environ.get("WORLD_SIZE", "1")))
    stage_map = os.environ.get("VARUNA_STAGE_TO_RANK_MAP", ",".join(map(str, ranks)) + ";")
    batch_size = int(os.environ.get("VARUNA_BATCH_SIZE", "12"))
    chunk_size = int(os.environ.get("VARUNA_CHUNK_SIZE", "4"))
    if args.plain:
        lines = train_plainly(batch_size=batch_size, chunk_size=chunk_size, steps=args.steps)
    else:
        lines = train(
            stage_to_rank_map=stage_map, batch_size=batch_size, chunk_size=chunk_size, steps=args.steps
        )
    for line in lines:
        if os.environ.get("RANK", "0") == "0":
            print(line)


if __name__ == "__main__":
    main()
