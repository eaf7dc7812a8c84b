"""Every rank of a group makes the same calls in the same order, whatever backend carries them out.

NCCL pairs calls by their order alone: one that is missing, or swapped with another, hangs or adds up what
does not belong together. So this is checked call by call, where gloo would forgive it.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.tasks import train
from varuna.execute.comm import session
from varuna.execute.comm.lanes import GroupLane, open_lanes

Calls = dict[tuple[int, ...], list[tuple[Any, ...]]]
"""By the ranks of the group: what was called, with which shape, dtype and device.

A lane is the sender's rank, the receiver's and -1.
"""


class RecordingLane:
    def __init__(self, lane: GroupLane, calls: list[tuple[Any, ...]]) -> None:
        self.name = lane.name
        self._lane, self._calls = lane, calls

    def broadcast(self, tensor: Tensor) -> Any:
        self._calls.append((tuple(tensor.shape), str(tensor.dtype), tensor.device.type))
        return self._lane.broadcast(tensor)


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

    def open_recorded(rank: int, peer: int, *args: Any, **kwargs: Any) -> tuple[GroupLane, GroupLane]:
        out, back = open_lanes(rank, peer, *args, **kwargs)
        there, here = calls.setdefault((rank, peer, -1), []), calls.setdefault((peer, rank, -1), [])
        return RecordingLane(out, there), RecordingLane(back, here)

    for what in real:
        setattr(dist, what, recorded(what))
    session.open_lanes = open_recorded  # type: ignore[attr-defined]
    try:
        train(name, depth, width, **options)
    finally:
        session.open_lanes = open_lanes  # type: ignore[attr-defined]
        for what, function in real.items():
            setattr(dist, what, function)
    return calls


def check_calls(found: Sequence[Calls]) -> int:
    """Every member of a group has made the calls that the first one has; how many groups there are."""
    groups = {ranks for calls in found for ranks in calls}
    for ranks in groups:
        first = found[ranks[0]][ranks]
        assert first, ranks
        for rank in ranks[:-1] if ranks[-1] < 0 else ranks:
            assert found[rank].get(ranks) == first, f"rank {rank} of {ranks}"
    return len(groups)
