"""`plain_randomness`: makes a plain model in one process draw the same random numbers as the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from varuna.capture.graph import randomness
from varuna.capture.trace import patches
from varuna.types import Work

_COMPOSITE: set[Any] = {
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
"""Python functions that call the operation which draws."""
_FACTORIES = ("rand", "randn", "randint", "normal")


class plain_randomness(TorchFunctionMode):
    """Seeds every random operation by (seed, step, sample, its number in the order of calls).

        with plain_randomness(seed=0, step=3, batch_size=len(x)):
            loss = model(x)

    Use a new one for each forward pass. A value belongs to the samples along its first dimension that equals
    the batch size, or else the first that is a multiple of it; all samples share any other value. For an
    operation on several tensors the first one decides, and those with the same size there follow it.
    """

    running: ClassVar[list[plain_randomness]] = []

    def __init__(self, *, seed: int, step: int, batch_size: int, first_sample: int = 0) -> None:
        super().__init__()
        self._work = Work(seed=seed, step=step, first_sample=first_sample)
        self._batch_size = batch_size
        self._ordinals = [0]
        self._draws: Mapping[int, randomness.DrawDims] = {}  # by ordinal; other draws go by sizes
        self._known: randomness.DrawDims | None = None  # of the current draw

    @classmethod
    def of(
        cls,
        work: Work,
        *,
        batch_size: int,
        first_ordinal: int = 0,
        draws: Mapping[int, randomness.DrawDims] | None = None,
    ) -> plain_randomness:
        """`draws` says where the samples are, as a capture found them; sizes alone may mislead."""
        mode = cls(seed=work.seed, step=work.step, batch_size=batch_size)
        mode._work, mode._ordinals, mode._draws = work, [first_ordinal], draws or {}
        return mode

    def __enter__(self) -> plain_randomness:
        if self not in plain_randomness.running:
            plain_randomness.running.append(self)
            self._depth = 0
            self._patches = ExitStack()
            self._patches.enter_context(patches.disabled_checkpointing(run_once))
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
        """Number the draws inside an opaque module separately; the module itself takes one ordinal."""
        self._ordinals.append(self._next() << 32)

    def leave_leaf(self) -> None:
        """End what `enter_leaf` began."""
        self._ordinals.pop()

    def _next(self) -> int:
        self._ordinals[-1] += 1
        return self._ordinals[-1] - 1

    def __torch_function__(
        self, func: Callable[..., Any], types_: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _COMPOSITE:
            with self:
                return patches.without_overrides(func)(*args, **kwargs)
        if getattr(func, "__name__", "") == "ctc_loss":
            self._next()  # a capture keeps it eager, as an opaque module
        operation = _random_operation(func, args)
        own_generator = kwargs.get("generator") is not None
        if operation is None or own_generator or not randomness.draws(operation, args, kwargs):
            return func(*args, **kwargs)
        ordinal = self._next()
        self._known = self._draws.get(ordinal) if len(self._ordinals) == 1 else None  # not in opaque modules
        return self._draw(func, operation, list(args), dict(kwargs), ordinal)

    def _draw(self, func: Any, operation: Any, args: list[Any], kwargs: dict[str, Any], ordinal: int) -> Any:
        name = func.__name__
        if name in ("dropout", "dropout_"):
            bound = randomness.bound(operation, args, kwargs)
            x = bound["input" if "input" in bound else "self"]
            dim, per_sample = self._result_dims([x.shape])[0] or (None, 0)
            y = randomness.dropout(x, bound["p"], self._work, ordinal, dim, per_sample)
            return x.copy_(y) if name == "dropout_" else y
        if operation._overloadname == "data":
            raise RuntimeError(
                f"{name} over packed sequences draws one dropout mask for all samples, so it would change "
                "with the micro-batch size. Make the recurrent module with dropout=0, and use nn.Dropout."
            )
        leaves = pytree.tree_leaves((args, kwargs))
        if name in _FACTORIES and not any(isinstance(leaf, Tensor) for leaf in leaves):
            return self._make(func, args, kwargs, ordinal)
        argument_dims = self._argument_dims(leaves, name)
        batched = any(dim is not None for dim in argument_dims)
        result_dims = []
        if batched:  # run the function on `meta` to find the sample dimensions of its results
            meta_args, meta_kwargs = pytree.tree_map_only(Tensor, _on_meta, (args, kwargs))
            try:
                with torch.no_grad():
                    results = pytree.tree_leaves(func(*meta_args, **meta_kwargs))
                result_dims = self._result_dims([leaf.shape for leaf in results])
            except RuntimeError:  # it reads values, such as torch.multinomial: one draw for all samples
                result_dims = [None]
        options: dict[str, Any] = {
            "parts": argument_dims,
            "results": None if None in result_dims else result_dims,
            "num_samples": self._batch_size if batched else None,
        }
        if name.endswith("_"):
            return args[0].copy_(randomness.draw_in_place(func, args, kwargs, self._work, ordinal, **options))
        return randomness.draw(func, args, kwargs, self._work, ordinal, **options)

    def _argument_dims(self, leaves: list[Any], name: str) -> list[randomness.SampleDim | None]:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self._known is not None and len(self._known.arguments) == len(tensors):
            given = self._at(self._known.arguments, [tensor.shape for tensor in tensors])
            known = {id(tensor): dim for tensor, dim in zip(tensors, given, strict=True)}
            return [known[id(leaf)] if isinstance(leaf, Tensor) else None for leaf in leaves]
        first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
        shape = () if first is None else first.shape[:-1] if name == "multinomial" else first.shape
        found = sample_dim_by_size(shape, self._batch_size)  # the last dimension of a multinomial: categories
        if first is None or found is None:
            return [None] * len(leaves)
        dim, size = found[0], first.shape[found[0]]
        return [
            found if isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == size else None
            for leaf in leaves
        ]

    def _make(self, func: Any, args: list[Any], kwargs: dict[str, Any], ordinal: int) -> Any:
        """Draw a new tensor, as in torch.rand(b, 4) or torch.randint(9, (b,)), one sample at a time."""
        shape = list(func(*args, **{**kwargs, "device": "meta"}).shape)
        found = self._result_dims([shape])[0]
        before = args[: 0 if func.__name__ in ("rand", "randn") else 2]
        while before and not isinstance(before[-1], int | float):
            before.pop()
        options = {key: value for key, value in kwargs.items() if key != "size"}
        num_samples = None
        if found is not None:
            shape[found[0]], num_samples = found[1], self._batch_size
        args = [*before, shape]
        parts = [None] * len(pytree.tree_leaves((args, options)))
        return randomness.draw(
            func, args, options, self._work, ordinal, parts=parts, results=[found], num_samples=num_samples
        )

    def _result_dims(self, shapes: Sequence[Sequence[int]]) -> list[randomness.SampleDim | None]:
        if self._known is not None and len(self._known.results) == len(shapes):
            return self._at(self._known.results, shapes)
        return [sample_dim_by_size(shape, self._batch_size) for shape in shapes]

    def _at(
        self, dims: Sequence[int | None], shapes: Sequence[Sequence[int]]
    ) -> list[randomness.SampleDim | None]:
        """Return the places of samples in values of these shapes; a value of one row is for all samples."""
        found: list[randomness.SampleDim | None] = []
        for dim, shape in zip(dims, shapes, strict=True):
            if dim is None or (dim < len(shape) and shape[dim] == 1 != self._batch_size):
                found.append(None)
            elif dim < len(shape) and shape[dim] % self._batch_size == 0:
                found.append((dim, shape[dim] // self._batch_size))
            else:  # the model draws other values than when it was captured
                return [sample_dim_by_size(own, self._batch_size) for own in shapes]
        return found


def sample_dim_by_size(shape: Sequence[int], batch_size: int) -> randomness.SampleDim | None:
    """Return the dimension of the samples and its size for one sample, as sizes suggest it."""
    if batch_size in shape:
        return list(shape).index(batch_size), 1
    multiples = [i for i, size in enumerate(shape) if size and size % batch_size == 0]
    return (multiples[0], shape[multiples[0]] // batch_size) if multiples else None


def _on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor's shape in one dtype for all: autocast, which would make them equal, skips `meta`."""
    return tensor.to("meta", torch.float32 if tensor.is_floating_point() else tensor.dtype)


def run_once(function: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """Run a function once, as reentrant checkpointing does: without gradients if no operand has one."""
    needs_grad = any(isinstance(operand, Tensor) and operand.requires_grad for operand in operands)
    with nullcontext() if needs_grad else torch.no_grad():
        return function(*operands)


def _random_operation(func: Any, args: Sequence[Any]) -> Any:
    """Return the random operation of the graph that a torch function calls, or None."""
    packet: Any = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    if not hasattr(packet, "overloads"):
        return None
    name = "input" if "input" in packet.overloads() and func.__name__ != "dropout" else packet.overloads()[0]
    if "data" in packet.overloads() and isinstance(args[3], list | tuple):
        name = "data"  # a recurrent operation on packed sequences
    operation = getattr(packet, name)
    return operation if torch.Tag.nondeterministic_seeded in operation.tags else None
