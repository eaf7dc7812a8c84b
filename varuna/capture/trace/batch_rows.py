"""The samples of a batch as a list, where the model only joins them again: `torch.cat(list(x))`.

A graph has no list of a length that it does not know. One object stands for all rows, and the operation that
joins them gets the tensor itself. Any other use of a row is refused.
"""

import re
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from varuna.errors import CaptureError

_JOINS = frozenset({"cat", "concat", "concatenate", "stack"})
_PART_ARGUMENTS = ("input", "chunks", "split_size_or_sections", "split_size", "dim")
_OPERATORS = (
    *(
        "add",
        "radd",
        "sub",
        "rsub",
        "mul",
        "rmul",
        "truediv",
        "rtruediv",
        "matmul",
        "rmatmul",
        "neg",
        "getitem",
    ),
    *("len", "iter", "bool", "eq", "ne", "lt", "le", "gt", "ge", "float", "int", "setitem", "contains"),
)


class BatchRows:
    """All rows of a tensor along its batch dimension."""

    def __init__(self, value: Tensor, dim: int, refusal: str) -> None:
        self._value, self._dim, self._refusal = value, dim, refusal
        self.is_joined = False

    def _refuse(self, *_args: Any, **_kwargs: Any) -> Any:
        raise CaptureError(self._refusal)

    def __getattr__(self, name: str) -> Any:
        raise CaptureError(self._refusal)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        listed = args[0] if args and isinstance(args[0], list | tuple) else ()
        rows = next(value for value in (*args, *listed) if isinstance(value, BatchRows))
        raise CaptureError(rows._refusal)

    def join(self, name: str, dim: int) -> Tensor | None:
        """Return what `name` makes of the list of all rows; None if the graph cannot express it."""
        rows = self._value.movedim(self._dim, 0)
        if dim != 0 or (name != "stack" and rows.dim() < 2):
            return None
        self.is_joined = True
        return rows if name == "stack" else rows.flatten(0, 1)


for _name in _OPERATORS:
    setattr(BatchRows, f"__{_name}__", BatchRows._refuse)


def makes_a_list(line: str) -> bool:
    """Return whether a line of the model only makes a list of the rows: `rows = list(x)`."""
    return re.search(r": \w+ = list\([\w.]+\)$", line) is not None


def joined(name: str, args: Any, kwargs: Any) -> Tensor | None:
    """Return the value of a call that joins a list of all rows; None for any other call."""
    if name not in _JOINS or not args or not isinstance(args[0], list | tuple) or len(args[0]) != 1:
        return None
    rows = args[0][0]
    if not isinstance(rows, BatchRows):
        return None
    return rows.join(name, args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0))


def equal_parts(name: str, *args: Any, **kwargs: Any) -> tuple[Tensor, ...] | None:
    """Return `x.chunk(2)` or `x.split(b)` of 2 * b rows, where torch would fix b; None for other parts."""
    x, number, dim = [*args, *(kwargs[key] for key in _PART_ARGUMENTS if key in kwargs), 0][:3]
    size: Any = x.shape[dim] if x.dim() else 0
    if not isinstance(size, torch.SymInt) or not isinstance(number, int | torch.SymInt):
        return None
    rows = _batch_expression(size)
    count = _batch_expression(number) if isinstance(number, torch.SymInt) else sympy.Integer(number)
    if name == "split":
        count = sympy.cancel(rows / count)
    each = sympy.expand(rows / count)
    if not count.is_Integer or any(not part.is_Integer for part in each.atoms(sympy.Rational)):
        return None
    part = size // int(count)
    return tuple(x.narrow(dim, i * part, part) for i in range(int(count)))


def _batch_expression(size: torch.SymInt) -> Any:
    """Return a size as a formula. The batch sizes of all inputs become one symbol."""
    environment: Any = size.node.shape_env
    expression = environment.replace(size.node.expr)
    first, *others = sorted(expression.free_symbols, key=str) or [None]
    for other in others:
        if environment.var_to_val.get(first) == environment.var_to_val.get(other):
            environment.evaluate_expr(sympy.Eq(first, other))
    return environment.replace(expression)


def require_all_joined(lists: Sequence[BatchRows]) -> None:
    """Raise if a list of rows was made and not joined: the model may count its items."""
    for rows in lists:
        if not rows.is_joined:
            rows._refuse()
