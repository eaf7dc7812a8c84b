"""Call conventions: how a model is called, and which of its outputs are wanted.

`Varuna` calls a model by keywords and wants its loss (`CallConvention`). `StructuredCall` calls it with any
arguments and wants all outputs; it gives each tensor a flat name:

    model(x, pair=(a, b))   <->   {"x": x, "pair_0": a, "pair_1": b}   and the nesting
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna.capture.model.structures import opened
from varuna.errors import CaptureError

LossChoice = int | str | Callable[[Any], Tensor] | None
"""Index, key or attribute of the loss among the outputs, or a function of them; None: found by itself."""


@dataclass(frozen=True)
class OutputStructure:
    """Nesting of a model's outputs, and those outputs that are not tensors."""

    spec: pytree.TreeSpec
    places: tuple[int | None, ...]  # index of the tensor of each leaf; None: a constant
    constants: tuple[object, ...]

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        constants = iter(self.constants)
        leaves = [next(constants) if place is None else tensors[place] for place in self.places]
        return pytree.tree_unflatten(leaves, self.spec)


class CallConvention:
    """Calls by keywords, for the loss."""

    key: Hashable = None  # equal for calls of the same form
    gradients: frozenset[str] = frozenset()  # inputs that get a gradient

    def __init__(self, loss: LossChoice = None) -> None:
        """`loss` chooses the loss among several outputs."""
        self._loss = loss

    def check(self, model: nn.Module, inputs: Mapping[str, object]) -> None:
        """Raise unless the inputs are valid keyword arguments of forward."""
        try:
            inspect.signature(model.forward).bind(**inputs)
        except TypeError as error:
            raise CaptureError(_cannot_call(model, f"the inputs {sorted(inputs)}", error)) from None
        except ValueError:  # no signature
            raise CaptureError(
                f"the forward of {type(model).__name__} is not a Python function, so it cannot be traced. "
                "Pass the module itself, without torch.jit.script or torch.jit.trace."
            ) from None

    @contextmanager
    def adapted(self, model: nn.Module, inputs: Mapping[str, object]) -> Iterator[None]:
        """Make `model(**inputs)` return the loss alone: what only other outputs need is not computed."""
        original = model.forward

        def forward(**given: Any) -> Any:
            return original(**given)

        with (
            model.register_forward_hook(lambda _module, _args, output: find_loss(output, self._loss)),
            patch.object(model, "forward", declaring(forward, inputs)),
        ):
            yield

    def structure(self) -> OutputStructure:
        """Return the structure of the last output of the adapted model."""
        return OutputStructure(pytree.tree_structure(0), (0,), ())


class StructuredCall(CallConvention):
    """Calls with any arguments, for all outputs."""

    def __init__(self, names: Sequence[str], spec: pytree.TreeSpec, gradients: frozenset[str]) -> None:
        self.names = tuple(names)
        self.gradients = gradients
        self.key = (self.names, str(spec), tuple(sorted(gradients)))
        self._spec = spec
        self._structure: OutputStructure | None = None

    @property
    def nesting(self) -> Any:
        """The arguments by name, with the flat name of each leaf in its place."""
        return pytree.tree_unflatten(list(self.names), self._spec)

    @classmethod
    def from_nesting(cls, names: Sequence[str], nesting: Any, gradients: frozenset[str]) -> StructuredCall:
        return cls(names, pytree.tree_structure(nesting), gradients)

    @classmethod
    def of(
        cls, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, grad_enabled: bool
    ) -> tuple[StructuredCall, dict[str, Any]]:
        """Return the form of a call, and its leaves by name."""
        try:
            bound = _signature(model).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(_cannot_call(model, "these arguments", error)) from None
        paths, spec = pytree.tree_flatten_with_path(opened(dict(bound.arguments)))
        leaves: dict[str, Any] = {}
        for path, leaf in paths:
            name = _identifier(path)
            while name in leaves:
                name += "_"
            leaves[name] = leaf
        tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
        gradients = frozenset(name for name, leaf in tensors.items() if grad_enabled and leaf.requires_grad)
        return cls(tuple(leaves), spec, gradients), leaves

    def check(self, model: nn.Module, inputs: Mapping[str, object]) -> None:
        assert tuple(inputs) == self.names

    @contextmanager
    def adapted(self, model: nn.Module, inputs: Mapping[str, object]) -> Iterator[None]:
        original = model.forward
        signature = inspect.signature(original)

        def forward(**leaves: Any) -> tuple[Tensor, ...]:
            bound = inspect.BoundArguments(
                signature, pytree.tree_unflatten([leaves[name] for name in self.names], self._spec)
            )
            return self._output_tensors(original(*bound.args, **bound.kwargs), set(map(id, leaves.values())))

        with patch.object(model, "forward", declaring(forward, inputs)):
            yield

    def structure(self) -> OutputStructure:
        assert self._structure is not None, "the model has not run yet"
        return self._structure

    def _output_tensors(self, output: Any, input_ids: set[int]) -> tuple[Tensor, ...]:
        leaves, spec = pytree.tree_flatten(opened(output))
        tensors: list[Tensor] = []
        places: list[int | None] = []
        constants: list[object] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                places.append(len(tensors))
                # An input or parameter that is returned becomes a value of its own, like all outputs.
                returned = id(leaf) in input_ids or isinstance(leaf, nn.Parameter)
                tensors.append(leaf.clone() if returned else leaf)
            elif leaf is None or isinstance(leaf, bool | int | float | str):
                places.append(None)
                constants.append(leaf)
            else:
                raise CaptureError(
                    f"the model's forward returned a {type(leaf).__name__}; expected tensors and constants "
                    "(None, bool, int, float, str) in tuples, lists, dicts or dataclasses. Return a tensor "
                    "in its place, or register the type with torch.utils._pytree.register_pytree_node."
                )
        if not tensors:
            raise CaptureError(
                f"the model's forward returned no tensor, but {in_words(output)}. Return at least one tensor."
            )
        self._structure = OutputStructure(spec, tuple(places), tuple(constants))
        return tuple(tensors)


