"""Inputs by function: the library asks for this rank's share of a step, and again if the share changes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from varuna.train.data import SampleOrder
from varuna.types import spread_evenly

Fetch = Callable[[Sequence[int]], Mapping[str, object]]
"""Returns the inputs of these samples."""


class StepPlace(Protocol):
    """The place of a rank in a step, as a wrapped model knows it."""

    @property
    def iteration(self) -> int: ...
    @property
    def rank_within_stage(self) -> int: ...
    @property
    def data_depth(self) -> int: ...


class FetchedInputs(dict[str, object]):
    """The inputs of this rank in one step, and how to fetch those of another share."""

    def __init__(self, fetch: Fetch, order: SampleOrder | None, batch_size: int, model: StepPlace) -> None:
        self._fetch, self._order, self._batch_size = fetch, order, batch_size
        self._place = _place(model)
        super().__init__(_checked(fetch(self._samples())))

    def at(self, model: StepPlace) -> "FetchedInputs":
        """Return the inputs of the model's next step in its current layout."""
        if _place(model) == self._place:
            return self
        return FetchedInputs(self._fetch, self._order, self._batch_size, model)

    def _samples(self) -> Sequence[int]:
        step, replica, num_replicas = self._place
        if self._order is not None:
            return self._order.replica(step=step, replica=replica, num_replicas=num_replicas)
        shares = spread_evenly(self._batch_size, parts=num_replicas)
        first = step * self._batch_size + sum(shares[:replica])
        return range(first, first + shares[replica])


def evaluated_share(fetch: Fetch, num_samples: int, model: StepPlace) -> Mapping[str, object]:
    """Return this replica's share of the samples 0, 1, 2, ... of an evaluation."""
    shares, replica = spread_evenly(num_samples, parts=model.data_depth), model.rank_within_stage
    first = sum(shares[:replica])
    return _checked(fetch(range(first, first + shares[replica])))


def _place(model: StepPlace) -> tuple[int, int, int]:
    return model.iteration, model.rank_within_stage, model.data_depth


def _checked(inputs: Any) -> Mapping[str, object]:
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"fetch must return a dict of the model's inputs, not a {type(inputs).__name__} (for example "
            "lambda samples: {'x': x[samples], 'y': y[samples]})"
        )
    return inputs
