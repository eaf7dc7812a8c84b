"""Refuses losses that divide by something else than this rank's samples, unless their weight is known."""

import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from varuna.capture.model.copies import working_copy

MOST_NODES = 500
"""Operations of the loss, outside of the partitioned modules, that are looked at."""
MEAN = 1
"""torch's number of reduction="mean"."""
TOLERANCE = 1e-3
"""Relative difference between a batch and its parts that rounding explains."""
SAME = 1e-6
"""Relative difference between the divisors of two ranks that rounding explains."""
PART = "PipelineFunctionBackward"
"""The node of a partitioned module in the graph of a loss."""


def refuse_counted_labels(loss: Tensor) -> None:
    """Raise if the loss is a mean over some of the labels: ignored ones, or with class weights.

    Ranks are weighted by their samples. So a mean over labels is the mean over the whole batch only if every
    sample has equally many labels that count.
    """
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().startswith("NllLoss") and node._saved_reduction == MEAN:
            labels, total = node._saved_target.numel(), float(node._saved_total_weight)
            if total != labels:
                raise ValueError(
                    f"the loss is a mean over some of the labels: {labels} labels of this rank count as "
                    f"{total:g}, because of ignore_index or class weights, so the mean over ranks is not "
                    "the mean over the whole batch (say how much the labels of a batch count: "
                    "VarunaStrategy(loss_weight=lambda batch: (batch['labels'] != -100).sum()); or compute "
                    "the loss in the forward of the partitioned module)"
                )
        waiting += [following for following, _ in node.next_functions]


def loss_divisors(loss: Tensor) -> list[float]:
    """Return what a loss divides by, for each path from it to a partitioned module or a parameter.

    Means, divisions by a number and products with a number count; numbers that are trained do not.
    """
    found: list[float] = []
    waiting: list[tuple[Any, float]] = [(loss.grad_fn, 1.0)]
    for _ in range(MOST_NODES):
        if not waiting:
            break
        node, divisor = waiting.pop()
        if node is None:
            continue
        if node.name() == PART or not node.next_functions:
            found.append(divisor)
            continue
        divisor *= _elements_of_mean(node)
        for index, (following, _) in enumerate(node.next_functions):
            waiting.append((following, divisor * _constant_divisor(node, index)))
    return found


def _elements_of_mean(node: Any) -> float:
    """Return how many values this node of a graph takes the mean of; 1 for other nodes."""
    if node.name().startswith("Mean"):
        sizes = node._saved_self_sym_sizes
        dims = getattr(node, "_saved_dim", None) or range(len(sizes))
        # torch shows a negative dim as an unsigned number.
        return float(math.prod(sizes[dim if dim < len(sizes) else dim - 2**64] for dim in dims))
    if getattr(node, "_saved_reduction", None) != MEAN:
        return 1.0
    if node.name().startswith("NllLoss"):
        return float(node._saved_total_weight)
    return float(node._saved_self.numel())


def _constant_divisor(node: Any, index: int) -> float:
    """Return the constant by which a node divides one of its inputs; 1 if there is none."""
    is_division, is_product = (node.name().startswith(kind) for kind in ("Div", "Mul"))
    if not (is_product or (is_division and index == 0)):
        return 1.0
    other = getattr(node, "_saved_self" if index else "_saved_other", None)
    if isinstance(other, Tensor):
        if other.dim() or other.requires_grad:  # one number for each sample is no constant
            return 1.0
        other = other.item()
    if not isinstance(other, int | float) or not other:
        return 1.0
    return float(other) if is_division else 1.0 / other


def explain_divisors(divisors: Sequence[Sequence[float]], counts: Sequence[int]) -> str | None:
    """Return why the mean over ranks is not the loss of the whole batch; None if nothing is wrong.

    `divisors` of each rank are those of `loss_divisors`, `counts` its samples. A divisor must be the same on
    all ranks, or proportional to their samples.
    """
    if len({len(own) for own in divisors}) > 1:
        return None  # the ranks compute different losses
    for numbers in zip(*divisors, strict=True):
        shares = [number / count if count else number for number, count in zip(numbers, counts, strict=True)]
        if _are_equal(numbers) or _are_equal(shares):
            continue
        rank = next(rank for rank, share in enumerate(shares) if not _are_equal((share, shares[0])))
        return (
            f"it divides by {numbers[0]:g} for the {counts[0]} samples of rank 0, and by {numbers[rank]:g} "
            f"for the {counts[rank]} samples of rank {rank}"
        )
    return None


def _are_equal(numbers: Sequence[float]) -> bool:
    return all(math.isclose(number, numbers[0], rel_tol=SAME) for number in numbers)