def _cannot_call(model: nn.Module, arguments: str, error: TypeError) -> str:
    return (
        f"{type(model).__name__}.forward cannot be called with {arguments}: {error}. "
        f"Its signature is {inspect.signature(model.forward)}."
    )


def declaring(forward: Any, names: Iterable[str]) -> Any:
    """Set the signature of a function: torch.export matches its example with the declared arguments.

    Arguments that a model takes by `**kwargs` thus become inputs like any other.
    """
    forward.__signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    )
    return forward


_signatures: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()  # by method, for fast calls


def _signature(model: nn.Module) -> inspect.Signature:
    method = getattr(model.forward, "__func__", None)
    if method is None:
        return inspect.signature(model.forward)
    if method not in _signatures:
        _signatures[method] = inspect.signature(model.forward)
    return _signatures[method]


def _identifier(path: Sequence[Any]) -> str:
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    text = re.sub("[^0-9A-Za-z]", "_", "_".join(parts))
    return text if text.isidentifier() else f"_{text}"


def find_loss(output: Any, choice: LossChoice = None) -> Tensor:
    """Return the loss among a model's outputs: the chosen one, or the only one that can be it."""
    if callable(choice):
        loss = choice(output)
    elif choice is not None:
        loss = _item(output, choice)
    else:
        loss = _only_loss(output)
    if _is_loss(loss):
        return loss.reshape(()) if loss.dim() else loss
    chosen = "" if choice is None else f", and loss={choice!r} chooses {in_words(loss)} of it"
    raise CaptureError(
        f"the model's forward returned {in_words(output)}{chosen}; expected its loss, the mean over the "
        'batch as a floating-point scalar: the output itself, its first element, or its "loss" item or '
        "attribute. Compute the loss inside forward (Hugging Face models do so if you pass "
        "`labels`), or choose it with loss=, an index, a key, or a function of the output."
    )


def _is_loss(value: Any) -> bool:
    is_number = isinstance(value, Tensor) and all(isinstance(n, int) and n == 1 for n in value.shape)
    return is_number and value.is_floating_point()


def _item(output: Any, choice: int | str) -> Any:
    try:
        if isinstance(choice, str) and not isinstance(output, Mapping):
            return getattr(output, choice)
        return output[choice]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise CaptureError(
            f"the model's forward returned {in_words(output)}, which has no loss={choice!r} "
            f"({type(error).__name__}). Pass an index, a key, an attribute, or a function of the output."
        ) from None


def _only_loss(output: Any) -> Any:
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(output, Tensor) or _is_loss(named):
        return output if isinstance(output, Tensor) else named
    places: dict[int | str, Any] = {}
    if isinstance(output, Mapping):
        places = dict(output)
    elif isinstance(output, tuple | list):
        if output and _is_loss(output[0]):
            return output[0]
        places = dict(enumerate(output))
    elif is_dataclass(output):
        places = {field.name: getattr(output, field.name, None) for field in fields(output)}
    found = {place: value for place, value in places.items() if _is_loss(value)}
    trained = {place: value for place, value in found.items() if value.requires_grad} or found
    if len(trained) > 1:
        choices = " or ".join(f"loss={place!r}" for place in trained)
        raise CaptureError(
            f"the model's forward returned {in_words(output)}, with {len(trained)} scalars that may be its "
            f"loss. Choose one with {choices}, or pass a function of the output."
        )
    return next(iter(trained.values()), None)


def in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of " + (", ".join(map(str, value)) or "nothing")
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of " + (", ".join(in_words(item) for item in value) or "nothing")
    if is_dataclass(value) and not isinstance(value, type):
        return f"a {type(value).__name__} of " + ", ".join(field.name for field in fields(value))
    return f"a {type(value).__name__}"
