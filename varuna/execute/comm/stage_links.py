"""Links to all replicas of the previous or next stage, for stages that differ in their number of replicas.

`StageLinks` looks like one link. It splits what it sends by sample and joins what it receives. A micro-batch
with a single peer is sent whole. A tensor without a batch dimension is the same for all samples: it goes
whole to every peer. Its gradient is the sum of what the peers return, so a rank with several such peers
returns the gradient to one of them and zeros to the others.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from varuna.execute.comm.link import PeerLink
from varuna.execute.step.spans import PeerSlice
from varuna.types import TensorSpec


class StageLinks:
    """Call `begin` for each step; then `send` and `take` all its micro-batches in order, also empty ones."""

    def __init__(self, links: Mapping[int, PeerLink], *, sends_gradients: bool) -> None:
        self._links = links  # by replica
        self._sends_gradients = sends_gradients
        self._slices: Sequence[Sequence[PeerSlice]] = ()
        self._specs: Sequence[Sequence[TensorSpec]] = ()
        self.took_frozen = False  # the last message taken: its senders want no gradients
        self._sent = self._taken = 0
        self._missing: Counter[int] = Counter()  # messages of this step that are not taken yet, by replica

    def begin(self, slices: Sequence[Sequence[PeerSlice]], specs: Sequence[Sequence[TensorSpec]]) -> None:
        """Start a step. For each micro-batch: the samples for each peer, and the tensors of the cut."""
        self._slices, self._specs = slices, specs
        self._sent = self._taken = 0
        self._missing = Counter(piece.peer for pieces in slices for piece in pieces)

    @property
    def peer(self) -> int:
        """Rank that this stage waits for."""
        return self._late_link().peer

    @property
    def ready(self) -> int:
        """Number of complete micro-batches that can be taken."""
        ready = {replica: link.ready for replica, link in self._links.items()}
        for number in range(self._taken, len(self._slices)):
            for piece in self._slices[number]:
                if not ready[piece.peer]:
                    return number - self._taken
                ready[piece.peer] -= 1
        return len(self._slices) - self._taken

    @property
    def over(self) -> bool:
        """True if a peer has ended that should send more."""
        return any(link.over and self._missing[replica] > link.ready for replica, link in self._links.items())

    def send(self, tensors: Sequence[Tensor], *, frozen: bool = False) -> None:
        slices, specs = self._slices[self._sent], self._crossing(self._sent, self._sends_gradients)
        self._sent += 1
        for piece in slices:
            parts = tensors
            if len(slices) > 1:
                pairs, is_first = zip(tensors, specs, strict=False), piece is slices[0]
                parts = [self._cut(tensor, spec, piece, is_first=is_first) for tensor, spec in pairs]
            self._links[piece.peer].send(parts, frozen=frozen)

    def take(self) -> list[Tensor]:
        if not self.ready:
            raise self._late_link().error()
        slices, specs = self._slices[self._taken], self._crossing(self._taken, not self._sends_gradients)
        self._taken += 1
        messages = []
        for piece in slices:
            messages.append(self._links[piece.peer].take())
            self._missing[piece.peer] -= 1
        self.took_frozen = any(self._links[piece.peer].took_frozen for piece in slices)
        if len(messages) < 2:
            return messages[0] if messages else []
        parts = zip(*messages, strict=True)
        return [self._join(several, spec) for several, spec in zip(parts, specs, strict=False)]

    def _crossing(self, number: int, gradients: bool) -> list[TensorSpec]:
        return [spec for spec in self._specs[number] if spec.needs_grad or not gradients]

    def _cut(self, tensor: Tensor, spec: TensorSpec, piece: PeerSlice, *, is_first: bool) -> Tensor:
        batch = _batch_dimension(spec)
        if batch is not None:
            dim, each = batch
            return tensor.narrow(dim, piece.first * each, (piece.stop - piece.first) * each)
        return tensor if is_first or not self._sends_gradients else torch.zeros_like(tensor)

    def _join(self, parts: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        batch = _batch_dimension(spec)
        if batch is not None:
            return torch.cat(list(parts), batch[0])
        return parts[0] if self._sends_gradients else torch.stack(list(parts)).sum(0)

    def _late_link(self) -> PeerLink:
        """Return a link that should deliver more, preferably one with an ended peer."""
        late = [link for replica, link in self._links.items() if self._missing[replica] > link.ready]
        late = late or list(self._links.values())
        return next((link for link in late if link.over), late[0])


def _batch_dimension(spec: TensorSpec) -> tuple[int, int] | None:
    """Return the dimension that holds the samples, and its length per sample."""
    for place, dim in enumerate(spec.dims):
        if dim is not None and dim.per_sample:
            return place, dim.per_sample
    return None
