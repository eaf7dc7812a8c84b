"""Turns what torch.export says of a model that it cannot trace into an error with the model's own line."""

from __future__ import annotations

import builtins
import contextlib
import io
import linecache
import logging
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._sympy.functions import Min
from torch.utils.checkpoint import CheckpointFunction

from varuna.capture.run.plain_randomness import run_once
from varuna.capture.trace.custom_function import UnsupportedFunction, record_function
from varuna.capture.trace.recorder import TraceRecorder
from varuna.errors import CaptureError

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)


def _is_the_models(filename: str) -> bool:
    return not filename.startswith((_OURS, _TORCH, "<"))


def _line(filename: str, number: int | None) -> str:
    return f"{filename}:{number}: {linecache.getline(filename, number or 0).strip()}"


def line_of(error: BaseException) -> str:
    """The last line of the model's own code on the way to an error, as "file:line: source", or ""."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_the_models(frame.filename):
            return _line(frame.filename, frame.lineno)
    return ""


def current_line() -> str:
    """The innermost line of the model's own code that is running now."""
    return model_line(sys._getframe(1))


def model_line(frame: FrameType | None) -> str:
    """The innermost line of the model's own code on the way to a frame, as "file:line: source", or ""."""
    while frame is not None:
        if _is_the_models(frame.f_code.co_filename):
            return _line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def opaque_call(path: str) -> str:
    """The call that makes a module an opaque one, ready to be pasted."""
    if not path:
        return "varuna.opaque(a submodule)"
    pattern = re.sub(r"\b\d+\b", "*", path)  # its like in the other layers will want the same
    return f'varuna.opaque(model, "{pattern}")'


@contextmanager
def refusals_explained(recorder: TraceRecorder, batch: int) -> Iterator[None]:
    """Every failure to trace becomes a CaptureError that says where, why, and what can be done."""
    said = io.StringIO()
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        # torch.export prints the graph so far when it gives up: it is of no use beside the model's line.
        with contextlib.redirect_stderr(said):
            yield
        sys.stderr.write(said.getvalue())
    except CaptureError:
        raise
    except Exception as error:
        if _depends_on_data(error):
            raise DependsOnData(_explanation(error, recorder, batch), recorder.running) from error
        raise CaptureError(_explanation(error, recorder, batch)) from error
    finally:
        logger.setLevel(level)


class DependsOnData(CaptureError):
    """A line of the model asks for the values of a tensor."""

    def __init__(self, text: str, module: str) -> None:
        super().__init__(text)
        self.module = module  # the one that was running, by its path


def _depends_on_data(error: Exception) -> bool:
    text = str(error).lower()
    return "DataDependent" in type(error).__name__ or "data-dependent" in text or "data dependent" in text


def _explanation(error: Exception, recorder: TraceRecorder, batch: int) -> str:
    text, kind = str(error), type(error).__name__
    place = line_of(error) or f"in {recorder.running or 'the model'}"
    if _depends_on_data(error):
        switch = ""
        if "experts" in place.lower() or "moe" in place.lower() or "expert" in recorder.running.lower():
            switch = (
                ', set config._experts_implementation = "grouped_mm" or "batched_mm" for Hugging Face experts'
            )
        return (
            f"{place}: this line depends on the values of a tensor, which only a run can know; "
            "expected one path "
            f"for all data (rewrite it with torch.where{switch}, or keep the module whole and eager with "
            f"{opaque_call(recorder.reading)})"
        )
    if "Constraints violated" in text or "specialized" in text.lower() or "suggested fixes" in text.lower():
        return (
            f"{_constrained_line(error) or place}: the batch size is fixed here; expected a "
            "forward that works for any "
            "batch, since micro-batches have their own (read sizes off the tensors: x.shape[0], "
            "x.view(-1, ...)). "
            f"torch.export says: {_short(text)}"
        )
    if ": raise " in place:
        return (
            f"{place}: {kind}: {_short(text)} (the model itself refused to run on a batch of {batch} without "
            "values: are these the inputs that it wants, and does it take batches of any size?)"
        )
    return (
        f"{place}: {kind}: {_short(text)} (raised when the forward ran on a batch of {batch} "
        "without values; if it "
        "runs as it is with that batch size, keep the module whole and eager with "
        f"{opaque_call(recorder.running)}; if it does not, "
        "look for a batch size that is written into it)"
    )


def _constrained_line(error: Exception) -> str:
    """The line of the model that asked how large the batch is: torch.export keeps it with its guards."""
    found = ""
    step = error.__traceback__
    while step is not None:
        for value in step.tb_frame.f_locals.values():
            shapes = getattr(value, "shape_env", None)
            for guard in getattr(shapes, "guards", ()):
                place = re.search(r"([^\s()]+):(\d+)", str(guard.sloc))
                file = _full_path(place[1]) if place is not None and guard.expr.free_symbols else "<nowhere>"
                if place is not None and _is_the_models(file):
                    found = _line(file, int(place[2]))
        step = step.tb_next
    return found


