"""The replicas of the stage before or after this one, as one neighbour, where they are not as many as here.

What is sent is cut by sample, what arrives is put together again; where a micro-batch has one peer,
neither. A tensor without a batch is the same for all samples: it goes to all peers whole, and its gradient
is the sum of what comes back, so a peer of several returns it to one of them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from varuna.execute.comm.link import Link
from varuna.execute.step.spans import Piece
from varuna.types import TensorSpec


class Crowd:
    """`begin` a step; then `send` and `take` its micro-batches in order, those without samples too."""

    def __init__(self, links: Mapping[int, Link], *, sends_gradients: bool) -> None:
        self._links = links  # by replica
        self._sends_gradients = sends_gradients
        self._pieces: Sequence[Sequence[Piece]] = ()
        self._specs: Sequence[Sequence[TensorSpec]] = ()
        self._sent = self._taken = 0
        self._missing: Counter[int] = Counter()  # messages of this step that are not taken yet, by replica

    def begin(self, pieces: Sequence[Sequence[Piece]], specs: Sequence[Sequence[TensorSpec]]) -> None:
        """For each micro-batch what is exchanged with whom, and what crosses the cut."""
        self._pieces, self._specs = pieces, specs
        self._sent = self._taken = 0
        self._missing = Counter(piece.peer for those in pieces for piece in those)

    @property
    def peer(self) -> int:
        """The rank that is waited for."""
        return self._late().peer

    @property
    def ready(self) -> int:
        """How many micro-batches are there whole and wait to be taken."""
        there = {replica: link.ready for replica, link in self._links.items()}
        for number in range(self._taken, len(self._pieces)):
            for piece in self._pieces[number]:
                if not there[piece.peer]:
                    return number - self._taken
                there[piece.peer] -= 1
        return len(self._pieces) - self._taken

    @property
    def over(self) -> bool:
        """Whether somebody has ended of whom more is expected."""
        return any(link.over and self._missing[replica] > link.ready for replica, link in self._links.items())

    def send(self, tensors: Sequence[Tensor]) -> None:
        pieces, specs = self._pieces[self._sent], self._crossing(self._sent, self._sends_gradients)
        self._sent += 1
        for piece in pieces:
            if len(pieces) > 1:
                parts = [
                    self._cut(tensor, spec, piece, is_first=piece is pieces[0])
                    for tensor, spec in zip(tensors, specs, strict=False)
                ]
                self._links[piece.peer].send(parts)
            else:
                self._links[piece.peer].send(tensors)

    def take(self) -> list[Tensor]:
        if not self.ready:
            raise self._late().error()
        pieces, specs = self._pieces[self._taken], self._crossing(self._taken, not self._sends_gradients)
        self._taken += 1
        messages = []
        for piece in pieces:
            messages.append(self._links[piece.peer].take())
            self._missing[piece.peer] -= 1
        if len(messages) < 2:
            return messages[0] if messages else []
        parts = zip(*messages, strict=True)
        return [self._join(several, spec) for several, spec in zip(parts, specs, strict=False)]

    def _crossing(self, number: int, gradients: bool) -> list[TensorSpec]:
        return [spec for spec in self._specs[number] if spec.needs_grad or not gradients]

    def _cut(self, tensor: Tensor, spec: TensorSpec, piece: Piece, *, is_first: bool) -> Tensor:
        part = by_sample(spec)
        if part is not None:
            dim, each = part
            return tensor.narrow(dim, piece.first * each, (piece.stop - piece.first) * each)
        return tensor if is_first or not self._sends_gradients else torch.zeros_like(tensor)

    def _join(self, parts: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        part = by_sample(spec)
        if part is not None:
            return torch.cat(list(parts), part[0])
        return parts[0] if self._sends_gradients else torch.stack(list(parts)).sum(0)

    def _late(self) -> Link:
        """Of those of whom something is missing, one that has ended, else any."""
        late = [link for replica, link in self._links.items() if self._missing[replica] > link.ready] or list(
            self._links.values()
        )
        return next((link for link in late if link.over), late[0])


def by_sample(spec: TensorSpec) -> tuple[int, int] | None:
    """The dimension along which a tensor holds the samples, and how much of it is each one's."""
    for place, dim in enumerate(spec.dims):
        if dim is not None and dim.per_sample:
            return place, dim.per_sample
    return None
