"""Opaque modules: modules that stay eager and whole, for code that cannot be traced.

In the graph such a module is one operation. A program runs the module's own forward on the stage's
parameters. It cannot be cut inside. Its random numbers are seeded per sample, as everywhere else.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import sympy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna.capture.model.copies import uninitialized_copy
from varuna.capture.model.structures import opened
from varuna.capture.model.tied_weights import named_tensors
from varuna.capture.run.plain_randomness import plain_randomness
from varuna.capture.trace import patches
from varuna.capture.trace.cutpoint import modules_named
from varuna.capture.trace.recorder import active, library
from varuna.errors import CaptureError
from varuna.types import Work

Module = TypeVar("Module", bound=nn.Module)

library.define("opaque(Tensor[] tensors, int call) -> Tensor[]")
OPAQUE = torch.ops.varuna.opaque.default


def opaque(module: Module, *patterns: str) -> Module:
    """Keep a module, or those of its submodules that match a pattern, eager and whole. Return the module.

        opaque(model.gate)
        opaque(model, "layers.*.gate")      # a * matches one part of the dotted name

    The captured model calls its own forward, so code that cannot be traced runs as it is.
    """
    if patterns:
        for name in modules_named(module, patterns):
            opaque(module.get_submodule(name))
    elif isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            "a module that torch.jit has compiled cannot be opaque. Make it without torch.jit.script or "
            "torch.jit.trace."
        )
    elif not is_opaque(module):
        module.register_forward_pre_hook(_enter_leaf)
        module.register_forward_hook(_leave_leaf, always_call=True)
        module.__dict__["_varuna_opaque"] = True
    return module


def is_opaque(module: nn.Module) -> bool:
    return "_varuna_opaque" in module.__dict__


def _enter_leaf(_module: nn.Module, _args: object) -> None:
    for mode in plain_randomness.running:
        mode.enter_leaf()


def _leave_leaf(_module: nn.Module, _args: object, _output: object) -> None:
    for mode in plain_randomness.running:
        mode.leave_leaf()


class _TensorPlaceholder:
    """Stands for a tensor among the leaves of a call."""


@dataclass
class RecordedCall:
    """One call of an opaque module in a traced forward pass."""

    name: str
    module: nn.Module
    structure: Any  # of (args, kwargs)
    constants: list[Any]  # leaves of (args, kwargs), with _TensorPlaceholder in place of each tensor
    results: Any = None  # structure of the output
    constant_results: Sequence[Any] = ()

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        remaining = iter(tensors)
        leaves = [next(remaining) if leaf is _TensorPlaceholder else leaf for leaf in self.constants]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs

    def keep_results(self, output: Any) -> list[Tensor]:
        leaves, self.results = pytree.tree_flatten(opened(output))
        self.constant_results = _constants(leaves)
        # Clone: an operation of the graph cannot return one of its inputs.
        return [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]


def _constants(leaves: Sequence[Any]) -> list[Any]:
    return [_TensorPlaceholder if isinstance(leaf, Tensor) else leaf for leaf in leaves]


@contextmanager
def leaves_marked(model: nn.Module) -> Iterator[None]:
    """Let each opaque module of the model add one operation to the graph in place of its own."""
    opaque_ones = {name: module for name, module in model.named_modules() if is_opaque(module)}
    with ExitStack() as stack:
        for name, module in opaque_ones.items():
            if not any(name.startswith(f"{other}.") for other in opaque_ones if other):
                stack.enter_context(patch.object(module, "forward", partial(record_call, name, module)))
        yield


def record_call(name: str, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Add one operation to the traced graph for a call of the module, and return its fake results."""
    recorder = active()
    assert recorder is not None
    leaves, structure = pytree.tree_flatten(opened((args, kwargs)))
    if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves):
        outer = _parent_path(name) if recorder.reading == name else recorder.reading
        raise CaptureError(
            f"the opaque module {name!r} takes a number that depends on the batch or on data. Let it read "
            "sizes from its tensors, or make the module around it opaque: "
            f'varuna.opaque(model, "{outer}").'
        )
    call = RecordedCall(name, module, structure, _constants(leaves))
    recorder.leaf_calls.append(call)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    produced = iter(torch.ops.varuna.opaque(tensors, len(recorder.leaf_calls) - 1))
    results = [next(produced) if leaf is _TensorPlaceholder else leaf for leaf in call.constant_results]
    return pytree.tree_unflatten(results, call.results)


def _parent_path(name: str) -> str:
    """Return the path of the module that contains another, skipping lists of layers."""
    parts = name.split(".")[:-1]
    while parts and parts[-1].isdigit():
        parts = parts[:-2]
    return ".".join(parts)


@torch.library.register_fake("varuna::opaque", lib=library)  # type: ignore[untyped-decorator]
def _fake_results(tensors: list[Tensor], call: int) -> list[Tensor]:
    recorder = active()
    assert recorder is not None
    leaf: RecordedCall = recorder.leaf_calls[call]
    args, kwargs = leaf.arguments(tensors)
    with recorder.inside(leaf.name), patches.untracked_modules():
        try:
            with patches.discarded_guards(tensors):
                return leaf.keep_results(type(leaf.module).forward(leaf.module, *args, **kwargs))
        except CaptureError:
            raise
        except Exception as refused:
            if recorder.varying_lengths:
                raise CaptureError(
                    f"the opaque module {leaf.name!r} does not run on fake tensors ({refused}), so its "
                    "output shapes are known for one length only."
                ) from refused
            return _results_by_running(leaf, tensors, refused)


