"""Reduces gradients over the replicas, in buckets, while the last backward still runs.

    last backward ──► p.grad final ──► bucket full ──► all-reduce over the replicas (async)
                                                          │
    last forward ──► loss, weight: a sum over all ranks (async, hidden by the backward)
                                                          │
                      tied parameters: sum over the stages that hold them
                                                          │
                      scaling: weights of the samples, loss scale
                                                          ▼
                      if needed: the norm, a sum over all stages, and clipping

Every gradient arrives here as the sum of weight_i / nominal weight over this replica's micro-batches. The sum
over replicas is the mean over the global batch, for any distribution of samples, up to the factor
nominal / true weight. That factor is 1 for a full batch. Accumulated gradients of earlier steps are set aside
first, so that only new gradients are reduced and scaled.
"""

import itertools
import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from operator import is_not

import torch
import torch.distributed as dist
from torch import Tensor

from varuna.execute.comm.wait import Waiter
from varuna.execute.device.host_copy import HostCopy
from varuna.execute.update.loss_sum import LossSum, LossTotals
from varuna.execute.update.parameter_hooks import ParameterHooks, run_accumulated_hooks, run_gradient_hooks
from varuna.types import BUCKET_BYTES, FIRST_BUCKET_BYTES

_steps = itertools.count(1)


@dataclass
class Bucket:
    """Gradients that are reduced as one flat tensor, followed by the number of replicas that have each."""

    parameters: list[Tensor]
    flat: Tensor
    views: list[Tensor]
    counts: Tensor
    missing: int = 0  # gradients that are not final yet in this step
    absent: list[int] = field(default_factory=list)  # parameters without a gradient on this replica
    work: dist.Work | None = None


@dataclass(frozen=True)
class TiedParameter:
    """A parameter of this stage that other stages hold too."""

    parameter: Tensor
    group: dist.ProcessGroup
    counts_here: bool  # in the norm: exactly one of its stages counts it
    num_stages: int
    is_summed: bool = True  # False: another rank of the group contributes the same sum
    may_lack: bool = False  # possibly no stage has a gradient for it: then it must stay None


@dataclass(frozen=True)
class StepTotals:
    """Results of a step that all ranks know."""

    loss: float
    overflow: bool
    norm: float | None
    weight: float = 0.0  # of all losses; 1 if they add up
    samples: int = 0  # of the whole batch


