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

import sympy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode

from varuna.capture.trace.batch_rows import BatchRows, equal_parts, joined, makes_a_list
from varuna.capture.trace.data_branches import decide
from varuna.capture.trace.opaque_module import record_call
from varuna.capture.trace.parameter_changes import ParameterChanges, refuse_change
from varuna.capture.trace.recorder import TraceRecorder
from varuna.errors import CaptureError

_NUMBER_READS = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")  # methods of a tensor
_COMPARISONS = {"__lt__": "lt", "lt": "lt", "__gt__": "gt", "gt": "gt"}
_LIBRARY_PATHS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), "<")


class DataDependentError(CaptureError):
    """A line of the model needs the values of a tensor."""

    def __init__(self, text: str, module: str) -> None:
        super().__init__(text)
        self.module = module  # path of the module that was running


class BatchRangeError(CaptureError):
    """The model takes another path for batch sizes outside a range."""

    def __init__(self, text: str, range: tuple[int, int]) -> None:
        super().__init__(text)
        self.range = range


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


def _line_that_fixes_the_batch(error: Exception, recorder: TraceRecorder) -> str:
    """Return the line that restricted the batch size: torch.export keeps it with its guards."""
    found = recorder.size_reads[-1][1] if recorder.size_reads else ""
    step = error.__traceback__
    while step is not None:
        for value in step.tb_frame.f_locals.values():
            shapes = getattr(value, "shape_env", None)
            for guard in getattr(shapes, "guards", ()):
                found = (line_of_guard(guard) if guard.expr.free_symbols else "") or found
        step = step.tb_next
    return found


def line_of_guard(guard: Any) -> str:
    """Return the model's line that made a guard of torch, or ""."""
    if isinstance(known := getattr(guard.sloc, "maybe_user_loc", None), str) and ": " in known:
        return known
    place = re.search(r"([^\s()]+):(\d+)", str(guard.sloc))
    if place is None or not _is_model_code(_full_path(place[1])):
        return ""
    return _source_line(_full_path(place[1]), int(place[2]))


def _full_path(ending: str) -> str:
    """Return the file of a loaded module whose path torch has shortened to its ending."""
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    return next((file for file in sorted(files) if file.endswith(ending)), ending)


def opaque_call(path: str) -> str:
    """Return how to make a module, and the same module of all other layers, opaque."""
    if not path:
        return "varuna.opaque, once you have moved these lines into a submodule"
    pattern = re.sub(r"\b\d+\b", "*", path)
    return f'varuna.opaque(model, "{pattern}")'


