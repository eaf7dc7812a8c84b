"""Sends tensors from every rank to every other rank in one all-to-all, if both sides know what will come.

It uses the group of all ranks and host memory. It moves inputs from the ranks that have them to the ranks
that compute on them, and outputs back.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from varuna.execute.comm.frames import TensorMeta, meta_of
from varuna.execute.comm.session import Session
from varuna.execute.step.spans import PeerSlice, Span, slice_for_peers

ALIGNMENT = 16
"""Each tensor begins at a multiple of this many bytes, so that it can be used in place."""


class SampleTransfer(NamedTuple):
    """A tensor whose samples some ranks hold and others want."""

    held: Mapping[int, Span]  # by rank
    wanted: Mapping[int, Span]
    rows: Callable[[int, int], Tensor]  # samples `first` to `stop - 1` of what this rank holds
    meta: Callable[[int], TensorMeta]  # of a given number of samples


def redistribute(
    session: Session,
    transfers: Sequence[SampleTransfer],
    *,
    device: torch.device,
    needed: bool = True,  # False, on all ranks alike: each rank wants exactly what it holds
) -> list[list[tuple[PeerSlice, Tensor]]]:
    """Return for each transfer the parts that this rank wants, with their source, in the order of samples."""
    own = session.rank
    if not needed:
        return [_keep(own, transfer, device) for transfer in transfers]
    outgoing: list[list[Tensor]] = [[] for _ in range(session.num_ranks)]
    expected: list[list[TensorMeta]] = [[] for _ in range(session.num_ranks)]
    incoming: list[list[PeerSlice]] = []
    for held, wanted, rows, meta in transfers:
        for rank, first, stop in _common(own, held, wanted):
            outgoing[rank].append(rows(first, stop))
        incoming.append(_common(own, wanted, held))
        for rank, first, stop in incoming[-1]:
            expected[rank].append(meta(stop - first))
    arrived = [iter(parts) for parts in _all_to_all(session, outgoing, expected, device=device)]
    return [[(piece, next(arrived[piece.peer])) for piece in pieces] for pieces in incoming]


def _keep(own: int, transfer: SampleTransfer, device: torch.device) -> list[tuple[PeerSlice, Tensor]]:
    """Return what a rank both holds and wants."""
    if own not in transfer.held or own not in transfer.wanted:
        return []
    first, stop = transfer.held[own]
    assert transfer.wanted[own] == (first, stop), "samples that stay where they are"
    size = stop - first
    return [(PeerSlice(own, 0, size), transfer.rows(0, size).to(device))] if size else []


def _common(own: int, ours: Mapping[int, Span], theirs: Mapping[int, Span]) -> list[PeerSlice]:
    """Return the samples of this rank's span that are in the span of each other rank."""
    if own not in ours:
        return []
    ranks = sorted(theirs, key=lambda rank: theirs[rank])
    found = slice_for_peers((ours[own],), ours[own], [theirs[rank] for rank in ranks])
    return [piece._replace(peer=ranks[piece.peer]) for piece in found]


def _all_to_all(
    session: Session,
    outgoing: Sequence[Sequence[Tensor]],  # for each rank
    expected: Sequence[Sequence[TensorMeta]],  # from each rank
    *,
    device: torch.device,
) -> list[list[Tensor]]:
    """Return the tensors from each rank."""
    own = session.rank
    kept = [tensor.to(device) for tensor in outgoing[own]]
    if session.group is None:
        return [kept if rank == own else [] for rank in range(len(expected))]
    metas = [[meta_of(t.dtype, tuple(t.shape)) for t in tensors] for tensors in outgoing]
    sent = [0 if rank == own else sum(map(_padded, those)) for rank, those in enumerate(metas)]
    coming = [0 if rank == own else sum(map(_padded, those)) for rank, those in enumerate(expected)]
    send, receive = torch.empty(sum(sent), dtype=torch.uint8), torch.empty(sum(coming), dtype=torch.uint8)
    place = 0
    for rank, tensors in enumerate(outgoing):
        for tensor, meta in zip(tensors, metas[rank], strict=True) if rank != own else ():
            _view(send, place, meta).copy_(tensor)
            place += _padded(meta)
    work = dist.all_to_all_single(receive, send, coming, sent, group=session.group, async_op=True)
    assert work is not None and session.waiter is not None
    session.waiter.for_work(work, lambda: "the exchange of samples with all ranks")
    place, found = 0, []
    for rank, those in enumerate(expected):
        taken = kept if rank == own else []
        for meta in those if rank != own else ():
            taken.append(_view(receive, place, meta).to(device))
            place += _padded(meta)
        found.append(taken)
    return found


def _padded(meta: TensorMeta) -> int:
    return -(-meta.num_bytes // ALIGNMENT) * ALIGNMENT


def _view(buffer: Tensor, place: int, meta: TensorMeta) -> Tensor:
    return buffer[place : place + meta.num_bytes].view(meta.dtype).view(meta.shape)
