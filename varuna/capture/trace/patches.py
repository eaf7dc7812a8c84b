"""Patches of torch's internals, each a context manager that undoes itself.

A patch may rely on private names of torch. tests/capture/test_patches.py has one test for each patch, which
fails with the patch's name when a torch release changes what the patch relies on.
"""

import builtins
import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.fx.proxy
from torch import Tensor, fx, nn
from torch._export.passes import replace_set_grad_with_hop_pass as set_grad_pass
from torch.amp.autocast_mode import _enter_autocast
from torch.distributions import Distribution
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import checkpoint
from torch.utils._sympy.functions import Min


@contextmanager
def fast_export(line: Callable[[FrameType | None], str]) -> Iterator[None]:
    """Skip work of torch.export that a capture never reads; the graph stays the same.

    A deep model would otherwise take minutes: torch formats a hundred stack frames for every operation and
    generates code after every pass. `line` returns the model's line for a stack frame.
    """

    class Lines(list[str]):
        """Replaces torch's CapturedTraceback: holds the model's line alone."""

        extract = staticmethod(lambda: Lines())

        def summary(self) -> list[str]:
            found = line(sys._getframe(1))
            return Lines([found] if found else [])

        def format(self) -> list[str]:
            return self

    with (
        patch.object(fx.GraphModule, "recompile", _recompile_when_called),
        patch.object(torch.fx.proxy, "CapturedTraceback", Lines),
        patch.object(torch.fx.proxy.TracerBase, "_filter_traceback_frames", lambda _, lines: lines),
    ):
        yield


def no_grad_in_autocast() -> AbstractContextManager[Any]:
    """Let torch.export keep a `no_grad` inside of an autocast region.

    It divides the graph at changes of the grad mode, and repeats the autocast in each part. Then it looks for
    the change at the start of a part, and drops it where an autocast comes first.
    """

    def changes_grad_mode(node: fx.Node, omit_if_same_with_ambient: bool = False) -> bool:
        part: Any = getattr(node.graph.owning_module, str(node.target)) if node.op == "call_module" else None
        first: Any = None
        for inner in part.graph.nodes if part is not None else ():
            if inner.op != "placeholder" and inner.target is not _enter_autocast:
                first = inner
                break
        if first is None or first.target is not torch._C._set_grad_enabled:
            return False
        return not omit_if_same_with_ambient or first.args[0] != torch.is_grad_enabled()

    return patch.object(set_grad_pass, "_is_set_grad_enabled_sub_mod", changes_grad_mode)


