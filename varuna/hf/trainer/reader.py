"""Batches of a Trainer: the first rank reads the data, and every rank gets the same whole batches."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import msgspec
from torch.utils.data import IterableDataset
from transformers.trainer_pt_utils import find_batch_size

from varuna.errors import WorkerError
from varuna.execute.comm.session import Session
from varuna.execute.comm.values import PlainValue


class BatchMessage(msgspec.Struct):
    """A message of the first rank: batches, or why it has none."""

    batches: PlainValue  # a list of dicts
    error: str | None = None
    is_last: bool = False
    remainder: int = -1  # samples of an incomplete last batch, as accelerate counts them


def plain_batch(batch: Any) -> dict[str, Any]:
    """Return a batch of a collator, such as a BatchEncoding, as a dict of the model's inputs."""
    if not isinstance(batch, Mapping) and not hasattr(batch, "items"):
        raise TypeError(
            f"the data collator returned a {type(batch).__name__}, not a dict of the model's inputs (return "
            "a dict such as {'input_ids': ..., 'labels': ...})"
        )
    return dict(batch.items())


def read_batches(collective: Any, read: Callable[[], BatchMessage]) -> BatchMessage:
    """Return what `read` returns on the first rank. All ranks call this, and all raise its error."""
    first = collective.ranks[0]
    if len(collective.ranks) == 1:
        return read()
    message, error = BatchMessage(PlainValue([])), None
    if collective.rank == first:
        try:
            message = read()
        except Exception as raised:
            error = raised
            message.error = f"{type(raised).__name__}: {raised}"
    call = collective.call("DataLoader") if isinstance(collective, Session) else nullcontext()
    with call:  # a rank that makes another call is named
        received: BatchMessage = collective.broadcast(message, first, BatchMessage)
    if error is not None:
        raise error
    if received.error is not None:
        raise WorkerError(f"rank {first} failed while it read the data: {received.error}")
    return received


class SharedReader:
    """A dataloader that only the first rank reads; every rank iterates over it."""

    def __init__(self, dataloader: Any, collective: Callable[[], Any], accelerator: Any) -> None:
        self._dataloader = dataloader
        self._collective = collective
        self._gradient_state = accelerator.gradient_state
        is_stream = isinstance(getattr(dataloader, "dataset", None), IterableDataset)
        self._counts_last_batch = is_stream and accelerator.dispatch_batches is not False
        self.end_of_dataloader = False
        self.remainder = -1

    def __len__(self) -> int:
        return len(self._dataloader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_dataloader"], name)

    def __iter__(self) -> Iterator[Any]:
        collective = self._collective()
        if len(collective.ranks) == 1:
            yield from self._batches()
            return
        reads = collective.rank == collective.ranks[0]
        items = self._batches() if reads else None

        def read() -> BatchMessage:
            assert items is not None
            item = next(items, None)
            batches = [] if item is None else [plain_batch(item)]
            is_last = bool(getattr(self._dataloader, "end_of_dataloader", False))
            return BatchMessage(
                PlainValue(batches), None, is_last, int(getattr(self._dataloader, "remainder", -1))
            )

        self.end_of_dataloader = False
        if not reads:  # metrics drop what accelerate adds to the last batch: it asks the active dataloader
            self._gradient_state._add_dataloader(self)
        try:
            while batches := (message := read_batches(self._collective(), read)).batches.value:
                self.end_of_dataloader, self.remainder = message.is_last, message.remainder
                yield batches[0]
        finally:
            if not reads:
                self._gradient_state._remove_dataloader(self)

    def _batches(self) -> Iterator[Any]:
        """Read the data. Note the samples of a stream's last batch, as Trainer's reader of streams does.

        Without this number, an incomplete last batch would count in metrics as a whole one.
        """
        loader = self._dataloader
        for batch in loader:
            is_last = getattr(loader, "end_of_dataloader", False)  # of accelerate, not of a script's own
            if self._counts_last_batch and is_last and loader.remainder == -1:
                samples: int | None = find_batch_size(batch)  # type: ignore[no-untyped-call]
                loader.remainder = samples or -1
            yield batch
