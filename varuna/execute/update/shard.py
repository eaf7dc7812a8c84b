"""Shards the optimizer's state over the replicas (ZeRO stage 1), for any torch optimizer.

Each replica's optimizer keeps only the parameters that it owns, so only their state is created. After its
step, the owners send the new values to the others. Gradients are complete on all replicas, so the updates are
those of the unsharded optimizer.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from varuna.errors import PeerLost
from varuna.execute.comm.session import Session
from varuna.types import BUCKET_BYTES, spread_by_size


class OptimizerShards:
    """The owners of an optimizer's parameters among the replicas of a stage. They change with the layout."""

    def __init__(self, optimizer: torch.optim.Optimizer, session: Session) -> None:
        has_replicas = session.replicas is not None
        # Adagrad starts with state.
        if has_replicas and any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
            raise ValueError(
                "the optimizer already has state (register it with set_optimizer before its first step)"
            )
        self._optimizer = optimizer
        self.survives: Callable[[], bool] = lambda: False  # the ranks can go on after a loss
        self.place([list(group["params"]) for group in optimizer.param_groups], session)
        optimizer.register_step_post_hook(lambda *_: self._share_values())
        self._clear_all()

    def place(self, groups: Sequence[Sequence[Tensor]], session: Session) -> None:
        """Give the optimizer this replica's parameters of each of its groups, in place.

        `groups` has all parameters, the same on all replicas. State of other parameters is dropped.
        """
        parameters = list(itertools.chain(*groups))
        sizes = [p.numel() * p.element_size() for p in parameters]
        # A rank that waits to join the job owns everything until then.
        count, replica = (1, 0) if session.replicas is None else (session.width, session.replica)
        owners = dict(zip(parameters, spread_by_size(sizes, parts=count), strict=True))
        for param_group, theirs in zip(self._optimizer.param_groups, groups, strict=True):
            param_group["params"][:] = [p for p in theirs if owners[p] == replica]
        for parameter in [p for p in self._optimizer.state if owners.get(p) != replica]:
            del self._optimizer.state[parameter]
        self._session = session
        self._owned = [  # by replica
            [p for p in parameters if owners[p] == owner] for owner in range(count)
        ]
        self._others = [p for p in parameters if owners[p] != replica]
        self.group_of = {p: number for number, theirs in enumerate(groups) for p in theirs}

    def counted(self, weights: Sequence[Tensor]) -> frozenset[Tensor] | None:
        """Return the weights that this replica counts in sums over all ranks; None without replicas.

        The first replica counts those that are not in the optimizer.
        """
        if self._session.replicas is None:
            return None
        owners = {p: owner for owner, theirs in enumerate(self._owned) for p in theirs}
        return frozenset(p for p in weights if owners.get(p, 0) == self._session.replica)

    def _clear_all(self) -> None:
        """Let `optimizer.zero_grad()` clear the gradients of all parameters, also of other replicas' ones."""
        clear_own = self._optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            clear_own(set_to_none=set_to_none)
            for parameter in self._others:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.detach_().zero_()

        self._optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def _share_values(self) -> None:
        """Send the new values to the other replicas. The manager's order ends it if a replica is silent."""
        group, waiter = self._session.replicas, self._session.waiter
        if group is None:
            return
        assert waiter is not None, "a job with replicas has several ranks"
        before, waiter.survives = waiter.survives, self.survives()
        try:
            share_values(
                self._owned,
                group,
                lambda work: waiter.for_work(work, lambda: "the new values of the other replicas"),
            )
        except PeerLost as error:
            if not waiter.survives:
                raise
            # The next step raises this: all ranks go back to a state that is whole.
            waiter.fail(PeerLost(f"another rank ended during the update: {error}"))
        finally:
            waiter.survives = before


class ValueMessage(NamedTuple):
    """Values of one owner on their way to the other replicas."""

    values: Sequence[Tensor]
    flat: Tensor
    work: dist.Work
    is_own: bool

    def finish(self, wait: Callable[[dist.Work], object]) -> None:
        wait(self.work)
        if not self.is_own:
            arrived = _unflatten_dense_tensors(self.flat, self.values)  # type: ignore[no-untyped-call]
            torch._foreach_copy_(list(self.values), list(arrived))


def share_values(
    owned: Sequence[Sequence[Tensor]],
    group: dist.ProcessGroup,
    wait: Callable[[dist.Work], object] = lambda work: work.wait(),
) -> None:
    """Broadcast each owner's values to all replicas, in few large messages; two of them are on their way.

    An interrupted `wait` leaves no message that writes to the values later.
    """
    messages = deque[ValueMessage]()
    for owner, theirs in enumerate(owned):
        tensors = [tensor.detach() for tensor in theirs]
        for values in _take_tensors(tensors, BUCKET_BYTES):  # type: ignore[no-untyped-call]
            messages.append(_send(values, owner, group))
            if len(messages) > 1:
                messages.popleft().finish(wait)
    for message in messages:
        message.finish(wait)


def _send(values: Sequence[Tensor], owner: int, group: dist.ProcessGroup) -> ValueMessage:
    options = dist.BroadcastOptions()
    options.rootRank = owner
    is_own = group.rank() == owner
    if is_own:
        flat: Tensor = _flatten_dense_tensors(values)  # type: ignore[no-untyped-call]
    else:
        flat = values[0].new_empty(sum(tensor.numel() for tensor in values))
    return ValueMessage(values, flat, group.broadcast([flat], options), is_own)
