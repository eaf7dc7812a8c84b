"""Refuses losses that divide by something else than this rank's samples, unless their weight is known."""

from typing import Any

from torch import Tensor

MOST_NODES = 500
"""Operations of the loss, outside of the partitioned modules, that are looked at."""
MEAN = 1
"""torch's number of reduction="mean"."""


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


def loss_factor(own_weight: float, total_weight: float, share: float) -> float:
    """Return what the loss of a rank is multiplied with, if its samples weigh `own_weight` of the total."""
    if not total_weight:
        raise ValueError("loss_weight is zero on all ranks (skip such a batch on all ranks)")
    return own_weight / total_weight / share if share else 0.0
