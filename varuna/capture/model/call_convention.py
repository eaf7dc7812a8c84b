"""How a model is called, and what of its answer is wanted.

`Varuna` calls a model by keywords and wants its loss. `Structured` calls it with any arguments, whose
tensors are told apart by flat names, and wants all that it gives:

    model(x, pair=(a, b))   ◄──►   {"x": x, "pair_0": a, "pair_1": b}   and how they are nested
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna.errors import CaptureError


class CallConvention:
    """By keywords, for the loss."""

    key: Hashable = None  # equal where models are called alike
    gradients: frozenset[str] = frozenset()  # inputs that a gradient goes back to

    def check(self, model: nn.Module, inputs: Mapping[str, object]) -> None:
        """The inputs are the forward's keyword arguments: all that it needs, none that it does not know."""
        try:
            inspect.signature(model.forward).bind(**inputs)
        except TypeError as error:
            raise CaptureError(
                f"{type(model).__name__}.forward cannot be called with the inputs {sorted(inputs)}: {error} "
                f"(its signature is {inspect.signature(model.forward)})"
            ) from None

    @contextmanager
    def adapted(self, model: nn.Module, inputs: Mapping[str, object]) -> Iterator[None]:
        """Within, `model(**inputs)` gives the tensors that are wanted.

        The loss alone leaves the graph: what only other outputs need is not computed.
        """
        hook = model.register_forward_hook(lambda _module, _args, output: find_loss(output))
        original = model.forward

        def forward(**given: Any) -> Any:
            return original(**given)

        model.forward = _declaring(forward, inputs)
        try:
            yield
        finally:
            hook.remove()
            model.forward = original

    def structure(self) -> OutputStructure:
        """Of what the model gave when it was last run adapted."""
        return OutputStructure(pytree.tree_structure(0), (0,), ())


@dataclass(frozen=True)
class OutputStructure:
    """How a model's results are nested, and what in them is no tensor."""

    spec: pytree.TreeSpec
    places: tuple[int | None, ...]  # of each leaf: which tensor it is; None: a constant
    constants: tuple[object, ...]

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        constants = iter(self.constants)
        leaves = [next(constants) if place is None else tensors[place] for place in self.places]
        return pytree.tree_unflatten(leaves, self.spec)


class StructuredCall(CallConvention):
    """With any arguments, for all that it gives."""

    def __init__(self, names: Sequence[str], spec: pytree.TreeSpec, gradients: frozenset[str]) -> None:
        self.names = tuple(names)
        self.gradients = gradients
        self.key = (self.names, str(spec), tuple(sorted(gradients)))
        self._spec = spec
        self._structure: OutputStructure | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Nested as the arguments are: torch's own descriptions of nesting do not travel well.
        return _nested, (self.names, pytree.tree_unflatten(list(self.names), self._spec), self.gradients)

    @classmethod
    def of(
        cls, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, grad_enabled: bool
    ) -> tuple[StructuredCall, dict[str, Any]]:
        """How this call is made, and its leaves by name. `keeps`: whether there may be a backward."""
        try:
            bound = _signature(model).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"{type(model).__name__}.forward cannot be called so: {error} "
                f"(its signature is {inspect.signature(model.forward)})"
            ) from None
        paths, spec = pytree.tree_flatten_with_path(dict(bound.arguments))
        leaves: dict[str, Any] = {}
        for path, leaf in paths:
            name = _identifier(path)
            while name in leaves:
                name += "_"
            leaves[name] = leaf
        tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
        back_to = (
            {name for name, tensor in tensors.items() if tensor.requires_grad} if grad_enabled else set()
        )
        return cls(tuple(leaves), spec, frozenset(back_to)), leaves

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
            return self._taken_apart(original(*bound.args, **bound.kwargs), set(map(id, leaves.values())))

        model.forward = _declaring(forward, inputs)
        try:
            yield
        finally:
            model.forward = original

    def structure(self) -> OutputStructure:
        assert self._structure is not None, "the model has not been run yet"
        return self._structure

    def _taken_apart(self, output: Any, given: set[int]) -> tuple[Tensor, ...]:
        leaves, spec = pytree.tree_flatten(output)
        tensors: list[Tensor] = []
        places: list[int | None] = []
        constants: list[object] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                places.append(len(tensors))
                # What is handed through is a value of its own, as all results are.
                tensors.append(leaf.clone() if id(leaf) in given or isinstance(leaf, nn.Parameter) else leaf)
            elif leaf is None or isinstance(leaf, bool | int | float | str):
                places.append(None)
                constants.append(leaf)
            else:
                raise CaptureError(
                    f"the model's forward returned a {type(leaf).__name__}; expected tensors and constants "
                    "(None, bool, int, float, str) in tuples, lists, dicts, or types that torch's pytree "
                    "knows (return a tensor in its place, or register the type with torch.utils._pytree)"
                )
        if not tensors:
            raise CaptureError(f"the model's forward returned no tensor, but {in_words(output)}")
        self._structure = OutputStructure(spec, tuple(places), tuple(constants))
        return tuple(tensors)


def _declaring(forward: Any, names: Iterable[str]) -> Any:
    """The function, with these arguments: torch.export matches its example with what a forward declares.

    So what a model takes by `**kwargs`, as Hugging Face's do, is an input like any other.
    """
    forward.__signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    )
    return forward


_signatures: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()  # of methods: each call asks


def _signature(model: nn.Module) -> inspect.Signature:
    method = getattr(model.forward, "__func__", None)
    if method is None:
        return inspect.signature(model.forward)
    if method not in _signatures:
        _signatures[method] = inspect.signature(model.forward)
    return _signatures[method]


def _nested(names: Sequence[str], nesting: Any, gradients: frozenset[str]) -> StructuredCall:
    return StructuredCall(names, pytree.tree_structure(nesting), gradients)


def _identifier(path: Sequence[Any]) -> str:
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    text = "_".join(parts)
    text = "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in text)
    return text if text.isidentifier() else f"_{text}"


def find_loss(output: Any) -> Tensor:
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, tuple | list) and not hasattr(output, "loss"):
        loss = output[0] if output else None
    elif not isinstance(output, Tensor):
        loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point():
        return loss
    raise CaptureError(
        f"the model's forward returned {in_words(output)}; expected its loss, a floating-point "
        "tensor with no "
        "dimension that is the mean over the batch: as the output itself, as its first element, or as "
        '`.loss` / `["loss"]` (compute the loss inside forward; Hugging Face models do so when '
        "given `labels`)"
    )


def in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of " + (", ".join(map(str, value)) or "nothing")
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of " + (", ".join(in_words(item) for item in value) or "nothing")
    return f"a {type(value).__name__}"
