"""The samples of a batch as a list, where the model only joins them again: `torch.cat(list(x))`.

A graph has no list of a length that it does not know. One object stands for all rows, and the operation that
joins them gets the tensor itself. Any other use of a row is refused.
"""

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from varuna.errors import CaptureError

_JOINS = frozenset({"cat", "concat", "concatenate", "stack"})
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
        rows = next(value for value in (*args, *(args[0] if args else ())) if isinstance(value, BatchRows))
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


def require_all_joined(lists: Sequence[BatchRows]) -> None:
    """Raise if a list of rows was made and not joined: the model may count its items."""
    for rows in lists:
        if not rows.is_joined:
            rows._refuse()
