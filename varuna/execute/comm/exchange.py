"""Hands tensors from every rank to every other in one message, where both sides know what will come.

Over the group of all ranks, through the host: for inputs that lie with other ranks than those that compute
on them, and for what comes out. Nothing is sent where nobody has anything for another rank.

`redistribute` is told who holds which samples and who wants which; what one rank has for another is what
lies in the spans of both (`shares`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from varuna.execute.comm.session import Session
from varuna.execute.step.spans import Piece, Span, pieces

ALIGNMENT = 16
"""Each tensor begins at a multiple of so many bytes: what arrives is used where it lies."""


class Form(NamedTuple):
    """What a tensor will be that is on its way."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Cargo(NamedTuple):
    """A tensor of which some ranks hold samples that others want."""

    held: Mapping[int, Span]  # by rank
    wanted: Mapping[int, Span]
    rows: Callable[[int, int], Tensor]  # samples `first` to `stop - 1` of what this rank holds
    form: Callable[[int], Form]  # of so many samples


def redistribute(
    session: Session,
    cargoes: Sequence[Cargo],
    *,
    device: torch.device,
    needed: bool = True,  # False, on all ranks alike: each wants what it holds itself
) -> list[list[tuple[Piece, Tensor]]]:
    """Of each cargo, what of this rank's samples came from which rank, in the order of samples."""
    own = session.rank
    if not needed:
        return [_kept(own, cargo, device) for cargo in cargoes]
    outgoing: list[list[Tensor]] = [[] for _ in range(session.num_ranks)]
    expected: list[list[Form]] = [[] for _ in range(session.num_ranks)]
    coming: list[list[Piece]] = []
    for held, wanted, rows, form in cargoes:
        for rank, first, stop in _common(own, held, wanted):
            outgoing[rank].append(rows(first, stop))
        coming.append(_common(own, wanted, held))
        for rank, first, stop in coming[-1]:
            expected[rank].append(form(stop - first))
    arrived = [iter(parts) for parts in exchange(session, outgoing, expected, device=device)]
    return [[(piece, next(arrived[piece.peer])) for piece in several] for several in coming]


def _kept(own: int, cargo: Cargo, device: torch.device) -> list[tuple[Piece, Tensor]]:
    """What a rank holds and wants itself, which is the same."""
    if own not in cargo.held or own not in cargo.wanted:
        return []
    first, stop = cargo.held[own]
    assert cargo.wanted[own] == (first, stop), "samples that stay where they are"
    size = stop - first
    return [(Piece(own, 0, size), cargo.rows(0, size).to(device))] if size else []


def _common(own: int, ours: Mapping[int, Span], theirs: Mapping[int, Span]) -> list[Piece]:
    """What this rank has in common with each of the others."""
    if own not in ours:
        return []
    ranks = sorted(theirs, key=lambda rank: theirs[rank])
    found = pieces((ours[own],), ours[own], [theirs[rank] for rank in ranks])
    return [piece._replace(peer=ranks[piece.peer]) for piece in found]


def exchange(
    session: Session,
    outgoing: Sequence[Sequence[Tensor]],  # for each rank
    expected: Sequence[Sequence[Form]],  # from each rank
    *,
    device: torch.device,
) -> list[list[Tensor]]:
    """What came from each rank."""
    own = session.rank
    if session.everyone is None:
        return [[t.to(device) for t in outgoing[own]] if rank == own else [] for rank in range(len(expected))]
    sent = [0 if rank == own else sum(map(_padded, forms)) for rank, forms in enumerate(_forms(outgoing))]
    coming = [0 if rank == own else sum(map(_padded, forms)) for rank, forms in enumerate(expected)]
    send, receive = torch.empty(sum(sent), dtype=torch.uint8), torch.empty(sum(coming), dtype=torch.uint8)
    place = 0
    for rank, tensors in enumerate(outgoing):
        for tensor in tensors if rank != own else ():
            form = Form(tensor.dtype, tuple(tensor.shape))
            _seen_as(send, place, form).copy_(tensor)
            place += _padded(form)
    work = dist.all_to_all_single(receive, send, coming, sent, group=session.everyone, async_op=True)
    assert work is not None and session.waiter is not None
    session.waiter.for_work(work, lambda: "what other ranks have for this one")
    place, found = 0, []
    for rank, forms in enumerate(expected):
        taken: list[Tensor] = [t.to(device) for t in outgoing[own]] if rank == own else []
        for form in forms if rank != own else ():
            taken.append(_seen_as(receive, place, form).to(device))
            place += _padded(form)
        found.append(taken)
    return found


def _forms(outgoing: Sequence[Sequence[Tensor]]) -> list[list[Form]]:
    return [[Form(tensor.dtype, tuple(tensor.shape)) for tensor in tensors] for tensors in outgoing]


def _padded(form: Form) -> int:
    return -(-form.num_bytes // ALIGNMENT) * ALIGNMENT


def _seen_as(buffer: Tensor, place: int, form: Form) -> Tensor:
    return buffer[place : place + form.num_bytes].view(form.dtype).view(form.shape)
