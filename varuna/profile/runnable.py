"""What a profile needs to know of a model, and the model's parts in the form in which they are measured."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from varuna.capture import Captured, Source, SpanProgram, stage_state
from varuna.capture.cuts.segment_kinds import entry, find_kinds, relayed
from varuna.capture.graph.fused_loss import with_fused_loss
from varuna.capture.model.batch import Batch
from varuna.execute.comm.session import single_rank_session
from varuna.execute.device.facts import device_memory_bytes, device_name
from varuna.execute.step.engine import Engine
from varuna.execute.step.scatter import move_inputs
from varuna.execute.step.stage import Program as Runnable
from varuna.execute.step.stage import Stage
from varuna.execute.step.trainer import Trainer
from varuna.execute.update.precision import LossScale, make_loss_scale
from varuna.execute.update.reduce import Reducer
from varuna.measure.draft import Kind, Subject
from varuna.measure.optimizer import Finish, Form
from varuna.measure.segments import Link
from varuna.types import CutCost, Dim, Plan, PrecisionName, StagePlan, TensorSpec, TieCost, Work

GetBatch = Callable[..., Mapping[str, object]]
WORK = Work(seed=0, step=0, first_sample=0)


# ---------------------------------------------------------------- the user's batches


class Batches:
    """Asks the user's `get_batch` for samples, and looks at what comes."""

    def __init__(self, get_batch: GetBatch, source: Source) -> None:
        self._get_batch = get_batch
        self._takes_device = "device" in inspect.signature(get_batch).parameters
        self._source = source
        self._dims: Mapping[str, int] = {}
        self.sample = self._ask(2)
        self._dims = source.batch(self.sample).dims
        self._check(self.sample, 2)

    def of(self, size: int) -> tuple[Mapping[str, object], Batch]:
        inputs = self._ask(size)
        return inputs, self._check(inputs, size)

    @property
    def sample_bytes(self) -> int:
        """Of one sample's inputs."""
        tensors = (value for name, value in self.sample.items() if name in self._dims)
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor)) // 2

    def _ask(self, size: int) -> Mapping[str, object]:
        inputs = self._get_batch(size, device="cpu") if self._takes_device else self._get_batch(size)
        if not isinstance(inputs, Mapping):
            raise TypeError(
                f"get_batch({size}) must return a dict of the model's keyword arguments, not "
                f"{type(inputs).__name__} (write {{'x': x, 'y': y}} for a model called as model(x=x, y=y))"
            )
        return inputs

    def _check(self, inputs: Mapping[str, object], size: int) -> Batch:
        # One sample does not show which leading 1 is its batch; two do.
        found = {
            name: value.shape[self._dims[name]]
            for name, value in inputs.items()
            if isinstance(value, Tensor) and name in self._dims
        }
        wrong = {name: number for name, number in found.items() if number != size}
        if wrong or not found:
            what = ", ".join(f"{number} in {name!r}" for name, number in wrong.items()) or "none"
            raise ValueError(
                f"get_batch({size}) must return {size} samples, but returned {what} "
                "(make as many as it is asked for)"
            )
        return Batch(size, dict(self._dims))


# ---------------------------------------------------------------- the model


def describe(
    source: Source,
    captured: Captured,
    *,
    sample_bytes: int,
    device: torch.device,
    devices_per_machine: int,
) -> Subject:
    kinds = find_kinds(source, captured)
    return Subject(
        fingerprint=captured.graph.fingerprint,
        device=device_name(device),
        device_memory_bytes=device_memory_bytes(device)
        // (devices_per_machine if device.type == "cpu" else 1),
        precision=source.precision,
        kinds=tuple(_kind(source, captured, kinds.index(kind)) for kind in range(max(kinds) + 1)),
        segments=tuple(kinds),
        cuts=tuple(
            _cut(captured.carve(index, index + 1).sent, index) for index in range(captured.num_segments - 1)
        ),
        ties=_ties(source, captured),
        sample_bytes=sample_bytes,
    )


def _kind(source: Source, captured: Captured, segment: int) -> Kind:
    """Of the state that a stage of this segment alone would have."""
    program = captured.carve(segment, segment + 1)
    graph = captured.graph.segments[segment]
    names = {*graph.parameters, *graph.buffers, *program.state}
    trained = [name for name in program.state if _trains(source, name)]
    return Kind(
        parameter_bytes=sum(_num_bytes(source, name) for name in names),
        gradient_bytes=sum(_num_bytes(source, name) for name in trained),
        num_trained=sum(math.prod(source.shape(name)) for name in trained),
    )


