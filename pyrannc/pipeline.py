"""One batch through the pipeline and back: inputs to the stages that want them, outputs to who gave inputs.

    given by ranks ──► replicas of all stages ──► forwards ──► results of the last stage ──► wanted by ranks
    gradients of inputs ◄── summed over stages ◄── backwards ◄── gradients of results, weighted ◄──┘

The global batch lies over the ranks in order, each with a span of it, and over the replicas in order too.
Where each rank's loss is the mean over its own samples, its gradient counts by its share of the samples:
the sum is then the gradient of the mean over the global batch, however the samples are spread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyrannc.calls import Agreed, Leaf
from varuna.capture.model.call_convention import OutputStructure
from varuna.errors import CaptureError, some
from varuna.execute.comm.exchange import SampleTransfer, redistribute
from varuna.execute.comm.frames import TensorMeta, meta_of
from varuna.execute.comm.session import Session
from varuna.execute.step.division import Division, divide_batch, divide_equal_widths
from varuna.execute.step.scatter import MicroBatch, join, put_in_order, samples_of
from varuna.execute.step.spans import Span, even_spans, spans
from varuna.execute.step.trainer import ForwardedBatch, Programs, Trainer
from varuna.types import TensorSpec, spread_evenly

Reduction = Literal["mean", "sum"]

WHOLE: Span = (0, 1)
"""Of what has no batch: it is held and wanted as one."""


@dataclass(frozen=True)
class Result:
    """One tensor that the model gives: along which dimension its samples lie, and how much is each one's."""

    spec: TensorSpec
    dim: int | None  # None: it has no batch; of all samples together
    per_sample: int = 1

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.spec.dtype)
        return found

    @property
    def differentiable(self) -> bool:
        return self.spec.needs_grad

    @property
    def summed(self) -> bool:
        """What of it comes from several ranks adds up."""
        return self.dim is None and self.dtype.is_floating_point

    def form(self, num_samples: int) -> TensorMeta:
        shape = tuple(0 if dim is None else dim.size(num_samples) for dim in self.spec.dims)
        return meta_of(torch.float64 if self.summed else self.dtype, shape)

    def rows(self, tensor: Tensor, first: int, stop: int) -> Tensor:
        if self.dim is None:
            return tensor
        return tensor.narrow(self.dim, first * self.per_sample, (stop - first) * self.per_sample)

    @property
    def num_elements(self) -> int:
        return torch.Size(self.form(0).shape).numel()


def classify(spec: TensorSpec) -> Result:
    """Of what a model gives; refused where it cannot be put together from micro-batches."""
    batched = [(place, dim) for place, dim in enumerate(spec.dims) if dim is None or dim.per_sample]
    if not batched:
        return Result(spec, None)
    place, dim = batched[0]
    if len(batched) == 1 and dim is not None and not dim.fixed:
        return Result(spec, place, dim.per_sample)
    raise CaptureError(
        f"the model gives {spec}, of which it is not clear what belongs to which sample (expected one "
        "dimension that is the batch, or a multiple of it, or none at all: a loss)"
    )


@dataclass(frozen=True)
class Way:
    """What is known of one way to call the model, on all ranks."""

    agreed: Agreed
    results: tuple[Result, ...]
    disordered: Sequence[str]  # of the results those that cannot be put together from parts, in words
    structure: OutputStructure
    programs: Programs
    needs: Sequence[frozenset[str]]  # of each rank: the inputs that its stage reads
    # This rank's parameters that get no gradient where only these of the results get one.
    untouched: Callable[[tuple[bool, ...]], Sequence[Tensor]]


@dataclass
class Passing:
    """One batch on its way: how it lies over ranks and replicas."""

    form: Way
    given: tuple[Span, ...]  # by each rank
    wanted: tuple[Span, ...]  # by each rank, of the results
    taken: tuple[Span, ...]  # by each rank, as a replica of its stage
    stays: bool  # each rank computes what it was given, from first to last
    division: Division
    flight: ForwardedBatch | None = None

    @property
    def total(self) -> int:
        return self.division.num_samples

    def weight(self, rank: int) -> float:
        """By which what a rank makes of its results counts."""
        first, stop = self.given[rank]
        return (stop - first) / self.total


