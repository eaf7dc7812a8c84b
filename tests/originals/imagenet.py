"""Trains an image classifier, with `--varuna` as a script for the original Varuna does it."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from varuna import CutPoint, Varuna

parser = argparse.ArgumentParser()
parser.add_argument("data", metavar="DIR")
parser.add_argument("-b", "--batch-size", default=256, type=int)
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("--world-size", default=-1, type=int)
parser.add_argument("--rank", default=-1, type=int)
parser.add_argument("--varuna", action="store_true", default=False)
parser.add_argument("--stage_to_rank_map", type=str, default=None)
parser.add_argument("--chunk_size", type=int, default=None)
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--resume_step", type=int, default=None)
parser.add_argument("--cpu", action="store_true", default=False)


class Classifier(nn.Module):
    """Returns its loss if it is given the classes."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.cutpoints = [CutPoint(), CutPoint()]  # a plain list, as the original's document shows
        self.body, self.second_norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, inputs, target=None):
        x = self.cutpoints[0](F.silu(self.norm(self.stem(inputs))))
        x = self.cutpoints[1](F.silu(self.second_norm(self.body(x))) + x)
        logits = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits if target is None else F.cross_entropy(logits, target)


def make_data(samples):
    generator = torch.Generator().manual_seed(samples)
    images = torch.randn(samples, 1, 6, 6, generator=generator)
    return TensorDataset(images, torch.randint(5, (samples,), generator=generator))


def main():
    args = parser.parse_args()
    args.distributed = args.world_size > 1 or args.varuna
    if args.distributed:
        if args.rank == -1:
            args.rank = int(os.environ["RANK"])
        dist.init_process_group(
            backend="gloo", init_method="env://", world_size=args.world_size, rank=args.rank
        )
    torch.manual_seed(0)
    model, train_data = Classifier(), make_data(16)
    if args.varuna:

        def get_batch_fn(size, device=None):
            image, target = next(iter(DataLoader(train_data, batch_size=size)))
            inputs = {"inputs": image, "target": target}
            return inputs if device is None else {key: value.to(device) for key, value in inputs.items()}

        model = Varuna(
            model,
            args.stage_to_rank_map,
            get_batch_fn,
            args.batch_size,
            args.chunk_size,
            fp16=False,
            local_rank=-1,
            device="cpu" if args.cpu else -1,
        )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    if args.varuna:
        model.set_optimizer(optimizer)
        model.to(model.device)
    best = float("inf")
    for epoch in range(args.epochs):
        train(DataLoader(train_data, batch_size=args.batch_size), model, optimizer, epoch, args)
        found = validate(DataLoader(make_data(12), batch_size=args.batch_size), model, args)
        best = min(best, found)
        state = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "best": best}
        if args.varuna:
            model.checkpoint(args.data, tempdir=None, step=epoch + 1)
        else:
            torch.save(state, os.path.join(args.data, "plain.pt"))


def train(loader, model, optimizer, epoch, args):
    model.train()
    for i, (images, target) in enumerate(loader):
        if args.varuna:
            batch = {"inputs": images.to(model.device), "target": target.to(model.device)}
            loss, overflow, grad_norm = model.step(batch, with_norm=True)
            assert not overflow and grad_norm > 0
        else:
            loss = model(images, target=target)
            loss.backward()
            loss = loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if args.rank <= 0:
            print(f"epoch {epoch} step {i} loss {loss:.6f}", flush=True)


def validate(loader, model, args):
    model.eval()
    total = count = 0
    with torch.no_grad():
        for images, target in loader:
            if args.varuna:
                loss = model.evaluate({"inputs": images.to(model.device), "target": target.to(model.device)})
            else:
                loss = model(images, target=target).item()
            total, count = total + loss * len(images), count + len(images)
    if args.rank <= 0:
        print(f"validation loss {total / count:.6f}", flush=True)
    return total / count


if __name__ == "__main__":
    main()
