"""Refusals: errors that name the line of the model that cannot be captured, and what to do about it."""

import io
import linecache
import logging
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from varuna.capture.trace.recorder import TraceRecorder
from varuna.errors import CaptureError

_NUMBER_READS = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")  # methods of a tensor
_LIBRARY_PATHS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), "<")


class DataDependentError(CaptureError):
    """A line of the model needs the values of a tensor."""

    def __init__(self, text: str, module: str) -> None:
        super().__init__(text)
        self.module = module  # path of the module that was running


def _is_model_code(filename: str) -> bool:
    return not filename.startswith(_LIBRARY_PATHS)


def _source_line(filename: str, number: int | None) -> str:
    return f"{filename}:{number}: {linecache.getline(filename, number or 0).strip().rstrip(':')}"


def model_line(frame: FrameType | None) -> str:
    """Return the innermost line of the model at or above a frame, as "file:line: source", or ""."""
    while frame is not None:
        if _is_model_code(frame.f_code.co_filename):
            return _source_line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def current_line() -> str:
    """Return the innermost running line of the model."""
    return model_line(sys._getframe(1))


def _line_that_fixes_the_batch(error: Exception) -> str:
    """Return the line that restricted the batch size: torch.export keeps it with its guards."""
    found = ""
    step = error.__traceback__
    while step is not None:
        for value in step.tb_frame.f_locals.values():
            shapes = getattr(value, "shape_env", None)
            for guard in getattr(shapes, "guards", ()):
                place = re.search(r"([^\s()]+):(\d+)", str(guard.sloc))
                if place is not None and guard.expr.free_symbols and _is_model_code(_full_path(place[1])):
                    found = _source_line(_full_path(place[1]), int(place[2]))
        step = step.tb_next
    return found


def _full_path(ending: str) -> str:
    """Return the file of a loaded module whose path torch has shortened to its ending."""
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    return next((file for file in sorted(files) if file.endswith(ending)), ending)


def opaque_call(path: str) -> str:
    """Return the call that makes a module, and the same module of all other layers, opaque."""
    if not path:
        return "varuna.opaque(a submodule)"
    pattern = re.sub(r"\b\d+\b", "*", path)
    return f'varuna.opaque(model, "{pattern}")'


class KnownBranches(TorchFunctionMode):
    """Decides `if torch.rand([]) < p` for p = 0 and p = 1, and lets `assert` on data pass.

    An assertion that fails would stop the model in a plain process too.
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
                f"{current_line()}: this line skips a layer at random with probability {limit}, which a "
                "traced graph cannot do. Set layerdrop to 0, or keep the module eager with "
                f"{opaque_call(self._recorder.running)}."
            )
        if name in _NUMBER_READS and not self._recorder.inside_leaf:
            source = current_line().partition(": ")[2]
            if source.startswith("assert ") and args[0].dtype == torch.bool:
                return True
            self._recorder.reader = self._recorder.running
        result = func(*args, **(kwargs or {}))
        if name == "rand" and isinstance(result, Tensor) and result.dim() == 0:
            self._drawn.append(result)
        return result


@contextmanager
def explained_failures(recorder: TraceRecorder, batch: int) -> Iterator[None]:
    """Turn every failure to trace into a CaptureError with the line, the reason and what to do."""
    stderr = io.StringIO()
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        # torch.export prints the unfinished graph when it fails; the model's line says more.
        with redirect_stderr(stderr):
            yield
        sys.stderr.write(stderr.getvalue())
    except CaptureError:
        raise
    except Exception as error:
        text = _explanation(error, recorder, batch)
        if _depends_on_data(error):
            raise DataDependentError(text, recorder.running) from error
        raise CaptureError(text) from error
    finally:
        logger.setLevel(level)


def refused_gradient_call(recorder: TraceRecorder, name: str, original: Any) -> Any:
    """Return a replacement for a function on gradients, which torch.export would silently leave out."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if recorder.inside_leaf:
            return original(*args, **kwargs)
        raise CaptureError(
            f"{current_line()}: forward calls {name}, which a traced graph cannot hold. "
            f"Keep the module eager with {opaque_call(recorder.running)}."
        )

    return refuse


def _depends_on_data(error: Exception) -> bool:
    text = str(error).lower()
    return "DataDependent" in type(error).__name__ or "data-dependent" in text or "data dependent" in text


def _explanation(error: Exception, recorder: TraceRecorder, batch: int) -> str:
    text, kind = str(error), type(error).__name__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_model_code(f.filename)]
    here = f"in {recorder.running or 'the model'}"
    place = _source_line(frames[-1].filename, frames[-1].lineno) if frames else here
    if _depends_on_data(error):
        experts = ""
        if "experts" in place.lower() or "moe" in place.lower() or "expert" in recorder.running.lower():
            experts = ', set config._experts_implementation = "grouped_mm" or "batched_mm" (Hugging Face)'
        return (
            f"{place}: this line depends on the values of a tensor, which are unknown while tracing. "
            f"Use torch.where{experts}, or keep the module eager with {opaque_call(recorder.reading)}."
        )
    if "Constraints violated" in text or "specialized" in text.lower() or "suggested fixes" in text.lower():
        return (
            f"{_line_that_fixes_the_batch(error) or place}: the batch size is fixed here, but micro-batches "
            "have sizes of their own. Read sizes from the tensors: x.shape[0], x.view(-1, ...). "
            f"torch.export says: {_shortened(text)}"
        )
    if ": raise " in place:
        return (
            f"{place}: the model raised {kind}: {_shortened(text)} (traced with a batch of {batch}). "
            "Check the names and shapes of the inputs, and that the model accepts any batch size."
        )
    return (
        f"{place}: {kind}: {_shortened(text)} (traced with a batch of {batch}, without values). If the "
        f"module runs with this batch size, keep it eager with {opaque_call(recorder.running)}; otherwise "
        "remove the fixed batch size from it."
    )


def _shortened(text: str) -> str:
    return " ".join([line.strip() for line in text.splitlines() if line.strip()][:4])[:600]
