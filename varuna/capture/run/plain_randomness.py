"""The same draws in one plain process: under `plain_randomness` a model drops what the pipeline drops."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar
from unittest.mock import patch

import msgspec
import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from varuna.capture.graph import randomness as random
from varuna.types import Work

_GONE_THROUGH: set[Any] = {
    functional.dropout,
    functional.alpha_dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.feature_alpha_dropout,
    functional.rrelu,
    functional.gumbel_softmax,
    functional.multi_head_attention_forward,
}
_FACTORIES = ("rand", "randn", "randint", "normal")


class plain_randomness(TorchFunctionMode):
    """Seeds every random operation by (seed, step, sample, its place in the order of calls).

        with plain_randomness(seed=0, step=3, batch_size=len(x)):
            loss = model(x)

    Use one for each forward pass. A value belongs to the samples along the first dimension that is
    the batch size, or else the first that is a multiple of it; any other is shared by all samples.
    Where an operation takes several tensors the first decides, and those that agree with it follow.
    """

    running: ClassVar[list[plain_randomness]] = []

    def __init__(self, *, seed: int, step: int, batch_size: int, first_sample: int = 0) -> None:
        super().__init__()
        self._work = Work(seed=seed, step=step, first_sample=first_sample)
        self._batch_size = batch_size
        self._ordinals = [0]
        self._shared: frozenset[int] = frozenset()  # the ordinals of draws that all samples share
        self._is_shared = False  # the draw at hand

    @classmethod
    def of(cls, work: Work, *, batch_size: int, first_ordinal: int) -> plain_randomness:
        mode = cls(seed=work.seed, step=work.step, batch_size=batch_size, first_sample=work.first_sample)
        mode._work = msgspec.structs.replace(mode._work, spans=work.spans)
        mode._ordinals = [first_ordinal]
        return mode

    def with_shared_draws(self, captured_shared: frozenset[int]) -> plain_randomness:
        """The same, with what a capture knows of the model's draws, where a size alone might deceive."""
        self._shared = captured_shared
        return self

    def __enter__(self) -> plain_randomness:
        if self not in plain_randomness.running:
            plain_randomness.running.append(self)
            self._depth = 0
            self._patches = ExitStack()
            self._patches.enter_context(_without_checkpointing())
        self._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if not self._depth:
            plain_randomness.running.remove(self)
            self._patches.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def enter_leaf(self) -> None:
        """An opaque module takes one ordinal; what it draws inside is numbered apart from the rest."""
        self._ordinals.append(self._next() << 32)

    def leave_leaf(self) -> None:
        self._ordinals.pop()

    def _next(self) -> int:
        self._ordinals[-1] += 1
        return self._ordinals[-1] - 1

    def __torch_function__(
        self, func: Callable[..., Any], types_: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _GONE_THROUGH:
            # These are written in Python: the operation that they draw by is further in.
            with self:
                return _unguarded(func)(*args, **kwargs)
        operation = _random_operation(func)
        own_generator = kwargs.get("generator") is not None  # whoever brings one draws apart from the model
        if operation is None or own_generator or not random.draws(operation, args, kwargs):
            return func(*args, **kwargs)
        ordinal = self._next()
        self._is_shared = ordinal in self._shared
        return self._draw(func, operation, list(args), dict(kwargs), ordinal)

    def _draw(self, func: Any, operation: Any, args: list[Any], kwargs: dict[str, Any], ordinal: int) -> Any:
        name = func.__name__
        if name in ("dropout", "dropout_"):
            bound = random.bound(operation, args, kwargs)
            x = bound["input" if "input" in bound else "self"]
            dim, per_sample = self._part(x.shape) or (None, 0)
            y = random.dropout(x, bound["p"], self._work, ordinal, dim, per_sample)
            return x.copy_(y) if name == "dropout_" else y
        leaves = pytree.tree_leaves((args, kwargs))
        if name in _FACTORIES and not any(isinstance(leaf, Tensor) for leaf in leaves):
            return self._make(func, args, kwargs, ordinal)
        parts = self._parts(leaves)
        batched = any(part is not None for part in parts)
        results = self._results(func, args, kwargs) if batched else []
        apart = None if any(part is None for part in results) else results
        how: dict[str, Any] = {
            "parts": parts,
            "results": apart,
            "num_samples": self._batch_size if batched else None,
        }
        if name.endswith("_"):
            return args[0].copy_(random.draw_in_place(func, args, kwargs, self._work, ordinal, **how))
        return random.draw(func, args, kwargs, self._work, ordinal, **how)

    def _parts(self, leaves: list[Any]) -> list[random.Part | None]:
        first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
        part = None if first is None else self._part(first.shape)
        if first is None or part is None:
            return [None] * len(leaves)
        dim, size = part[0], first.shape[part[0]]
        return [
            part if isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == size else None
            for leaf in leaves
        ]

    def _make(self, func: Any, args: list[Any], kwargs: dict[str, Any], ordinal: int) -> Any:
        """torch.rand(b, 4), torch.randint(9, (b,)): the size says what belongs to whom."""
        shape = list(func(*args, **{**kwargs, "device": "meta"}).shape)
        part = self._part(shape)
        before = args[: 0 if func.__name__ in ("rand", "randn") else 2]
        while before and not isinstance(before[-1], int | float):
            before.pop()
        options = {key: value for key, value in kwargs.items() if key != "size"}
        size = [[part[1] if part is not None and i == part[0] else n for i, n in enumerate(shape)]]
        count = None if part is None else self._batch_size
        parts = [None] * len(pytree.tree_leaves((before + size, options)))
        return random.draw(
            func, before + size, options, self._work, ordinal, parts=parts, results=[part], num_samples=count
        )

    def _results(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> list[random.Part | None]:
        """How what comes out belongs to the samples, found without values."""

        def to_meta(leaf: Any) -> Any:
            return torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf

        meta_args, meta_kwargs = pytree.tree_map(to_meta, (args, kwargs))
        with torch.no_grad():
            return [self._part(leaf.shape) for leaf in pytree.tree_leaves(func(*meta_args, **meta_kwargs))]

    def _part(self, shape: Sequence[int]) -> random.Part | None:
        if self._is_shared:
            return None
        for i, size in enumerate(shape):
            if size == self._batch_size:
                return i, 1
        for i, size in enumerate(shape):
            if size and size % self._batch_size == 0:
                return i, size // self._batch_size
        return None


def run_once(function: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """What torch.utils.checkpoint with use_reentrant=True gives, but for running it again: where none of the
    operands takes a gradient nothing within gets one."""
    takes_gradient = any(isinstance(operand, Tensor) and operand.requires_grad for operand in operands)
    with nullcontext() if takes_gradient else torch.no_grad():
        return function(*operands)


@contextmanager
def _without_checkpointing() -> Iterator[None]:
    """torch.utils.checkpoint runs a part again in the backward, where no mode is on to draw the same: within,
    a part that is to be run again keeps what the backward needs instead."""

    def run(_cls: Any, function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        return run_once(function, args)

    def nothing_again(*_args: Any, **_kwargs: Any) -> Iterator[None]:
        yield

    with (
        patch.object(checkpoint.CheckpointFunction, "apply", classmethod(run)),
        patch.object(checkpoint, "_checkpoint_without_reentrant_generator", nothing_again),
    ):
        yield


def _random_operation(func: Any) -> Any:
    """The operation of the graph that a function of torch stands for, where it may draw."""
    packet: Any = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    if not hasattr(packet, "overloads"):
        return None
    name = "input" if "input" in packet.overloads() and func.__name__ != "dropout" else packet.overloads()[0]
    operation = getattr(packet, name)
    return operation if torch.Tag.nondeterministic_seeded in operation.tags else None


_unguarded_functions: dict[types.FunctionType, types.FunctionType] = {}


def _unguarded(function: Any) -> types.FunctionType:
    """A function of torch.nn.functional that does not ask for overrides first: we are the override."""
    if function not in _unguarded_functions:
        blind = {
            name: lambda *_: False for name in function.__globals__ if name.startswith("has_torch_function")
        }
        copy = types.FunctionType(
            function.__code__,
            {**function.__globals__, **blind},
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        _unguarded_functions[function] = copy
    return _unguarded_functions[function]
