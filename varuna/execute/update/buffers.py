"""Makes buffers that forwards change (BatchNorm's) equal on all replicas."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


def synchronize_buffers(
    before: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    *,
    momentum: Mapping[str, float | None],
    counts: Sequence[int],
    replica: int,
    reduce: Callable[[Tensor], None],
) -> None:
    """Make buffers equal on all replicas, in place, with one reduction.

    BatchNorm's running value after a micro-batch is (1 - momentum) × value + momentum × statistic. So a
    replica's micro-batches are an affine map of the value before the step. The maps of all replicas, composed
    in order, give the value of one process that runs all micro-batches in order. Counters add what each
    replica added. Any other buffer is averaged.

    `counts` are the micro-batches of each replica.
    """
    factors: list[tuple[float, float, float]] = []  # of the old value here, the change, the old value overall
    olds: list[Tensor] = []
    for name, buffer in buffers.items():
        share = momentum.get(name)
        keep = 1.0 if share is None else 1.0 - share
        seen = before.get(f"{name.rpartition('.')[0]}.num_batches_tracked".lstrip("."))
        cumulative = name in momentum and share is None and seen is not None
        follows = share is not None or cumulative or not buffer.is_floating_point()
        if cumulative:  # a BatchNorm without momentum: its value is the mean over all micro-batches
            first = int(seen or 0)
            here, total = first + counts[replica], max(first + sum(counts), 1)
            factors.append((first / max(here, 1), here / total, first / total))
        elif follows:
            factors.append((keep ** counts[replica], keep ** sum(counts[replica + 1 :]), keep ** sum(counts)))
        else:
            factors.append((0.0, 1 / len(counts), 0.0))
        olds.append(before[name] if follows else torch.zeros_like(buffer))
    sizes = [old.numel() for old in olds]
    old, new = _flatten(olds), _flatten(list(buffers.values()))
    rows = torch.tensor(factors, dtype=torch.float64).repeat_interleave(torch.tensor(sizes), 0)
    own, later, overall = rows.to(old.device).unbind(1)
    summed = new.sub_(own * old).mul_(later)
    reduce(summed)
    summed.add_(overall * old)
    for buffer, found in zip(buffers.values(), torch.split(summed, sizes), strict=True):
        buffer.copy_(found.view(buffer.shape))


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate in float64, which is exact for counters."""
    size = sum(tensor.numel() for tensor in tensors)
    flat = torch.empty(size, dtype=torch.float64, device=tensors[0].device)
    return torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat)
