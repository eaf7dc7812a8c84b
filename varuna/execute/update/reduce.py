"""Brings the replicas' gradients together, in buckets, while the last backward still runs.

    last backward ──► p.grad ready ──► bucket full ──► all-reduce over the replicas (async)
                                                          │
    last forward ──► loss, weight: a sum over all ranks (async, hidden by the backward)
                                                          │
                      ties: sum over the stages that hold one tensor
                                                          │
                      scaling: weights of the samples, loss scale
                                                          ▼
                      where asked for: the norm, a sum over all stages, and the clip

Every gradient arrives here as the sum of weight_i / nominal weight over this replica's
micro-batches; the sum over replicas is then the global batch's mean, whatever the spread of samples,
up to the factor nominal / true weight, which is 1 unless a batch was ragged. Gradients of earlier
steps that have not been consumed yet (accumulation) are set aside first, so that only what is new
is reduced and scaled.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from varuna.execute.device.reading import Reading

FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first reduction starts early
BUCKET_BYTES = 25 << 20
ASKS = float("inf")
"""What a rank that asks for attention says in place of its weight; then all sum their weights once more.

A third number in every step's sum would be one more of the backend's messages in every step.
"""
NOTHING_WEIGHED = (
    "no replica gave a sample, or loss_weight is zero for all of them (leave such a batch out, on all ranks)"
)


class WaitsForWork(Protocol):
    def for_work(self, work: dist.Work, what: Callable[[], str]) -> None: ...
    def for_device(self, done: Callable[[], bool]) -> None: ...


@dataclass
class Bucket:
    """Gradients that are reduced as one flat tensor, and after them, for each, how many replicas have it."""

    parameters: list[Tensor]
    flat: Tensor
    views: list[Tensor]
    counts: Tensor
    missing: int = 0  # gradients not there yet in this step
    absent: list[int] = field(default_factory=list)  # those that this replica has not
    work: dist.Work | None = None


@dataclass(frozen=True)
class Tie:
    """A tensor of this stage that other stages hold too."""

    parameter: Tensor
    group: dist.ProcessGroup
    counts_here: bool  # in the norm: exactly one of its stages counts it
    num_stages: int
    is_summed: bool = True  # of ranks that hold the same sum, one gives it to the group
    may_lack: bool = False  # no stage may have a gradient for it: then it has none, as in one process


@dataclass(frozen=True)
class Totals:
    """What all ranks know after a step."""

    loss: float
    overflow: bool
    norm: float | None


@dataclass
class Reducer:
    """`begin` a step, `announce` its loss, `expect_last_backward`, `finish` it."""

    parameters: Sequence[Tensor]  # those of this stage that train, in the model's order
    replicas: dist.ProcessGroup | None  # this stage's, where there are several
    everyone: dist.ProcessGroup | None  # all ranks, where there are several stages
    counts_norm: bool  # one replica of each stage does
    waiter: WaitsForWork | None
    ties: Sequence[Tie] = ()
    # Of a sharded optimizer this replica's parameters: a script may have unscaled their gradients alone.
    own_share: frozenset[Tensor] | None = None
    watches: bool = True  # False: an opaque leaf may add to a gradient more than once in a backward
    asks: Callable[[], bool] = lambda: False  # whether this rank wants all ranks to do something
    # Those whose gradients every step puts at the same place.
    placed: Container[Tensor] = frozenset()
    attention: bool = False  # some rank has asked, as all know by now; whoever sees to it sets it back
    _buckets: list[Bucket] = field(default_factory=list)
    _places: dict[Tensor, tuple[Bucket, Tensor]] = field(default_factory=dict)  # of each, and its view there
    _set_aside: dict[Tensor, Tensor] = field(default_factory=dict)
    _num_started: int = 0  # buckets under way in this step
    _announced: tuple[float, float, Tensor, dist.Work | None] | None = None  # loss and weight here; the sum

    def begin(self) -> None:
        """Sets gradients of earlier steps aside, so that this step's stand alone."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                # A gradient may live where this step will write its own: in a bucket, for one.
                stays = parameter not in self._places and parameter not in self.placed
                self._set_aside[parameter] = parameter.grad if stays else parameter.grad.clone()
                parameter.grad = None

    def expect_last_backward(self) -> Callable[[], None]:
        """Watches gradients become final, starting each bucket as it fills; returns how to stop watching."""
        if self.replicas is None or not self.watches:
            return lambda: None
        if not self._buckets:
            self._make_buckets()
        if len(self._buckets) == 1:  # full with the last gradient of all: nothing to watch for
            return lambda: None
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
        hooks = [p.register_post_accumulate_grad_hook(self._ready) for p in self.parameters]  # type: ignore[no-untyped-call]

        def stop() -> None:
            for hook in hooks:
                hook.remove()

        return stop

    def announce(self, loss: float, weight: float) -> None:
        """Starts the sum over all ranks of weight × loss and of weights; zeros where a stage has no loss."""
        totals = torch.tensor([loss, ASKS if self.asks() else weight], dtype=torch.float64)
        group = self.everyone or self.replicas
        work = None if group is None else dist.all_reduce(totals, group=group, async_op=True)
        self._announced = loss, weight, totals, work

    def finish(
        self, *, nominal_weight: float, loss_scale: float, checks_overflow: bool, max_norm: float | None
    ) -> Totals:
        self._reduce_over_replicas()
        self._reduce_ties()
        loss, weight = self._announced_totals()
        if not weight > 0:
            raise ValueError(f"this step has no loss: {NOTHING_WEIGHED}")
        self._scale(nominal_weight / weight / loss_scale)
        self._take_back()
        norm = self._norm() if checks_overflow or max_norm is not None else None
        overflow = checks_overflow and norm is not None and not norm < float("inf")
        if norm is not None and max_norm is not None and not overflow:
            self._clip(norm, max_norm)
        return Totals(loss / weight, overflow, norm)

    def settle(self) -> None:
        """Sums over replicas and ties, where no loss was announced and gradients have their true weight."""
        self._reduce_over_replicas()
        self._reduce_ties()
        self._take_back()

    def share_out(self) -> None:
        """Leaves each rank its part of gradients that are reduced already: `settle` sums them up again."""
        copies = dict.fromkeys(self.parameters, 1 if self.replicas is None else self.replicas.size())
        for tie in self.ties:
            copies[tie.parameter] *= tie.num_stages
        for parameter, count in copies.items():
            if parameter.grad is not None and count > 1:
                parameter.grad.div_(count)

    def clip(self, max_norm: float) -> float:
        """The norm of the whole model's gradient, which is then clipped; infinity: only measured."""
        norm = self._norm()
        self._clip(norm, max_norm)
        return norm

    # ------------------------------------------------------------ over the replicas

    def _make_buckets(self) -> None:
        """Last used first, for that is the order in which gradients become final."""
        limit, run, size = FIRST_BUCKET_BYTES, list[Tensor](), 0
        for parameter in reversed(self.parameters):
            same_kind = not run or (run[0].dtype, run[0].device) == (parameter.dtype, parameter.device)
            if run and (not same_kind or size >= limit):
                self._add_bucket(run)
                limit, run, size = BUCKET_BYTES, [], 0
            run.append(parameter)
            size += parameter.numel() * parameter.element_size()
        if run:
            self._add_bucket(run)

    def _add_bucket(self, parameters: list[Tensor]) -> None:
        sizes = [p.numel() for p in parameters]
        flat = torch.zeros(sum(sizes) + len(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        *pieces, counts = torch.split(flat, [*sizes, len(sizes)])
        views = [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]
        bucket = Bucket(parameters, flat, views, counts)
        self._buckets.append(bucket)
        self._places.update((p, (bucket, view)) for p, view in zip(parameters, views, strict=True))

    def _ready(self, parameter: Tensor) -> None:
        bucket, view = self._places[parameter]
        bucket.missing -= 1
        gradient = parameter.grad
        if gradient is not None and gradient is not view and gradient.device.type == "cpu":
            # While it is still in the cache; a GPU copies all of a bucket at once.
            parameter.grad = view.copy_(gradient)
        # In one fixed order: replicas whose gradients come in another order must still pair up.
        while self._num_started < len(self._buckets) and not self._buckets[self._num_started].missing:
            self._start(self._buckets[self._num_started])

    def _start(self, bucket: Bucket) -> None:
        with torch.no_grad():
            gradients = [p.grad for p in bucket.parameters]
            bucket.absent = [number for number, gradient in enumerate(gradients) if gradient is None]
            bucket.counts.fill_(1)
            if bucket.absent:  # the others may live in the bucket already
                torch._foreach_zero_([bucket.views[number] for number in bucket.absent])
                bucket.counts[bucket.absent] = 0
            pairs = zip(bucket.views, gradients, strict=True)
            elsewhere = [(view, grad) for view, grad in pairs if grad is not None and grad is not view]
            if elsewhere:
                torch._foreach_copy_([view for view, _ in elsewhere], [grad for _, grad in elsewhere])
            # From here on the gradients live in the bucket: nothing is copied back.
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
        self._num_started += 1
        bucket.work = dist.all_reduce(bucket.flat, group=self.replicas, async_op=True)

    def _reduce_over_replicas(self) -> None:
        if self.replicas is None:
            return
        assert self.waiter is not None
        if not self._buckets:
            self._make_buckets()
        for bucket in self._buckets[self._num_started :]:
            self._start(bucket)
        self._num_started = 0
        for bucket in self._buckets:
            assert bucket.work is not None
            self.waiter.for_work(bucket.work, lambda: "the all-reduce of gradients over the replicas")
            bucket.work = None
            # What no replica has a gradient for has none, as in one process.
            counts = bucket.counts.tolist() if bucket.absent else []
            for number in bucket.absent:
                if not counts[number]:
                    bucket.parameters[number].grad = None

    def _reduce_ties(self) -> None:
        """Each stage that holds a tied tensor gets the sum, to the same bits, so copies stay equal."""
        works = []
        lacking: list[tuple[Tensor, Tensor]] = []  # what no stage may have a gradient for; how many have
        for tie in self.ties:
            if tie.may_lack:
                here = float(tie.parameter.grad is not None)
                count = torch.tensor(here, device=tie.parameter.device)
                lacking.append((tie.parameter, count))
                works.append(dist.all_reduce(count, group=tie.group, async_op=True))
            if tie.parameter.grad is None:
                tie.parameter.grad = torch.zeros_like(tie.parameter)
            elif not tie.is_summed:
                tie.parameter.grad.zero_()
            works.append(dist.all_reduce(tie.parameter.grad, group=tie.group, async_op=True))
        for work in works:
            assert self.waiter is not None and work is not None
            self.waiter.for_work(work, lambda: "the all-reduce of tied weights over the stages")
        for parameter, count in lacking:
            if not count:
                parameter.grad = None

    # ------------------------------------------------------------ over everyone

    def _announced_totals(self) -> tuple[float, float]:
        assert self._announced is not None, "finish before announce"
        own_loss, own_weight, totals, work = self._announced
        self._announced = None
        what = "the sum of losses over all ranks"
        if work is not None:
            assert self.waiter is not None
            self.waiter.for_work(work, lambda: what)
        loss, weight = totals.tolist()
        if weight == ASKS:
            self.attention = True
            totals = torch.tensor([own_loss, own_weight], dtype=torch.float64)
            if work is not None:
                self._all_reduce(totals, self.everyone or self.replicas, what)
            loss, weight = totals.tolist()
        return loss, weight

    def announced_loss(self) -> float:
        """The loss of all ranks, where no gradients follow."""
        loss, weight = self._announced_totals()
        if not weight > 0:
            raise ValueError(f"this evaluation has no loss: {NOTHING_WEIGHED}")
        return loss / weight

    def sum_over_replicas(self, tensor: Tensor) -> None:
        self._all_reduce(tensor, self.replicas, "the buffers of the other replicas")

    def _norm(self) -> float:
        """Of the whole model's gradient: each tied tensor counted once, each stage by one replica, or each
        parameter by the replica whose share it is in."""
        elsewhere = {tie.parameter for tie in self.ties if not tie.counts_here}
        here = [p for p in self.parameters if self.own_share is None or p in self.own_share]
        gradients = [p.grad for p in here if p.grad is not None and p not in elsewhere]
        squared = torch.zeros((), dtype=torch.float64)
        group = self.everyone if self.own_share is None else self.everyone or self.replicas
        if gradients and (self.counts_norm or group is None or self.own_share is not None):
            norms = torch.stack([n.double() for n in torch._foreach_norm(gradients)])
            (number,) = Reading(norms.square().sum()).numbers(self.waiter)
            squared.fill_(number)
        if group is not None:
            self._all_reduce(squared, group, "the norm of the gradient over all stages")
        return float(squared.sqrt())

    def _all_reduce(self, tensor: Tensor, group: dist.ProcessGroup | None, what: str) -> None:
        assert self.waiter is not None
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        self.waiter.for_work(work, lambda: what)

    def _scale(self, factor: float) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)

    def _clip(self, norm: float, max_norm: float) -> None:
        self._scale(min(1.0, max_norm / (norm + 1e-6)))

    def _take_back(self) -> None:
        for parameter, earlier in self._set_aside.items():
            parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)
        self._set_aside.clear()


