"""Branches on data that have one path to capture: the other one raises, or is for data that is not there.

    if labels.max() >= self.vocab_size: raise ...     the path that does not raise
    assert (x > 0).all()                              the path that does not raise
    if not torch.isfinite(h).all(): h = h.clamp(...)  finite values
    if rows.size(0) > 0: ... else: ...                at least one row
    if not padding.any(): padding = None              the mask stays, since a mask of nothing does nothing

The graph keeps the condition as a check: a stage whose data would take the other path raises the model's own
error, or one that names the line.
"""

import ast
import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from varuna.capture.trace.recorder import TraceRecorder, library

library.define("check(Tensor condition, int index) -> ()")
library.define("check_number(Scalar condition, int index) -> ()")
CHECK: Any = torch.ops.varuna.check.default
CHECK_NUMBER: Any = torch.ops.varuna.check_number.default
for _name in ("check", "check_number"):
    library.impl(_name, lambda condition, index: None, "CompositeExplicitAutograd")
for _operation in (CHECK, CHECK_NUMBER):
    torch.fx.node.has_side_effect(_operation)

_FINITE = {"isfinite": ("all", True), "isinf": ("any", False), "isnan": ("any", False)}
"""Functions that test for finite values: how the result is reduced, and the result for finite values."""


class ModelCheck:
    """One check of a traced model, as a function of its condition."""

    def __init__(self, expected: bool, error: Exception) -> None:
        self.expected = expected
        self.error = error
        self.__name__ = self.__qualname__ = f"check_{expected}"
        self.__module__ = __name__

    def __call__(self, condition: Any) -> None:
        if bool(condition) is not self.expected:
            # A new one each time: an exception keeps the traceback of its last raise.
            raise type(self.error)(*self.error.args)


@dataclass(frozen=True)
class _Read:
    """A read of a condition's value, and the statement that does it."""

    statement: ast.If | ast.Assert
    frame: FrameType
    condition: Any  # a bool tensor, or a SymBool

    @property
    def line(self) -> str:
        filename, number = self.frame.f_code.co_filename, self.statement.lineno
        return f"{filename}:{number}: {linecache.getline(filename, number).strip().rstrip(':')}"


def decide(recorder: TraceRecorder, condition: Any, way_out: str) -> bool | None:
    """Return the value of a condition on the path to capture, and record its check; None: unknown."""
    if isinstance(condition, Tensor) and condition.numel() != 1:
        return None
    read = _find_read(condition)
    if isinstance(condition, torch.SymBool) and (value := _value_for_rows(condition)) is not None:
        line = read.line if read is not None else "in the model"
        text = (
            f"{line}: no row is chosen here, where the model takes another path, which is not captured. "
            f"Use larger micro-batches, so that each has such a row, or {way_out}."
        )
        return _checked(recorder, condition, value, RuntimeError(text))
    if read is None:
        return None
    try:
        leaves = list(_data_leaves(read, read.statement.test))
        outcome = _outcome_without_error(read.statement)
        if outcome is not None:
            return _decide_test(recorder, read, leaves, outcome)
        return _decide_finite(recorder, read, leaves, way_out)
    except _UnknownTestError:
        return None


# ------------------------------------------------------------ the statement


class _UnknownTestError(Exception):
    """The test has a form that is not followed."""


