"""Saving and loading against the ways that PyTorch and the operating system offer for the same bytes.

Each function here runs on every rank, takes its turns side by side, and returns the seconds of each side.
"""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from varuna import CutPoint, Varuna
from varuna.checkpoint.format.tensors import fill, memory_of
from varuna.checkpoint.load import open_checkpoint
from varuna.checkpoint.store.store import open_store
from varuna.types import format_stage_map


class Wide(nn.Module):
    """Linear layers in a row: many bytes of state, little to compute at a small batch."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(layers - 1))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index < len(self.cuts):
                x = self.cuts[index](x)
        return x.square().mean()


class Trained:
    """A wrapped model that has taken a step, so that its optimizer has state; and its next steps."""

    def __init__(self, *, depth: int, layers: int, width: int, samples: int) -> None:
        drawn = torch.Generator().manual_seed(1)  # the same on all stages
        self.inputs = {"x": torch.randn(samples, width, generator=drawn)}
        ranks = [[stage] for stage in range(depth)]
        sample = {"x": self.inputs["x"][:2]}
        model = Wide(layers, width)
        self.model = Varuna(
            model, format_stage_map(ranks), sample, samples, max(1, samples // 4), device="cpu", seed=1
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model.set_optimizer(self.optimizer)
        self.step()

    def step(self) -> None:
        self.model.step(self.inputs)
        self.optimizer.step()
        self.model.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """All of this rank's state, as a checkpoint holds it."""
        found = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name}/{key}"] = value
        return found


Side = Callable[[], None]


def in_turn(sides: Sequence[Side], repeats: int) -> list[list[float]]:
    """Seconds of each side, turn by turn; every rank starts each together. The first turn warms up."""
    seconds: list[list[float]] = [[] for _ in sides]
    for turn in range(repeats + 1):
        order = range(len(sides)) if turn % 2 == 0 else reversed(range(len(sides)))
        for index in order:
            dist.barrier()
            started = time.perf_counter()
            sides[index]()
            dist.barrier()
            if turn:
                seconds[index].append(time.perf_counter() - started)
    return seconds


def saving(folder: str, repeats: int, depth: int, layers: int, width: int) -> list[list[float]]:
    """Ours, torch.distributed.checkpoint, a plain write; each with fsync, each into a fresh folder."""
    trained = Trained(depth=depth, layers=layers, width=width, samples=8)
    tensors = trained.tensors()
    rank = dist.get_rank()
    count = iter(range(10**6))

    def fresh() -> Path:
        return Path(folder, f"turn-{next(count)}")

    def ours() -> None:
        trained.model.checkpoint(fresh())

    def torchs() -> None:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(fresh(), sync_files=True))

    def plain() -> None:
        place = fresh()
        place.mkdir(parents=True, exist_ok=True)
        fd = os.open(place / f"rank-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for tensor in tensors.values():
            rest = memory_of(tensor)
            while rest:
                rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
        os.close(fd)

    def clean() -> None:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)

    seconds: list[list[float]] = [[], [], []]
    for turn in range(repeats + 1):  # removing is not part of any turn
        order = (0, 1, 2) if turn % 2 == 0 else (2, 1, 0)
        for index in order:
            dist.barrier()
            started = time.perf_counter()
            (ours, torchs, plain)[index]()
            dist.barrier()
            if turn:
                seconds[index].append(time.perf_counter() - started)
            clean()
    trained.model.close()
    return seconds


def loading(folder: str, repeats: int, depth: int, layers: int, width: int) -> list[list[float]]:
    """Ours and torch.distributed.checkpoint's, from the page cache, into what is there."""
    trained = Trained(depth=depth, layers=layers, width=width, samples=8)
    tensors = trained.tensors()
    trained.model.checkpoint(Path(folder, "ours"))
    dcp.save(tensors, checkpoint_id=Path(folder, "torchs"))

    def ours() -> None:
        trained.model.load_checkpoint(Path(folder, "ours"))

    def torchs() -> None:
        dcp.load(tensors, checkpoint_id=Path(folder, "torchs"))

    seconds = in_turn([ours, torchs], repeats)
    trained.model.close()
    return seconds


def one_stage_of_four(folder: str, repeats: int, layers: int, width: int) -> tuple[list[list[float]], float]:
    """Compare what one stage of four reads with a read of the whole checkpoint, in time and bytes."""
    trained = Trained(depth=1, layers=layers, width=width, samples=8)
    trained.model.checkpoint(folder)
    opened = open_checkpoint(open_store(folder), None)
    entries = opened.manifest.tensors
    places = {key: torch.empty(e.shape, dtype=getattr(torch, e.dtype)) for key, e in entries.items()}
    part = [key for key in entries if int(key.split("layers.")[1].split(".")[0]) < layers // 4]

    def read(keys: Sequence[str]) -> None:
        for key, view in opened.read(keys).items():
            fill(places[key], view, entries[key])

    seconds = in_turn([lambda: read(part), lambda: read(list(entries))], repeats)
    trained.model.close()
    sizes = {key: entry.stop - entry.first for key, entry in entries.items()}
    return seconds, sum(sizes[key] for key in part) / sum(sizes.values())


def stall(folder: str, repeats: int, layers: int, width: int) -> list[list[float]]:
    """The call that starts a background save, and one copy of the same state into memory that is there."""
    trained = Trained(depth=1, layers=layers, width=width, samples=8)
    tensors = trained.tensors()
    copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}

    def copy() -> None:
        for name, tensor in tensors.items():
            copies[name].copy_(tensor)

    seconds: list[list[float]] = [[], []]
    for turn in range(repeats + 1):
        started = time.perf_counter()
        saved = trained.model.checkpoint(folder, tempdir="memory", keep_last=1)
        called = time.perf_counter()
        saved.result()
        begun = time.perf_counter()
        copy()
        if turn:
            seconds[0].append(called - started)
            seconds[1].append(time.perf_counter() - begun)
    trained.model.close()
    return seconds


def overlapped(
    folder: str, repeats: int, depth: int, layers: int, width: int, samples: int, steps: int
) -> tuple[list[list[float]], list[float]]:
    """Steps while a save is under way, and the same number without; and how long the saves took.

    Saves follow each other where one ends before the steps do, so that every step is overlapped.
    """
    trained = Trained(depth=depth, layers=layers, width=width, samples=samples)
    seconds: list[list[float]] = [[], []]
    saves: list[float] = []
    for turn in range(repeats + 1):
        for saving in (True, False) if turn % 2 else (False, True):
            dist.barrier()
            spent = 0.0
            begun = time.perf_counter()
            saved = trained.model.checkpoint(folder, tempdir="memory", keep_last=1) if saving else None
            for _ in range(steps):
                started = time.perf_counter()
                trained.step()
                spent += time.perf_counter() - started
            if saved is not None:
                saved.result()
                saves.append(time.perf_counter() - begun)
            if turn:
                seconds[0 if saving else 1].append(spent / steps)
    trained.model.close()
    return seconds, saves