def average_buffers(
    before: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    *,
    momentum: Mapping[str, float | None],
    counts: Sequence[int],
    replica: int,
    reduce: Callable[[Tensor], None],
) -> None:
    """Makes buffers that forwards changed equal on all replicas, in place.

    BatchNorm's running value after a micro-batch is (1 - momentum) × value + momentum × statistic, so
    what a replica's micro-batches did is an affine map of the value before the step, and the maps of
    all replicas in order compose to what one process running all micro-batches in order would hold.
    Counters add up what each replica added; anything else is averaged. All of it travels as one message.
    """
    factors: list[
        tuple[float, float, float]
    ] = []  # of the value before, of what changed, of what was before all
    olds: list[Tensor] = []
    for name, buffer in buffers.items():
        share = momentum.get(name)
        keep = 1.0 if share is None else 1.0 - share
        seen = before.get(f"{name.rpartition('.')[0]}.num_batches_tracked".lstrip("."))
        cumulative = name in momentum and share is None and seen is not None
        follows = share is not None or cumulative or not buffer.is_floating_point()
        if cumulative:
            factors.append(_factors_of_a_mean(int(seen or 0), counts, replica))
        elif follows:
            factors.append((keep ** counts[replica], keep ** sum(counts[replica + 1 :]), keep ** sum(counts)))
        else:
            factors.append((0.0, 1 / len(counts), 0.0))
        olds.append(before[name] if follows else torch.zeros_like(buffer))
    sizes = [old.numel() for old in olds]
    old, new = _flat(olds), _flat(list(buffers.values()))
    rows = torch.tensor(factors, dtype=torch.float64).repeat_interleave(torch.tensor(sizes), 0)
    own, later, all_of_them = rows.to(old.device).unbind(1)
    total = new.sub_(own * old).mul_(later)
    reduce(total)
    total.add_(all_of_them * old)
    for buffer, found in zip(buffers.values(), torch.split(total, sizes), strict=True):
        buffer.copy_(found.view(buffer.shape))


def _factors_of_a_mean(seen: int, counts: Sequence[int], replica: int) -> tuple[float, float, float]:
    """Of BatchNorm without a momentum: its value is the mean over all micro-batches that it has seen."""
    own, total = seen + counts[replica], max(seen + sum(counts), 1)
    return seen / max(own, 1), own / total, seen / total


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """One after the other, in a form that counts exactly, as far as any counter gets."""
    size = sum(tensor.numel() for tensor in tensors)
    flat = torch.empty(size, dtype=torch.float64, device=tensors[0].device)
    return torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat)