@dataclass
class Reducer:
    """In each step call `begin`, `announce`, `expect_last_backward` and `finish`."""

    weights: Sequence[Tensor]  # of this stage that the model uses, frozen ones too, in the model's order
    replicas: dist.ProcessGroup | None  # of this stage, if there are several
    everyone: dist.ProcessGroup | None  # all ranks, if there are several stages
    counts_norm: bool  # True on one replica of each stage
    waiter: Waiter | None
    ties: Sequence[TiedParameter] = ()
    # With a sharded optimizer, this replica's parameters: a script may have unscaled only their gradients.
    owned: frozenset[Tensor] | None = None
    overlaps: bool = True  # False: an opaque module may add to a gradient several times in a backward
    has_request: Callable[[], bool] = lambda: False  # this rank wants all ranks to do something
    fixed_gradients: Container[Tensor] = frozenset()  # parameters whose gradient memory never changes
    # Called in `finish` after hooks and the norm, if the loss is finite: other ranks are not needed.
    on_whole: Callable[[], None] = lambda: None
    request_seen: bool = False  # some rank had a request; the code that handles it resets this
    _buckets: list[Bucket] = field(default_factory=list)
    _places: dict[Tensor, tuple[Bucket, Tensor]] = field(default_factory=dict)  # bucket and view of each
    _set_aside: dict[Tensor, Tensor] = field(default_factory=dict)
    _num_started: int = 0  # buckets whose reduction has started in this step
    _loss_sum: LossSum | None = None
    _tie_works: list[dist.Work | None] = field(default_factory=list)  # not waited for yet
    begun: int = 0  # grows with every step of any model of this process
    hooks: ParameterHooks = field(default_factory=ParameterHooks)
    parameters: Sequence[Tensor] = field(init=False)  # those that train now

    def __post_init__(self) -> None:
        self.parameters = [weight for weight in self.weights if weight.requires_grad]

    def begin(self) -> None:
        """Set gradients of earlier steps aside."""
        self._prepare()
        for parameter in self.parameters:
            if parameter.grad is not None:
                # This step may write its gradient to the same memory, for example in a bucket.
                stays = parameter not in self._places and parameter not in self.fixed_gradients
                self._set_aside[parameter] = parameter.grad if stays else parameter.grad.clone()
                parameter.grad = None

    def _prepare(self) -> None:
        """Take hooks off. Reduce what trains now: the script may have frozen or unfrozen parameters."""
        self.begun = next(_steps)
        trained = [weight for weight in self.weights if weight.requires_grad]
        if len(trained) != len(self.parameters) or any(map(is_not, trained, self.parameters)):
            self.parameters = trained
            self._buckets, self._places = [], {}
        self.hooks.take_off(self.parameters)

    def expect_last_backward(self) -> Callable[[], None]:
        """Start each bucket as soon as its gradients are final. Returns a function that stops this."""
        if self.replicas is None or not self.overlaps:
            return lambda: None
        if not self._buckets:
            self._make_buckets()
        if len(self._buckets) == 1:  # full only with the very last gradient: nothing to overlap
            return lambda: None
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
        hooks = [p.register_post_accumulate_grad_hook(self._on_final) for p in self.parameters]  # type: ignore[no-untyped-call]

        def stop() -> None:
            for hook in hooks:
                hook.remove()

        return stop

    def announce(self, loss: float, weight: float) -> None:
        """Start the sum of weight × loss and of weights over all ranks. Zeros on a stage without a loss."""
        group = self.everyone or self.replicas
        self._loss_sum = LossSum(loss, weight, request=self.has_request(), group=group, waiter=self.waiter)

    def finish(
        self,
        *,
        nominal_weight: float,
        loss_scale: float,
        checks_overflow: bool,
        max_norm: float | None,
        skips_nan: bool = False,
        sums: bool = False,
    ) -> StepTotals:
        """`skips_nan`: drop the new gradients, as after an overflow, if the loss is not finite.

        `sums`: losses add up to that of the batch; else it is their mean by weight.
        """
        self._reduce_over_replicas()
        self._reduce_ties()
        loss, weight, _ = self._announced_totals("step")
        weight = 1.0 if sums else weight
        hooks = self.hooks.put_back()
        if skips_nan and not math.isfinite(loss):
            for parameter in self.parameters:
                parameter.grad = self._set_aside.get(parameter)
            self._set_aside.clear()
            return StepTotals(loss / weight, True, None, weight)
        measures_norm = checks_overflow or max_norm is not None
        on_whole = self.on_whole if math.isfinite(loss / weight) else lambda: None
        is_whole = not measures_norm and not hooks
        if is_whole:
            on_whole()
        self._scale(nominal_weight / weight / loss_scale)
        run_gradient_hooks(hooks)
        self._add_set_aside()
        run_accumulated_hooks(hooks)
        norm = self._norm() if measures_norm else None
        if not is_whole:
            on_whole()
        overflow = checks_overflow and norm is not None and not norm < float("inf")
        if norm is not None and max_norm is not None and not overflow:
            self._clip(norm, max_norm)
        return StepTotals(loss / weight, overflow, norm, weight)

    def reduce_gradients(self) -> None:
        """Sum gradients over replicas and ties, without a loss and without scaling."""
        self._reduce_over_replicas()
        self._reduce_ties()
        hooks = self.hooks.put_back()
        run_gradient_hooks(hooks)
        self._add_set_aside()
        run_accumulated_hooks(hooks)

    def divide_gradients(self) -> None:
        """Divide reduced gradients over the ranks, so that `reduce_gradients` gives the same sum again."""
        self._prepare()
        copies = dict.fromkeys(self.parameters, 1 if self.replicas is None else self.replicas.size())
        for tie in self.ties:
            if tie.parameter in copies:
                copies[tie.parameter] *= tie.num_stages
        for parameter, count in copies.items():
            if parameter.grad is not None and count > 1:
                parameter.grad.div_(count)

    def clip(self, max_norm: float) -> float:
        """Clip the gradient of the whole model and return its norm before. Infinity: only measure it."""
        norm = self._norm()
        self._clip(norm, max_norm)
        return norm

    def _make_buckets(self) -> None:
        """Make buckets in reverse order of the parameters: the order in which gradients become final."""
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
        *parts, counts = torch.split(flat, [*sizes, len(sizes)])
        views = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
        bucket = Bucket(parameters, flat, views, counts)
        self._buckets.append(bucket)
        self._places.update((p, (bucket, view)) for p, view in zip(parameters, views, strict=True))

    def _on_final(self, parameter: Tensor) -> None:
        bucket, view = self._places[parameter]
        bucket.missing -= 1
        gradient = parameter.grad
        if gradient is not None and gradient is not view and gradient.device.type == "cpu":
            # While it is in the cache. A GPU copies a whole bucket at once.
            parameter.grad = view.copy_(gradient)
        # In a fixed order: replicas whose gradients come in another order must still match.
        while self._num_started < len(self._buckets) and not self._buckets[self._num_started].missing:
            self._start(self._buckets[self._num_started])

    def _start(self, bucket: Bucket) -> None:
        with torch.no_grad():
            gradients = [p.grad for p in bucket.parameters]
            bucket.absent = [number for number, gradient in enumerate(gradients) if gradient is None]
            bucket.counts.fill_(1)
            if bucket.absent:
                torch._foreach_zero_([bucket.views[number] for number in bucket.absent])
                bucket.counts[bucket.absent] = 0
            pairs = zip(bucket.views, gradients, strict=True)
            elsewhere = [(view, grad) for view, grad in pairs if grad is not None and grad is not view]
            if elsewhere:
                torch._foreach_copy_([view for view, _ in elsewhere], [grad for _, grad in elsewhere])
            # From here on the gradients are views of the bucket: nothing is copied back.
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
            # A parameter without a gradient on all replicas keeps None, as in one process.
            counts = bucket.counts.tolist() if bucket.absent else []
            for number in bucket.absent:
                if not counts[number]:
                    bucket.parameters[number].grad = None

    def _reduce_ties(self) -> None:
        """Give each stage that holds a tied parameter the same sum, bit for bit: copies stay equal."""
        works: list[dist.Work | None] = []
        self._tie_works = works
        counted: list[tuple[Tensor, Tensor]] = []  # and how many ranks have a gradient
        for tie in self.ties:
            if not tie.parameter.requires_grad:
                continue
            if tie.may_lack:
                here = float(tie.parameter.grad is not None)
                count = torch.tensor(here, device=tie.parameter.device)
                counted.append((tie.parameter, count))
                works.append(dist.all_reduce(count, group=tie.group, async_op=True))
            if tie.parameter.grad is None:
                tie.parameter.grad = torch.zeros_like(tie.parameter)
            elif not tie.is_summed:
                tie.parameter.grad.zero_()
            works.append(dist.all_reduce(tie.parameter.grad, group=tie.group, async_op=True))
        for work in works:
            assert self.waiter is not None and work is not None
            self.waiter.for_work(work, lambda: "the all-reduce of tied weights over the stages")
        works.clear()
        for parameter, count in counted:
            if not count:
                parameter.grad = None

    def _announced_totals(self, what: str) -> LossTotals:
        assert self._loss_sum is not None, "finish before announce"
        totals = self._loss_sum.finish()
        self._loss_sum = None
        self.request_seen |= totals.requested
        if not totals.weight > 0:
            raise ValueError(
                f"this {what} has no loss: no replica gave a sample, or loss_weight is zero for all of them "
                "(skip such a batch on all ranks)"
            )
        return totals

    def announced_loss(self, *, sums: bool) -> float:
        """Return the loss of all ranks in an evaluation, which has no gradients."""
        loss, weight, _ = self._announced_totals("evaluation")
        return loss if sums else loss / weight

    def sum_over_replicas(self, tensor: Tensor) -> None:
        self._all_reduce(tensor, self.replicas, "the buffers of the other replicas")

    def counts(self, parameter: Tensor) -> bool:
        """Return whether this rank counts the parameter in a sum over all ranks.

        Each tied parameter counts once. Each stage counts on one replica; with a sharded optimizer, each
        parameter on the replica that owns it.
        """
        if any(tie.parameter is parameter and not tie.counts_here for tie in self.ties):
            return False
        if self.owned is not None:
            return parameter in self.owned
        return self.counts_norm or self.everyone is None

    def _norm(self) -> float:
        """Return the norm of the whole model's gradient."""
        gradients = [p.grad for p in self.parameters if p.grad is not None and self.counts(p)]
        squared = torch.zeros((), dtype=torch.float64)
        group = self.everyone if self.owned is None else self.everyone or self.replicas
        if gradients:
            norms = torch.stack([n.double() for n in torch._foreach_norm(gradients)])
            (number,) = HostCopy(norms.square().sum()).numbers(self.waiter)
            squared.fill_(number)
        if group is not None:
            self._all_reduce(squared, group, "the norm of the gradient over all stages")
        return float(squared.sqrt())

    def _all_reduce(self, tensor: Tensor, group: dist.ProcessGroup | None, what: str) -> None:
        assert self.waiter is not None
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        self.waiter.for_work(work, lambda: what)

    def unfinished_works(self) -> list[dist.Work]:
        """Return the reductions of an interrupted step that may still run."""
        works = [bucket.work for bucket in self._buckets] + self._tie_works
        works.append(None if self._loss_sum is None else self._loss_sum.work)
        return [work for work in works if work is not None]

    def _scale(self, factor: float) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)

    def _clip(self, norm: float, max_norm: float) -> None:
        self._scale(min(1.0, max_norm / (norm + 1e-6)))

    def _add_set_aside(self) -> None:
        for parameter, earlier in self._set_aside.items():
            parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)
        self._set_aside.clear()
