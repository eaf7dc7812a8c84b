"""Custom autograd.Functions: each call becomes one operation of the graph and keeps its own backward.

torch.export would trace into the forward of a Function and lose the backward that belongs to it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from varuna.capture.run.plain_randomness import run_once
from varuna.capture.trace import patches
from varuna.capture.trace.opaque_module import RecordedCall, record_call, result_tensors
from varuna.capture.trace.recorder import TraceRecorder
from varuna.capture.trace.refusals import current_line, opaque_call
from varuna.errors import CaptureError


class UnsupportedFunction(CaptureError):
    """The Function does something that one operation of the graph cannot."""


class FunctionModule(nn.Module):
    """Wraps a Function as a module, so that its calls are recorded like those of opaque modules."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        with _PurityCheck({_storage_id(tensor) for tensor in inputs}):
            apply: Any = self.function.apply
            return apply(*args, **kwargs)


class _PurityCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where a Function draws random numbers or changes an input."""

    def __init__(self, input_storages: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inputs = input_storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UnsupportedFunction("draws random numbers")
        if func._schema.is_mutable and isinstance(args[0], Tensor) and _storage_id(args[0]) in self._inputs:
            raise UnsupportedFunction("changes an input in place")
        return func(*args, **(kwargs or {}))


def _runs_modules(value: Any) -> bool:
    """Return whether a value is a module, or a function that holds one."""
    if isinstance(value, partial):
        return any(map(_runs_modules, (value.func, *value.args, *value.keywords.values())))
    held = [value, getattr(value, "__self__", None)]
    held += [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if cell != CellType()]
    return any(isinstance(one, nn.Module) or (one is not value and _is_bound(one)) for one in held)


def _is_bound(value: Any) -> bool:
    return isinstance(getattr(value, "__self__", None), nn.Module)


def _storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class FunctionCall:
    """One call of a Function, as a function of its tensors; other arguments are constants."""

    def __init__(self, call: RecordedCall) -> None:
        assert isinstance(call.module, FunctionModule)
        self._call = call
        self._function: Any = call.module.function
        # Generated code uses the name; segments are compared by the qualified name.
        self.__name__ = f"apply_{self._function.__name__}"
        self.__qualname__ = f"{self.__name__} {call.constants}"
        self.__module__ = self._function.__module__

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        args, kwargs = self._call.arguments(tensors)
        return result_tensors(self._function.apply(*args, **kwargs), tensors)


@contextmanager
def recorded_functions(recorder: TraceRecorder) -> Iterator[None]:
    """Record every call of a custom Function as one operation of the graph."""

    def apply(cls: Any, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if cls is CheckpointFunction:
            run, _preserve, *operands = args
            return run_once(run, operands)
        if cls.__module__.startswith("torch."):
            return original(*args, **kwargs)
        place, module = current_line(), recorder.running  # modules inside the Function run, too
        leaves = pytree.tree_leaves((args, kwargs))
        if any(map(_runs_modules, leaves)):
            raise CaptureError(
                f"{place}: the custom autograd.Function {cls.__qualname__} takes modules, or a function that "
                "calls them. Its backward runs them again, but a stage has their parameters in forward only. "
                "Call the modules without it; to save memory, use torch.utils.checkpoint.checkpoint."
            )
        if recorder.inside_leaf is not None:
            return original(*args, **kwargs)
        try:
            if any(isinstance(leaf, torch.SymInt | torch.SymFloat) for leaf in leaves):
                raise UnsupportedFunction("takes a size that depends on the batch")
            return record_call(cls.__qualname__, FunctionModule(cls), *args, **kwargs)
        except UnsupportedFunction as error:
            raise CaptureError(
                f"{place}: the custom autograd.Function {cls.__qualname__} {error}, so it cannot be one "
                f"operation of a graph. Keep the module eager with {opaque_call(module)}."
            ) from error

    with patches.function_apply(apply):
        yield
