"""One batch through the pipeline and back: inputs to the stages that want them, outputs to who gave inputs.

    given by ranks ──► replicas of all stages ──► forwards ──► results of the last stage ──► wanted by ranks
    gradients of inputs ◄── summed over stages ◄── backwards ◄── gradients of results, weighted ◄──┘

The global batch lies over the ranks in order, each with a span of it, and over the replicas in order too.
Where each rank's loss is the mean over its own samples, its gradient counts by its share of the samples:
the sum is then the gradient of the mean over the global batch, however the samples are spread.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyrannc.calls import Agreed
from varuna.capture.calling import Structure
from varuna.errors import CaptureError
from varuna.execute.exchange import Form, exchange
from varuna.execute.session import Session
from varuna.execute.shares import Span, even_spans, pieces, spans
from varuna.execute.trainer import Flight, Shares, Trainer
from varuna.types import TensorSpec, place_in_map

Reduction = Literal["mean", "sum"]


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

    def form(self, num_samples: int) -> Form:
        shape = tuple(0 if dim is None else dim.size(num_samples) for dim in self.spec.dims)
        return Form(torch.float64 if self.summed else self.dtype, shape)

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
    structure: Structure
    needs: Sequence[frozenset[str]]  # of each rank: the inputs that its stage reads
    # This rank's parameters that get no gradient where only these of the results get one.
    untouched: Callable[[tuple[bool, ...]], Sequence[Tensor]]


@dataclass
class Passing:
    """One batch on its way: how it lies over ranks and replicas."""

    form: Way
    given: tuple[Span, ...]  # by each rank
    wanted: tuple[Span, ...]  # by each rank, of the results
    taken: tuple[Span, ...]  # by each replica
    total: int
    flight: Flight | None = None

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
        self.reduced = True  # whether what is in `.grad` is of all replicas
        self._untouched: set[Tensor] = set()  # by the backwards since it was reduced last

    # ------------------------------------------------------------ forward

    def forward(
        self, form: Way, leaves: Mapping[str, Any], counts: Sequence[int]
    ) -> tuple[list[Tensor], Passing]:
        passing = self._spread(form, counts)
        agreed = form.agreed
        inputs = self._hand_out(passing, leaves)
        first, stop = passing.taken[self.session.replica]
        flight = self.trainer.forwards(
            inputs,
            num_samples=stop - first,
            dims=agreed.dims,
            shares=Shares(
                first, float(passing.total), [len(self._microbatches(b - a)) for a, b in passing.taken]
            ),
            microbatch_size=self._microbatch_size(stop - first),
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
        given, width = spans(counts), self.session.width
        alone = self.session.depth == 1 and self.gathers  # each rank computes what it was given
        return Passing(
            form,
            given,
            wanted=given if self.gathers else ((0, total),) * len(given),
            taken=given if alone else even_spans(total, parts=width),
            total=total,
        )

    def _microbatch_size(self, num_samples: int) -> int:
        if self.pipeline_num:
            return max(1, -(-num_samples // self.pipeline_num))
        return self.trainer.plan.microbatch_size

    def _microbatches(self, num_samples: int) -> range:
        return range(0, num_samples, self._microbatch_size(num_samples))

    def _wanting_gradients(self, passing: Passing) -> list[str]:
        leaves = passing.form.agreed.draft.tensors
        return [leaf.name for leaf in leaves if leaf.has_gradient and passing.form.agreed.draft.keeps]

    def _hand_out(self, passing: Passing, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of this rank's replica, as far as its stage reads them."""
        agreed, own = passing.form.agreed, self.session.rank
        taken = [passing.taken[self._replica(rank)] for rank in self._ranks]
        outgoing: list[list[Tensor]] = [[] for _ in self._ranks]
        expected: list[list[Form]] = [[] for _ in self._ranks]
        sources: list[tuple[str, int]] = []  # of what comes in: its name and from whom
        for leaf in agreed.draft.tensors:
            tensor = leaves.get(leaf.name)
            batched = leaf.name in agreed.dims
            dim = agreed.dims.get(leaf.name, 0)
            if not batched and self.gathers:
                continue  # each rank has its own
            for rank in self._readers(passing, leaf.name):
                for first, stop in self._rows(passing.given[own], taken[rank], batched):
                    assert isinstance(tensor, Tensor)
                    part = tensor.detach()
                    outgoing[rank].append(part.narrow(dim, first, stop - first) if batched else part)
            if leaf.name in passing.form.needs[own]:
                for rank in self._ranks:
                    for first, stop in self._rows(passing.given[rank], taken[own], batched):
                        shape = list(leaf.shape)
                        if leaf.dim is not None:
                            shape.insert(leaf.dim, stop - first if batched else 1)
                        expected[rank].append(Form(getattr(torch, leaf.dtype), tuple(shape)))
                        sources.append((leaf.name, rank))
        arrived = [
            iter(parts)
            for parts in exchange(
                self.session,
                outgoing,
                expected,
                device=self.device,
                needed=not (passing.taken == passing.given and self.gathers),
            )
        ]
        parts: dict[str, list[Tensor]] = {}
        for name, rank in sorted(sources, key=lambda source: source[1]):
            parts.setdefault(name, []).append(next(arrived[rank]))
        inputs: dict[str, Any] = {name: value for name, _, value in agreed.draft.constants}
        for leaf in agreed.draft.tensors:
            if leaf.name in parts:
                found = parts[leaf.name]
                dim = agreed.dims.get(leaf.name, 0)
                inputs[leaf.name] = found[0] if len(found) == 1 else torch.cat(found, dim)
            elif leaf.name not in agreed.dims and self.gathers:
                inputs[leaf.name] = leaves[leaf.name].detach()
        return inputs

    def _rows(self, given: Span, taken: Span, batched: bool) -> Iterator[Span]:
        """What a rank has for another, counted within what it was given; of what is shared, all of it."""
        if not batched:
            if given[0] < given[1]:
                yield 0, 1
            return
        for piece in pieces(((0, max(given[1], taken[1])),), given, [taken]):
            yield piece.first, piece.stop

    def _hand_back(self, passing: Passing, flight: Flight) -> list[Tensor]:
        """The results of the samples that this rank wants; what has no batch, of all samples."""
        results, last = passing.form.results, self.session.stage == self.session.depth - 1
        outgoing: list[list[Tensor]] = [[] for _ in self._ranks]
        expected: list[list[Form]] = [[] for _ in self._ranks]
        lasts = self.session.stage_map[-1]
        taken, wanted = passing.taken, passing.wanted
        for number, result in enumerate(results):
            own = self._put_together(result, number, flight, passing.total) if last and flight.jobs else None
            for rank in self._ranks:
                if own is None:
                    continue
                if result.dim is None:
                    outgoing[rank].append(own)
                    continue
                mine = taken[self.session.replica]
                for piece in pieces((mine,), mine, [wanted[rank]]):
                    outgoing[rank].append(result.rows(own, piece.first, piece.stop))
            for replica, rank in enumerate(lasts):
                span, mine = taken[replica], wanted[self.session.rank]
                if result.dim is None:
                    if span[0] < span[1]:
                        expected[rank].append(result.form(0))
                    continue
                for piece in pieces((mine,), mine, [span]):
                    expected[rank].append(result.form(piece.stop - piece.first))
        stays = passing.taken == passing.wanted and all(result.dim is not None for result in results)
        arrived = exchange(
            self.session,
            outgoing,
            expected,
            device=self.device,
            needed=not (stays and self.session.depth == 1),
        )
        queues = [iter(parts) for parts in arrived]
        found = []
        for result in results:
            parts = []
            for replica, rank in enumerate(lasts):
                span, mine = taken[replica], wanted[self.session.rank]
                there = range(span[0] < span[1]) if result.dim is None else pieces((mine,), mine, [span])
                parts += [next(queues[rank]) for _ in there]
            found.append(self._joined(result, parts))
        return found

    def _put_together(self, result: Result, number: int, flight: Flight, total: int) -> Tensor:
        parts = [outputs[number] for outputs in flight.results]
        if result.dim is not None:
            return parts[0] if len(parts) == 1 else torch.cat(parts, result.dim)
        if not result.summed:
            if any(not torch.equal(part, parts[0]) for part in parts):
                self._refuse_differing(result)
            return parts[0]
        whole = torch.zeros(parts[0].shape, dtype=torch.float64, device=parts[0].device)
        for part, job in zip(parts, flight.jobs, strict=True):
            share = job.microbatch.size / total if self.reduction == "mean" else 1.0
            whole.add_(part.double(), alpha=share)
        return whole

    def _joined(self, result: Result, parts: Sequence[Tensor]) -> Tensor:
        if result.dim is not None:
            if not parts:
                form = result.form(0)
                return torch.empty(form.shape, dtype=form.dtype, device=self.device)
            return parts[0] if len(parts) == 1 else torch.cat(list(parts), result.dim)
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
            self.trainer.reducer.settle()
            self._leave_untouched()
            self.reduced = True
            if self.must_agree_on_overflow:
                self._agree_on_overflow()

    def _leave_untouched(self) -> None:
        """Cuts and sums hand on zeros; in one process such a parameter has no gradient, so no decay."""
        for parameter in self._untouched:
            parameter.grad = None

    def _prepare(self, delays: bool) -> None:
        """What is reduced already must not be summed over the replicas again."""
        reducer = self.trainer.reducer
        if self.reduced and not delays:
            reducer.begin()
        elif self.reduced:
            reducer.share_out()

    def _compare(
        self, passing: Passing, gradients: Sequence[Tensor | None]
    ) -> tuple[list[bool], list[Tensor | None]]:
        """Which results any rank has a gradient for; and of what has no batch, the sum over the ranks."""
        results = passing.form.results
        unbatched = [number for number, result in enumerate(results) if result.dim is None]
        weight = passing.weight(self.session.rank)
        numbers = [float(gradient is not None) for gradient in gradients]
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
        results, total = passing.form.results, passing.total
        lasts = self.session.stage_map[-1]
        outgoing: list[list[Tensor]] = [[] for _ in self._ranks]
        expected: list[list[Form]] = [[] for _ in self._ranks]
        moving = [
            number
            for number, result in enumerate(results)
            if present[number] and result.dim is not None and result.differentiable
        ]
        is_last = self.session.stage == self.session.depth - 1
        mine = passing.given[self.session.rank]
        taken = passing.taken[self.session.replica]
        for number in moving:
            result, gradient = results[number], gradients[number]
            for replica, rank in enumerate(lasts):
                for piece in pieces((mine,), mine, [passing.taken[replica]]):
                    if gradient is None:
                        form = result.form(piece.stop - piece.first)
                        part = torch.zeros(form.shape, dtype=form.dtype, device=self.device)
                    else:
                        # Where rank 0 gives all and every rank has all results, rank 0's gradient counts.
                        part = result.rows(gradient, piece.first, piece.stop)
                        part = part * passing.weight(self.session.rank)
                    outgoing[rank].append(part)
            for rank in self._ranks if is_last else ():
                for piece in pieces((taken,), taken, [passing.given[rank]]):
                    expected[rank].append(result.form(piece.stop - piece.first))
        stays = passing.taken == passing.given and self.session.depth == 1
        queues = [
            iter(parts)
            for parts in exchange(
                self.session, outgoing, expected, device=self.device, needed=bool(moving) and not stays
            )
        ]
        if not is_last or passing.flight is None:
            return []
        whole: dict[int, Tensor] = {}
        for number in moving:
            parts = [
                next(queues[rank])
                for rank in self._ranks
                for _ in pieces((taken,), taken, [passing.given[rank]])
            ]
            if parts:
                dim = results[number].dim
                assert dim is not None
                whole[number] = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        found: list[list[Tensor | None]] = []
        for job in passing.flight.jobs:
            first, size = job.microbatch.first_sample, job.microbatch.size
            row: list[Tensor | None] = []
            for number, result in enumerate(results):
                if number in whole:
                    row.append(result.rows(whole[number], first, first + size))
                elif (gradient := shared[number]) is not None and result.differentiable:
                    share = size / total if self.reduction == "mean" else 1.0
                    row.append((gradient * share).to(result.dtype))
                else:
                    row.append(None)
            found.append(row)
        return found

    def _gradients_of_inputs(self, passing: Passing, flight: Flight) -> dict[str, Tensor]:
        """Each stage that reads an input has a part of its gradient; who gave the input sums them."""
        names = self._wanting_gradients(passing)
        if not names:
            return {}
        agreed, own = passing.form.agreed, self.session.rank
        leaves = {leaf.name: leaf for leaf in agreed.draft.tensors}
        taken = [passing.taken[self._replica(rank)] for rank in self._ranks]
        outgoing: list[list[Tensor]] = [[] for _ in self._ranks]
        expected: list[list[Form]] = [[] for _ in self._ranks]
        places: list[tuple[str, int, int, int]] = []
        for name in names:
            dim = agreed.dims[name]
            if name in passing.form.needs[own] and flight.jobs:
                whole = torch.cat([_gradient(job.microbatch.inputs[name]) for job in flight.jobs], dim)
                for rank in self._ranks:
                    for piece in pieces((taken[own],), taken[own], [passing.given[rank]]):
                        outgoing[rank].append(whole.narrow(dim, piece.first, piece.stop - piece.first))
            for rank in self._readers(passing, name):
                for piece in pieces((passing.given[own],), passing.given[own], [taken[rank]]):
                    shape = list(leaves[name].shape)
                    shape.insert(dim, piece.stop - piece.first)
                    expected[rank].append(Form(getattr(torch, leaves[name].dtype), tuple(shape)))
                    places.append((name, rank, piece.first, piece.stop))
        stays = passing.taken == passing.given and self.session.depth == 1
        queues = [
            iter(parts)
            for parts in exchange(self.session, outgoing, expected, device=self.device, needed=not stays)
        ]
        count = passing.given[own][1] - passing.given[own][0]
        found: dict[str, Tensor] = {}
        for name in names:
            shape = list(leaves[name].shape)
            shape.insert(agreed.dims[name], count)
            found[name] = torch.zeros(shape, dtype=getattr(torch, leaves[name].dtype), device=self.device)
        for name, rank, first, stop in places:
            found[name].narrow(agreed.dims[name], first, stop - first).add_(next(queues[rank]))
        weight = passing.weight(own)
        return {name: gradient / weight if count else gradient for name, gradient in found.items()}

    def _agree_on_overflow(self) -> None:
        """An overflow on any rank becomes one on all, so that every gradient scaler skips the same steps."""
        reducer = self.trainer.reducer
        if not reducer.clip(float("inf")) < float("inf"):
            for parameter in reducer.parameters:
                if parameter.grad is not None:
                    parameter.grad.fill_(float("inf"))

    # ------------------------------------------------------------ who is who

    @property
    def _ranks(self) -> range:
        return range(self.session.depth * self.session.width)

    def _replica(self, rank: int) -> int:
        return place_in_map(self.session.stage_map, rank)[1]

    def _readers(self, passing: Passing, name: str) -> list[int]:
        return [rank for rank in self._ranks if name in passing.form.needs[rank]]


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
        *_inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        results, passing = run()
        ctx.set_materialize_grads(False)
        ctx.passing, ctx.back, ctx.names = passing, back, names
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
        return (None, None, None, None, *(found.get(name) for name in ctx.names))