class _CTCLoss(nn.Module):
    """Stays eager: torch does not know the sizes of what its forward keeps for its backward."""

    def forward(self, log_probs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(log_probs, FakeTensor):
            reduction = kwargs.get("reduction", args[4] if len(args) > 4 else "mean")
            return log_probs.new_empty(log_probs.shape[1:2] if reduction in ("none", 0) else ())
        return nn.functional.ctc_loss(log_probs, *args, **kwargs)


class KnownBranches(TorchFunctionMode):
    """Decides `if torch.rand([]) < p` for p = 0 and p = 1, and branches with one path to capture.

    `torch.rand(1)` may also be used as a mask: only a branch on it is decided, not the comparison.
    """

    def __init__(self, recorder: TraceRecorder, changes: ParameterChanges) -> None:
        super().__init__()
        self._recorder = recorder
        self._changes = changes
        self._drawn: list[Tensor] = []
        self._known: list[tuple[Tensor, bool]] = []  # comparisons of drawn values, and their results

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        compares = name in _COMPARISONS and len(args) == 2 and any(args[0] is x for x in self._drawn)
        if compares and args[0].dim():
            result, limit = func(*args, **(kwargs or {})), args[1]
            if isinstance(limit, int | float) and not 0 < limit < 1:
                self._known.append((result, (limit >= 1) == (_COMPARISONS[name] == "lt")))
            return result
        if compares and _COMPARISONS[name] == "lt":
            limit = args[1]
            if isinstance(limit, int | float) and not 0 < limit < 1:
                return limit >= 1
            raise CaptureError(
                f"{current_line()}: this line skips a layer at random with probability {limit}, which a "
                "traced graph cannot do. Set layerdrop to 0, or keep the module eager with "
                f"{opaque_call(self._recorder.running)}."
            )
        if name == "__bool__":
            for result, known in self._known:
                if result is args[0]:
                    return known
        if name in _NUMBER_READS and self._recorder.inside_leaf is None:
            self._recorder.reader = self._recorder.running
            value = decide(self._recorder, args[0], _way_out(self._recorder)) if name == "__bool__" else None
            if value is not None:
                return value
        if name in ("unbind", "__len__") and self._recorder.inside_leaf is None:
            dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)
            size = args[0].shape[dim] if args[0].dim() else 1
            # A size that depends on data, such as that of `nonzero`, is torch's to report.
            if isinstance(size, torch.SymInt) and not free_unbacked_symbols(size):
                if name == "unbind":
                    return self._rows(args[0], dim)
                if makes_a_list(current_line()):
                    return 1  # list() asks for a hint of its length
        if (whole := joined(name, args, kwargs)) is not None:
            return whole
        if name in ("chunk", "split") and self._recorder.inside_leaf is None:
            parts = equal_parts(name, *args, **(kwargs or {}))
            if parts is not None:
                return parts
        if name == "_pack_padded_sequence" and self._recorder.inside_leaf is None:
            raise CaptureError(
                f"{current_line()}: this line packs sequences by their lengths, which a traced graph cannot "
                "do. Pass total_length=x.shape[1] to pad_packed_sequence, and keep the module that packs and "
                f"unpacks eager with {opaque_call(self._recorder.running)}."
            )
        if self._recorder.inside_leaf is None:
            if (changed := self._changes.changed(name, func, args, kwargs)) is not None:
                refuse_change(current_line(), changed)
            if name == "__get__" and self._changes.is_data(func):
                return args[0].detach()
        if name == "ctc_loss" and self._recorder.inside_leaf is None:
            return record_call(name, _CTCLoss(), *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if name == "rand" and isinstance(result, Tensor) and tuple(result.shape) in ((), (1,)):
            self._drawn.append(result)
        return result

    def _rows(self, value: Tensor, dim: int) -> tuple[BatchRows]:
        """Return one object for all rows of the batch, if the line only makes a list of them."""
        line = current_line()
        refusal = (
            f"{line}: this line iterates over the batch, but micro-batches have sizes of their own. Work on "
            f"the whole tensor, or keep the module eager with {opaque_call(self._recorder.running)}."
        )
        if not makes_a_list(line):
            raise CaptureError(refusal)
        self._recorder.lists.append(BatchRows(value, dim, refusal))
        return (self._recorder.lists[-1],)


def decide_number(recorder: TraceRecorder, condition: torch.SymBool) -> bool | None:
    """Return the value of a condition on numbers of the data, on the path to capture; None: unknown.

    Conditions on the batch size are recorded, to name their lines.
    """
    if recorder.inside_leaf is not None:
        return None
    if free_unbacked_symbols(condition):
        return decide(recorder, condition, _way_out(recorder))
    frame = sys._getframe(2)
    if _is_model_code(frame.f_code.co_filename):
        recorder.size_reads.append((condition.node.expr, model_line(frame), recorder.running))
    return None


def _way_out(recorder: TraceRecorder) -> str:
    return f"keep the module eager with {opaque_call(recorder.reading)}"


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
        if (found := _batch_range(error)) is not None:
            reads = [(line, path) for test, line, path in recorder.size_reads if _changes_at(test, found)]
            line, path = reads[0] if reads else (here(recorder), "")
            text = (
                f"{line}: the model computes otherwise for batches of other than {found[0]} to {found[1]} "
                "samples, but micro-batches have sizes of their own. Compute the same for all batch sizes, "
                f"or keep the module eager with {opaque_call(path)}."
            )
            raise BatchRangeError(text, found) from error
        raise CaptureError(text) from error
    finally:
        logger.setLevel(level)


def refused_gradient_call(recorder: TraceRecorder, name: str, original: Any) -> Any:
    """Return a replacement for a function on gradients, which torch.export would silently leave out."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if recorder.inside_leaf is not None:
            return original(*args, **kwargs)
        raise CaptureError(
            f"{current_line()}: forward calls {name}, which a traced graph cannot hold. "
            f"Keep the module eager with {opaque_call(recorder.running)}."
        )

    return refuse


def here(recorder: TraceRecorder) -> str:
    return f"in {recorder.running or 'the model'}"


def _batch_range(error: Exception) -> tuple[int, int] | None:
    """Return the range of batch sizes that torch.export suggests; None if the batch size is fixed."""
    found = re.search(r"batch = Dim\('batch'(?:, min=(\d+))?(?:, max=(\d+))?\)", str(error))
    return None if found is None else (int(found[1] or 2), int(found[2] or sys.maxsize))


def _changes_at(test: Any, range: tuple[int, int]) -> bool:
    """Return whether a condition changes at an end of the range."""

    def at(size: int) -> Any:
        return test.xreplace(dict.fromkeys(test.free_symbols, sympy.Integer(size)))

    return bool(at(range[0] - 1) != at(range[0]) or at(range[1]) != at(range[1] + 1))


def _depends_on_data(error: Exception) -> bool:
    text = str(error).lower()
    return "DataDependent" in type(error).__name__ or "data-dependent" in text or "data dependent" in text


def _explanation(error: Exception, recorder: TraceRecorder, batch: int) -> str:
    text, kind = str(error), type(error).__name__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_model_code(f.filename)]
    place = _source_line(frames[-1].filename, frames[-1].lineno) if frames else here(recorder)
    fixes_batch = "Constraints violated" in text or "specialized" in text.lower()
    if recorder.scripted and (fixes_batch or recorder.running.startswith(recorder.scripted)):
        return (
            f"{place}: the module {recorder.scripted!r} is compiled by torch.jit, which fixes sizes and "
            "hides its operations. Use the module without torch.jit.script or torch.jit.trace."
        )
    if "on device meta" in text:
        return (
            f"{place}: this line uses a tensor on `meta` that is neither a parameter nor a buffer, so its "
            "values are unknown. Register it as a buffer, or make it in forward."
        )
    if _depends_on_data(error):
        experts = ""
        if "experts" in place.lower() or "moe" in place.lower() or "expert" in recorder.running.lower():
            experts = ', set config._experts_implementation = "grouped_mm" or "batched_mm" (Hugging Face)'
        return (
            f"{place}: this line depends on the values of a tensor, which are unknown while tracing. "
            f"Use torch.where{experts}, or keep the module eager with {opaque_call(recorder.reading)}."
        )
    if fixes_batch or "suggested fixes" in text.lower():
        line = _line_that_fixes_the_batch(error, recorder) or place
        return (
            f"{line}: the batch size is fixed here, but micro-batches "
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
