"""Every rank of a group makes the same calls in the same order, whatever backend carries them out.

NCCL pairs calls by their order alone: one that is missing, or swapped with another, hangs or adds up what
does not belong together. So this is checked call by call, where gloo would forgive it.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.tasks import train

Calls = dict[tuple[int, ...], list[tuple[Any, ...]]]
"""By the ranks of the group: what was called, with which shape, dtype and device."""


def record_calls(name: str, depth: int, width: int, **options: Any) -> Calls:
    calls: Calls = {}
    real = {"all_reduce": dist.all_reduce, "broadcast": dist.broadcast}

    def recorded(what: str) -> Any:
        def call(tensor: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            ranks = tuple(dist.get_process_group_ranks(group))
            form = what, tuple(tensor.shape), str(tensor.dtype), tensor.device.type
            calls.setdefault(ranks, []).append(form)
            return real[what](tensor, *args, group=group, **kwargs)

        return call

    for what in real:
        setattr(dist, what, recorded(what))
    try:
        train(name, depth, width, **options)
    finally:
        for what, function in real.items():
            setattr(dist, what, function)
    return calls


def check_calls(found: Sequence[Calls]) -> int:
    """Every member of a group has made the calls that the first one has; how many groups there are."""
    groups = {ranks for calls in found for ranks in calls}
    for ranks in groups:
        first = found[ranks[0]][ranks]
        for rank in ranks:
            assert found[rank].get(ranks) == first, f"rank {rank} of {ranks}"
    return len(groups)
