"""The programs of this rank's stage: one for each form of the inputs, captured when first needed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from varuna.capture import Captured, Source, SpanProgram, StageState
from varuna.capture.graph.fused_loss import with_fused_loss
from varuna.capture.model.batch import Batch, find_batch
from varuna.capture.run.chain import ProgramChain, chain_of
from varuna.train.validate import WrapOptions, refuse_unforeseen
from varuna.types import Plan


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
    _programs: dict[object, SpanProgram | ProgramChain] = field(default_factory=dict)

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
        source, sampled = self.sampled.source, self.sampled.captured
        key = training, source.signature(inputs, batch)
        if key not in self._programs:
            captured = source.capture(inputs, training=training, batch=batch)
            if captured.num_segments != sampled.num_segments:
                raise ValueError(
                    f"with these inputs the model has {captured.num_segments} segments, with the sample "
                    f"inputs it had {sampled.num_segments} (CutPoints must not depend on the inputs)"
                )
            if training:
                refuse_unforeseen(captured, sampled, self.state, self.plan, self.stage)
            self._programs[key] = self._make_program(captured)
        return self._programs[key]

    def _make_program(self, captured: Captured) -> SpanProgram | ProgramChain:
        own, device = self.plan.stages[self.stage], self.options.device
        if self.options.compile and not captured.cut_automatically:
            return chain_of(self.sampled.source, captured, own.first, own.stop, device).compiled()
        # Automatically cut segments are too short to be compiled one by one.
        program = captured.carve(own.first, own.stop).to(device)
        return program.compiled() if self.options.compile else with_fused_loss(program)


def batch_of(inputs: object, batch_dims: Mapping[str, int | None]) -> Batch:
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"inputs must be a dict of the model's keyword arguments, not {type(inputs).__name__} "
            "(for a model that is called as model(x=x, y=y), pass {'x': x, 'y': y})"
        )
    return find_batch(inputs, batch_dims)
