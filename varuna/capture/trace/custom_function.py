"""A custom autograd.Function in a captured model: one operation, which keeps its own backward.

torch.export looks into its forward and would forget the backward that belongs to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from varuna.capture.trace.opaque_module import RecordedCall, open_to_gradients, record_call
from varuna.errors import CaptureError


class FunctionModule(nn.Module):
    """Stands for the Function while the model is traced."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        with _Watching({_memory(tensor) for tensor in given}):
            apply: Any = self.function.apply
            return apply(*args, **kwargs)


class UnsupportedFunction(CaptureError):
    """The Function does something that an operation of the graph cannot."""


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Over a Function: its draws would be nobody's, a change of what it is given nobody would know."""

    def __init__(self, given: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = given

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UnsupportedFunction("draws random numbers")
        if func._schema.is_mutable and isinstance(args[0], Tensor) and _memory(args[0]) in self._given:
            raise UnsupportedFunction("changes what it is given")
        return func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class FunctionCall:
    """One call of the Function: of its tensors, with its other arguments as they were."""

    def __init__(self, call: RecordedCall) -> None:
        assert isinstance(call.module, FunctionModule)
        self._call = call
        self._function: Any = call.module.function
        # By which graphs call it; and by which they are compared.
        self.__name__ = f"apply_{self._function.__name__}"
        self.__qualname__ = f"{self.__name__} {call.constants}"
        self.__module__ = self._function.__module__

    def __repr__(self) -> str:
        return self.__name__

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        args, kwargs = self._call.arguments(tensors)
        found = pytree.tree_leaves(self._function.apply(*args, **kwargs))
        results = [leaf for leaf in found if isinstance(leaf, Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return [open_to_gradients(result) for result in results]
        return results


def record_function(
    function: type[torch.autograd.Function], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """In place of `function.apply` while a model is traced."""
    if any(isinstance(leaf, torch.SymInt | torch.SymFloat) for leaf in pytree.tree_leaves((args, kwargs))):
        raise UnsupportedFunction("is given a size that follows from the batch")
    return record_call(function.__qualname__, FunctionModule(function), args, kwargs)
