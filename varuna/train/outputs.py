"""All outputs of a wrapped model, such as logits, for a whole batch on every rank."""

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import xxhash
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna.capture import Captured, SpanProgram
from varuna.capture.model.batch import Batch
from varuna.capture.model.call_convention import CallConvention, StructuredCall, declaring
from varuna.capture.model.lengths import sizes_of
from varuna.errors import CaptureError, list_some
from varuna.execute.step.division import Division, divide_batch, divide_equal_widths
from varuna.execute.step.outputs import ModelOutput, classify_output
from varuna.execute.step.spans import even_spans
from varuna.execute.update.initial_values import hash_tensor
from varuna.train.loader import own_share
from varuna.train.varuna import Varuna
from varuna.types import spread_evenly

CPU = torch.device("cpu")


class OutputsCall(StructuredCall):
    """Calls by keywords, for all outputs."""

    def __init__(self) -> None:
        super().__init__((), pytree.tree_structure(0), frozenset())
        self.key = "all outputs"

    def check(self, model: nn.Module, inputs: Mapping[str, object]) -> None:
        CallConvention.check(self, model, inputs)

    @contextmanager
    def adapted(self, model: nn.Module, inputs: Mapping[str, object]) -> Iterator[None]:
        original = model.forward

        def forward(**given: Any) -> tuple[Tensor, ...]:
            return self._output_tensors(original(**given), set(map(id, given.values())))

        with patch.object(model, "forward", declaring(forward, inputs)):
            yield


def refuse_different_inputs(model: Varuna, inputs: Mapping[str, Any]) -> None:
    """Raise on all ranks if they have different inputs. All ranks call this."""
    session = model._session
    with session.call("predict"), model._report_errors("predict"):
        model._programs.batch(inputs)  # raises if these are no inputs
        digest = xxhash.xxh3_128()
        for name, value in sorted(inputs.items()):
            form = f"{value.dtype} {value.shape}" if isinstance(value, Tensor) else repr(value)
            digest.update(f"{name} {form}".encode())
            digest.update(hash_tensor(value) if isinstance(value, Tensor) else b"")
        own = struct.unpack("4I", digest.digest())
        found = session.gather_numbers([float(number) for number in own])
        others = [rank for rank, each in zip(session.ranks, found, strict=True) if each != found[0]]
        if others:
            raise ValueError(
                f"predict was called with other inputs on {list_some([f'rank {rank}' for rank in others])} "
                f"than on rank {session.ranks[0]}: pass the same whole batch on all ranks, not each "
                "replica's share"
            )


def whole_outputs(model: Varuna, inputs: Mapping[str, Any], device: torch.device = CPU) -> Any:
    """Return the outputs for all samples of a batch, in evaluation mode, on every rank. All ranks call this.

    All ranks have the same inputs, of the whole batch. The outputs are on `device`.
    """
    session, programs, trainer = model._session, model._programs, model._trainer
    with session.call("predict"), model._report_errors("predict"):
        programs.follow_changes(session)
        batch = programs.batch(inputs)
        captured = _captured(model, inputs, batch)
        own = model.plan.stages[session.stage]
        program = captured.carve(own.first, own.stop)
        division = _division(model, batch.size)
        _refuse_disorder(model, captured, batch.size)
        flight = trainer.forwards(
            own_share(model, inputs),
            programs=lambda inputs, size, dims, _training: _program(model, inputs, Batch(size, dims)),
            division=division,
            dims=batch.dims,
            training=False,
            gradients=(),
            keeps=False,
            num_totals=captured.num_totals if program.totals is not None else 0,
        )
        trainer.engine.where = f"stage {session.stage}, sending the outputs"
        outputs = _outputs(captured, inputs, batch)
        mine: list[Tensor] = []
        if division.own[0] < division.own[1] and session.stage == model.plan.depth - 1:
            microbatches = [job.microbatch for job in flight.jobs if job.microbatch.size]
            for number, output in enumerate(outputs):
                values = [results[number] for results in flight.results if results]
                whole = output.combine_microbatches(values, microbatches, float(batch.size))
                assert whole is not None
                mine.append(whole.detach().cpu())
        parts = [part for part in _from_last_stage(model, mine) if part]
    whole_tensors = [
        output.combine_ranks([part[number] for part in parts], CPU).to(device)
        for number, output in enumerate(outputs)
    ]
    return captured.structure.filled(whole_tensors)


def _captured(model: Varuna, inputs: Mapping[str, Any], batch: Batch) -> Captured:
    captured = model._programs.sampled.source.capture(
        inputs, training=False, batch=batch, convention=OutputsCall()
    )
    if captured.num_segments != model.plan.stages[-1].stop:
        raise ValueError(
            f"in evaluation the model has {captured.num_segments} segments, in training it has "
            f"{model.plan.stages[-1].stop} (CutPoints must not depend on the mode or the inputs)"
        )
    return captured


def _program(model: Varuna, inputs: Mapping[str, Any], batch: Batch) -> SpanProgram:
    own, captured = model.plan.stages[model.stage], _captured(model, inputs, batch)
    program = captured.carve(own.first, own.stop).to(model.device)
    return captured.at_sizes(program, own.first, own.stop, sizes_of(inputs, batch))


def _outputs(captured: Captured, inputs: Mapping[str, Any], batch: Batch) -> list[ModelOutput]:
    return [
        classify_output(spec, "sum" if is_sum else "mean")
        for spec, is_sum in zip(captured.results_at(sizes_of(inputs, batch)), captured.loss.sums, strict=True)
    ]


def _division(model: Varuna, num_samples: int) -> Division:
    session, size = model._session, model.plan.microbatch_size
    if session.uneven:
        shares = tuple(spread_evenly(num_samples, parts=len(ranks)) for ranks in session.stage_map)
        return divide_batch(shares, stage=session.stage, replica=session.replica, microbatch_size=size)
    spans = even_spans(num_samples, parts=session.width)
    return divide_equal_widths(spans, replica=session.replica, microbatch_sizes=[size] * session.width)


def _refuse_disorder(model: Varuna, captured: Captured, num_samples: int) -> None:
    divided = model.plan.width > 1 or num_samples > model.plan.microbatch_size
    if divided and (reasons := list_some(captured.disordered)):
        raise CaptureError(
            f"among the model's outputs, {reasons}, so it cannot be put together from several micro-batches "
            "or replicas (give each sample its own rows)"
        )


def _from_last_stage(model: Varuna, mine: list[Tensor]) -> list[list[Tensor]]:
    """Return the outputs of each replica of the last stage, on every rank."""
    session = model._session
    return [session.broadcast(mine, rank, list[Tensor]) for rank in session.stage_map[-1]]
