"""One batch through the pipeline and back.

    inputs of ranks ──► replicas of all stages ──► forwards ──► outputs of the last stage ──► outputs of ranks
    gradients of inputs ◄── summed over stages ◄── backwards ◄── weighted gradients of outputs ◄──┘

The global batch is the concatenation of the ranks' batches, and is spread over the replicas in the same
order. If each rank's loss is a mean over its own samples, its gradient is weighted by its share of all
samples: the sum is the gradient of the mean over the global batch, for any distribution of samples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyrannc.calls import AgreedCall, TensorInput
from varuna.capture import Captured
from varuna.capture.model.call_convention import OutputStructure
from varuna.capture.model.lengths import Sizes
from varuna.errors import CaptureError, list_some
from varuna.execute.comm.session import Session
from varuna.execute.step.division import Division, divide_batch, divide_equal_widths
from varuna.execute.step.exchange import SampleTransfer, redistribute
from varuna.execute.step.outputs import ModelOutput, Reduction, classify_output
from varuna.execute.step.scatter import (
    MicroBatch,
    WeightFunction,
    join,
    put_in_order,
    samples_of,
    weight_of,
)
from varuna.execute.step.spans import Span, even_spans, spans
from varuna.execute.step.trainer import ForwardedBatch, Programs, Trainer
from varuna.types import spread_evenly

WHOLE: Span = (0, 1)
"""Span of a tensor without batch dimension, which is transferred as one sample."""


@dataclass(frozen=True)
class CapturedCall:
    """An agreed call after its capture; known to all ranks."""

    call: AgreedCall
    outputs: tuple[ModelOutput, ...]
    disordered: Sequence[str]  # outputs that cannot be put together from parts, with the reason
    structure: OutputStructure
    programs: Programs
    needs: Sequence[frozenset[str]]  # for each rank: the inputs that its stage reads
    # Returns this rank's parameters that get no gradient if only these outputs get one.
    untouched: Callable[[tuple[bool, ...]], Sequence[Tensor]]
    num_totals: int  # numbers of the whole batch that this rank's stage reads

    @property
    def gradient_inputs(self) -> list[TensorInput]:
        signature = self.call.signature
        return [tensor for tensor in signature.tensors if tensor.has_gradient and signature.grad_enabled]

    def readers(self, name: str) -> list[int]:
        return [rank for rank, names in enumerate(self.needs) if name in names]


@dataclass
class BatchInFlight:
    """One batch between its forward and its backward, and its distribution over ranks."""

    captured: CapturedCall
    given: tuple[Span, ...]  # by each rank
    wanted: tuple[Span, ...]  # outputs that each rank wants
    taken: tuple[Span, ...]  # by each rank as a replica of its stage
    is_local: bool  # each rank computes its own samples, from the first operation to the last
    division: Division
    last_ranks: tuple[int, ...]  # of the last stage
    weights: Sequence[float]  # of each rank: its number of samples, or what `loss_weight` returns
    flight: ForwardedBatch | None = None
    losses: Mapping[int, Tensor] = field(default_factory=dict)  # scalar outputs by number, if they are kept
    is_counted: bool = False  # its samples are reported

    @property
    def num_samples(self) -> int:
        """Number of samples of all ranks."""
        return self.given[-1][1]

    @property
    def total(self) -> float:
        return sum(self.weights)

    def weight(self, rank: int) -> float:
        """Return a rank's share of the global batch, which scales its output gradients."""
        return self.weights[rank] / self.total

    def last_spans(self) -> dict[int, Span]:
        """Return the samples of each rank of the last stage."""
        return {rank: self.taken[rank] for rank in self.last_ranks}

    def input_transfer(self, tensor: TensorInput, value: Any) -> SampleTransfer:
        """Send an input from the ranks that gave it to those that read it."""
        held = dict(enumerate(self.given))
        wanted = {rank: self.taken[rank] for rank in self.captured.readers(tensor.name)}
        dim = self.captured.call.dims.get(tensor.name)
        if dim is None:
            return SampleTransfer(
                {rank: WHOLE for rank, (first, stop) in held.items() if first < stop},
                dict.fromkeys(wanted, WHOLE),
                lambda _first, _stop: value.detach(),
                lambda _count: tensor.meta(1),
            )
        return SampleTransfer(
            held, wanted, lambda first, stop: value.detach().narrow(dim, first, stop - first), tensor.meta
        )

    def output_transfer(self, output: ModelOutput, own: Tensor | None) -> SampleTransfer:
        """Send an output from the last stage to the ranks that want it."""

        def rows(first: int, stop: int) -> Tensor:
            assert own is not None
            return output.rows(own, first, stop)

        held, wanted = self.last_spans(), dict(enumerate(self.wanted))
        if output.dim is None:
            held = {rank: WHOLE for rank, (first, stop) in held.items() if first < stop}
            wanted = dict.fromkeys(wanted, WHOLE)
        return SampleTransfer(held, wanted, rows, output.meta)

    def output_gradient_transfer(
        self, output: ModelOutput, gradient: Tensor | None, rank: int, device: torch.device
    ) -> SampleTransfer:
        """Send the gradient of an output from the ranks that gave its samples to the last stage.

        If rank 0 gave all samples and every rank has all outputs, the gradient of rank 0 counts.
        """
        weighted = None if gradient is None else gradient * self.weight(rank)

        def rows(first: int, stop: int) -> Tensor:
            if weighted is not None:
                return output.rows(weighted, first, stop)
            meta = output.meta(stop - first)
            return torch.zeros(meta.shape, dtype=meta.dtype, device=device)

        return SampleTransfer(dict(enumerate(self.given)), self.last_spans(), rows, output.meta)

    def input_gradient_transfer(
        self, tensor: TensorInput, flight: ForwardedBatch, rank: int
    ) -> SampleTransfer:
        """Send the gradient of an input from the ranks that read it to those that gave it."""
        dim = self.captured.call.dims[tensor.name]
        microbatches = [job.microbatch for job in flight.jobs if job.microbatch.size]
        held = {reader: self.taken[reader] for reader in self.captured.readers(tensor.name)}
        whole: Tensor | None = None
        if rank in held and microbatches:
            gradients = [_take_gradient(microbatch.inputs[tensor.name]) for microbatch in microbatches]
            whole = put_in_order(gradients, [microbatch.spans for microbatch in microbatches], dim)

        def rows(first: int, stop: int) -> Tensor:
            assert whole is not None
            return whole.narrow(dim, first, stop - first)

        return SampleTransfer(held, dict(enumerate(self.given)), rows, tensor.meta)