@contextmanager
def without_collections() -> Iterator[None]:
    """Do not look for garbage: most of what a capture makes lives on, so a fifth of its time is saved."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_recompile: Any = fx.GraphModule.recompile


def _recompile_when_called(module: fx.GraphModule) -> None:
    """Generate the module's code at its first call: torch.export runs few of the graphs that it edits."""
    codegen = module.graph._codegen
    if isinstance(codegen, _PyTreeCodeGen):
        module._in_spec, module._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec

    def forward(self: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        _recompile(self)
        return self.forward(*args, **kwargs)

    type(module).forward = forward  # each graph module has a class of its own


def function_apply(
    apply: Callable[[Any, Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any],
) -> AbstractContextManager[Any]:
    """Replace `torch.autograd.Function.apply` by `apply(cls, original, args, kwargs)`."""
    original = torch.autograd.Function.__dict__["apply"].__func__

    def replacement(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(cls, functools.partial(original, cls), args, kwargs)

    return patch.object(torch.autograd.Function, "apply", classmethod(replacement))


@contextmanager
def gradient_calls(wrap: Callable[[str, Any], Any]) -> Iterator[None]:
    """Replace the functions that work on gradients by `wrap(name, original)`."""
    with (
        patch.object(torch.autograd, "grad", wrap("torch.autograd.grad", torch.autograd.grad)),
        patch.object(Tensor, "backward", wrap("Tensor.backward", Tensor.backward)),
        patch.object(Tensor, "register_hook", wrap("Tensor.register_hook", Tensor.register_hook)),
    ):
        yield


def unchecked_distributions() -> AbstractContextManager[Any]:
    """Stop distributions from checking their arguments, which are unknown while tracing."""
    return patch.object(Distribution, "_validate_args", False)


def symbolic_len() -> AbstractContextManager[Any]:
    """Let `len(tensor)` return its symbolic size: an int would fix the batch size in the graph."""
    original = builtins.len

    def size(value: Any) -> Any:
        return value.shape[0] if isinstance(value, Tensor) and value.dim() else original(value)

    return patch.object(builtins, "len", size)


class _KindOfSet(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, set)


class StableSet(set[Any], metaclass=_KindOfSet):
    """A set whose strings come in sorted order: by their hashes, the order is another in each process."""

    def __iter__(self) -> Iterator[Any]:
        values = list(super().__iter__())
        return iter(sorted(values) if all(isinstance(value, str) for value in values) else values)


@contextmanager
def stable_sets(model: nn.Module) -> Iterator[None]:
    """Let `set(names)` in the files of a model's classes have the same order on all ranks.

    Some models loop over such a set. Without this, each rank would trace another order of operations.
    """
    classes = {base for module in model.modules() for base in type(module).__mro__}
    files = {sys.modules.get(name) for name in {cls.__module__ for cls in classes} if _is_foreign(name)}
    with ExitStack() as stack:
        for file in files:
            if file is not None and "set" not in vars(file):
                stack.enter_context(patch.object(file, "set", StableSet, create=True))
        yield


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] not in ("builtins", "torch", "varuna", "pyrannc", "typing")


def simplified_min() -> AbstractContextManager[Any]:
    """Replace the minimum of two sizes where their bounds decide it: its stride would fix the batch size."""
    original = ShapeEnv.simplify

    def simplify(shapes: ShapeEnv, expression: Any, size_oblivious: bool = False) -> Any:
        found: Any = original(shapes, expression, size_oblivious)
        smaller: dict[Any, Any] = {}
        for atom in found.atoms(Min):
            bounds = {size: shapes.bound_sympy(size) for size in atom.args}
            for size, bound in bounds.items():
                if all(other is size or bound.upper <= bounds[other].lower for other in bounds):
                    smaller[atom] = size
        return original(shapes, found.xreplace(smaller), size_oblivious) if smaller else found

    return patch.object(ShapeEnv, "simplify", simplify)


def skipped_moves() -> AbstractContextManager[Any]:
    """Make `self.layer.to(dtype)` inside a forward a no-op where it changes nothing."""
    original = nn.Module._apply

    def apply(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        tensors = (*module.parameters(recurse), *module.buffers(recurse))
        same = all((new := fn(t)).dtype == t.dtype and new.device == t.device for t in tensors)
        return module if same else original(module, fn, recurse)  # type: ignore[no-untyped-call]

    return patch.object(nn.Module, "_apply", apply)


def kept_attention_masks() -> AbstractContextManager[Any]:
    """Let torch.nn.Transformer keep a mask of which it would find out, by its values, that it is causal."""

    def is_causal(_mask: Any, is_causal: bool | None = None, _size: Any = None) -> bool:
        return bool(is_causal)

    return patch.object(nn.modules.transformer, "_detect_is_causal_mask", is_causal)


@contextmanager
def recurrent_precision(cudnn: bool) -> Iterator[None]:
    """Trace recurrent modules on CUDA with the dtype of their results: under autocast cuDNN returns fp16.

    The trace does not reach cuDNN and would keep the dtype of the inputs, in bf16 too. torch.export switches
    cuDNN off, so `cudnn` says whether the model will run with it.
    """

    def returning_half(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            results = function(*args, **kwargs)
            cast = cudnn and torch.is_autocast_enabled("cuda")
            return tuple(t.half() if cast and t.device.type == "cuda" else t for t in results)

        return call

    with ExitStack() as stack:
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            function = returning_half(getattr(torch._VF, name))
            stack.enter_context(patch.object(torch._VF, name, function))
        yield


def number_conditions(decide: Callable[[torch.SymBool], bool | None]) -> AbstractContextManager[Any]:
    """Let `decide` choose the value of a condition on symbolic numbers; None: torch does."""
    original: Any = torch.SymBool.__bool__

    def read(condition: torch.SymBool) -> bool:
        value = decide(condition)
        return original(condition) if value is None else value

    return patch.object(torch.SymBool, "__bool__", read)


def untracked_modules() -> AbstractContextManager[Any]:
    """Call modules without the tracer, which never removes a module that raises from its stack."""
    return patch.object(nn.Module, "__call__", nn.Module._wrapped_call_impl)


@contextmanager
def no_new_guards(shapes: ShapeEnv) -> Iterator[None]:
    """Raise if code restricts a symbolic size."""
    if hasattr(shapes, "error_on_new_guards"):
        with shapes.error_on_new_guards():
            yield
        return

    def refuse(expression: Any, value: Any) -> None:  # torch 2.11 only warns
        raise RuntimeError(f"{expression} must be {value}, but no size may be restricted here")

    with patch.object(shapes, "frozen", True), patch.object(shapes, "_check_frozen", refuse):
        yield


@contextmanager
def discarded_guards(tensors: list[Tensor]) -> Iterator[None]:
    """Raise if code restricts the batch size, and forget the symbols of an attempt that raised."""
    mode = torch._guards.detect_fake_mode(tensors)
    shapes = mode.shape_env if mode is not None else None
    if shapes is None:
        yield
        return
    pending = shapes.pending_fresh_unbacked_symbols
    before = list(pending)
    try:
        with no_new_guards(shapes):
            yield
    except Exception:
        pending[:] = before
        raise


@contextmanager
def disabled_checkpointing(run: Callable[[Callable[..., Any], Sequence[Any]], Any]) -> Iterator[None]:
    """Let `torch.utils.checkpoint` keep its activations: a second forward would draw other numbers.

    `run(function, operands)` replaces the reentrant kind.
    """

    def apply(_cls: Any, function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        return run(function, args)

    def recompute_nothing(*_args: Any, **_kwargs: Any) -> Iterator[None]:
        yield

    with (
        patch.object(checkpoint.CheckpointFunction, "apply", classmethod(apply)),
        patch.object(checkpoint, "_checkpoint_without_reentrant_generator", recompute_nothing),
    ):
        yield


@functools.cache
def without_overrides(function: Any) -> types.FunctionType:
    """Return a copy of a function of torch.nn.functional that does not dispatch to a TorchFunctionMode."""
    never = {name: lambda *_: False for name in function.__globals__ if name.startswith("has_torch_function")}
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **never},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
