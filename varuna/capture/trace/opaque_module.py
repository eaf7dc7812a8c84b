"""Modules that stay eager and whole: for a branch on data, or a custom autograd.Function.

In the graph such a module is one operation; in a program it is the module's own forward, on the
stage's own parameters. It cannot be cut, and its draws belong to the samples as everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import sympy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna.capture.model.copies import uninitialized_copy
from varuna.capture.run.plain_randomness import plain_randomness
from varuna.capture.trace.cutpoint import modules_named
from varuna.capture.trace.recorder import active, library
from varuna.errors import CaptureError
from varuna.types import Work

Module = TypeVar("Module", bound=nn.Module)

library.define("opaque(Tensor[] tensors, int call) -> Tensor[]")
OPAQUE = torch.ops.varuna.opaque.default


class _Mark:
    """A pair of hooks that tells a running `plain_randomness` where an opaque module begins and ends."""

    def enter(self, _module: nn.Module, _args: object) -> None:
        for mode in plain_randomness.running:
            mode.enter_leaf()

    def leave(self, _module: nn.Module, _args: object, _output: object) -> None:
        for mode in plain_randomness.running:
            mode.leave_leaf()


def opaque(module: Module, *patterns: str) -> Module:
    """Marks a module, or with patterns those of its submodules that match, to stay eager and whole.

        opaque(model.gate)
        opaque(model, "layers.*.gate")      # a * stands for one part of the dotted name

    Gives the module back.
    """
    if patterns:
        for name in modules_named(module, patterns):
            opaque(module.get_submodule(name))
    elif not is_opaque(module):
        mark = _Mark()
        module.register_forward_pre_hook(mark.enter)
        module.register_forward_hook(mark.leave, always_call=True)
        module.__dict__["_varuna_opaque"] = True
    return module


def is_opaque(module: nn.Module) -> bool:
    return "_varuna_opaque" in module.__dict__


@dataclass
class RecordedCall:
    """One call of an opaque module in a traced forward pass."""

    name: str
    module: nn.Module
    structure: Any  # of (args, kwargs)
    constants: list[Any]  # their leaves, with None where a tensor goes
    results: Any = None  # the structure of what comes out
    constant_results: tuple[Any, ...] = ()

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        remaining = iter(tensors)
        leaves = [next(remaining) if constant is _TENSOR else constant for constant in self.constants]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs

    def keep_results(self, output: Any) -> list[Tensor]:
        leaves, self.results = pytree.tree_flatten(output)
        self.constant_results = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        # An output that is an input would be an alias, which an operation of the graph cannot give.
        return [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]


class _Tensor:
    def __repr__(self) -> str:
        return "a tensor"


_TENSOR = _Tensor()


@contextmanager
def leaves_marked(model: nn.Module) -> Iterator[None]:
    """While a model is traced, each of its opaque modules leaves one operation in the graph."""
    marked: list[nn.Module] = []
    opaque_ones = {name: module for name, module in model.named_modules() if is_opaque(module)}
    for name, module in opaque_ones.items():
        if not any(name.startswith(f"{other}.") for other in opaque_ones if other):
            module.__dict__["forward"] = _OpaqueForward(name, module)
            marked.append(module)
    try:
        yield
    finally:
        for module in marked:
            del module.__dict__["forward"]


class _OpaqueForward:
    """Stands in for an opaque module's forward."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return record_call(self._name, self._module, args, kwargs)


