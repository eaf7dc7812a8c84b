"""Batches that one rank reads for all: shares, epochs, positions in checkpoints, and bad data."""

import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor, nn

import varuna
from tests.pool import Pool
from tests.tasks import stage_map

SIZES = (8, 8, 5, 1, 8, 2)
"""Samples of each batch of an epoch: odd ones, and fewer than replicas."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut, self.last = nn.Linear(4, 8), varuna.CutPoint(), nn.Linear(8, 1)

    def forward(self, x: Tensor, scale: Tensor, y: Tensor) -> Tensor:
        return ((self.last(self.cut(torch.tanh(self.first(x * scale)))) - y) ** 2).mean()


class Stream:
    """Data that cannot be indexed; epochs differ."""

    def __init__(self) -> None:
        self.epoch = self.start = self.position = self.read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        start, self.start = self.start, 0
        for number in range(start, len(SIZES)):
            self.read += 1
            generator = torch.Generator().manual_seed(100 * self.epoch + number)
            x = torch.randn(SIZES[number], 4, generator=generator, dtype=torch.float64)
            self.position = number + 1
            yield {"x": x, "scale": torch.linspace(1, 2, 4).double(), "y": x.sum(1, keepdim=True)}


class KeptStream(Stream):
    """Can restore its own position."""

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]


def make(depth: int, width: int, source: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(1)
    sample = {**next(iter(Stream())), "scale": torch.ones(4).double()}
    model = varuna.Varuna(
        Net().double(), stage_map(depth, width), sample, 8, 2, device="cpu", batch_dims={"scale": None}
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    model.set_optimizer(optimizer)
    rank = int(os.environ.get("RANK", "0"))
    return model, optimizer, varuna.DataLoader(source if rank == 0 else None, model)


def train(
    depth: int, width: int, kept: bool, steps: int, store: str, on_demand: bool = False
) -> tuple[list[float], int]:
    """Train up to a step, continue from the store if it has a checkpoint, and save at the end."""
    source = KeptStream() if kept else Stream()
    model, optimizer, loader = make(depth, width, source)
    if Path(store).exists():
        model.load_checkpoint(store, None)
    losses = []
    while model.iteration < steps:
        for inputs in loader:
            losses.append(model.step(inputs)[0])
            optimizer.step()
            model.zero_grad()
            if on_demand and model.iteration == steps - 2:
                model.on_demand_checkpoint(store)  # all ranks save when the batch of the last step is read
            if model.iteration == steps:
                break
    if not on_demand:
        model.checkpoint(store)
    model.close()
    return losses, source.read


def train_plainly(steps: int) -> list[float]:
    torch.manual_seed(1)
    model, source, losses = Net().double(), Stream(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for epoch in range(steps):
        source.set_epoch(epoch)
        for inputs in source:
            if len(losses) == steps:
                return losses
            loss = model(**inputs)
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("kept", [False, True])
def test_one_reader_serves_every_layout_and_continues_in_another(
    pool: Pool, tmp_path: Path, kept: bool
) -> None:
    """TRA-4: batches of any size, over epochs, from a checkpoint in the middle of an epoch."""
    expected, store = train_plainly(14), str(tmp_path / "store")
    for (depth, width), first, last in (((2, 1), 0, 3), ((1, 3), 3, 9), ((2, 2), 9, 14)):
        ranks = pool.run(train, depth * width, depth, width, kept, last, store)
        for losses, _ in ranks:
            assert losses == pytest.approx(expected[first:last], rel=1e-10)
        reads = [read for _, read in ranks]
        assert reads[1:] == [0] * (len(reads) - 1), "only the first rank reads"
        if kept:
            assert reads[0] == last - first, "no batch is read twice"


def test_a_batch_that_was_read_but_not_trained_is_read_again(pool: Pool, tmp_path: Path) -> None:
    """TRA-4: a save on demand happens between reading a batch and its step."""
    expected, store = train_plainly(8), str(tmp_path / "store")
    pool.run(train, 2, 2, 1, False, 5, store, True)
    ((losses, _),) = pool.run(train, 1, 1, 1, False, 8, store)
    assert losses == pytest.approx(expected[4:], rel=1e-10)


class Broken:
    def __init__(self, item: Any) -> None:
        self.item = item

    def __iter__(self) -> Iterator[Any]:
        yield from Stream()
        if isinstance(self.item, Exception):
            raise self.item
        yield self.item


def read(item: Any) -> str:
    model, _, loader = make(1, 2, [] if item == "empty" else Broken(item))
    try:
        for inputs in loader:
            model.evaluate(inputs)
    except Exception as error:
        return f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    return "read"


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ([1], "a batch must be a dict of the model's inputs, not a list"),
        ({"x": torch.zeros(9, 4), "scale": torch.zeros(4), "y": torch.zeros(9, 1)}, "9 samples"),
        (OSError("the bucket is gone"), "the bucket is gone"),
        ("empty", "epoch 0 has no batch"),
    ],
)
def test_bad_data_ends_all_ranks_with_the_cause(pool: Pool, item: Any, said: str) -> None:
    """TRA-4: an error of the reader is the error of every rank, and names reading as the place."""
    assert all(said in found and "reading data" in found for found in pool.run(read, 2, item))


def test_a_second_loader_needs_its_own_name() -> None:
    """TRA-4: a script that makes a loader for each epoch is told how to write its loop."""
    model, _, _ = make(1, 1, Stream())
    with pytest.raises(ValueError, match=r"already registered as 'data'.*loop over one DataLoader"):
        varuna.DataLoader(Stream(), model)
    assert len(list(varuna.DataLoader(Stream(), model, name=None))) == len(SIZES)
    model.close()


def rows() -> Iterator[dict[str, list[float]]]:
    for seed in range(37):  # the last batch has 5
        yield {"x": torch.randn(4, generator=torch.Generator().manual_seed(seed)).tolist()}


def as_inputs(x: Tensor) -> dict[str, Tensor]:
    x = x.double()
    return {"x": x, "scale": torch.linspace(1, 2, 4).double(), "y": x.sum(1, keepdim=True)}


class Streamed:
    """A stream of the library datasets, which restores its own position."""

    def __init__(self) -> None:
        self.data = datasets.IterableDataset.from_generator(rows).batch(8).with_format("torch")

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self.data:
            yield as_inputs(batch["x"])

    def state_dict(self) -> dict[str, Any]:
        return self.data.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.load_state_dict(state)


class Shards:
    """Samples in tar files, as WebDataset keeps them: one after another, in batches over the files' ends."""

    def __init__(self, folder: str) -> None:
        self.files = sorted(Path(folder).glob("*.tar"))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        waiting: list[list[float]] = []
        for file in self.files:
            with tarfile.open(file) as shard:
                for member in shard:
                    content = shard.extractfile(member)
                    assert content is not None
                    waiting.append(json.loads(content.read())["x"])
                    if len(waiting) == 8:
                        yield as_inputs(torch.tensor(waiting))
                        waiting = []
        if waiting:
            yield as_inputs(torch.tensor(waiting))


