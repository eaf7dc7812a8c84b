"""Symbolic sizes while a model is traced: sizes that are equal, and functions of `math` on sizes."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from types import FrameType
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from varuna.capture.model.batch import Batch
from varuna.capture.model.lengths import LengthGroup, Place
from varuna.errors import CaptureError

MAX_TERMS = 256
"""Terms of a formula for a size. A convolutional network needs about 80."""

_FUNCTIONS: Mapping[str, Any] = {name: getattr(torch, f"_sym_{name}", None) for name in ("sqrt", "log2")}


def unify(inputs: Mapping[str, Any], groups: Sequence[LengthGroup], batch: Batch) -> None:
    """Make the sizes of a group one symbol, and the batch sizes of all inputs another one."""
    together: list[Sequence[Place]] = [list(batch.dims.items())] if groups else []
    for places in (*together, *(group.places for group in groups)):
        (first, dim), *others = places
        for name, other in others:
            bool(inputs[name].shape[other] == inputs[first].shape[dim])  # torch records that they are equal


def named_guards(line: Callable[[FrameType | None], str]) -> AbstractContextManager[Any]:
    """Let the guards of torch name the model's line where torch itself decides about a size."""
    original = ShapeEnv._get_sloc

    def locate(shapes: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        return replace(original(shapes, *args, **kwargs), maybe_user_loc=line(sys._getframe(1)) or None)

    return patch.object(ShapeEnv, "_get_sloc", locate)


@contextmanager
def symbolic_math() -> Iterator[None]:
    """Let `math.sqrt` take a symbolic size: it would fix the size, since it returns a float."""

    def wrap(original: Callable[..., Any], symbolic: Callable[..., Any]) -> Callable[..., Any]:
        def function(x: Any) -> Any:
            return symbolic(x) if isinstance(x, torch.SymInt | torch.SymFloat) else original(x)

        return function

    with ExitStack() as stack:
        for name, symbolic in _FUNCTIONS.items():
            if symbolic is not None:
                stack.enter_context(patch.object(math, name, wrap(getattr(math, name), symbolic)))
        yield


def bounded_expressions(line: Callable[[FrameType | None], str]) -> AbstractContextManager[Any]:
    """Refuse sizes whose formulas grow too large: torch would simplify them for minutes."""
    original = ShapeEnv.evaluate_expr

    def evaluate(shapes: ShapeEnv, expression: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(expression, sympy.Basic):
            terms = islice(sympy.preorder_traversal(expression), MAX_TERMS + 1)
            if sum(1 for _ in terms) > MAX_TERMS:
                place = line(sys._getframe(1))
                raise CaptureError(f"{place or 'the model'}: the sizes become formulas that are too large")
        return original(shapes, expression, *args, **kwargs)

    return patch.object(ShapeEnv, "evaluate_expr", evaluate)


@contextmanager
def symbolic_lengths(line: Callable[[FrameType | None], str]) -> Iterator[None]:
    """Keep sizes symbolic during an export where torch or Python would fix them without need."""
    with symbolic_math(), named_guards(line), bounded_expressions(line):
        yield
