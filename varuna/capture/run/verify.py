"""Verifies a capture: compares outputs, gradients and buffers of the carved programs with the model's own.

    the model's copy ──► outputs, gradients, buffers ──┐
    its programs, as one stage and cut everywhere ─────┴─► differ by more than the model's own noise?

Both run on the device of the training, small models in fp64: there rounding moves the twelfth digit, and a
ReLU or a router that decides otherwise is rare. Larger models run in fp32. A difference in the norm of a
tensor counts if it exceeds what the precision explains, and a multiple of the movement that the last bits of
the weights cause in the model itself.
"""

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from varuna.capture.model.call_convention import CallConvention
from varuna.capture.model.copies import working_copy
from varuna.capture.model.tied_weights import canonical_names, named_tensors
from varuna.capture.run.captured import Captured
from varuna.capture.run.one_precision import one_precision
from varuna.capture.run.plain_randomness import plain_randomness
from varuna.capture.run.program import SpanProgram, attributes
from varuna.capture.trace.opaque_module import opaque
from varuna.capture.trace.trace import LOW_PRECISION, autocast, without_kv_cache
from varuna.errors import CaptureError, list_some
from varuna.types import Work

log = logging.getLogger("varuna")

_WORK = Work(seed=0, step=0, first_sample=0)

FP64_PARAMETERS = 50_000_000
"""Largest number of parameters that are copied in fp64."""
CHECKED_SAMPLES = 4
"""Samples of the inputs with which the models run: activations in fp64 take four times those in bf16."""
FLOORS = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
"""Difference of a tensor, as a share of its norm, that rounding alone explains."""
NOISE_MULTIPLE = 20.0
PRECISION_MULTIPLE = 10.0
"""Multiplies the floors where results of two precisions are compared."""
USUAL = 0.01
"""Gradients that cancel to nearly 0 are compared with this share of the largest gradient."""

LOW = set(LOW_PRECISION.values())

Results = dict[str, Tensor]
"""Outputs, then buffers, then gradients from the last parameter to the first, each by its name in errors."""


class _Unsuitable(Exception):
    """The model cannot run in this precision."""


def check_capture(
    model: nn.Module,
    captured: Captured,
    inputs: Mapping[str, object],
    *,
    device: torch.device | None = None,
    convention: CallConvention | None = None,
) -> None:
    """Raise if the captured model, as one stage or cut everywhere, differs from the model itself.

    The comparison runs on `device`, by default the device of the capture. The model, its gradients and the
    state of all random generators stay as they are.
    """
    device = _with_index(device or captured.device)
    refused: tuple[CaptureError, Results] | None = None
    with kept_generators(device), torch.inference_mode(False), torch.enable_grad():
        for dtype in _precisions(model, captured):
            comparison = _Comparison(model, captured, inputs, device, dtype, convention)
            try:
                comparison.run()
            except _Unsuitable as unsuitable:
                log.debug("the capture cannot be compared in %s: %s", dtype, unsuitable)
                continue
            except torch.OutOfMemoryError:
                log.warning("the captured model was not compared with the original: out of memory")
                return
            except CaptureError as error:
                if refused is not None or dtype is None:
                    raise refused[0] if refused is not None else error from None
                refused = error, comparison.expected
                continue
            if refused is not None and comparison.agrees_with(refused[1]):
                raise refused[0]  # the model computes the same in both precisions: the exact one decides
            if captured.precision != "fp32" or not comparison.has_own_casts:  # autocast casts by itself
                return


def _precisions(model: nn.Module, captured: Captured) -> list[torch.dtype | None]:
    """Return the precisions to try, the most exact one first; None: the precision of the training."""
    parameters = list(model.parameters())
    if sum(parameter.numel() for parameter in parameters) <= FP64_PARAMETERS:
        return [torch.float64, None]
    if captured.precision != "fp32" and all(p.dtype == torch.float32 for p in parameters):
        return [torch.float32, None]
    return [None]


