"""`varuna.log`: scalars of a script, such as an accuracy, as curves of the job."""

import operator
import os
import warnings
from collections.abc import Mapping
from typing import Any, TypeGuard

from varuna.morph.metrics.local import TRACK, current_metrics, is_dropped
from varuna.morph.metrics.ring import MAX_NAME, MetricsWriter
from varuna.observe.history import MAX_NAMES

MAX_STEP = 2**53 - 1
"""Largest step: programs that read JSON may hold numbers as doubles."""
_names: set[str] = set()
_warned: set[str] = set()
_before_steps: set[str] = set()  # names that have a value at step 0


def log(values: Mapping[str, Any], step: int | None = None, *, num_steps: int | None = None) -> None:
    """Log scalars of the job: `varuna.log({"accuracy": 0.9})`.

    `step` is the number of finished steps; the default is that of this process. `num_steps` says at which
    step the training ends, for the progress display; `model.batches(steps=...)` says it, too. If several
    ranks log a name, the values of the lowest rank count. A job has at most 256 names, with at most 62
    bytes each. Invalid values and steps are dropped with a warning. Without a manager, rank 0 writes its
    values to `metrics.jsonl` in the log folder; other launchers than `varuna run` need a variable (see
    Metrics).
    """
    writer = current_metrics()
    if not writer.watched and is_dropped(os.environ):
        _warn(
            "target",
            f"varuna.log: the values are dropped, because this process has no log folder (set {TRACK}=file "
            f"or {TRACK}=tensorboard, or start the script with `varuna run`)",
            depth=1,
        )
    if num_steps is not None:
        _describe_end(writer, num_steps)
    if not isinstance(values, (dict, Mapping)):  # a dict is found faster
        _warn(
            "values", f"varuna.log takes a mapping such as {{'accuracy': 0.9}}, not {_shown(values)}", depth=1
        )
        return
    if step is not None and (step := _checked_step(step)) is None:
        return
    for name, value in values.items():
        _log_value(writer, name, value, step)


def _describe_end(writer: MetricsWriter, num_steps: object) -> None:
    try:
        last = max(0, int(num_steps))  # type: ignore[call-overload]
        if last > MAX_STEP:
            raise ValueError
    except (TypeError, ValueError, OverflowError, RuntimeError):
        _warn(
            "end", f"varuna.log: num_steps must be a number of steps, not {_shown(num_steps)}; it is ignored"
        )
        return
    writer.describe(num_steps=last)


def _checked_step(step: object) -> int | None:
    """Return the step as an int; None: it is invalid, and the values are dropped."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = -1
    if 0 <= number <= MAX_STEP:
        return number
    _warn(
        "wrong step",
        f"varuna.log: step must be a whole number from 0 to {MAX_STEP}, not {_shown(step)}; "
        "the values are dropped",
    )
    return None


def _is_name(name: object) -> TypeGuard[str]:
    try:
        return isinstance(name, str) and 0 < len(name.encode()) <= MAX_NAME
    except UnicodeEncodeError:  # made from bytes that are no UTF-8, such as the name of a file
        return False


def _is_known(name: object) -> TypeGuard[str]:
    """Return whether a name has a curve. A new one gets it if it is valid."""
    if isinstance(name, str) and name in _names:
        return True
    if not _is_name(name):
        _warn(
            "name",
            f"varuna.log: a name must be text of 1 to {MAX_NAME} bytes of UTF-8, not {_shown(name)}",
            depth=3,
        )
        return False
    if len(_names) >= MAX_NAMES:
        _warn(
            "names",
            f"varuna.log: a job has at most {MAX_NAMES} names; {name!r} and others are dropped",
            depth=3,
        )
        return False
    _names.add(name)
    return True


def _log_value(writer: MetricsWriter, name: object, value: object, step: int | None) -> None:
    if not _is_known(name):
        return
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        _warn(name, f"varuna.log: {name!r} must be one number, not {_shown(value)}; it is dropped")
        return
    if step is None and writer.watched and not writer.last_step:
        _note_without_step(name)
    writer.scalar(name, number, writer.last_step if step is None else step)


def _shown(value: object) -> str:
    """Return a value for a warning. Huge numbers and some objects have no text."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"a value of type {type(value).__name__}"


def _note_without_step(name: str) -> None:
    """Warn if a name gets a second value before the first step: a curve has one value for each step."""
    if name in _before_steps:
        _warn(
            "step",
            f"varuna.log: {name!r} has several values at step 0, and the first one counts (in a script that "
            "does not train with Varuna, pass step=...)",
            depth=3,
        )
    _before_steps.add(name)


def _warn(topic: str, text: str, *, depth: int = 2) -> None:
    """Warn once for each topic, at the line of the script: `log` is `depth` calls above."""
    if topic not in _warned:
        _warned.add(topic)
        warnings.warn(text, RuntimeWarning, stacklevel=depth + 2)