def _results_by_running(leaf: RecordedCall, tensors: list[Tensor], refused: Exception) -> list[Tensor]:
    """Find the output shapes of a module with a branch on data: run it on zeros at two batch sizes."""
    sizes = [size for tensor in tensors for size in tensor.shape if isinstance(size, torch.SymInt)]
    # In a thread, which has torch's usual modes: a module may compute gradients itself.
    with torch.random.fork_rng(devices=[]), ThreadPoolExecutor(1) as thread:
        try:
            one, two = (thread.submit(_results_on, leaf, tensors, batch, 0).result() for batch in (3, 5))
        except Exception:  # lengths of sequences must be above 0
            try:
                one, two = (thread.submit(_results_on, leaf, tensors, batch, 1).result() for batch in (3, 5))
            except Exception as error:
                raise CaptureError(
                    f"the opaque module {leaf.name!r} runs neither on fake tensors ({refused}) nor on zeros "
                    f"or ones ({error}), so its output shapes are unknown. Let it run on zeros, or make a "
                    "module around it opaque."
                ) from error
    return [_symbolic(a, b, sizes, tensors) for a, b in zip(one, two, strict=True)]


def _results_on(leaf: RecordedCall, tensors: Sequence[Tensor], batch: int, value: int) -> list[Tensor]:
    """Run an opaque module whose inputs and state all have one value."""
    module = uninitialized_copy(leaf.module)
    module.__dict__.pop("forward", None)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.zero_()
    made = []
    for tensor in tensors:
        shape = [_size_at(size, batch) for size in tensor.shape]
        made.append(torch.full(shape, value, dtype=tensor.dtype))
        if tensor.is_floating_point():
            made[-1] = made[-1].requires_grad_().clone()  # not a leaf, which must not change in place
    args, kwargs = leaf.arguments(made)
    return leaf.keep_results(module(*args, **kwargs))


def _size_at(size: Any, batch: int) -> int:
    # While tracing, each input has its own symbol for the batch size.
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    return int(expression.xreplace(dict.fromkeys(expression.free_symbols, sympy.Integer(batch))))


def _symbolic(one: Tensor, two: Tensor, sizes: list[Any], tensors: list[Tensor]) -> Tensor:
    """Return a fake tensor whose sizes are linear in the batch size, from the shapes at 3 and at 5."""
    shape: list[Any] = []
    for at_three, at_five in zip(one.shape, two.shape, strict=True):
        if at_three == at_five:
            shape.append(at_three)
            continue
        known, low, high = sizes[0], _size_at(sizes[0], 3), _size_at(sizes[0], 5)
        slope = sympy.Rational(at_five - at_three, high - low)
        shape.append(known * int(slope.p) // int(slope.q) + int(at_three - slope * low))
    return tensors[0].new_empty(shape, dtype=one.dtype)


class OpaqueLeaf(nn.Module):
    """An opaque module inside a program: a pure function of its state and its tensors."""

    def __init__(self, call: RecordedCall) -> None:
        super().__init__()
        self._call = call
        self.ordinal = 0  # set by bind_randomness
        self.shapes: list[list[int | None]] = []  # sizes of the results; None: depends on the batch
        self.name = call.name
        # In a tuple, so that its parameters are not registered: every call passes them in.
        self._module = (call.module,)
        self.names = tuple(named_tensors(call.module))
        # Recurrent modules list their weights again in an attribute, which functional_call leaves as it is.
        self._recurrent = [(n, m) for n, m in call.module.named_modules() if isinstance(m, nn.RNNBase)]

    @property
    def module(self) -> nn.Module:
        return self._module[0]

    def forward(
        self, state: Sequence[Tensor], tensors: Sequence[Tensor], work: Work, num_samples: int
    ) -> list[Tensor]:
        args, kwargs = self._call.arguments(tensors)
        values = dict(zip(self.names, state, strict=True))
        with ExitStack() as stack:
            for path, module in self._recurrent:
                names = [f"{path}.{name}" if path else name for name in module._flat_weights_names]
                stack.enter_context(patch.object(module, "_flat_weights", [values[n] for n in names]))
            stack.enter_context(plain_randomness.of(work, batch_size=num_samples, first_ordinal=self.ordinal))
            output = torch.func.functional_call(self.module, values, args, kwargs)
        results = result_tensors(output, (*state, *tensors))
        for result, shape in zip(results, self.shapes, strict=False):
            if any(known not in (None, size) for size, known in zip(result.shape, shape, strict=False)):
                expected = ", ".join("b" if size is None else str(size) for size in shape)
                raise RuntimeError(
                    f"the opaque module {self.name!r} returned a tensor of shape {list(result.shape)}; "
                    f"expected [{expected}], as when it was captured. Only the batch may change a size (for "
                    "packed sequences, pass total_length to pad_packed_sequence)."
                )
        return results


def result_tensors(output: Any, operands: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors of an output; as the graph assumes, they need a gradient if any operand does."""
    results = [leaf for leaf in pytree.tree_leaves(opened(output)) if isinstance(leaf, Tensor)]
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in operands):
        return results
    return [
        result if result.requires_grad or not result.is_floating_point() else result.detach().requires_grad_()
        for result in results
    ]
