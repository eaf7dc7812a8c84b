"""Batches from one reader: the first rank iterates over any data, and every rank gets its replica's share.

The reader's position is saved and loaded with the model, so a job continues with the next batch, in any
layout.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec
from torch import Tensor

from varuna.execute.comm.session import Session
from varuna.execute.comm.values import PlainValue
from varuna.train.hot.repeat import enter_next
from varuna.train.varuna import Varuna
from varuna.types import spread_evenly


class ReaderPosition(msgspec.Struct, frozen=True):
    """The batches that were read. The same on all ranks."""

    epoch: int = 0
    batches: int = 0  # of this epoch
    source: Any = None  # state of the data itself, if it has one


class Dealt(msgspec.Struct):
    """A message of the first rank: a batch, or the end of an epoch."""

    inputs: PlainValue  # None: the epoch has ended
    source: PlainValue


class DataLoader:
    """Yields this rank's share of every batch; iterate over it on all ranks.

        for inputs in varuna.DataLoader(batches, model):
            loss, overflow = model.step(inputs)

    `batches` yields dicts of inputs for the whole job, of at most `batch_size` samples. Only the first rank
    reads it; other ranks may pass None. If it has `state_dict` and `load_state_dict`, these restore its
    position when a job resumes; else the batches before are read again and dropped. If it has `set_epoch`,
    it is called before each epoch. `name` registers the position with the model; None does not save it.
    """

    def __init__(
        self, batches: Iterable[Mapping[str, Any]] | None, model: Varuna, *, name: str | None = "data"
    ) -> None:
        self._source = batches
        self._model = model
        if self._reads and not self._session.provisional:  # a rank that joins does not know its rank yet
            self._check_source()
        self._position = self._before = ReaderPosition()
        self._read_at = -1  # the model's iteration when the last batch was read
        self._resumes = False
        if name in model._checkpoints.training.registered:
            raise ValueError(
                f"an object is already registered as {name!r} (for several epochs, loop over one DataLoader "
                "several times; for other data, such as an evaluation's, pass name=None or another name)"
            )
        if name is not None:
            model.register(name, self)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        enter_next(self._model)  # a joiner takes the position of the others
        if self._resumes:
            self._resumes = False
        elif self._position.batches:
            self._position = ReaderPosition(self._position.epoch + 1)
        items: Iterator[Mapping[str, Any]] | None = None
        while True:
            enter_next(self._model)
            with self._session.call("DataLoader"), self._model._report_errors("reading data"):
                if not self._reads:
                    items = None
                elif items is None:  # also in mid-epoch: a morph has made this rank the first one
                    items = self._begin_epoch()
                inputs = self._next(items)
            if inputs is None:
                return
            yield inputs

    @property
    def _session(self) -> Session:
        return self._model._session

    @property
    def _reads(self) -> bool:
        return self._session.rank == self._session.ranks[0]

    def _check_source(self) -> None:
        if not isinstance(self._source, Iterable):
            raise TypeError(
                f"the first rank needs an iterable of batches, not a {type(self._source).__name__} (pass a "
                "DataLoader, a list or a generator function's result; if machines may change, on all ranks: "
                "another rank may become the first one)"
            )

    def _begin_epoch(self) -> Iterator[Mapping[str, Any]]:
        self._check_source()
        source: Any = self._source
        if hasattr(source, "set_epoch"):
            source.set_epoch(self._position.epoch)
        if self._position.source is not None and self._position.batches:
            source.load_state_dict(self._position.source)
            return iter(source)
        return islice(iter(source), self._position.batches, None)

    def _next(self, items: Iterator[Mapping[str, Any]] | None) -> dict[str, Any] | None:
        """Read a batch on the first rank, which has `items`; send it to all, and return this rank's share."""
        dealt = Dealt(PlainValue(None), PlainValue(None))
        if items is not None and (item := next(items, None)) is not None:
            if not isinstance(item, Mapping):
                raise TypeError(
                    f"a batch must be a dict of the model's inputs, not a {type(item).__name__} (for example "
                    "{'x': x, 'y': y}; use a collate function, or a generator that makes the dict)"
                )
            state = getattr(self._source, "state_dict", lambda: None)()
            dealt = Dealt(PlainValue(dict(item)), PlainValue(state))
        dealt = self._session.broadcast(dealt, self._session.ranks[0], Dealt)
        inputs: dict[str, Any] | None = dealt.inputs.value
        if inputs is None:
            if not self._position.batches:
                raise ValueError(f"epoch {self._position.epoch} has no batch: the data is empty or used up")
            return None
        self._before, self._read_at = self._position, self._model.iteration
        self._position = ReaderPosition(self._position.epoch, self._position.batches + 1, dealt.source.value)
        return self._share(inputs)

    def _share(self, inputs: dict[str, Any]) -> dict[str, Any]:
        model = self._model
        batch, most = model._programs.batch(inputs), model.plan.batch_size
        if batch.size > most:
            raise ValueError(
                f"a batch of the data has {batch.size} samples, but the job's batch_size is {most} (give "
                "both the same size)"
            )
        return own_share(model, inputs)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was trained."""
        waits = self._read_at == self._model.iteration  # a save before the step of this batch
        return msgspec.structs.asdict(self._before if waits else self._position)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a position that `state_dict` returned."""
        self._position = self._before = ReaderPosition(**state_dict)
        self._read_at = -1
        self._resumes = True


def own_share(model: Varuna, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return this replica's share of the inputs of a whole batch."""
    batch = model._programs.batch(inputs)
    shares = spread_evenly(batch.size, parts=model.data_depth)
    first, size = sum(shares[: model.rank_within_stage]), shares[model.rank_within_stage]
    return {
        name: value.narrow(batch.dims[name], first, size)
        if isinstance(value, Tensor) and name in batch.dims
        else value
        for name, value in inputs.items()
    }
