"""Segments in the form in which they are measured, and an empty model for the engine's overhead."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from varuna.capture import Captured, Source, stage_state
from varuna.capture.cuts.segment_kinds import entry, relayed, trains_before
from varuna.capture.graph.fused_loss import with_fused_loss
from varuna.execute.comm.session import single_rank_session
from varuna.execute.step.engine import Engine
from varuna.execute.step.nonfinite import NonFiniteLosses
from varuna.execute.step.scatter import move_inputs
from varuna.execute.step.stage import Stage, StageProgram, TotalsFunction
from varuna.execute.step.trainer import Trainer
from varuna.execute.update.precision import LossScale, make_loss_scale
from varuna.execute.update.reduce import Reducer
from varuna.measure.optimizer import FinishGradients
from varuna.measure.segments import LinkedSegment
from varuna.types import Plan, PrecisionName, StagePlan, TensorSpec, Work

WORK = Work(seed=0, step=0, first_sample=0)


class StageSegment:
    """A segment at one micro-batch size, run by the `Stage` that training uses."""

    def __init__(
        self,
        stage: Stage,
        program: StageProgram,
        inputs: Mapping[str, object],
        relayed: Sequence[bool],
        num_results: int = 1,  # of a last segment, which sends nothing
        *,
        wants_gradients: bool = True,  # a segment before it trains
        trains: bool = True,  # this one does, or one before it
    ) -> None:
        self._stage = stage
        self._program = program
        self._inputs = inputs
        self.relayed = relayed
        self._wants_gradients = wants_gradients
        wanted = [spec.needs_grad for spec in program.sent] or [True] * num_results
        self.wanted = [is_wanted and trains for is_wanted in wanted]
        self.enter: Callable[[], object] | None = None
        self._next = self._oldest = 0  # micro-batch numbers
        stage.clear()

    def forward(self, given: Sequence[Tensor], *, keep_graph: bool = True) -> list[Tensor]:
        number, self._next = self._next, self._next + 1
        return self._stage.forward(
            number,
            self._program,
            list(given),
            self._inputs,
            WORK,
            keep_graph=keep_graph,
            wants_gradients=self._wants_gradients,
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


class SegmentFactory:
    """Makes one runnable segment of each kind; the weights stay the same for all micro-batch sizes."""

    def __init__(
        self, source: Source, segments: Sequence[int], *, device: torch.device, initialize: Any = None
    ) -> None:
        self._source = source
        self._first = [segments.index(kind) for kind in range(max(segments) + 1)]
        self._segments = segments
        self._device = device
        self._initialize = initialize
        self._stages: dict[int, Stage] = {}

    def before(self, kind: int) -> int | None:
        """Return the kind of the segment before the first segment of this kind."""
        first = self._first[kind]
        return self._segments[first - 1] if first else None

    def sent(self, kind: int, captured: Captured) -> Sequence[TensorSpec]:
        """Return the tensors that a segment of this kind sends."""
        return captured.carve(self._first[kind], self._first[kind] + 1).sent

    def make(self, kind: int, captured: Captured, inputs: Mapping[str, object]) -> StageSegment:
        if captured.num_segments != len(self._segments):
            raise ValueError(
                f"with these inputs the model has {captured.num_segments} segments, with the sample it had "
                f"{len(self._segments)} (the CutPoints that a forward reaches must not depend on its inputs)"
            )
        first = self._first[kind]
        program = captured.carve(first, first + 1)
        if kind not in self._stages:
            self._stages[kind] = Stage(
                stage_state(
                    self._source,
                    captured,
                    first,
                    first + 1,
                    device=self._device,
                    initialize=self._initialize,
                )
            )
        stage = self._stages[kind]
        local_inputs = move_inputs(inputs, self._device)
        runnable = with_fused_loss(program.to(self._device))
        segment = StageSegment(
            stage,
            runnable,
            local_inputs,
            relayed(captured, first),
            len(captured.results),
            wants_gradients=trains_before(self._source, captured, first),
            trains=trains_before(self._source, captured, first + 1),
        )
        recomputed = entry(program, first)
        if recomputed is not None:
            entry_program = recomputed.to(self._device)
            state = [stage.state.tensor(name) for name in entry_program.state]
            received: list[Any] = [None] * len(entry_program.received)  # the program reads none of it
            segment.enter = lambda: entry_program(state, received, local_inputs, WORK)
        return segment

    def drop_all(self) -> None:
        """Free weights and gradients; the next segment of each kind gets new ones."""
        self._stages.clear()


class OneWeightState:
    """State of the empty model: one weight."""

    def __init__(self, device: torch.device) -> None:
        self.weight = nn.Parameter(torch.ones((), device=device))

    def tensor(self, name: str) -> Tensor:
        return self.weight


class EmptyProgram:
    """A program that returns its one weight as a loss; or, between others, what it received."""

    state: tuple[str, ...] = ("weight",)
    mutated: tuple[str, ...] = ()
    repeats = True
    totals: TotalsFunction | None = None

    def __init__(self, *, between: bool) -> None:
        spec = TensorSpec("nothing", "float32", (), needs_grad=True)
        self.received = self.sent = (spec,) if between else ()

    def __call__(
        self, state: Sequence[Tensor], received: Sequence[Tensor], inputs: Mapping[str, object], work: Work
    ) -> tuple[Tensor, ...]:
        return ((*received, *state)[0].view(()),)


class EmptyTraits:
    """Traits of a model in which no replica's step depends on the others."""

    random = False
    changes_buffers = False
    momentum: Mapping[str, float | None] = {}


def empty_link(device: torch.device) -> LinkedSegment:
    segment = StageSegment(Stage(OneWeightState(device)), EmptyProgram(between=True), {}, (False,))
    return LinkedSegment(segment, given=[torch.zeros((), device=device)])


def empty_step(device: torch.device, most: int) -> Callable[[int], None]:
    """Return a function that trains n micro-batches of the empty model with the usual trainer and engine."""
    state = OneWeightState(device)
    engine = Engine(
        Stage(state), index=0, stages=1, upstream=None, downstream=None, waiter=None, device=device
    )
    session = single_rank_session()
    trainer = Trainer(
        plan=Plan((StagePlan(0, 1, (0,)),), batch_size=most, microbatch_size=1),
        session=session,
        engine=engine,
        reducer=_reducer([state.weight]),
        state=state,
        traits=EmptyTraits(),
        programs=lambda *_: EmptyProgram(between=False),
        mutated=(),
        seed=0,
        losses=NonFiniteLosses(session),
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
    return Reducer(weights, replicas=None, everyone=None, counts_norm=True, waiter=None)


def finish_in(precision: PrecisionName) -> FinishGradients:
    """Return what a rank without replicas does after the last backward of a step."""
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
