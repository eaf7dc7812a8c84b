"""Random numbers of Python and numpy in a forward: a traced graph would repeat one draw forever."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from varuna.errors import CaptureError


@contextmanager
def refused_host_randomness(model: nn.Module) -> Iterator[None]:
    """Raise if the block draws random numbers of `random`, numpy, or a generator of the model."""
    before = _states(model)
    yield
    after = _states(model)
    drawn = [name for name, state in after.items() if name in before and before[name] != state]
    if drawn:
        raise CaptureError(
            f"forward draws random numbers from {drawn[0]}. A traced model would use the same numbers in "
            "every step. Draw them with torch (torch.rand, nn.Dropout), or pass them as an input."
        )


def _states(model: nn.Module) -> dict[str, str]:
    found: dict[str, Any] = {"Python's random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy.random"] = numpy.random.get_state()
    found |= {name: _state(generator) for name, generator in _generators(model).items()}
    return {name: repr(_hashable(state)) for name, state in found.items()}


def _generators(model: nn.Module) -> dict[str, Any]:
    """Return the generators that are attributes of modules."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (random.Random,)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    return {
        f"the generator {attribute!r} of {path or type(module).__name__}": value
        for path, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, kinds)
    }


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def _hashable(state: Any) -> Any:
    """Return the state with arrays as bytes: a printed array leaves elements out."""
    if isinstance(state, dict):
        return {key: _hashable(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_hashable, state))
    return state.tobytes() if hasattr(state, "tobytes") else state
