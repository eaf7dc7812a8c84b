"""Cuts one replica's batch into micro-batches, each with its exact weight in the global loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from varuna.execute.step.spans import Runs, size

WeightFunction = Callable[[Mapping[str, object]], float]
"""Weight of a micro-batch in the loss: its samples, or the user's own measure, for example tokens."""


@dataclass(frozen=True)
class MicroBatch:
    first_sample: int  # within this replica's batch
    size: int
    weight: float
    inputs: Mapping[str, object]
    runs: Runs = ()  # all its samples within this replica's batch, unless they are contiguous

    @property
    def spans(self) -> Runs:
        """All its samples within this replica's batch."""
        return self.runs or (((self.first_sample, self.first_sample + self.size),) if self.size else ())


def scatter(
    inputs: Mapping[str, object],
    *,
    num_samples: int,
    dims: Mapping[str, int],  # batch dimension of each batched input
    microbatch_size: int,
    device: torch.device,
    weigh: WeightFunction | None = None,
) -> list[MicroBatch]:
    """Return the micro-batches, with their inputs on the device.

    `weigh` sees the original inputs, which are mostly on the host: reading them does not stop the device.
    """
    firsts = range(0, num_samples, microbatch_size)
    parts = cut(move_inputs(inputs, device), dims, microbatch_size, len(firsts))
    originals = parts if weigh is None else cut(inputs, dims, microbatch_size, len(firsts))
    microbatches = []
    for first, part, original in zip(firsts, parts, originals, strict=True):
        size = min(microbatch_size, num_samples - first)
        weight = float(size) if weigh is None else weight_of(weigh, original)
        if weight:  # weight 0 need not be computed, and its loss may not be finite
            microbatches.append(MicroBatch(first, size, weight, part))
    return microbatches


def scatter_runs(
    inputs: Mapping[str, object],
    *,
    dims: Mapping[str, int],
    microbatches: Sequence[Runs],  # within this replica's batch
    device: torch.device,
    weigh: WeightFunction | None = None,
) -> list[MicroBatch]:
    """Return micro-batches of the given samples. Empty ones stay, so that all ranks have equally many."""
    moved = move_inputs(inputs, device)
    found = []
    for runs in microbatches:
        count = size(runs)
        if not count:
            found.append(MicroBatch(0, 0, 0.0, {}))
            continue
        weight = float(count) if weigh is None else weight_of(weigh, _choose(inputs, dims, runs))
        several = runs if len(runs) > 1 else ()
        found.append(MicroBatch(runs[0][0], count, weight, _choose(moved, dims, runs), several))
    return found


def _choose(inputs: Mapping[str, object], dims: Mapping[str, int], runs: Runs) -> dict[str, object]:
    return {
        name: samples_of(value, runs, dims[name]) if name in dims and isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


def samples_of(value: Tensor, runs: Runs, dim: int, *, each: int = 1) -> Tensor:
    """Return the samples of one micro-batch; one sample has length `each` along the dimension."""
    return join([value.narrow(dim, first * each, (stop - first) * each) for first, stop in runs], dim)


def put_in_order(values: Sequence[Tensor], runs: Sequence[Runs], dim: int, *, each: int = 1) -> Tensor:
    """Join the outputs of micro-batches in the order of samples; the inverse of `samples_of`."""
    found: list[tuple[int, Tensor]] = []
    for value, spans in zip(values, runs, strict=True):
        lengths = [(stop - first) * each for first, stop in spans]
        parts = (value,) if len(spans) == 1 else torch.split(value, lengths, dim)
        found += [(first, part) for (first, _), part in zip(spans, parts, strict=True)]
    return join([part for _, part in sorted(found, key=lambda pair: pair[0])], dim)


def join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def with_leaves(microbatch: MicroBatch, names: Sequence[str]) -> MicroBatch:
    """Return the micro-batch with these inputs as leaves that collect a gradient."""
    leaves = {name: microbatch.inputs[name] for name in names if name in microbatch.inputs}
    own = {
        name: value.detach().requires_grad_() for name, value in leaves.items() if isinstance(value, Tensor)
    }
    return replace(microbatch, inputs={**microbatch.inputs, **own})


def cut(
    inputs: Mapping[str, object], dims: Mapping[str, int], size: int, count: int
) -> list[dict[str, object]]:
    parts = {
        name: torch.split(value, size, dims[name])
        for name, value in inputs.items()
        if name in dims and isinstance(value, Tensor)
    }
    return [
        {name: parts[name][index] if name in parts else value for name, value in inputs.items()}
        for index in range(count)
    ]


def weight_of(weigh: WeightFunction, part: Mapping[str, object]) -> float:
    weight = float(weigh(part))
    if not 0 <= weight < float("inf"):
        raise ValueError(f"loss_weight must return a finite number, zero or more, not {weight}")
    return weight


def move_inputs(inputs: Mapping[str, object], device: torch.device) -> dict[str, object]:
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