class Pipeline:
    def __init__(
        self,
        session: Session,
        trainer: Trainer,
        *,
        gathers: bool,
        pipeline_num: int,  # 0: as the plan has it
        reduction: Reduction,
    ) -> None:
        self.session = session
        self.trainer = trainer
        self.device = trainer.engine.device
        self.gathers = gathers
        self.pipeline_num = pipeline_num
        self.reduction = reduction
        self.must_agree_on_overflow = False  # some call was made in fp16
        self.overflowed = False  # whether what was reduced last did
        self.reduced = True  # whether what is in `.grad` is of all replicas
        self._untouched: set[Tensor] = set()  # by the backwards since it was reduced last

    # ------------------------------------------------------------ forward

    def forward(
        self, form: Way, leaves: Mapping[str, Any], counts: Sequence[int]
    ) -> tuple[list[Tensor], Passing]:
        passing = self._spread(form, counts)
        self._refuse_disorder(passing)
        agreed = form.agreed
        flight = self.trainer.forwards(
            self._hand_out(passing, leaves),
            programs=form.programs,
            division=passing.division,
            dims=agreed.dims,
            training=agreed.draft.training,
            gradients=self._wanting_gradients(passing),
            keeps=agreed.draft.keeps,
        )
        self.trainer.engine.where = f"stage {self.session.stage}, handing out the outputs"
        results = self._hand_back(passing, flight)
        flight.results = ()
        passing.flight = flight if agreed.draft.keeps else None
        return results, passing

    def _spread(self, form: Way, counts: Sequence[int]) -> Passing:
        total = sum(counts)
        if not total:
            raise ValueError("no rank has any sample (give at least one rank a batch)")
        given, session = spans(counts), self.session
        stays = session.depth == 1 and self.gathers
        taken = list(given)
        for ranks in () if stays else session.stage_map:
            for rank, span in zip(ranks, even_spans(total, parts=len(ranks)), strict=True):
                taken[rank] = span
        return Passing(
            form,
            given,
            wanted=given if self.gathers else ((0, total),) * len(given),
            taken=tuple(taken),
            stays=stays,
            division=self._divide(taken, total),
        )

    def _refuse_disorder(self, passing: Passing) -> None:
        """Alike on all ranks: how many parts there are follows from the batch."""
        division, disordered = passing.division, some(passing.form.disordered)
        wholes = [self._lasts(passing).values(), passing.given if self.gathers else ()]
        parts = [sum(first < stop for first, stop in spans) for spans in wholes if not passing.stays]
        if disordered and max(*parts, len(division.runs), *division.num_microbatches) > 1:
            raise CaptureError(
                f"of what the model gives, {disordered}, so that it cannot be put together from several "
                "micro-batches or replicas, nor parted for several ranks (give each sample its own rows: "
                "torch.stack([a, b], 1) in place of torch.cat([a, b], 0), say; or, where no sample "
                "really sees another, keep the module of that line whole with varuna.opaque)"
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
        if self.pipeline_num:
            return max(1, -(-num_samples // self.pipeline_num))
        return self.trainer.plan.microbatch_size

    def _wanting_gradients(self, passing: Passing) -> list[str]:
        leaves = passing.form.agreed.draft.tensors
        return [leaf.name for leaf in leaves if leaf.has_gradient and passing.form.agreed.draft.keeps]

    def _hand_out(self, passing: Passing, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of this rank's replica, as far as its stage reads them."""
        agreed = passing.form.agreed
        # What all samples share each rank has, unless rank 0 alone is called with anything.
        moving = [leaf for leaf in agreed.draft.tensors if leaf.name in agreed.dims or not self.gathers]
        cargoes = [self._cargo_of(leaf, leaves.get(leaf.name), passing) for leaf in moving]
        arrived = redistribute(self.session, cargoes, device=self.device, needed=not passing.stays)
        inputs: dict[str, Any] = {name: value for name, _, value in agreed.draft.constants}
        for leaf, parts in zip(moving, arrived, strict=True):
            if parts:
                inputs[leaf.name] = join([part for _, part in parts], agreed.dims.get(leaf.name, 0))
        for leaf in agreed.draft.tensors:
            if leaf not in moving:
                inputs[leaf.name] = leaves[leaf.name].detach()
        return inputs

    def _cargo_of(self, leaf: Leaf, tensor: Any, passing: Passing) -> SampleTransfer:
        """An input, from who was given it to who reads it."""
        held = dict(enumerate(passing.given))
        wanted = {rank: passing.taken[rank] for rank in self._readers(passing, leaf.name)}
        dim = passing.form.agreed.dims.get(leaf.name)
        if dim is None:
            return SampleTransfer(
                {rank: WHOLE for rank, (first, stop) in held.items() if first < stop},
                dict.fromkeys(wanted, WHOLE),
                lambda _first, _stop: tensor.detach(),
                lambda _count: leaf.form(1),
            )
        return SampleTransfer(
            held, wanted, lambda first, stop: tensor.detach().narrow(dim, first, stop - first), leaf.form
        )

    def _hand_back(self, passing: Passing, flight: ForwardedBatch) -> list[Tensor]:
        """The results of the samples that this rank wants; what has no batch, of all samples."""
        results = passing.form.results
        cargoes = []
        for number, result in enumerate(results):
            own = self._put_together(result, number, flight, passing.total) if flight.results else None
            cargoes.append(self._cargo_back(result, own, passing))
        stays = passing.stays and all(result.dim is not None for result in results)
        arrived = redistribute(self.session, cargoes, device=self.device, needed=not stays)
        return [
            self._joined(result, [part for _, part in parts])
            for result, parts in zip(results, arrived, strict=True)
        ]

    def _cargo_back(self, result: Result, own: Tensor | None, passing: Passing) -> SampleTransfer:
        """A result, from the last stage to who wants it."""

        def rows(first: int, stop: int) -> Tensor:
            assert own is not None
            return result.rows(own, first, stop)

        held, wanted = self._lasts(passing), dict(enumerate(passing.wanted))
        if result.dim is None:
            held = {rank: WHOLE for rank, (first, stop) in held.items() if first < stop}
            wanted = dict.fromkeys(wanted, WHOLE)
        return SampleTransfer(held, wanted, rows, result.form)

    def _put_together(self, result: Result, number: int, flight: ForwardedBatch, total: int) -> Tensor | None:
        jobs = [job.microbatch for job in flight.jobs if job.microbatch.size]
        parts = [outputs[number] for outputs in flight.results if outputs]
        if not parts:
            return None
        if result.dim is not None:
            return put_in_order(parts, [job.spans for job in jobs], result.dim, each=result.per_sample)
        if not result.summed:
            if any(not torch.equal(part, parts[0]) for part in parts):
                self._refuse_differing(result)
            return parts[0]
        whole = torch.zeros(parts[0].shape, dtype=torch.float64, device=parts[0].device)
        for part, job in zip(parts, jobs, strict=True):
            share = job.size / total if self.reduction == "mean" else 1.0
            whole.add_(part.double(), alpha=share)
        return whole

    def _joined(self, result: Result, parts: Sequence[Tensor]) -> Tensor:
        if result.dim is not None:
            if not parts:
                form = result.form(0)
                return torch.empty(form.shape, dtype=form.dtype, device=self.device)
            return join(parts, result.dim)
        if result.summed:
            return torch.stack(list(parts)).sum(0).to(result.dtype)
        if any(not torch.equal(part, parts[0]) for part in parts):
            self._refuse_differing(result)
        return parts[0]

    def _refuse_differing(self, result: Result) -> None:
        raise CaptureError(
            f"the model gives {result.spec}, which has no batch and differs between micro-batches, so that "
            "it means something else in each (give a value for each sample, and sum them outside the model)"
        )

    # ------------------------------------------------------------ backward

    def backward(
        self,
        passing: Passing,
        gradients: Sequence[Tensor | None],
        *,
        again: bool,
        delays: bool,
    ) -> dict[str, Tensor]:
        """Leaves gradients in the parameters; gives those of the inputs that this rank gave."""
        flight = passing.flight
        if flight is None or len(flight.held) != len(flight.jobs):
            raise RuntimeError(
                "these outputs have had their backward (for several backwards of one forward, call "
                "pyrannc.keep_graph(True) before the first)"
            )
        present, shared = self._compare(passing, gradients)
        own = self._collect(passing, gradients, present, shared)
        if not passing.stays:  # cuts hand on zeros; else what is present is this rank's own affair
            untouched = {p for p in passing.form.untouched(tuple(present)) if p.grad is None}
            self._untouched = untouched if self.reduced else untouched & self._untouched
        self._prepare(delays)
        self.trainer.backwards(flight, own, again=again, reduces=not delays)
        self._leave_untouched()
        self.reduced = not delays
        if self.must_agree_on_overflow and not delays:
            self._agree_on_overflow()
        found = self._gradients_of_inputs(passing, flight)
        if not again:
            passing.flight = None
        return found

    def allreduce(self) -> None:
        """Sums what delayed backwards have left over the replicas."""
        if not self.reduced:
            self.trainer.reducer.reduce_gradients()
            self._leave_untouched()
            self.reduced = True
            if self.must_agree_on_overflow:
                self._agree_on_overflow()

    def _leave_untouched(self) -> None:
        """In one process a parameter that no wanted result depends on has no gradient, so no decay."""
        for parameter in self._untouched:
            parameter.grad = None

    def _prepare(self, delays: bool) -> None:
        """What is reduced already must not be summed over the replicas again."""
        reducer = self.trainer.reducer
        if self.reduced and not delays:
            reducer.begin()
        elif self.reduced:
            reducer.divide_gradients()

    def _compare(
        self, passing: Passing, gradients: Sequence[Tensor | None]
    ) -> tuple[list[bool], list[Tensor | None]]:
        """Which results any rank has a gradient for; and of what has no batch, the sum over the ranks."""
        results = passing.form.results
        unbatched = [number for number, result in enumerate(results) if result.dim is None]
        here = [gradient is not None for gradient in gradients]
        # Each rank's are of what it computes itself; or there is one that can have any, and so has.
        if not unbatched and (passing.stays or sum(result.differentiable for result in results) == 1):
            return here, [None] * len(results)
        weight = passing.weight(self.session.rank)
        numbers = list(map(float, here))
        for number in unbatched:
            gradient = gradients[number]
            if gradient is None:
                numbers += [0.0] * results[number].num_elements
            else:
                numbers += (gradient.double() * weight).reshape(-1).tolist()
        everyone = torch.tensor(self.session.gather_numbers(numbers), dtype=torch.float64)
        present = [bool(count) for count in everyone[:, : len(results)].sum(0).tolist()]
        shared: list[Tensor | None] = [None] * len(results)
        place = len(results)
        for number in unbatched:
            count = results[number].num_elements
            if present[number]:
                whole = everyone[:, place : place + count].sum(0)
                shared[number] = whole.view(results[number].form(0).shape).to(self.device)
            place += count
        return present, shared

    def _collect(
        self,
        passing: Passing,
        gradients: Sequence[Tensor | None],
        present: Sequence[bool],
        shared: Sequence[Tensor | None],
    ) -> list[list[Tensor | None]]:
        """On the last stage, the gradients of each micro-batch's results."""
        results, flight = passing.form.results, passing.flight
        moving = [
            number
            for number, result in enumerate(results)
            if present[number] and result.dim is not None and result.differentiable
        ]
        arrived = redistribute(
            self.session,
            [self._cargo_forth(results[number], gradients[number], passing) for number in moving],
            device=self.device,
            needed=bool(moving) and not passing.stays,
        )
        if self.session.stage != self.session.depth - 1 or flight is None:
            return []
        whole: dict[int, Tensor] = {}
        for number, parts in zip(moving, arrived, strict=True):
            dim = results[number].dim
            if parts and dim is not None:
                whole[number] = join([part for _, part in parts], dim)

        def of_microbatch(number: int, microbatch: MicroBatch) -> Tensor | None:
            result, gradient = results[number], shared[number]
            if number in whole and result.dim is not None:
                return samples_of(whole[number], microbatch.spans, result.dim, each=result.per_sample)
            if gradient is None or not result.differentiable:
                return None
            share = microbatch.size / passing.total if self.reduction == "mean" else 1.0
            return (gradient * share).to(result.dtype)

        return [
            [of_microbatch(number, job.microbatch) for number in range(len(results))]
            if job.microbatch.size
            else []
            for job in flight.jobs
        ]

    def _cargo_forth(self, result: Result, gradient: Tensor | None, passing: Passing) -> SampleTransfer:
        """The gradient of a result, from who was given its samples to the last stage.

        Where rank 0 gives all and every rank has all results, rank 0's gradient counts.
        """
        weighted = None if gradient is None else gradient * passing.weight(self.session.rank)

        def rows(first: int, stop: int) -> Tensor:
            if weighted is not None:
                return result.rows(weighted, first, stop)
            form = result.form(stop - first)
            return torch.zeros(form.shape, dtype=form.dtype, device=self.device)

        return SampleTransfer(dict(enumerate(passing.given)), self._lasts(passing), rows, result.form)

    def _gradients_of_inputs(self, passing: Passing, flight: ForwardedBatch) -> dict[str, Tensor]:
        """Each stage that reads an input has a part of its gradient; who gave the input sums them."""
        agreed = passing.form.agreed
        names = set(self._wanting_gradients(passing))
        if not names:
            return {}
        leaves = [leaf for leaf in agreed.draft.tensors if leaf.name in names]
        arrived = redistribute(
            self.session,
            [self._cargo_of_gradient(leaf, passing, flight) for leaf in leaves],
            device=self.device,
            needed=not passing.stays,
        )
        first, stop = passing.given[self.session.rank]
        weight = passing.weight(self.session.rank)
        found: dict[str, Tensor] = {}
        for leaf, parts in zip(leaves, arrived, strict=True):
            form = leaf.form(stop - first)
            whole = torch.zeros(form.shape, dtype=form.dtype, device=self.device)
            for piece, part in parts:
                whole.narrow(agreed.dims[leaf.name], piece.first, piece.stop - piece.first).add_(part)
            found[leaf.name] = whole / weight if stop > first else whole
        return found

    def _cargo_of_gradient(self, leaf: Leaf, passing: Passing, flight: ForwardedBatch) -> SampleTransfer:
        """The gradient of an input, from who reads it to who was given it."""
        dim = passing.form.agreed.dims[leaf.name]
        microbatches = [job.microbatch for job in flight.jobs if job.microbatch.size]
        held = {rank: passing.taken[rank] for rank in self._readers(passing, leaf.name)}
        whole: Tensor | None = None
        if self.session.rank in held and microbatches:
            parts = [_gradient(microbatch.inputs[leaf.name]) for microbatch in microbatches]
            whole = put_in_order(parts, [microbatch.spans for microbatch in microbatches], dim)

        def rows(first: int, stop: int) -> Tensor:
            assert whole is not None
            return whole.narrow(dim, first, stop - first)

        return SampleTransfer(held, dict(enumerate(passing.given)), rows, leaf.form)

    def _agree_on_overflow(self) -> None:
        """An overflow on any rank becomes one on all, so that every gradient scaler skips the same steps."""
        reducer = self.trainer.reducer
        self.overflowed = not reducer.clip(float("inf")) < float("inf")
        if self.overflowed:
            for parameter in reducer.parameters:
                if parameter.grad is not None:
                    parameter.grad.fill_(float("inf"))

    # ------------------------------------------------------------ who is who

    def _lasts(self, passing: Passing) -> dict[int, Span]:
        """The ranks of the last stage, and what each has taken."""
        return {rank: passing.taken[rank] for rank in self.session.stage_map[-1]}

    def _readers(self, passing: Passing, name: str) -> list[int]:
        return [rank for rank, names in enumerate(passing.form.needs) if name in names]


def _gradient(leaf: object) -> Tensor:
    assert isinstance(leaf, Tensor)
    found, leaf.grad = leaf.grad, None
    return torch.zeros_like(leaf) if found is None else found


class Passage(torch.autograd.Function):
    """The pipeline as one step of the user's own graph, on every rank."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[], tuple[list[Tensor], Passing]],
        back: Callable[[Passing, Sequence[Tensor | None]], dict[str, Tensor]],
        names: Sequence[str],
        _anchor: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        results, passing = run()
        ctx.set_materialize_grads(False)
        ctx.passing, ctx.back = passing, back
        ctx.devices = {name: tensor.device for name, tensor in zip(names, inputs, strict=True)}
        ctx.mark_non_differentiable(
            *(
                tensor
                for tensor, result in zip(results, passing.form.results, strict=True)
                if not result.differentiable
            )
        )
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        found = ctx.back(ctx.passing, gradients)
        return (None, None, None, None, *(found[name].to(device) for name, device in ctx.devices.items()))
