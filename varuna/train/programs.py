"""The programs of this rank's stage: one for each form of the inputs, captured when first needed."""

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from varuna.capture import Captured, Source, SpanProgram, StageState
from varuna.capture.graph.fused_loss import with_fused_loss
from varuna.capture.model.attributes import AttributeChange, ModelAttributes
from varuna.capture.model.batch import Batch, find_batch
from varuna.capture.model.lengths import sizes_of
from varuna.capture.model.state import ModelTensors
from varuna.capture.run.chain import ProgramChain, chain_of
from varuna.errors import CaptureError, list_some
from varuna.execute.comm.session import Session
from varuna.execute.step.trainer import Trainer
from varuna.train.validate import WrapOptions, refuse_unforeseen
from varuna.types import Plan

log = logging.getLogger("varuna")

MAX_PROGRAMS = 64
"""Programs that a stage keeps."""
MANY_CHANGES = 10
"""Warn after this number of steps with changed attributes."""


class CapturedModel(NamedTuple):
    """The model as captured with the sample inputs, and what the ranks have agreed on.

    It must not refer to the original model, whose values the script may drop.
    """

    source: Source
    captured: Captured
    batch: Batch  # of the sample inputs
    seed: int
    machines: list[str]  # of each rank


@dataclass
class StagePrograms:
    """Captures, compiles and keeps the programs of one stage."""

    sampled: CapturedModel
    options: WrapOptions
    plan: Plan
    stage: int
    state: StageState
    tensors: ModelTensors  # this stage's, in the script's model
    _programs: dict[Any, SpanProgram | ProgramChain] = field(default_factory=dict)  # by form of inputs
    _made: dict[tuple[Captured, Hashable], SpanProgram | ProgramChain] = field(default_factory=dict)
    _traits_key: Hashable = ()  # the changed attributes that the trainer knows

    def adopt(self, last: "StagePrograms") -> None:
        """Use the programs of another layout in which this rank had the same segments."""
        self._programs, self._made = last._programs, last._made

    def batch(self, inputs: object) -> Batch:
        """Return the size and the batch dimensions of the inputs."""
        batch = batch_of(inputs, self.options.batch_dims)
        sample = self.sampled.batch
        if batch.size == 1 and sample.size > 1:
            # With one sample, any leading 1 could be the batch; the sample inputs have shown which.
            batch = Batch(1, {name: dim for name, dim in batch.dims.items() if name in sample.dims})
        return batch

    def __call__(
        self, inputs: Mapping[str, object], size: int, dims: Mapping[str, int], training: bool
    ) -> SpanProgram | ProgramChain:
        batch = Batch(size, dims)
        source = self.sampled.source
        key = training, source.signature(inputs, batch), source.attributes.key
        if key not in self._programs:
            captured = source.capture(inputs, training=training, batch=batch)
            made = captured, key[-1]
            if made not in self._made:
                self._check(captured, training)
                self._forget_old()
                program = self._make_program(captured)
                refuse_missing_weights(program, self.state)
                self._made[made] = program
            own, sizes = self.plan.stages[self.stage], sizes_of(inputs, batch)
            self._programs[key] = captured.at_sizes(self._made[made], own.first, own.stop, sizes)
        return self._programs[key]

    def _check(self, captured: Captured, training: bool) -> None:
        """Refuse inputs for which this stage was not built."""
        sampled = self.sampled.captured
        if captured.num_segments != sampled.num_segments:
            raise ValueError(
                f"with these inputs the model has {captured.num_segments} segments, with the sample "
                f"inputs it had {sampled.num_segments} (CutPoints must not depend on the inputs)"
            )
        if self.options.loss_weight is None and captured.num_totals != sampled.num_totals:
            raise ValueError(
                "with these inputs the model divides its loss by other counts than with the sample "
                "inputs (wrap it with sample inputs of the same form, or pass loss_weight=)"
            )
        if training and not self.sampled.source.attributes.key:
            refuse_unforeseen(captured, sampled, self.state, self.plan, self.stage)

    def _forget_old(self) -> None:
        """Drop programs of attributes that the script changed long ago; drop all if there are too many."""
        recent = self.sampled.source.attributes.recent if len(self._made) < MAX_PROGRAMS else ()
        self._programs = {key: program for key, program in self._programs.items() if key[-1] in recent}
        self._made = {key: program for key, program in self._made.items() if key[-1] in recent}

    def follow_changes(self, session: Session) -> None:
        """Use attributes of the model that the script has changed. All ranks must have changed the same."""
        self.tensors.follow()
        attributes = self.sampled.source.attributes
        changes = attributes.changes()
        if changes:
            session.announce_change(str(changes[0]))
            agree_on_changes(session, attributes, changes)

    def update_traits(self, trainer: Trainer, inputs: Mapping[str, object], batch: Batch) -> None:
        """Capture the model again if its attributes have changed since the last step."""
        source, own = self.sampled.source, self.plan.stages[self.stage]
        if source.attributes.key == self._traits_key:
            return
        captured = source.capture(inputs, training=True, batch=batch)
        program = captured.carve(own.first, own.stop)
        refuse_other_weights(program, self.sampled.captured.carve(own.first, own.stop), self.state)
        trainer.traits, trainer.mutated = captured, program.mutated
        self._traits_key = source.attributes.key

    def _make_program(self, captured: Captured) -> SpanProgram | ProgramChain:
        own, device = self.plan.stages[self.stage], self.options.device
        if self.options.compile and not captured.cut_automatically:
            return chain_of(self.sampled.source, captured, own.first, own.stop, device).compiled()
        # Automatically cut segments are too short to be compiled one by one.
        program = captured.carve(own.first, own.stop).to(device)
        return program.compiled() if self.options.compile else with_fused_loss(program)


