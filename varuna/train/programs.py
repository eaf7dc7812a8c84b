"""The programs of this rank's stage: one for each form of the inputs, captured when first needed."""

from collections.abc import Mapping

import torch

from varuna.capture import Captured, Source, SpanProgram, StageState
from varuna.capture.graph.fused_loss import with_fused_loss
from varuna.capture.model.batch import Batch, find_batch
from varuna.capture.run.chain import ProgramChain, chain_of
from varuna.train.validate import refuse_unforeseen
from varuna.types import Plan


class StagePrograms:
    """Captures, compiles and keeps the programs of one stage."""

    def __init__(
        self,
        source: Source,
        sampled: Captured,  # the model, captured with the sample inputs
        sample: Batch,
        *,
        batch_dims: Mapping[str, int | None],
        plan: Plan,
        stage: int,
        state: StageState,
        device: torch.device,
        compile: bool,
    ) -> None:
        self._source = source
        self._sampled = sampled
        self._sample = sample
        self._batch_dims = batch_dims
        self._plan = plan
        self._stage = stage
        self._state = state
        self._device = device
        self._compile = compile
        self._programs: dict[object, SpanProgram | ProgramChain] = {}

    def batch(self, inputs: object) -> Batch:
        """Return the size and the batch dimensions of the inputs."""
        batch = batch_of(inputs, self._batch_dims)
        if batch.size == 1 and self._sample.size > 1:
            # With one sample, any leading 1 could be the batch; the sample inputs have shown which.
            batch = Batch(1, {name: dim for name, dim in batch.dims.items() if name in self._sample.dims})
        return batch

    def __call__(
        self, inputs: Mapping[str, object], size: int, dims: Mapping[str, int], training: bool
    ) -> SpanProgram | ProgramChain:
        batch = Batch(size, dims)
        key = training, self._source.signature(inputs, batch)
        if key not in self._programs:
            captured = self._source.capture(inputs, training=training, batch=batch)
            if captured.num_segments != self._sampled.num_segments:
                raise ValueError(
                    f"with these inputs the model has {captured.num_segments} segments, with the sample "
                    f"inputs it had {self._sampled.num_segments} (CutPoints must not depend on the inputs)"
                )
            if training:
                refuse_unforeseen(captured, self._sampled, self._state, self._plan, self._stage)
            self._programs[key] = self._make_program(captured)
        return self._programs[key]

    def _make_program(self, captured: Captured) -> SpanProgram | ProgramChain:
        own = self._plan.stages[self._stage]
        if self._compile and not captured.cut_automatically:
            return chain_of(self._source, captured, own.first, own.stop, self._device).compiled()
        # Automatically cut segments are too short to be compiled one by one.
        program = captured.carve(own.first, own.stop).to(self._device)
        return program.compiled() if self._compile else with_fused_loss(program)


def batch_of(inputs: object, batch_dims: Mapping[str, int | None]) -> Batch:
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"inputs must be a dict of the model's keyword arguments, not {type(inputs).__name__} "
            "(for a model that is called as model(x=x, y=y), pass {'x': x, 'y': y})"
        )
    return find_batch(inputs, batch_dims)
