"""Cuts one replica's batch into micro-batches, each with its exact weight in the global loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from varuna.execute.step.spans import Runs, size

WeightFunction = Callable[[Mapping[str, object]], float]
"""How much a micro-batch counts in the loss: its samples, or the user's own measure (tokens, say)."""


@dataclass(frozen=True)
class MicroBatch:
    first_sample: int  # within this replica's batch
    size: int
    weight: float
    inputs: Mapping[str, object]
    runs: Runs = ()  # where its samples do not follow each other: all of them, within this replica's batch

    @property
    def spans(self) -> Runs:
        """All its samples, within this replica's batch."""
        return self.runs or (((self.first_sample, self.first_sample + self.size),) if self.size else ())


def scatter(
    inputs: Mapping[str, object],
    *,
    num_samples: int,
    dims: Mapping[str, int],  # of the batched inputs: the dimension along which the samples lie
    microbatch_size: int,
    device: torch.device,
    weigh: WeightFunction | None = None,
) -> list[MicroBatch]:
    """The micro-batches' inputs on the device, where they are weighed as they came: on the host, mostly,
    where a look at them stops nobody."""
    firsts = range(0, num_samples, microbatch_size)
    parts = _cut(move_inputs(inputs, device), dims, microbatch_size, len(firsts))
    seen = parts if weigh is None else _cut(inputs, dims, microbatch_size, len(firsts))
    microbatches = []
    for first, part, as_it_came in zip(firsts, parts, seen, strict=True):
        size = min(microbatch_size, num_samples - first)
        weight = float(size) if weigh is None else _weight(weigh, as_it_came)
        if weight:  # what counts for nothing need not be computed (and may have no finite loss)
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
    """The same for chosen samples; micro-batches without any stay, so that all ranks count alike."""
    moved = move_inputs(inputs, device)
    found = []
    for runs in microbatches:
        count = size(runs)
        if not count:
            found.append(MicroBatch(0, 0, 0.0, {}))
            continue
        weight = float(count) if weigh is None else _weight(weigh, _choose(inputs, dims, runs))
        several = runs if len(runs) > 1 else ()
        found.append(MicroBatch(runs[0][0], count, weight, _choose(moved, dims, runs), several))
    return found


def _choose(inputs: Mapping[str, object], dims: Mapping[str, int], runs: Runs) -> dict[str, object]:
    return {
        name: samples_of(value, runs, dims[name]) if name in dims and isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


def samples_of(value: Tensor, runs: Runs, dim: int, *, each: int = 1) -> Tensor:
    """The samples of one micro-batch; `each` is how much of the dimension is one sample's."""
    return join([value.narrow(dim, first * each, (stop - first) * each) for first, stop in runs], dim)


def put_in_order(values: Sequence[Tensor], runs: Sequence[Runs], dim: int, *, each: int = 1) -> Tensor:
    """The other way round: what micro-batches of such samples gave, by sample."""
    found: list[tuple[int, Tensor]] = []
    for value, spans in zip(values, runs, strict=True):
        lengths = [(stop - first) * each for first, stop in spans]
        parts = (value,) if len(spans) == 1 else torch.split(value, lengths, dim)
        found += [(first, part) for (first, _), part in zip(spans, parts, strict=True)]
    return join([part for _, part in sorted(found, key=lambda each: each[0])], dim)


def join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def with_leaves(microbatch: MicroBatch, names: Sequence[str]) -> MicroBatch:
    """The same micro-batch with inputs of its own to which gradients go back."""
    leaves = {name: microbatch.inputs[name] for name in names if name in microbatch.inputs}
    own = {
        name: value.detach().requires_grad_() for name, value in leaves.items() if isinstance(value, Tensor)
    }
    return replace(microbatch, inputs={**microbatch.inputs, **own})


def _cut(
    inputs: Mapping[str, object], dims: Mapping[str, int], size: int, count: int
) -> list[dict[str, object]]:
    pieces = {
        name: torch.split(value, size, dims[name])
        for name, value in inputs.items()
        if name in dims and isinstance(value, Tensor)
    }
    return [
        {name: pieces[name][index] if name in pieces else value for name, value in inputs.items()}
        for index in range(count)
    ]


def _weight(weigh: WeightFunction, part: Mapping[str, object]) -> float:
    weight = float(weigh(part))
    if not 0 <= weight < float("inf"):
        raise ValueError(f"the weight of a micro-batch must be zero or more, but loss_weight gave {weight}")
    return weight


def move_inputs(inputs: Mapping[str, object], device: torch.device) -> dict[str, object]:
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