def agree_on_changes(
    session: Session, attributes: ModelAttributes, changes: Sequence[AttributeChange]
) -> None:
    """Check that the script has changed the same attributes on all ranks, and use them. All ranks call it."""
    everyone = session.gather(tuple(changes), tuple[AttributeChange, ...])
    first_rank, first = session.ranks[0], everyone[0]
    for rank, theirs in zip(session.ranks, everyone, strict=True):
        found = [f"on rank {first_rank} {change}" for change in first if change not in theirs]
        found += [f"on rank {rank} {change}" for change in theirs if change not in first]
        if found:
            raise ValueError(
                f"the script changes the model differently on ranks {first_rank} and {rank}: "
                f"{list_some(found)} (set the same values on all ranks, before the same step)"
            )
    attributes.accept()
    if attributes.num_changes == MANY_CHANGES and session.rank == session.ranks[0]:
        log.warning(
            "the script has changed attributes of the model (last, %s) before %d steps, and each time the "
            "model is captured again (pass a value that changes often as an input of the model)",
            changes[0],
            MANY_CHANGES,
        )


def refuse_other_weights(program: SpanProgram, of_sample: SpanProgram, state: StageState) -> None:
    """Refuse changed attributes with which a stage uses other parameters than when it was wrapped."""
    differing = sorted(set(program.state) ^ set(of_sample.state))
    weights = [name for name in differing if name not in state.canonical or state.tensor(name).requires_grad]
    if weights:
        raise CaptureError(
            f"since the script has changed attributes of the model, its forward uses other weights: "
            f"{list_some(weights)}. Train the model with the attributes and the adapters with which it was "
            "wrapped, or wrap it again; freeze weights with requires_grad_(False)."
        )


def refuse_missing_weights(program: SpanProgram | ProgramChain, state: StageState) -> None:
    """Refuse changed attributes with which a stage needs weights that it does not hold."""
    if missing := [name for name in program.state if name not in state.canonical]:
        raise CaptureError(
            f"since the script has changed attributes of the model, its forward uses {list_some(missing)}, "
            "which this stage does not hold: they were unused when the model was wrapped, for example as "
            "another adapter. gather_model() returns a model that has all of them."
        )


def batch_of(inputs: object, batch_dims: Mapping[str, int | None]) -> Batch:
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"inputs must be a dict of the model's keyword arguments, not {type(inputs).__name__} "
            "(for a model that is called as model(x=x, y=y), pass {'x': x, 'y': y})"
        )
    return find_batch(inputs, batch_dims)
