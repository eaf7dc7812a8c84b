"""The tensors of a Hugging Face folder: where each one is, and how to read it in small pieces."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from varuna.checkpoint.format.part import FileTensor
from varuna.checkpoint.format.tensors import memory_of
from varuna.checkpoint.transfer import PICKLED, files_of_model, tensor_places
from varuna.errors import CheckpointError

CHUNK_BYTES = 1 << 20
"""Most bytes of a file that are in memory beside the tensor that they fill."""


class TensorPlace(NamedTuple):
    """A tensor of a safetensors file, and its bytes in this file."""

    path: Path
    spec: FileTensor
    first: int
    stop: int

    @property
    def dtype(self) -> torch.dtype:
        found = getattr(torch, self.spec.dtype)
        assert isinstance(found, torch.dtype)
        return found

    def read(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the tensor on the device. Without a conversion the file fills its memory directly."""
        tensor = torch.empty(self.spec.shape, dtype=dtype, device=device)
        if dtype == self.dtype and tensor.device.type == "cpu":
            with self._file() as file:
                _fill(file, memory_of(tensor), self.path, self.spec.key)
            return tensor
        flat, done = tensor.view(-1), 0
        for piece in self._pieces():
            converted = flat[done : done + len(piece)].copy_(piece)
            if _is_narrower(dtype, self.dtype) and not torch.equal(
                piece.isfinite(), converted.isfinite().cpu()
            ):
                raise CheckpointError(
                    f"{self.spec.key!r} of {self.path} has values that are too large for {dtype} "
                    "(build the model in float32 or bfloat16)"
                )
            done += len(piece)
        return tensor

    def equals(self, other: "TensorPlace") -> bool:
        """Compare the values of two tensors of one dtype and shape, piece by piece."""
        pairs = zip(self._pieces(), other._pieces(), strict=True)
        return all(torch.equal(one.view(torch.uint8), two.view(torch.uint8)) for one, two in pairs)

    def _pieces(self) -> Iterator[Tensor]:
        """Yield the elements in order; a piece is valid until the next one."""
        size = self.dtype.itemsize
        buffer = torch.empty(min(CHUNK_BYTES, self.stop - self.first) // size, dtype=self.dtype)
        with self._file() as file:
            for start in range(self.first, self.stop, CHUNK_BYTES):
                piece = buffer[: min(CHUNK_BYTES, self.stop - start) // size]
                _fill(file, memory_of(piece), self.path, self.spec.key)
                yield piece

    @contextmanager
    def _file(self) -> Iterator[BinaryIO]:
        """Open the file at the tensor's first byte."""
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.first)
            yield file


def find_tensors(folder: str | os.PathLike[str]) -> dict[str, TensorPlace]:
    """Return all tensors of a folder, or of one safetensors file, by name. Only headers are read."""
    place = Path(folder)
    if not place.exists():
        raise CheckpointError(
            f"{place} does not exist (name a local folder; for a model of the Hub, pass the folder that "
            "huggingface_hub.snapshot_download returns)"
        )
    files = files_of_model(place) if place.is_dir() else {place.name: set()}
    if pickled := [name for name in files if name.endswith(PICKLED)]:
        raise CheckpointError(
            f"{place} has its weights only in {pickled[0]}, a pickle, which is not read (convert it once: "
            "AutoModel.from_pretrained(folder).save_pretrained(other_folder) writes model.safetensors)"
        )
    found: dict[str, TensorPlace] = {}
    for name, expected in files.items():
        path = (place if place.is_dir() else place.parent) / name
        if not path.exists():
            raise CheckpointError(f"{path} does not exist, but the index lists it (download the whole model)")
        places = {key: TensorPlace(path, *entry) for key, entry in tensor_places(path).items()}
        if missing := sorted(expected - places.keys()):
            raise CheckpointError(f"{path} does not contain {missing[0]!r}, which the index lists")
        found |= places
    return found


def _fill(file: BinaryIO, memory: memoryview, path: Path, key: str) -> None:
    done = 0
    while done < len(memory):
        count = file.readinto(memory[done:])  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{path} is truncated or damaged: it ends within {key!r}")
        done += count


def _is_narrower(dtype: torch.dtype, other: torch.dtype) -> bool:
    floating = dtype.is_floating_point and other.is_floating_point
    return floating and torch.finfo(dtype).max < torch.finfo(other).max