@dataclass
class Pipeline:
    """Runs batches through all stages, and keeps the state of the gradients between backwards."""

    session: Session
    trainer: Trainer
    gather_inputs: bool
    pipeline_num: int  # micro-batches of a replica's batch; 0: as planned
    reduction: Reduction | None  # of outputs without batch dimension; None: found in the model
    loss_weight: WeightFunction | None = None
    keeps_losses: bool = False  # for the reports of steps
    must_agree_on_overflow: bool = False  # a call was made in fp16
    overflowed: bool = False  # in the last reduction
    reduced: bool = True  # `.grad` holds the sum over all replicas
    _untouched: set[Tensor] = field(default_factory=set)  # by the backwards since the last reduction

    @property
    def device(self) -> torch.device:
        return self.trainer.engine.device

    @property
    def recognises_losses(self) -> bool:
        return self.reduction is None and self.loss_weight is None

    def classify_outputs(self, captured: Captured, sizes: Sizes) -> tuple[ModelOutput, ...]:
        """Return the outputs of a call with inputs of these sizes."""
        sums = (
            captured.loss.sums
            if self.recognises_losses
            else [self.reduction == "sum"] * len(captured.results)
        )
        return tuple(
            classify_output(spec, "sum" if is_sum else "mean")
            for spec, is_sum in zip(captured.results_at(sizes), sums, strict=True)
        )

    def forward(
        self, captured: CapturedCall, leaves: Mapping[str, Any], counts: Sequence[int]
    ) -> tuple[list[Tensor], BatchInFlight]:
        batch = self._distribute(captured, counts, self._weights(leaves, counts))
        self._refuse_disorder(batch)
        signature = captured.call.signature
        flight = self.trainer.forwards(
            self._distribute_inputs(batch, leaves),
            programs=captured.programs,
            division=batch.division,
            dims=captured.call.dims,
            training=signature.training,
            gradients=[tensor.name for tensor in captured.gradient_inputs],
            keeps=signature.grad_enabled,
            num_totals=captured.num_totals,
        )
        self.trainer.engine.where = f"stage {self.session.stage}, sending the outputs"
        outputs = self._collect_outputs(batch, flight)
        flight.results = ()
        batch.flight = flight if signature.grad_enabled else None
        if self.keeps_losses and signature.grad_enabled:
            batch.losses = _scalars(captured.outputs, outputs)
        return outputs, batch

    def _weights(self, leaves: Mapping[str, Any], counts: Sequence[int]) -> Sequence[float]:
        """Return the weight of each rank's samples in the loss."""
        if self.loss_weight is None:
            return counts
        own = weight_of(self.loss_weight, leaves) if counts[self.session.rank] else 0.0
        weights = [weight for (weight,) in self.session.gather_numbers([own])]
        if sum(counts) and not sum(weights):
            raise ValueError("loss_weight is zero on all ranks (skip such a batch on all ranks)")
        return weights

    def _distribute(
        self, captured: CapturedCall, counts: Sequence[int], weights: Sequence[float]
    ) -> BatchInFlight:
        total = sum(counts)
        if not total:
            raise ValueError("no rank has a sample (call the model with at least one sample on some rank)")
        given, session = spans(counts), self.session
        is_local = session.depth == 1 and self.gather_inputs
        taken = list(given)
        for ranks in () if is_local else session.stage_map:
            for rank, span in zip(ranks, even_spans(total, parts=len(ranks)), strict=True):
                taken[rank] = span
        return BatchInFlight(
            captured,
            given,
            wanted=given if self.gather_inputs else ((0, total),) * len(given),
            taken=tuple(taken),
            is_local=is_local,
            division=self._divide(taken, total),
            last_ranks=tuple(session.stage_map[-1]),
            weights=weights,
        )

    def _refuse_disorder(self, batch: BatchInFlight) -> None:
        """Raise the same error on all ranks if an output cannot be put together from its parts."""
        division, disordered = batch.division, list_some(batch.captured.disordered)
        sides = [batch.last_spans().values(), batch.given if self.gather_inputs else ()]
        parts = [sum(first < stop for first, stop in spans) for spans in sides if not batch.is_local]
        if disordered and max(*parts, len(division.runs), *division.num_microbatches) > 1:
            raise CaptureError(
                f"among the model's outputs, {disordered}, so it cannot be put together from several "
                "micro-batches or replicas, or divided among several ranks (give each sample its own rows, "
                "for example torch.stack([a, b], 1) instead of torch.cat([a, b], 0); or, if no sample "
                "depends on another, wrap the module of that line in varuna.opaque)"
            )

    def _divide(self, taken: Sequence[Span], total: int) -> Division:
        session = self.session
        if session.uneven:
            shares = tuple(spread_evenly(total, parts=len(ranks)) for ranks in session.stage_map)
            length = self.microbatch_size(max(max(counts) for counts in shares))
            return divide_batch(shares, stage=session.stage, replica=session.replica, microbatch_size=length)
        own = [taken[rank] for rank in session.stage_map[session.stage]]
        lengths = [self.microbatch_size(stop - first) for first, stop in own]
        return divide_equal_widths(own, replica=session.replica, microbatch_sizes=lengths)

    def microbatch_size(self, num_samples: int) -> int:
        """Return the micro-batch size for a replica's number of samples."""
        if self.pipeline_num:
            return max(1, -(-num_samples // self.pipeline_num))
        return self.trainer.plan.microbatch_size

    def _distribute_inputs(self, batch: BatchInFlight, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of this rank's replica that its stage reads."""
        call = batch.captured.call
        tensors = call.signature.tensors
        # Every rank has the inputs that all samples share, unless only rank 0 is called with inputs.
        moving = [tensor for tensor in tensors if tensor.name in call.dims or not self.gather_inputs]
        transfers = [batch.input_transfer(tensor, leaves.get(tensor.name)) for tensor in moving]
        arrived = redistribute(self.session, transfers, device=self.device, needed=not batch.is_local)
        inputs: dict[str, Any] = {name: value for name, _, value in call.signature.constants}
        for tensor, parts in zip(moving, arrived, strict=True):
            if parts:
                inputs[tensor.name] = join([part for _, part in parts], call.dims.get(tensor.name, 0))
        for tensor in tensors:
            if tensor not in moving:
                inputs[tensor.name] = leaves[tensor.name].detach()
        return inputs

    def _collect_outputs(self, batch: BatchInFlight, flight: ForwardedBatch) -> list[Tensor]:
        """Return the outputs that this rank wants; an output without batch dimension is of all samples."""
        outputs = batch.captured.outputs
        microbatches = [job.microbatch for job in flight.jobs if job.microbatch.size]
        transfers = []
        for number, output in enumerate(outputs):
            values = [results[number] for results in flight.results if results]
            own = output.combine_microbatches(values, microbatches, batch.total)
            transfers.append(batch.output_transfer(output, own))
        is_local = batch.is_local and all(output.dim is not None for output in outputs)
        arrived = redistribute(self.session, transfers, device=self.device, needed=not is_local)
        return [
            output.combine_ranks([part for _, part in parts], self.device)
            for output, parts in zip(outputs, arrived, strict=True)
        ]

    def backward(
        self,
        batch: BatchInFlight,
        gradients: Sequence[Tensor | None],
        *,
        keep_graph: bool,
        delay_reduction: bool,
    ) -> dict[str, Tensor]:
        """Add to the gradients of the parameters; return those of the inputs that this rank gave."""
        flight = batch.flight
        if flight is None or len(flight.held) != len(flight.jobs):
            raise RuntimeError(
                "backward was already called for these outputs (for several backwards of one forward, call "
                "pyrannc.keep_graph(True) before the first)"
            )
        present, shared = self._exchange_presence(batch, gradients)
        own = self._collect_output_gradients(batch, gradients, present, shared)
        if not batch.is_local:  # between stages, zeros stand for missing gradients; a local rank has none
            untouched = {p for p in batch.captured.untouched(tuple(present)) if p.grad is None}
            self._untouched = untouched if self.reduced else untouched & self._untouched
        if self.reduced:  # these gradients must not be summed over the replicas again
            reducer = self.trainer.reducer
            (reducer.divide_gradients if delay_reduction else reducer.begin)()
        self.trainer.backwards(flight, own, again=keep_graph, reduces=not delay_reduction)
        self._finish_backwards(reduced=not delay_reduction)
        input_gradients = self._collect_input_gradients(batch, flight)
        if not keep_graph:
            batch.flight = None
        return input_gradients

    def allreduce(self) -> None:
        """Sum the gradients of delayed backwards over the replicas."""
        if not self.reduced:
            self.trainer.reducer.reduce_gradients()
            self._finish_backwards(reduced=True)

    def _finish_backwards(self, *, reduced: bool) -> None:
        # As in one process: a parameter that no used output depends on has no gradient, so no weight decay.
        for parameter in self._untouched:
            parameter.grad = None
        self.reduced = reduced
        if self.must_agree_on_overflow and reduced:
            # An overflow on any rank becomes one on all: all gradient scalers skip the same steps.
            reducer = self.trainer.reducer
            self.overflowed = not reducer.clip(float("inf")) < float("inf")
            for parameter in reducer.parameters if self.overflowed else ():
                if parameter.grad is not None:
                    parameter.grad.fill_(float("inf"))

    def _exchange_presence(
        self, batch: BatchInFlight, gradients: Sequence[Tensor | None]
    ) -> tuple[list[bool], list[Tensor | None]]:
        """Return which outputs have a gradient on any rank, and the sums of those without batch dimension."""
        outputs = batch.captured.outputs
        unbatched = [number for number, output in enumerate(outputs) if output.dim is None]
        here = [gradient is not None for gradient in gradients]
        # No exchange is needed if each rank computes its own outputs, or if only one output can have any.
        if not unbatched and (batch.is_local or sum(output.spec.needs_grad for output in outputs) == 1):
            return here, [None] * len(outputs)
        weight = batch.weight(self.session.rank)
        own = [torch.tensor(here, dtype=torch.float64)]
        for number in unbatched:
            gradient = gradients[number]
            zeros = torch.zeros(outputs[number].meta(0).shape, dtype=torch.float64)
            own.append(zeros if gradient is None else gradient.double().cpu() * weight)
        numbers = torch.cat([values.reshape(-1) for values in own]).tolist()
        summed = torch.tensor(self.session.gather_numbers(numbers), dtype=torch.float64).sum(0)
        counts, *wholes = summed.split_with_sizes([values.numel() for values in own])
        present = list(map(bool, counts.tolist()))
        shared: list[Tensor | None] = [None] * len(outputs)
        for number, whole in zip(unbatched, wholes, strict=True):
            if present[number]:
                shared[number] = whole.view(outputs[number].meta(0).shape).to(self.device)
        return present, shared

    def _collect_output_gradients(
        self,
        batch: BatchInFlight,
        gradients: Sequence[Tensor | None],
        present: Sequence[bool],
        shared: Sequence[Tensor | None],
    ) -> list[list[Tensor | None]]:
        """Return the gradients of each micro-batch's outputs, on the last stage."""
        outputs, flight, rank = batch.captured.outputs, batch.flight, self.session.rank
        moving = [
            number
            for number, output in enumerate(outputs)
            if present[number] and output.dim is not None and output.spec.needs_grad
        ]
        transfers = [
            batch.output_gradient_transfer(outputs[number], gradients[number], rank, self.device)
            for number in moving
        ]
        needed = bool(moving) and not batch.is_local
        arrived = redistribute(self.session, transfers, device=self.device, needed=needed)
        if rank not in batch.last_ranks or flight is None:
            return []
        whole: dict[int, Tensor] = {}
        for number, parts in zip(moving, arrived, strict=True):
            dim = outputs[number].dim
            if parts and dim is not None:
                whole[number] = join([part for _, part in parts], dim)

        def of_microbatch(number: int, microbatch: MicroBatch) -> Tensor | None:
            output, gradient = outputs[number], shared[number]
            if number in whole and output.dim is not None:
                return samples_of(whole[number], microbatch.spans, output.dim, each=output.per_sample)
            if gradient is None or not output.spec.needs_grad:
                return None
            share = output.share(microbatch, batch.total)
            # The loss of a micro-batch with weight 0 may not be finite.
            return (gradient * share).to(output.dtype) if share else None

        return [
            [of_microbatch(number, job.microbatch) for number in range(len(outputs))]
            if job.microbatch.size
            else []
            for job in flight.jobs
        ]

    def _collect_input_gradients(self, batch: BatchInFlight, flight: ForwardedBatch) -> dict[str, Tensor]:
        """Sum the gradient of each input over the stages that read it, on the rank that gave it."""
        tensors, rank = batch.captured.gradient_inputs, self.session.rank
        if not tensors:
            return {}
        transfers = [batch.input_gradient_transfer(tensor, flight, rank) for tensor in tensors]
        arrived = redistribute(self.session, transfers, device=self.device, needed=not batch.is_local)
        first, stop = batch.given[rank]
        weight = batch.weight(rank)
        gradients: dict[str, Tensor] = {}
        for tensor, parts in zip(tensors, arrived, strict=True):
            meta = tensor.meta(stop - first)
            whole = torch.zeros(meta.shape, dtype=meta.dtype, device=self.device)
            dim = batch.captured.call.dims[tensor.name]
            for piece, part in parts:
                whole.narrow(dim, piece.first, piece.stop - piece.first).add_(part)
            gradients[tensor.name] = whole / weight if weight else whole
        return gradients


def _scalars(outputs: Sequence[ModelOutput], values: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return copies of the outputs that are one number of the whole batch and may be its loss."""
    return {
        number: value.detach().clone()
        for number, (output, value) in enumerate(zip(outputs, values, strict=True))
        if output.dim is None and output.spec.needs_grad and value.numel() == 1
    }


def _take_gradient(leaf: object) -> Tensor:
    assert isinstance(leaf, Tensor)
    gradient, leaf.grad = leaf.grad, None
    return torch.zeros_like(leaf) if gradient is None else gradient


class PipelineFunction(torch.autograd.Function):
    """The pipeline as one operation of the user's autograd graph, on every rank."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[], tuple[list[Tensor], BatchInFlight]],
        run_backward: Callable[[BatchInFlight, Sequence[Tensor | None]], dict[str, Tensor]],
        names: Sequence[str],
        _anchor: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        outputs, batch = run()
        ctx.set_materialize_grads(False)
        ctx.batch, ctx.run_backward = batch, run_backward
        ctx.devices = {name: tensor.device for name, tensor in zip(names, inputs, strict=True)}
        pairs = zip(outputs, batch.captured.outputs, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, output in pairs if not output.spec.needs_grad))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        found = ctx.run_backward(ctx.batch, gradients)
        return (None, None, None, None, *(found[name].to(device) for name, device in ctx.devices.items()))