class _Comparison:
    """One comparison in one precision on one device."""

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        inputs: Mapping[str, object],
        device: torch.device,
        dtype: torch.dtype | None,
        convention: CallConvention | None,
    ) -> None:
        self._captured, self._device, self._dtype = captured, device, dtype
        self._convention = convention or CallConvention()
        self._model = working_copy(model, device, dtype)
        if not self._model.training:
            self._model.train()
        modules = dict(self._model.named_modules())
        for name in modules.keys() & captured.leaf_names:  # some were made opaque while tracing
            opaque(modules[name])
        self._inputs = {name: self._own_input(name, value) for name, value in inputs.items()}
        self._buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        self._cotangents: list[Tensor] = []
        self.expected: Results = {}
        self.has_own_casts = False  # the programs cast to a lower precision, the model itself does not

    def _own_input(self, name: str, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        dim = self._captured.batch_dims.get(name)
        if dim is not None:
            value = value.narrow(dim, 0, min(CHECKED_SAMPLES, value.shape[dim]))
        wanted = self._dtype if value.is_floating_point() and self._dtype is not None else value.dtype
        own = value.detach().to(self._device, wanted, copy=True)
        return own.requires_grad_(name in self._convention.gradients)

    def run(self) -> None:
        with one_precision(self._dtype, self._device) as mode:
            try:
                self._forward()  # a model that counts its calls now differs from its capture
                expected = self.expected = self._eager()
            except Exception as error:
                if self._dtype is None:
                    raise
                raise _Unsuitable(repr(error)) from error
            if self._dtype is not None and not all(bool(v.isfinite().all()) for v in expected.values()):
                raise _Unsuitable("values that are not finite")
            n = self._captured.num_segments
            asked = set(mode.requested)
            noise: dict[str, float] = {}
            for cuts in ([0, n], list(range(n + 1))):
                found = self._carved(cuts)
                suspects = self._differing(expected, found, noise)
                if suspects and not noise:
                    noise = self._noise(expected)
                    suspects = self._differing(expected, found, noise)
                if suspects:
                    self._refuse(suspects, expected, cuts)
            self.has_own_casts = bool(LOW & (mode.requested - asked))

    # ------------------------------------------------------------ the two ways to run the model

    def _forward(self) -> tuple[Tensor, ...]:
        captured, model = self._captured, self._model
        self._restore_buffers()
        name, dim = next(iter(captured.batch_dims.items()))
        batch: Any = self._inputs[name]
        draws = plain_randomness.of(_WORK, batch_size=batch.shape[dim], draws=captured.draws)
        with ExitStack() as stack:
            stack.enter_context(without_kv_cache(model))
            stack.enter_context(self._convention.adapted(model, self._inputs))
            stack.enter_context(draws)
            if self._dtype is None:
                stack.enter_context(autocast(captured.precision, self._device))
            output = model(**self._inputs)
        return (output,) if isinstance(output, Tensor) else tuple(output)

    def _eager(self) -> Results:
        outputs = self._forward()
        changed = self._changed_buffers()
        self._cotangents = self._cotangents or [_cotangent(output) for output in outputs]
        named = dict(self._model.named_parameters(remove_duplicate=False))
        wanted = {name: p for name, p in {**named, **self._inputs_with_gradient}.items() if p.requires_grad}
        pairs = [(o, c) for o, c in zip(outputs, self._cotangents, strict=True) if o.requires_grad]
        grads: Sequence[Tensor | None] = ()
        if wanted and pairs:
            roots, cotangents = zip(*pairs, strict=True)
            grads = torch.autograd.grad(roots, list(wanted.values()), cotangents, allow_unused=True)
        canonical_name = canonical_names(self._captured.graph.ties)
        found: Results = {}
        for (name, tensor), grad in zip(wanted.items(), grads, strict=False):
            canonical = canonical_name.get(name, name)
            if grad is None:
                continue
            # Two names of one Parameter give its gradient twice; two tied by declaration give two halves.
            same = canonical in found and tensor is wanted[canonical]
            found[canonical] = grad if canonical not in found or same else found[canonical] + grad
        return self._results(outputs, changed, found)

    @property
    def _inputs_with_gradient(self) -> dict[str, Any]:
        return {name: self._inputs[name] for name in sorted(self._convention.gradients)}

    def _carved(self, cuts: Sequence[int]) -> Results:
        tensors = named_tensors(self._model)
        inputs = self._inputs_with_gradient
        stages: list[tuple[SpanProgram, list[Tensor], list[Tensor], tuple[Tensor, ...]]] = []
        sent: tuple[Tensor, ...] = ()
        self._restore_buffers()
        for first, stop in pairwise(cuts):
            program = self._captured.carve(first, stop).to(self._device)
            if self._dtype is not None:
                program = replace(program, precision="fp32")  # without autocast
            received = [
                value.detach().contiguous().requires_grad_(spec.needs_grad)
                for value, spec in zip(sent, program.received, strict=True)
            ]
            state = [tensors[name] for name in program.state]
            sent = program(state, received, self._inputs, _WORK)
            stages.append((program, state, received, sent))
        changed = self._changed_buffers()
        outputs = sent
        grads: list[Tensor | None] = list(self._cotangents)
        found: Results = {}
        for program, state, received, values in reversed(stages):
            pairs = [
                (value, grad)
                for value, grad in zip(values, grads, strict=True)
                if grad is not None and value.requires_grad
            ]
            read = [*zip(program.state, state, strict=True), *inputs.items()]
            wanted = [t for t in (*(tensor for _, tensor in read), *received) if t.requires_grad]
            if not wanted or not pairs:  # nothing in this segment is trained
                grads = [None] * len(received)
                continue
            roots, cotangents = zip(*pairs, strict=True)
            computed = torch.autograd.grad(roots, wanted, cotangents, allow_unused=True)
            by_tensor = {id(tensor): grad for tensor, grad in zip(wanted, computed, strict=True)}
            grads = [by_tensor.get(id(value)) for value in received]
            for name, tensor in read:
                grad = by_tensor.get(id(tensor))
                if grad is not None:
                    found[name] = found[name] + grad if name in found else grad
        return self._results(outputs, changed, found)

    def _results(
        self, outputs: Sequence[Tensor], buffers: Mapping[str, Tensor], grads: Mapping[str, Tensor]
    ) -> Results:
        only_loss = len(outputs) == 1 and outputs[0].dim() == 0
        named = {"the loss" if only_loss else f"output {i}": o.detach() for i, o in enumerate(outputs)}
        named |= {f"the buffer {name!r}": buffer for name, buffer in buffers.items()}
        order = [*self._inputs_with_gradient, *named_tensors(self._model)]
        for name in reversed(order):
            if name in grads:
                named[f"the gradient of {name!r}"] = grads[name].detach()
        return named

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        for name, buffer in self._model.named_buffers():
            if name in self._buffers:
                buffer.copy_(self._buffers[name])

    def _changed_buffers(self) -> dict[str, Tensor]:
        return {name: b.detach().clone() for name, b in self._model.named_buffers() if name in self._buffers}

    # ------------------------------------------------------------ comparison

    def _differing(
        self, expected: Results, found: Results, noise: Mapping[str, float], multiple: float = 1.0
    ) -> dict[str, tuple[float, float]]:
        """Return the tensors that differ more than allowed: the difference, and what is allowed."""
        floor = multiple * FLOORS[self._working_dtype]
        largest = max((norm(v) for name, v in expected.items() if "gradient" in name), default=0.0)
        suspects: dict[str, tuple[float, float]] = {}
        for name in [*expected, *(name for name in found if name not in expected)]:
            one, other = expected.get(name), found.get(name)
            difference = distance(one, other)
            scale = max(norm(one), USUAL * largest if "gradient" in name else 0.0)
            allowed = allowed_difference(scale, floor=floor, noise=noise.get(name, 0.0))
            if not difference <= allowed:
                suspects[name] = difference, allowed
        return suspects

    def agrees_with(self, others: Results) -> bool:
        """Return whether the plain model's results differ from those in another precision by rounding alone.

        They differ by more if the code depends on the dtype of its values.
        """
        with one_precision(self._dtype, self._device):
            noise = self._noise(self.expected)
        return not self._differing(self.expected, others, noise, multiple=PRECISION_MULTIPLE)

    @property
    def _working_dtype(self) -> torch.dtype:
        if self._dtype is not None:
            return self._dtype
        dtypes = {p.dtype for p in self._model.parameters()} | {
            LOW_PRECISION.get(self._captured.precision, torch.float32)
        }
        return max((d for d in dtypes if d in FLOORS), key=FLOORS.__getitem__)

    def _noise(self, expected: Results) -> dict[str, float]:
        """Return how far the last bits of weights and inputs move each result of the plain model."""
        again = self._eager()
        repeated = self._differing(expected, again, {})
        movement = {name: distance(expected[name], again.get(name)) for name in expected}
        for bits in (1, 3):
            with self._moved(bits):
                moved = self._eager()
            for name in expected:
                movement[name] = max(movement[name], distance(expected[name], moved.get(name)))
        whole = [0, self._captured.num_segments]
        base = self._carved(whole)
        with self._moved_constants():
            moved = self._carved(whole)
        for name in moved:
            movement[name] = max(movement.get(name, 0.0), distance(base.get(name), moved[name]))
        if repeated and self._dtype == torch.float64:
            first = next(iter(repeated))
            raise CaptureError(
                f"the model computes {first} differently when it is called again with the same inputs. Its "
                "forward must depend only on its inputs, parameters and buffers, not on a Python counter, an "
                "attribute that it changes, or numpy's random numbers."
            )
        return movement

    @contextmanager
    def _moved(self, bits: int) -> Iterator[None]:
        """Move weights and inputs by units in the last place, and back."""
        tensors = {id(t): t for t in (*self._model.parameters(), *self._inputs.values())}
        floats = [t for t in tensors.values() if isinstance(t, Tensor) and t.is_floating_point()]
        flip_last_bits(floats, bits)
        try:
            yield
        finally:
            flip_last_bits(floats, bits)

    @contextmanager
    def _moved_constants(self) -> Iterator[None]:
        """Move the graph's constants, which were computed in the precision of the trace, and back."""
        module = self._captured.carve(0, self._captured.num_segments).graph_module
        constants = [value for value in attributes(module).values() if isinstance(value, Tensor)]
        floats = [value for value in constants if value.is_floating_point() or value.is_complex()]
        flip_last_bits(floats, 1)
        try:
            yield
        finally:
            flip_last_bits(floats, 1)

    def _refuse(
        self, suspects: Mapping[str, tuple[float, float]], expected: Results, cuts: Sequence[int]
    ) -> None:
        first, *others = suspects
        difference, allowed = suspects[first]
        more = f", and so {'do' if len(others) > 1 else 'does'} {list_some(others)}" if others else ""
        raise CaptureError(
            f"the captured model, cut at {list(cuts[1:-1]) or 'no place'}, differs from the model itself: "
            f"{first} by {difference:.3g} where its norm is {norm(expected.get(first)):.3g} (allowed: "
            f"{allowed:.3g}){more}. Check that forward depends only on its inputs and parameters, not on a "
            "Python counter, on numpy's random numbers, or on whether it is traced."
        )


def _cotangent(output: Tensor) -> Tensor:
    """Return a gradient for an output: 1 for a loss, else fixed random numbers."""
    if output.dim() == 0:
        return torch.ones_like(output)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    return drawn.to(output.device, output.dtype)


@torch.no_grad()
def flip_last_bits(tensors: Sequence[Tensor], bits: int) -> None:
    """Flip the last bits of all values, in place; a second call restores them exactly."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    with _disable_current_modes():  # which would change a copy in another precision
        for tensor in tensors:
            values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            values.detach().view(whole[values.element_size()]).bitwise_xor_(bits)


def allowed_difference(scale: float, *, floor: float, noise: float) -> float:
    """Return the difference that counts as rounding: `noise` is what the last bits of the weights cause."""
    return max(floor * scale, NOISE_MULTIPLE * noise, 1e-30)


def norm(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else distance(tensor, None)


def distance(one: Tensor | None, other: Tensor | None) -> float:
    """Return the norm of the difference; None is 0, and equal values that are not finite do not differ."""
    present = [t for t in (one, other) if t is not None]
    if not present or not present[0].numel():
        return 0.0
    wide = torch.complex128 if present[0].is_complex() else torch.float64
    left, right = (torch.zeros((), dtype=wide) if t is None else t.detach().to(wide) for t in (one, other))
    difference = left - right
    if not bool(difference.isfinite().all()):
        same = (left == right) | (left.isnan() & right.isnan())
        difference = torch.where(same, 0.0, difference.nan_to_num(nan=float("inf")))
    return float(torch.linalg.vector_norm(difference))


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Restore the states of Python's and torch's random generators."""
    python = random.getstate()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