def _find_read(condition: Any) -> _Read | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_FOLDER):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name.startswith("<"):
        return None
    positions = list(frame.f_code.co_positions())
    line, _, column, _ = positions[frame.f_lasti // 2]
    found = None
    for statement in _statements(frame.f_code.co_filename):
        end = statement.test.end_lineno or statement.lineno, statement.test.end_col_offset or 0
        if (statement.lineno, statement.col_offset) <= (line or 0, column or 0) <= end:
            found = statement  # the innermost one comes last
    return None if found is None else _Read(found, frame, condition)


_OWN_FOLDER = __file__.rpartition("/")[0]


@lru_cache(maxsize=64)
def _statements(filename: str) -> tuple[ast.If | ast.Assert, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return ()
    found = [node for node in ast.walk(tree) if isinstance(node, ast.If | ast.Assert)]
    return tuple(sorted(found, key=lambda node: (node.lineno, node.col_offset)))


def _raises(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Raise)


def _outcome_without_error(statement: ast.If | ast.Assert) -> bool | None:
    """Return the outcome of the test with which the model goes on; None if both do."""
    if isinstance(statement, ast.Assert):
        return True
    if _raises(statement.body):
        return False
    return True if _raises(statement.orelse) else None


def _data_leaves(read: _Read, test: ast.expr, positive: bool = True) -> Iterator[tuple[ast.expr, Any, bool]]:
    """Yield the operands of a test that depend on data: the operand, its value, whether it counts negated."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _data_leaves(read, test.operand, not positive)
    elif isinstance(test, ast.BoolOp):
        for operand in test.values:
            found = list(_data_leaves(read, operand, positive))
            yield from found
            if not found and isinstance(test.op, ast.Or) == bool(_evaluated(read, operand)):
                return  # a constant decides: Python does not look at the rest
    elif test is read.statement.test or _is_only_operand(read.statement.test, test):
        yield test, read.condition, positive
    else:
        value = _evaluated(read, test)
        if isinstance(value, Tensor | torch.SymBool):
            yield test, value, positive


def _is_only_operand(whole: ast.expr, operand: ast.expr) -> bool:
    while isinstance(whole, ast.UnaryOp) and isinstance(whole.op, ast.Not):
        whole = whole.operand
    return whole is operand


def _evaluated(read: _Read, expression: ast.expr) -> Any:
    code = compile(ast.Expression(expression), "<condition>", "eval")
    try:
        return eval(code, read.frame.f_globals, dict(read.frame.f_locals))
    except Exception as error:
        raise _UnknownTestError from error


# ------------------------------------------------------------ decisions


def _decide_test(
    recorder: TraceRecorder, read: _Read, leaves: list[tuple[ast.expr, Any, bool]], outcome: bool
) -> bool:
    """Choose the outcome of an `assert` or of a test with a `raise` behind it."""
    values = {outcome == positive for _, _, positive in leaves}
    if len(values) != 1:
        raise _UnknownTestError  # not known which operand is read
    (value,) = values
    error = _own_error(read)
    if len(leaves) == 1:
        return _checked(recorder, leaves[0][1], value, error)
    if not all(isinstance(leaf, Tensor) for _, leaf, _ in leaves):
        raise _UnknownTestError
    whole = _combined(read, read.statement.test)
    _checked(recorder, whole, outcome, error)
    return value


def _combined(read: _Read, test: ast.expr) -> Any:
    """Return a test as one tensor."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return torch.logical_not(torch.as_tensor(_combined(read, test.operand)))
    if isinstance(test, ast.BoolOp):
        join = torch.logical_or if isinstance(test.op, ast.Or) else torch.logical_and
        result = None
        for operand in test.values:
            value = _combined(read, operand)
            if not isinstance(value, Tensor):
                if bool(value) == isinstance(test.op, ast.Or):
                    return value if result is None else join(result, torch.tensor(bool(value)))
                continue
            result = value if result is None else join(result, value)
        return result
    return _evaluated(read, test)


def _decide_finite(
    recorder: TraceRecorder, read: _Read, leaves: list[tuple[ast.expr, Any, bool]], way_out: str
) -> bool | None:
    """Choose the path of finite values, or the path on which a mask of nothing stays a mask."""
    if isinstance(read.statement, ast.If) and _drops_a_mask(read.statement):
        return isinstance(read.statement.test, ast.UnaryOp)  # `not mask.any()`, or `mask.all()`
    values = {_finite_value(leaf) for leaf, _, _ in leaves}
    if len(values) != 1 or None in values:
        return None
    (value,) = values
    assert value is not None
    error = RuntimeError(
        f"{read.line}: values are not finite here, where the model takes another path, which is not "
        f"captured. To run it, {way_out}."
    )
    for _, condition, _ in leaves:
        _checked(recorder, condition, value, error)
    return value


def _finite_value(leaf: ast.expr) -> bool | None:
    """Return the value of `torch.isfinite(x).all()` and relatives for finite values; None for others."""
    if isinstance(leaf, ast.Call) and isinstance(leaf.func, ast.Attribute):
        inner = leaf.func.value
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            reduced, value = _FINITE.get(inner.func.attr, ("", False))
            return value if leaf.func.attr == reduced else None
    return None


def _drops_a_mask(statement: ast.If) -> bool:
    """Return whether the statement is `if not mask.any(): mask = None`, or `if mask.all(): mask = None`."""
    test, wanted = statement.test, "all"
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, wanted = test.operand, "any"
    if not isinstance(test, ast.Call) or not isinstance(test.func, ast.Attribute) or test.args:
        return False
    mask = ast.unparse(test.func.value)
    drop = ast.unparse(statement.body[0]) if len(statement.body) == 1 else ""
    return test.func.attr == wanted and not statement.orelse and drop == f"{mask} = None"


def _value_for_rows(condition: torch.SymBool) -> bool | None:
    """Return the value of a condition that only separates no rows from some; None for others."""
    expression = condition.node.expr
    symbols = free_unbacked_symbols(expression)
    if len(symbols) != 1 or expression.free_symbols != symbols:
        return None
    (symbol,) = symbols

    def at(size: int) -> bool:
        return bool(expression.xreplace({symbol: sympy.Integer(size)}))

    values = {at(size) for size in (1, 2, 3, 10, 1000)}
    return at(1) if len(values) == 1 and at(0) != at(1) else None


def _own_error(read: _Read) -> Exception:
    """Return the error that the model raises on the other path."""
    statement = read.statement
    if isinstance(statement, ast.Assert):
        return AssertionError(_text(read, statement.msg) if statement.msg is not None else read.line)
    raising = statement.body[-1] if _raises(statement.body) else statement.orelse[-1]
    assert isinstance(raising, ast.Raise)
    call = raising.exc
    kind, arguments = (call.func, call.args) if isinstance(call, ast.Call) else (call, [])
    try:
        found = _evaluated(read, kind) if kind is not None else RuntimeError
    except _UnknownTestError:
        found = RuntimeError
    text = _text(read, arguments[0]) if len(arguments) == 1 else ast.unparse(raising)
    try:
        error = found(text)
    except Exception:  # it takes other arguments
        error = None
    return error if isinstance(error, Exception) else RuntimeError(text)


def _text(read: _Read, message: ast.expr) -> str:
    """Return a message of the model; a value that is unknown now is shown by its source."""
    parts = message.values if isinstance(message, ast.JoinedStr) else [message]
    text = ""
    for part in parts:
        expression = part.value if isinstance(part, ast.FormattedValue) else part
        try:
            value = _evaluated(read, expression)
        except _UnknownTestError:
            value = None
        known = isinstance(value, str | int | float | tuple | list | torch.dtype)
        text += str(value) if known else "{" + ast.unparse(expression) + "}"
    return text


def _checked(recorder: TraceRecorder, condition: Any, value: bool, error: Exception) -> bool:
    recorder.checks.append(ModelCheck(value, error))
    index = len(recorder.checks) - 1
    if isinstance(condition, Tensor):
        torch.ops.varuna.check(condition, index)
    else:
        torch.ops.varuna.check_number(condition, index)
        holds: Any = condition if value else torch.sym_not(condition)  # type: ignore[no-untyped-call]
        torch._check(holds)  # type: ignore[no-untyped-call]
    return value
