"""Names of the library's activities in torch.profiler. Without a profiler they cost next to nothing."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch.autograd import profiler

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_UNNAMED = nullcontext()


def profiled(name: str, number: int = -1) -> AbstractContextManager[Any]:
    """Show a block as "varuna NAME", or "varuna NAME NUMBER", while a profiler runs."""
    if not profiler._is_profiler_enabled:
        return _UNNAMED
    return profiler.record_function(f"varuna {name}" if number < 0 else f"varuna {name} {number}")


def profiled_as(name: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Show all calls of a function as "varuna NAME"."""

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @wraps(function)
        def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            with profiled(name):
                return function(*args, **kwargs)

        return run

    return decorate