def loss_factor(own_weight: float, total_weight: float, share: float) -> float:
    """Return what the loss of a rank is multiplied with, if its samples weigh `own_weight` of the total."""
    if not total_weight:
        raise ValueError("loss_weight is zero on all ranks (skip such a batch on all ranks)")
    return own_weight / total_weight / share if share else 0.0


@dataclass(frozen=True)
class PartsCheck:
    """The comparison of a batch's loss with those of its halves."""

    difference: str | None = None  # why they do not add up
    skipped: str | None = None  # why they were not compared


def compare_parts(
    module: Any, batch: Any, others: Sequence[Any], weight: Callable[[Any], Any] | None
) -> PartsCheck:
    """Compare the loss of a batch with those of its halves.

    Runs `training_step` of a copy, without gradients, logging and dropout.
    """
    count = _count_samples(batch)
    if count is None:
        return PartsCheck(skipped=f"no tensor is found in the batch, a {type(batch).__name__}")
    if count < 2:
        return PartsCheck(skipped="the first batch of a rank has a single sample")
    if any(p.is_meta for p in module.parameters()):
        return PartsCheck(skipped="a part of the model is on meta")
    pieces = [(0, count), (0, count // 2), (count // 2, count)]
    try:
        with torch.no_grad(), torch.random.fork_rng():
            copied = _silent_copy(module)
            found = [_loss_of(copied, _part(batch, count, *piece), others) for piece in pieces]
            again = _loss_of(copied, batch, others)
        weights: list[float] = [stop - first for first, stop in pieces]
        if weight is not None:
            weights = [float(weight(_part(batch, count, *piece))) for piece in pieces]
    except Exception as error:
        return PartsCheck(skipped=f"training_step of a part of the batch raises {error!r}")
    whole, one, other = found
    if again != whole:
        return PartsCheck(skipped="it draws random numbers, or changes from call to call")
    if not weights[0]:
        return PartsCheck(skipped="loss_weight of the first batch is zero")
    parts = (one * weights[1] + other * weights[2]) / weights[0]
    if abs(parts - whole) <= TOLERANCE * max(abs(whole), abs(one), abs(other)):
        return PartsCheck()
    return PartsCheck(f"it is {whole:.6g} for {count} samples, and {parts:.6g} from their two halves")


def _silent_copy(module: nn.Module) -> Any:
    """Copy a LightningModule without its Trainer; parameters are shared, and nothing is logged."""
    trainer = module.__dict__.get("_trainer")
    module.__dict__["_trainer"] = None
    try:
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        copied: Any = working_copy(module, device, None).eval()
    finally:
        module.__dict__["_trainer"] = trainer
    copied.__dict__.update(_trainer=trainer, log=_ignore, log_dict=_ignore)
    return copied


def _ignore(*_args: Any, **_options: Any) -> None:
    """Stands for `self.log`."""


def _loss_of(module: Any, batch: Any, others: Sequence[Any]) -> float:
    output = module.training_step(batch, *others)
    return float(output["loss"] if isinstance(output, Mapping) else output)


def _count_samples(batch: Any) -> int | None:
    """Return the first size of the first tensor of a batch."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else None
    values: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        values = batch.values()
    elif isinstance(batch, list | tuple):
        values = batch
    elif is_dataclass(batch):
        values = (getattr(batch, field.name) for field in fields(batch))
    return next((count for count in map(_count_samples, values) if count is not None), None)


def _part(batch: Any, count: int, first: int, stop: int) -> Any:
    """Return some samples of a batch of `count` samples."""
    if isinstance(batch, Tensor):
        return batch[first:stop] if batch.dim() and len(batch) == count else batch
    if isinstance(batch, Mapping):
        values = {name: _part(value, count, first, stop) for name, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return values
        same: MutableMapping[Any, Any] = copy(batch)  # of the same type: training_step may use its attributes
        same.update(values)
        return same
    if isinstance(batch, list | tuple):
        rows = len(batch) == count and not any(isinstance(x, Tensor) and len(x) == count for x in batch)
        inside = batch[first:stop] if rows else [_part(value, count, first, stop) for value in batch]
        return type(batch)(*inside) if hasattr(batch, "_fields") else type(batch)(inside)
    if is_dataclass(batch) and not isinstance(batch, type):
        parts = {field.name: _part(getattr(batch, field.name), count, first, stop) for field in fields(batch)}
        copied: Any = copy(batch)
        for name, value in parts.items():
            object.__setattr__(copied, name, value)
        return copied
    return batch