def _full_path(ending: str) -> str:
    """torch cuts paths short: find the module that is meant."""
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    return next((file for file in sorted(files) if file.endswith(ending)), ending)


def _short(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:4])[:600]


@contextmanager
def watched(recorder: TraceRecorder) -> Iterator[None]:
    """Looks out for what torch.export would take silently, or refuse for no reason."""
    checks = Distribution._validate_args  # of the values that a distribution is made with
    Distribution.set_default_validate_args(False)
    try:
        with (
            _whole_functions(recorder),
            _no_backwards(recorder),
            _sizes_by_len(),
            _smaller_sizes(),
            _needless_moves(),
            _Branches(recorder),
        ):
            yield
    finally:
        Distribution.set_default_validate_args(checks)


@contextmanager
def _whole_functions(recorder: TraceRecorder) -> Iterator[None]:
    """torch.export traces through a custom autograd.Function and loses its backward: keep it whole."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            run, _preserve, *operands = args
            return run_once(run, operands)
        if cls.__module__.startswith("torch.") or recorder.is_inside_leaf:
            return original.__func__(cls, *args, **kwargs)
        place = current_line()
        try:
            return record_function(cls, args, kwargs)
        except UnsupportedFunction as error:
            raise CaptureError(
                f"{place}: the custom autograd.Function {cls.__qualname__} {error}, and would lose its own "
                "backward in a captured graph; expected a function of its tensors (keep the module whole and "
                f"eager with {opaque_call(recorder.running)})"
            ) from error

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


@contextmanager
def _no_backwards(recorder: TraceRecorder) -> Iterator[None]:
    """What a forward does to its own backward is in no graph: torch.export would leave it out."""

    def refusing(what: str, original: Any) -> Any:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if recorder.is_inside_leaf:
                return original(*args, **kwargs)
            raise CaptureError(
                f"{current_line()}: the forward {what}, which a captured graph cannot hold (keep the module "
                f"whole and eager with {opaque_call(recorder.running)})"
            )

        return refuse

    with (
        patch.object(torch.autograd, "grad", refusing("takes a gradient", torch.autograd.grad)),
        patch.object(Tensor, "backward", refusing("runs a backward", Tensor.backward)),
        patch.object(Tensor, "register_hook", refusing("hooks into a gradient", Tensor.register_hook)),
    ):
        yield


@contextmanager
def _sizes_by_len() -> Iterator[None]:
    """`len(x)` is an int to Python, which would fix the batch; asked by name it is a size like others."""
    original = builtins.len

    def size(value: Any) -> Any:
        return value.shape[0] if isinstance(value, Tensor) and value.dim() else original(value)

    builtins.len = size
    try:
        yield
    finally:
        builtins.len = original


@contextmanager
def _smaller_sizes() -> Iterator[None]:
    """The smaller of two sizes is known where their bounds tell; else its stride would fix the batch."""
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

    ShapeEnv.simplify = simplify  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        ShapeEnv.simplify = original  # type: ignore[method-assign]


@contextmanager
def _needless_moves() -> Iterator[None]:
    """`self.layer.to(dtype)` within a forward: where nothing changes, nothing is to be done."""
    original = nn.Module._apply

    def apply(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        tensors = (*module.parameters(recurse), *module.buffers(recurse))
        same = all((new := fn(t)).dtype == t.dtype and new.device == t.device for t in tensors)
        return module if same else original(module, fn, recurse)  # type: ignore[no-untyped-call]

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


READS = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")
"""Of a tensor's methods, those that give a number."""


class _Branches(TorchFunctionMode):
    """Branches on data of which the answer is sure.

    `if torch.rand([]) < self.layerdrop` at 0 and at 1; `assert (ids >= 0).all()`, which holds, or else
    the model itself would not run.
    """

    def __init__(self, recorder: TraceRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._drawn: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__lt__", "lt") and len(args) == 2 and any(args[0] is drawn for drawn in self._drawn):
            limit = args[1]
            if isinstance(limit, int | float) and not 0 < limit < 1:
                return limit >= 1
            raise CaptureError(
                f"{current_line()}: a layer is skipped at random with probability {limit}: a "
                "branch on data, which a "
                "captured graph cannot hold (set layerdrop to 0, or keep the module whole and eager with "
                f"{opaque_call(self._recorder.running)})"
            )
        if name in READS and not self._recorder.is_inside_leaf:
            source = current_line().partition(": ")[2]
            if source.startswith("assert ") and args[0].dtype == torch.bool:
                return True
            self._recorder.note_read()
        result = func(*args, **(kwargs or {}))
        if name == "rand" and isinstance(result, Tensor) and result.dim() == 0:
            self._drawn.append(result)
        return result