def _trains(source: Source, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    parameter = source.meta_model.get_submodule(path)._parameters.get(leaf)
    return parameter is not None and parameter.requires_grad


def _num_bytes(source: Source, name: str) -> int:
    return math.prod(source.shape(name)) * source.dtype(name).itemsize


def _cut(sent: Sequence[TensorSpec], cut: int) -> CutCost:
    return CutCost(
        sent=_bytes_of(sent, cut), returned=_bytes_of([spec for spec in sent if spec.needs_grad], cut)
    )


def _bytes_of(specs: Sequence[TensorSpec], cut: int) -> Dim:
    per_sample = fixed = 0
    for spec in specs:
        if None in spec.dims:
            raise ValueError(
                f"{spec} crosses the cut after segment {cut}, and its size depends on its values: what it "
                "costs cannot be foretold (put the CutPoint where sizes follow from the batch)"
            )
        each = getattr(torch, spec.dtype).itemsize
        dims = [dim for dim in spec.dims if dim is not None]
        # The size is a line in the batch, since only one dimension may grow with it: two points tell it.
        one, two = (math.prod(dim.size(batch) for dim in dims) * each for batch in (1, 2))
        per_sample += two - one
        fixed += 2 * one - two
    return Dim(per_sample, fixed)


def _ties(source: Source, captured: Captured) -> tuple[TieCost, ...]:
    holders: dict[str, list[int]] = {}
    for segment in captured.graph.segments:
        for name in segment.parameters:
            holders.setdefault(name, []).append(segment.index)
    return tuple(
        TieCost(tuple(segments), _num_bytes(source, name), math.prod(source.shape(name)))
        for name, segments in holders.items()
        if len(segments) > 1 and _trains(source, name)
    )


def trained_forms(source: Source, captured: Captured) -> list[Form]:
    """The shapes of the weights that train, each once, in the order of the segments."""
    names = {
        name: None
        for segment in range(captured.num_segments)
        for name in captured.carve(segment, segment + 1).state
        if _trains(source, name)
    }
    return [Form(source.shape(name), source.dtype(name)) for name in names]


# ---------------------------------------------------------------- its parts, at work


class Part:
    """A segment at one micro-batch size, run by the `Stage` that training uses."""

    def __init__(
        self,
        stage: Stage,
        program: Runnable,
        inputs: Mapping[str, object],
        relayed: Sequence[bool],
        num_results: int = 1,  # of a last segment, which sends nothing on
    ) -> None:
        self._stage = stage
        self._program = program
        self._inputs = inputs
        self.relayed = relayed
        self.wanted = [spec.needs_grad for spec in program.sent] or [True] * num_results
        self.enter: Callable[[], object] | None = None
        self._next = self._oldest = 0  # micro-batches
        stage.clear()

    def forward(self, given: Sequence[Tensor], *, keep_graph: bool = True) -> list[Tensor]:
        number, self._next = self._next, self._next + 1
        return self._stage.forward(
            number, self._program, list(given), self._inputs, WORK, keep_graph=keep_graph
        )

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        number, self._oldest = self._oldest, self._oldest + 1
        return self._stage.backward(number, gradients)

    def backward_inputs(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        return self._stage.backward_inputs(self._oldest, gradients)

    def backward_weights(self) -> None:
        number, self._oldest = self._oldest, self._oldest + 1
        self._stage.backward_weights(number)

    def forget(self) -> None:
        self._stage.held.clear()
        self._oldest = self._next


class Parts:
    """Makes the parts of a model, one for each kind of segment; their weights stay from size to size."""

    def __init__(
        self, source: Source, segments: Sequence[int], *, device: torch.device, initialize: Any
    ) -> None:
        self._source = source
        self._first = [segments.index(kind) for kind in range(max(segments) + 1)]
        self._segments = segments
        self._device = device
        self._initialize = initialize
        self._stages: dict[int, Stage] = {}

    def before(self, kind: int) -> int | None:
        """The kind that is given to this one: that of the segment before its first."""
        first = self._first[kind]
        return self._segments[first - 1] if first else None

    def span(self, kind: int) -> tuple[int, int]:
        """The segment by which a kind is known, as first and stop."""
        return self._first[kind], self._first[kind] + 1

    def make(self, kind: int, captured: Captured, inputs: Mapping[str, object]) -> Part:
        if captured.num_segments != len(self._segments):
            raise ValueError(
                f"with these inputs the model has {captured.num_segments} segments, with the sample's it had "
                f"{len(self._segments)} (its CutPoints must not depend on the inputs)"
            )
        first = self._first[kind]
        program = captured.carve(first, first + 1)
        stage = self._stage(kind, captured)
        here = move_inputs(inputs, self._device)
        runnable = with_fused_loss(program.to(self._device))
        part = Part(stage, runnable, here, relayed(captured, first), len(captured.results))
        again = entry(program, first)
        if again is not None:
            part.enter = self._enter(again.to(self._device), stage, here)
        return part

    def _enter(
        self, program: SpanProgram, stage: Stage, inputs: Mapping[str, object]
    ) -> Callable[[], object]:
        state = [stage.state.tensor(name) for name in program.state]
        received: list[Any] = [None] * len(program.received)  # none of it is read
        return lambda: program(state, received, inputs, WORK)

    def drop_all(self) -> None:
        """Lets go of weights and gradients; whoever is made next has new ones."""
        self._stages.clear()

    def _stage(self, kind: int, captured: Captured) -> Stage:
        if kind not in self._stages:
            first = self._first[kind]
            state = stage_state(
                self._source,
                captured,
                first,
                first + 1,
                device=self._device,
                initialize=self._initialize,
            )
            self._stages[kind] = Stage(state)
        return self._stages[kind]


# ---------------------------------------------------------------- nothing, at work


class OneWeight:
    """The state of a model that does nothing."""

    def __init__(self, device: torch.device) -> None:
        self.weight = nn.Parameter(torch.ones((), device=device))

    def tensor(self, name: str) -> Tensor:
        return self.weight


class Nothing:
    """A program that gives out its one weight, as a loss; or, between others, what it was given."""

    state: tuple[str, ...] = ("weight",)
    mutated: tuple[str, ...] = ()
    repeats = True

    def __init__(self, between: bool) -> None:
        given = TensorSpec("nothing", "float32", (), needs_grad=True)
        self.received = self.sent = (given,) if between else ()

    def __call__(
        self, state: Sequence[Tensor], received: Sequence[Tensor], inputs: Mapping[str, object], work: Work
    ) -> tuple[Tensor, ...]:
        return ((*received, *state)[0].view(()),)


class NothingSpecial:
    """The traits of a model in which no replica's step depends on the others'."""

    random = False
    changes_buffers = False
    momentum: Mapping[str, float | None] = {}


def part_that_does_nothing(device: torch.device) -> Link:
    part = Part(Stage(OneWeight(device)), Nothing(between=True), {}, (False,))
    return Link(part, given=[torch.zeros((), device=device)])


def step_that_does_nothing(device: torch.device, most: int) -> Callable[[int], None]:
    """Trains n micro-batches of a model that does nothing, with the trainer and the engine of all others."""
    state = OneWeight(device)
    engine = Engine(
        Stage(state), index=0, stages=1, upstream=None, downstream=None, waiter=None, device=device
    )
    trainer = Trainer(
        plan=Plan((StagePlan(0, 1, (0,)),), batch_size=most, microbatch_size=1),
        session=single_rank_session(),
        engine=engine,
        reducer=_reducer([state.weight]),
        state=state,
        traits=NothingSpecial(),
        programs=lambda *_: Nothing(between=False),
        mutated=(),
        seed=0,
    )
    samples = torch.zeros(most, 1)

    def step(count: int) -> None:
        trainer.step(
            {"x": samples[:count]},
            num_samples=count,
            dims={"x": 0},
            training=True,
            loss_scale=LossScale(),
            max_norm=None,
        )
        state.weight.grad = None

    return step


def _reducer(weights: Sequence[nn.Parameter]) -> Reducer:
    return Reducer(parameters=weights, replicas=None, everyone=None, counts_norm=True, waiter=None)


def finish_in(precision: PrecisionName) -> Finish:
    """What the last backward of a step is followed by, on a rank without others."""
    scale = make_loss_scale(precision, "dynamic", 2.0**16, 1.0)

    def finish(weights: Sequence[nn.Parameter]) -> None:
        reducer = _reducer(weights)
        reducer.announce(1.0, 1.0)
        reducer.finish(
            nominal_weight=1.0,
            loss_scale=scale.value,
            checks_overflow=scale.checks_overflow,
            max_norm=None,
        )

    return finish


# ---------------------------------------------------------------- the machine
