"""Makes the initial values of a model equal on all ranks, as DistributedDataParallel does.

Models that are built without a seed, or with a seed per rank, differ between ranks. Each rank hashes the
tensors that it has. If hashes of a tensor differ, all ranks get the values of the first rank that has it. In
the usual case only hashes are sent.
"""

import logging
from collections.abc import Mapping

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from varuna.errors import list_some
from varuna.execute.comm.frames import memory_of, to_host
from varuna.execute.comm.session import Session

CHUNK_BYTES = 64 << 20
"""Most bytes that are copied to the host, or sent, at once."""


@torch.no_grad()
def share_initial_values(
    session: Session, kept: Mapping[str, Tensor], passing: Mapping[str, Tensor], log: logging.Logger
) -> None:
    """Make the tensors in `kept` equal on all ranks, in place. All ranks call this.

    `passing` are further tensors of this rank that other ranks keep: the rest of the first rank's model.
    """
    if session.group is None:
        return
    own = {**passing, **kept}
    gathered = session.gather({name: hash_tensor(tensor) for name, tensor in own.items()}, dict[str, bytes])
    found = dict(zip(session.ranks, gathered, strict=True))
    sources: dict[str, int] = {}  # of each tensor, the first rank that has it
    for rank, hashes in found.items():
        for name in hashes:
            sources.setdefault(name, rank)
    differing = {
        name: source
        for name, source in sources.items()
        if any(hashes.get(name, found[source][name]) != found[source][name] for hashes in found.values())
    }
    if not differing:
        return
    if session.rank == session.ranks[0]:
        log.warning(
            "the ranks have different initial values of %s: all get those of the first rank that has them, "
            "rank %s (call torch.manual_seed with the same seed on all ranks before you build the model)",
            list_some(list(differing)),
            list_some([str(rank) for rank in sorted(set(differing.values()))]),
        )
    for name, source in differing.items():
        value = _broadcast(session, own.get(name), source)
        if name in kept and session.rank != source:
            assert value is not None
            kept[name].copy_(value.view(kept[name].dtype).view(kept[name].shape))


def hash_tensor(tensor: Tensor) -> bytes:
    """Hash the elements in chunks, so that a tensor on a device needs little memory of the host."""
    flat = tensor.detach().reshape(-1)
    length = CHUNK_BYTES // tensor.element_size()
    digest = xxhash.xxh3_128()
    for first in range(0, flat.numel(), length):
        digest.update(memory_of(to_host(flat[first : first + length])))
    return digest.digest()


def _broadcast(session: Session, own: Tensor | None, source: int) -> Tensor | None:
    """Return the bytes of rank `source`'s tensor; None on a rank that has no such tensor."""
    (size,) = session.gather_numbers([0 if own is None else own.numel() * own.element_size()])[
        session.ranks.index(source)
    ]
    assert session.waiter is not None
    value = None
    if session.rank == source:
        assert own is not None
        value = to_host(own.detach()).reshape(-1).view(torch.uint8)
    elif own is not None:
        value = torch.empty(int(size), dtype=torch.uint8)
    for first in range(0, int(size), CHUNK_BYTES):
        stop = min(first + CHUNK_BYTES, int(size))
        chunk = torch.empty(stop - first, dtype=torch.uint8) if value is None else value[first:stop]
        work = dist.broadcast(chunk, source, group=session.group, async_op=True)
        assert work is not None
        session.waiter.for_work(work, lambda: f"the initial values of rank {source}")
    return value