def record_call(name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Leaves one operation in the graph that is being traced, for whatever the module does."""
    recorder = active()
    assert recorder is not None
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    constants = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves):
        around = _around(name) if recorder.reading == name else recorder.reading
        raise CaptureError(
            f"the opaque module {name!r} is given a number that follows from the batch or from data; "
            "expected tensors and constants (let it read sizes off its tensors, or keep the module around "
            f'it whole: varuna.opaque(model, "{around}"))'
        )
    call = RecordedCall(name, module, structure, constants)
    recorder.leaf_calls.append(call)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    produced = iter(torch.ops.varuna.opaque(tensors, len(recorder.leaf_calls) - 1))
    results = [next(produced) if constant is _TENSOR else constant for constant in call.constant_results]
    return pytree.tree_unflatten(results, call.results)


def _around(name: str) -> str:
    """The path of the module that holds another, not counting lists of layers."""
    parts = name.split(".")[:-1]
    while parts and parts[-1].isdigit():
        parts = parts[:-2]
    return ".".join(parts)


@torch.library.register_fake("varuna::opaque", lib=library)  # type: ignore[untyped-decorator]
def _shapes(tensors: list[Tensor], call: int) -> list[Tensor]:
    recorder = active()
    assert recorder is not None
    leaf: RecordedCall = recorder.leaf_calls[call]
    forward = type(leaf.module).forward
    args, kwargs = leaf.arguments(tensors)
    mode = torch._guards.detect_fake_mode(tensors)
    shapes = mode.shape_env if mode is not None else None
    pending = shapes.pending_fresh_unbacked_symbols if shapes is not None else []
    before = list(pending)
    # Whatever it asks of the batch's size here (a loop over its samples) must not hold for the graph.
    unasked = shapes.error_on_new_guards() if shapes is not None else nullcontext()
    with recorder.inside(leaf.name), _untraced():
        try:
            with unasked:
                return leaf.keep_results(forward(leaf.module, *args, **kwargs))
        except CaptureError:
            raise
        except Exception as refused:
            pending[:] = before  # what the failed attempt asked for is not part of the graph
            return _shapes_by_running(leaf, tensors, refused)


@contextmanager
def _untraced() -> Iterator[None]:
    """The tracer keeps a stack of the modules that run, where one that raises would stay for ever."""
    traced = nn.Module.__call__
    nn.Module.__call__ = nn.Module._wrapped_call_impl  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = traced  # type: ignore[method-assign]


def _shapes_by_running(leaf: RecordedCall, tensors: list[Tensor], refused: Exception) -> list[Tensor]:
    """Where fake values will not do (a branch on data): two real runs on zeros, at two batch sizes."""
    sizes = [size for tensor in tensors for size in tensor.shape if isinstance(size, torch.SymInt)]
    runs = []
    with (
        torch._subclasses.fake_tensor.unset_fake_temporarily(),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
    ):
        module = uninitialized_copy(leaf.module)
        module.__dict__.pop("forward", None)
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.zero_()
        for batch in (3, 5):
            zeros = [
                torch.zeros([_size_at(s, batch) for s in tensor.shape], dtype=tensor.dtype)
                for tensor in tensors
            ]
            args, kwargs = leaf.arguments(zeros)
            try:
                runs.append(leaf.keep_results(module(*args, **kwargs)))
            except Exception as error:
                raise CaptureError(
                    f"the opaque module {leaf.name!r} runs neither on fake tensors ({refused}) nor on zeros "
                    f"({error}), so the shapes of its outputs cannot be found"
                ) from error
    return [_with_shape_of(one, two, sizes, tensors) for one, two in zip(*runs, strict=True)]


def _size_at(size: Any, batch: int) -> int:
    # While a model is traced each input has its own symbol for the batch: they are all the same.
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    return int(expression.xreplace(dict.fromkeys(expression.free_symbols, sympy.Integer(batch))))


def _with_shape_of(one: Tensor, two: Tensor, sizes: list[Any], tensors: list[Tensor]) -> Tensor:
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

    def __init__(self, call: RecordedCall, ordinal: int) -> None:
        super().__init__()
        self._call = call
        self.ordinal = ordinal
        self.name = call.name
        # In a tuple: its parameters are handed in at every call, and are none of the program's own.
        self._module = (call.module,)
        self.names = tuple(dict(call.module.named_parameters(remove_duplicate=False))) + tuple(
            dict(call.module.named_buffers(remove_duplicate=False))
        )

    @property
    def module(self) -> nn.Module:
        return self._module[0]

    def forward(
        self, state: Sequence[Tensor], tensors: Sequence[Tensor], work: Work, num_samples: int
    ) -> list[Tensor]:
        args, kwargs = self._call.arguments(tensors)
        values = dict(zip(self.names, state, strict=True))
        with plain_randomness.of(work, batch_size=num_samples, first_ordinal=self.ordinal):
            output = torch.func.functional_call(self.module, values, args, kwargs)
        results = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*state, *tensors)):
            # The graph cannot look inside: every floating-point result counts as one that takes a gradient.
            return [open_to_gradients(result) for result in results]
        return results


def open_to_gradients(result: Tensor) -> Tensor:
    if result.requires_grad or not result.is_floating_point():
        return result
    return result.detach().requires_grad_()
