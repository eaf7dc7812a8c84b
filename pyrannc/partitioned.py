"""A partitioned model on one rank: its stage's state, the pipeline, and the tensors of other ranks."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyrannc.calls import AgreedCall, AgreedCalls, CurrentCall, refuse_ragged
from pyrannc.pipeline import BatchInFlight, CapturedCall, Pipeline, PipelineFunction
from pyrannc.process import reporting_losses
from varuna.capture import Captured, Source, SpanProgram
from varuna.capture.graph.loss_totals import TotalsProgram
from varuna.capture.model.hooks import BackwardHooks
from varuna.capture.model.state import ModelTensors, StageState
from varuna.execute.comm.address import machine_identity
from varuna.execute.comm.session import Session
from varuna.execute.comm.values import PlainValue
from varuna.execute.device.out_of_memory import Remedies
from varuna.files import write_atomic
from varuna.observe import merge, to_perfetto
from varuna.observe.record import on_one_clock
from varuna.plan.plan_file import PinnedPlan
from varuna.train.programs import MAX_PROGRAMS, refuse_missing_weights, refuse_other_weights
from varuna.train.rank_errors import explain_out_of_memory
from varuna.train.validate import refuse_inseparable
from varuna.types import Timeline

RunBackward = Callable[[BatchInFlight, Any], dict[str, Tensor]]


@dataclass
class PartitionedModel:
    """This rank's part of a model, after its first call."""

    calls: AgreedCalls
    source: Source
    session: Session
    planned: Captured  # the capture for which the layout was planned
    pinned: PinnedPlan
    state: StageState
    owners: Mapping[str, int]  # for each parameter and buffer, the first rank that holds it
    device: torch.device
    hooks: BackwardHooks  # of the model, which a script may register at any time
    tensors: ModelTensors
    pipeline: Pipeline = field(init=False)
    _captured_calls: dict[tuple[int, Hashable], CapturedCall] = field(default_factory=dict)
    _programs: dict[tuple[int, bool, Hashable], SpanProgram] = field(default_factory=dict)
    _shared_programs: dict[tuple[Captured, Hashable], SpanProgram] = field(default_factory=dict)
    _needs: dict[tuple[Captured, Hashable], list[frozenset[str]]] = field(default_factory=dict)
    _checked_kinds: set[tuple[int, Hashable]] = field(default_factory=set)
    _traits_key: Hashable = ()  # the changed attributes that the trainer knows
    _anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))

    def run(self, call: CurrentCall, run_backward: RunBackward) -> Any:
        """Run a call forward; `run_backward` runs when autograd reaches its outputs."""
        self.hooks.refuse()
        self.tensors.follow()
        if self.source.attributes.key != self._traits_key:
            self._update_traits(call.number)
        captured = self._captured_call(call)
        signature = captured.call.signature
        self.pipeline.must_agree_on_overflow |= signature.precision == "fp16"
        run_forward = partial(self.pipeline.forward, captured, call.leaves, call.counts)
        if not signature.grad_enabled:
            outputs, _ = run_forward()
        else:
            needs = [tensor.name for tensor in captured.gradient_inputs if tensor.name in call.leaves]
            inputs = [call.leaves[name] for name in needs]
            apply: Any = PipelineFunction.apply
            outputs = apply(run_forward, run_backward, needs, self._anchor, *inputs)
        return captured.structure.filled(outputs)

    def program(
        self, number: int, inputs: Mapping[str, object], size: int, dims: Mapping[str, int], training: bool
    ) -> SpanProgram:
        """Return this stage's program for a call and micro-batch size, captured when first needed."""
        key = number, size == 1, self.source.attributes.key
        if key not in self._programs:
            stage = self.pinned.plan.stages[self.session.stage]
            call = self.calls.calls[number]
            captured = call.capture(self.source, size=1 if size == 1 else 2)
            shared = captured, key[-1]
            if shared not in self._shared_programs:
                self._forget_old()
                self._shared_programs[shared] = captured.carve(stage.first, stage.stop).to(self.device)
            program = self._shared_programs[shared]
            refuse_missing_weights(program, self.state)
            self._programs[key] = captured.at_sizes(program, stage.first, stage.stop, call.other_sizes)
        return self._programs[key]

    def _forget_old(self) -> None:
        """Drop programs of attributes that the script changed long ago; drop all if there are too many."""
        recent = self.source.attributes.recent if len(self._shared_programs) < MAX_PROGRAMS else ()
        self._programs = {key: program for key, program in self._programs.items() if key[-1] in recent}
        self._shared_programs = {key: own for key, own in self._shared_programs.items() if key[-1] in recent}

    def _update_traits(self, number: int) -> None:
        """Capture the model again in its first training call after a change of its attributes."""
        agreed = self.calls.calls[number]
        if not agreed.signature.training:
            return
        own = self.pinned.plan.stages[self.session.stage]
        captured = agreed.capture(self.source)
        program = captured.carve(own.first, own.stop)
        trainer = self.pipeline.trainer
        refuse_other_weights(program, self.planned.carve(own.first, own.stop), self.state)
        trainer.traits, trainer.mutated = captured, program.mutated
        self._traits_key = self.source.attributes.key

    def _captured_call(self, current: CurrentCall) -> CapturedCall:
        """Return an agreed call with its outputs, captured when first needed; all ranks call it."""
        session, number, attributes = self.session, current.number, self.source.attributes
        is_local = session.depth == 1 and self.calls.gather_inputs
        if current.ragged and not is_local:
            refuse_ragged(session, self.calls.calls[number].signature)
        kind = current.kind, attributes.key
        if is_local and kind not in self._checked_kinds:  # later, each rank has its own lengths
            agreed = self.calls.calls[current.kind].capture(self.source)
            check_same_forward(session, session.gather(agreed.graph.fingerprint, str), agreed)
            self._checked_kinds.add(kind)
        key = number, attributes.key
        if key not in self._captured_calls:
            self._captured_calls = {
                k: call for k, call in self._captured_calls.items() if k[-1] in attributes.recent
            }
            self.pipeline.trainer.engine.where = f"stage {session.stage}, capturing a new kind of call"
            call = self.calls.calls[number]
            captured = call.capture(self.source)
            needs = self._needs_of(captured, call, is_local)
            totals = self._totals_of(captured)
            state = self.state

            @cache
            def untouched(present: tuple[bool, ...]) -> list[Tensor]:
                return [state.tensor(name) for name in captured.untouched(present) if name in state.canonical]

            self._captured_calls[key] = CapturedCall(
                call,
                self.pipeline.classify_outputs(captured, call.other_sizes),
                captured.disordered,
                captured.structure,
                partial(self.program, number),
                needs,
                untouched,
                captured.num_totals if totals is not None else 0,
            )
        return self._captured_calls[key]

    def _needs_of(self, captured: Captured, call: AgreedCall, is_local: bool) -> list[frozenset[str]]:
        """Check a new capture, and return the inputs that the stage of each rank reads."""
        key, recent = (captured, self.source.attributes.key), self.source.attributes.recent
        if key not in self._needs:
            self._needs = {key: needs for key, needs in self._needs.items() if key[-1] in recent}
            plan, session = self.pinned.plan, self.session
            if captured.num_segments != plan.stages[-1].stop:
                raise ValueError(
                    f"in this call the model has {captured.num_segments} segments, in the first call it had "
                    f"{plan.stages[-1].stop} (the CutPoints that a forward reaches must not depend on its "
                    "inputs)"
                )
            refuse_inseparable(plan, captured)
            own = plan.stages[session.stage]
            totals = self._totals_of(captured)
            inputs = frozenset(captured.carve(own.first, own.stop).inputs)
            inputs |= frozenset(totals.inputs if totals is not None else ())
            if self.pipeline.loss_weight is not None and own.stop == captured.num_segments:
                inputs |= {tensor.name for tensor in call.signature.tensors}
            if is_local:
                self._needs[key] = [inputs] * session.num_ranks
            else:
                everyone = session.gather((captured.graph.fingerprint, inputs), tuple[str, frozenset[str]])
                check_same_forward(session, [fingerprint for fingerprint, _ in everyone], captured)
                self._needs[key] = [names for _, names in everyone]
        return self._needs[key]

    def _totals_of(self, captured: Captured) -> TotalsProgram | None:
        """Return the program of the totals that this stage's loss needs."""
        own = self.pinned.plan.stages[self.session.stage]
        return captured.carve(own.first, own.stop).totals if self.pipeline.recognises_losses else None

    def gather_named(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return the values of all ranks by name, each from the name's owner; all ranks call it."""
        rank = self.session.rank
        values: dict[str, Any] = {}
        mine = {name: value for name, value in own.items() if self.owners.get(name) == rank}
        with self.session.call("optimizer.state_dict"):  # unless it is part of another call
            for owner in sorted(set(self.owners.values())):
                sent = PlainValue(mine if owner == rank else {})
                values.update(self.session.broadcast(sent, owner, PlainValue).value)
        return values

    def gather_states(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return the optimizer's state of all ranks by name, in a call of the script."""
        with reporting_losses(self.session):
            return self.gather_named(own)

    def write_trace(self, file: Path) -> None:
        """Write a trace of the last call of all ranks; all ranks call it."""
        session = self.session
        own = self.pipeline.trainer.engine.recorder.timeline(session.rank, session.stage)
        machines = session.gather(machine_identity(), str)
        whole = merge(on_one_clock(session.gather(own, Timeline), machines))
        if session.rank == 0:
            write_atomic(file, to_perfetto({"last call": whole}))

    def explain_out_of_memory(
        self, error: torch.OutOfMemoryError, optimizer: torch.optim.Optimizer | None
    ) -> Exception:
        plan = self.pinned.plan
        share = -(-plan.batch_size // len(plan.stages[self.session.stage].ranks))

        def num_microbatches(size: int) -> int:  # all are held at the end of a forward
            return -(-share // size)

        return explain_out_of_memory(
            error,
            trainer=self.pipeline.trainer,
            state=self.state,
            optimizer=optimizer,
            microbatch_size=self.pipeline.microbatch_size(share),
            held_microbatches=num_microbatches,
            remedies=Remedies(
                recompute="checkpointing=True",
                microbatches=lambda size: f"pipeline_num={num_microbatches(size)}",
                stages=lambda count: f"partition_num={count} on as many devices or more",
            ),
        )


def check_same_forward(session: Session, fingerprints: list[str], captured: Captured) -> None:
    """Raise ValueError with the first different operation, if ranks captured different forwards."""
    differing = [rank for rank, theirs in enumerate(fingerprints) if theirs != fingerprints[0]]
    if not differing:
        return
    listings = session.gather(captured.listing, list[str])
    rank = differing[0]
    pairs = zip(listings[rank], listings[0], strict=False)
    theirs, first = next(
        ((own, other) for own, other in pairs if own != other),
        (f"{len(listings[rank])} operations", f"{len(listings[0])}"),
    )
    raise ValueError(
        f"the model's forward on rank {rank} differs from the one on rank 0: {theirs!r}, on rank 0 {first!r} "
        "(build and call the same model on all ranks; its forward must not depend on the rank, the "
        "environment or the data)"
    )