def write_shards(folder: Path) -> None:
    for first in range(0, 37, 15):
        with tarfile.open(folder / f"{first:03}.tar", "w") as shard:
            for number, row in list(enumerate(rows()))[first : first + 15]:
                content = json.dumps(row).encode()
                member = tarfile.TarInfo(f"{number:06}.json")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))


def train_on(folder: str, shards: bool, depth: int, width: int, steps: int) -> list[float]:
    model, optimizer, loader = make(depth, width, Shards(folder) if shards else Streamed())
    store = f"{folder}/store"
    if Path(store).exists():
        model.load_checkpoint(store, None)
    losses = []
    for inputs in loader:
        losses.append(model.step(inputs)[0])
        optimizer.step()
        model.zero_grad()
        if model.iteration == steps:
            break
    model.checkpoint(store)
    model.close()
    return losses


@pytest.mark.parametrize("shards", [False, True])
def test_streams_of_datasets_and_tar_shards_continue_where_they_were(
    pool: Pool, tmp_path: Path, shards: bool
) -> None:
    """TRA-4: every sample once, over a restart at another layout."""
    write_shards(tmp_path)
    torch.manual_seed(1)
    model, expected = Net().double(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for inputs in Shards(str(tmp_path)):
        loss = model(**inputs)
        loss.backward()
        expected.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    (first, *_) = pool.run(train_on, 2, str(tmp_path), shards, 2, 1, 2)
    (second, *_) = pool.run(train_on, 3, str(tmp_path), shards, 1, 3, 99)
    assert first + second == pytest.approx(expected, rel=1e-10)
