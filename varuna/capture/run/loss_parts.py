"""Compares a batch as a whole with its parts, where the graph leaves doubt whether their losses add up.

    a few samples ──► loss, gradients ─────────────────────────────┐
    two parts of them ──► weighed as micro-batches are, and summed ─┴─► equal?

BatchNorm uses its running statistics in this comparison, and nothing is dropped at random.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from varuna.capture.graph import randomness
from varuna.capture.graph.checks import where
from varuna.capture.model.copies import working_copy
from varuna.capture.model.tied_weights import named_tensors
from varuna.capture.run.captured import Captured
from varuna.capture.run.one_precision import one_precision
from varuna.capture.run.program import SpanProgram, attributes, build
from varuna.capture.run.verify import FP64_PARAMETERS, USUAL, distance, kept_generators, norm
from varuna.types import LOSS_TOTALS, TensorSpec, Work

log = logging.getLogger("varuna")
aten = torch.ops.aten

TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3}
"""Difference, as a share of the norm, that rounding and its consequences explain."""


Results = dict[str, Tensor]
"""Outputs and gradients of a batch or of a part, by their names in errors."""


def explain_parts(
    model: nn.Module,
    captured: Captured,
    inputs: Mapping[str, object],
    *,
    device: torch.device,
    limit: int = FP64_PARAMETERS,
) -> str | None:
    """Return why the losses of micro-batches do not add up to that of the batch; None if they do.

    Where the graph proves it, nothing runs. The model and all random generators stay as they are. Of a model
    with more than `limit` parameters, or on `meta`, only the part after the last values of single samples
    runs, on numbers in their place; operations that may couple samples, but need not, are not compared then.
    """
    doubts = [fact.doubt for fact in captured.loss.kinds if fact.doubt is not None]
    parameters = list(model.parameters())
    is_whole = not any(p.is_meta for p in parameters) and sum(p.numel() for p in parameters) <= limit
    if not doubts and captured.loss.coupling is not None and is_whole:
        doubts = [captured.loss.coupling]
    if not doubts:
        return None
    program = captured.carve(0, captured.num_segments) if is_whole else captured.carve_tail()
    tensors = named_tensors(model)
    size = sum(tensors[name].numel() for name in program.state)
    found: str | None = None
    if size > limit:
        return (
            f"{where(doubts[0])}: this loss may not be a mean or sum over samples, and the part of the model "
            f"to compare has {size:,} parameters, more than {limit:,}"
        )
    with kept_generators(device), torch.inference_mode(False), torch.enable_grad():
        dtypes = (torch.float64, torch.float32) if size <= FP64_PARAMETERS else (torch.float32,)
        for dtype in dtypes:
            try:
                source = named_tensors(working_copy(model, device, dtype)) if is_whole else tensors
                found = _Parts(program, source, captured, inputs, device, dtype).difference()
                break
            except Exception as error:  # the model may not run in this precision
                log.debug("the batch cannot be compared with its parts in %s: %r", dtype, error)
                found = f"this loss may not be a mean or sum over samples, and cannot be compared ({error})"
    return None if found is None else f"{where(doubts[0])}: {found}"


class _Parts:
    def __init__(
        self,
        program: SpanProgram,
        tensors: Mapping[str, Tensor],
        captured: Captured,
        inputs: Mapping[str, object],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._captured, self._device, self._dtype = captured, device, dtype
        self._program = replace(_without_noise(program.to(device)), precision="fp32")
        self._generator = torch.Generator().manual_seed(0)
        counted = program.totals.state if program.totals is not None else ()
        self._tensors = {name: self._own_tensor(tensors[name]) for name in {*program.state, *counted}}
        name, dim = next((name, dim) for name, dim in captured.batch_dims.items() if name in inputs)
        given: Any = inputs[name]
        rows = list(range(given.shape[dim]))[:4]
        # At least two samples each: the graph is of several samples. Unequal numbers, to compare weights.
        one, other = rows[: len(rows) // 2] or rows, rows[len(rows) // 2 :]
        one, other = one + one[-1:] * (2 - len(one)), other + other[-1:] * (3 - len(other))
        self._sizes = len(one), len(other)
        self._places: dict[str, int] = {}  # of the batch in each output that has one
        self._inputs = {n: self._own_input(n, value, one + other) for n, value in inputs.items()}
        self._received = [self._row_numbers(spec) for spec in program.received]

    def _own_tensor(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of the model; one on `meta` gets numbers."""
        if tensor.is_meta:
            filled = self._numbers(tensor.shape) if tensor.is_floating_point() else None
            made = torch.zeros(tensor.shape, dtype=tensor.dtype) if filled is None else filled
            return made.to(self._device).requires_grad_(tensor.requires_grad)
        wanted = self._dtype if tensor.is_floating_point() else tensor.dtype
        is_buffer = not isinstance(tensor, nn.Parameter)  # which the program may change
        own = tensor.detach().to(self._device, wanted, copy=is_buffer)
        return own.requires_grad_(tensor.requires_grad)

    def _numbers(self, shape: Sequence[int]) -> Tensor:
        """Return numbers between 0 and 1 that a probability, a score or a weight may have."""
        drawn = torch.rand(shape, generator=self._generator, dtype=self._dtype)
        return (0.05 + 0.9 * drawn).to(self._device).requires_grad_()

    def _row_numbers(self, spec: TensorSpec) -> Tensor:
        """Return numbers for a value of all samples, of a size of its own in each sample."""
        total = sum(self._sizes)
        found = self._numbers([dim.size(total) for dim in spec.dims if dim is not None]).detach()
        rows = found.movedim(_batch_dim(spec), 0)
        sizes = torch.arange(1, total + 1, dtype=self._dtype, device=self._device) / total
        rows.mul_(sizes.view(-1, *[1] * (rows.dim() - 1)))
        return found.requires_grad_()

    def _own_input(self, name: str, value: object, rows: list[int]) -> object:
        if not isinstance(value, Tensor):
            return value
        dim = self._captured.batch_dims.get(name)
        if dim is not None:
            value = value.index_select(dim, torch.tensor(rows, device=value.device))
        wanted = self._dtype if value.is_floating_point() else value.dtype
        return value.detach().to(self._device, wanted, copy=True)

    def difference(self) -> str | None:
        """Return the first difference between the whole and its parts, if there is one."""
        with one_precision(self._dtype, self._device):
            found, alike = self._compare()
            if found is None and alike:
                self._inputs = {name: self._varied(name, value) for name, value in self._inputs.items()}
                try:
                    found, alike = self._compare()
                except Exception as error:  # a value that the model does not accept
                    log.debug("the model does not run with varied samples: %r", error)
            if found is None and alike and self._is_nonlinear:
                return "the samples are alike, so they do not show whether the losses of parts add up"
        return found

    @property
    def _is_nonlinear(self) -> bool:
        """True if a doubt comes from an operation on a sum over the batch."""
        doubts = [fact.doubt for fact in self._captured.loss.kinds if fact.doubt is not None]
        values = [d.meta.get("val") for d in doubts if isinstance(d.target, torch._ops.OpOverload)]
        return any(isinstance(value, Tensor) and not value.dim() for value in values)

    def _varied(self, name: str, value: object) -> object:
        """Make the samples of an input differ, with values like its own."""
        dim = self._captured.batch_dims.get(name)
        if not isinstance(value, Tensor) or dim is None:
            return value
        rows = value.movedim(dim, 0).clone()
        noise = torch.rand(rows.shape, generator=torch.Generator().manual_seed(0)).to(rows.device)
        for number, row in enumerate(rows):
            if rows.is_floating_point():
                row.mul_(0.5).add_(0.5 * noise[number].to(row.dtype))  # from 0 to 1, if it was
            elif row.dim():
                row.copy_(row.roll(number, -1) if len(row.unique()) > 1 else row)
            elif number % 2 and row in (0, 1):
                row.copy_(1 - row.to(torch.int64))
        return rows.movedim(0, dim)

    def _compare(self) -> tuple[str | None, bool]:
        """Return the first difference, and whether both parts have equal results."""
        (one, other), total = self._sizes, sum(self._sizes)
        whole = self._run(0, total, None)
        totals = None
        if self._program.totals is not None:
            totals = self._program.totals(self._tensors.__getitem__, self._inputs, total, self._device)
        first, second = self._run(0, one, totals), self._run(one, total, totals)
        largest = max((norm(value) for name, value in whole.items() if "gradient" in name), default=0.0)
        for name, value in whole.items():
            parts = [part[name] for part in (first, second) if name in part]
            added = sum(parts[1:], parts[0]) if "rows" not in name else torch.cat(parts, self._places[name])
            scale = max(norm(value), USUAL * largest if "gradient" in name else 0.0, 1e-30)
            if not distance(value, added) <= TOLERANCES[self._dtype] * scale and self._repeats(whole):
                return f"{name} is {_text(value)} for some samples, and {_text(added)} from two parts", False
        scaled = [(first[name] / one, second[name] / other) for name in first if "rows" not in name]
        return None, all(distance(*pair) <= 1e-9 * norm(pair[0]) for pair in scaled)

    def _repeats(self, whole: Results) -> bool:
        """Return whether another seed gives the same results: an opaque module may draw random numbers."""
        if not self._program.random:
            return True
        again = self._run(0, sum(self._sizes), None, seed=1)
        return all(distance(value, again[name]) <= 1e-6 * norm(value) for name, value in whole.items())

    def _run(self, first: int, stop: int, totals: Tensor | None, seed: int = 0) -> Results:
        """Run some of the samples. Losses are multiplied by their weights, and so are their gradients."""
        captured, program, count = self._captured, self._program, stop - first
        inputs: dict[str, Any] = {**self._inputs, LOSS_TOTALS: totals}
        for name, dim in captured.batch_dims.items():
            if isinstance(inputs.get(name), Tensor):
                inputs[name] = inputs[name].narrow(dim, first, count)
        state = [self._tensors[name] for name in program.state]
        received = [
            value.narrow(_batch_dim(spec), first, count)
            for value, spec in zip(self._received, program.received, strict=True)
        ]
        outputs = program(state, received, inputs, Work(seed=seed, step=0, first_sample=first))
        found: Results = {}
        losses = []
        self._places = {}
        for number, (output, spec) in enumerate(zip(outputs, captured.results, strict=True)):
            batched = [place for place, dim in enumerate(spec.dims) if dim is None or dim.per_sample]
            if batched:
                self._places[f"the rows of output {number}"] = batched[0]
                found[f"the rows of output {number}"] = output.detach()
            elif output.is_floating_point():
                losses.append(output if captured.loss.sums[number] else output * (count / sum(self._sizes)))
                found["the loss" if len(outputs) == 1 else f"output {number}"] = losses[-1].detach()
        trained = {n: t for n, t in zip(program.state, state, strict=True) if t.requires_grad}
        names = (spec.name for spec in program.received)
        trained |= dict(zip(names, self._received, strict=True))
        roots = [loss.sum() for loss in losses if loss.requires_grad]
        if roots and trained:
            gradients = torch.autograd.grad(roots, list(trained.values()), allow_unused=True)
            for name, gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    found[f"the gradient of {name!r}"] = gradient
        return found


def _batch_dim(spec: TensorSpec) -> int:
    return next(place for place, dim in enumerate(spec.dims) if dim is not None and dim.per_sample)


def _text(value: Tensor) -> str:
    return f"{float(value):.6g}" if value.numel() == 1 else f"of norm {norm(value):.6g}"


def _without_noise(program: SpanProgram) -> SpanProgram:
    """Return the program without dropout, and with the running statistics of BatchNorm."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph_module.graph, {}))
    for node in graph.nodes:
        if node.target is aten.batch_norm.default and node.args[3] is not None:
            node.args = (*node.args[:5], False, *node.args[6:])
        elif node.target is randomness.dropout:
            node.args = (node.args[0], 0.0, *node.args[2:])
    return replace(program, graph_module=build(graph, attributes(program.graph_module)))
