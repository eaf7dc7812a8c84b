"""Traces an operation once, and writes it down again where it comes again: a deep model repeats its layers.

The model's own code runs from its first line to its last. But of a call with arguments of the same shapes,
precisions and constants as an earlier one, torch would only find out the same again, in a millisecond or
two: here the nodes that the earlier call left are written down for the new tensors, and the results are made
after the earlier ones. Whatever is not surely the same is left to torch.

Such results differ from torch's own in that they are no views, share a storage, and have a stand-in for a
`grad_fn`. Where that could show (a model changes one in place, or takes it into a nested graph, or wants a
parameter whose cast autocast would have kept), `NotAsQuick` asks for a trace without repeats.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental.proxy_tensor import _ProxyTensor, get_proxy_mode, get_proxy_slot, set_proxy_slot
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode

from varuna.capture.trace.recorder import CHECKS

_PLAIN = (int, float, bool, complex, str, type(None), type(...), torch.dtype, torch.device)
_PLAIN_TOO = (torch.layout, torch.memory_format)
_FACTS = frozenset({"shape", "dtype", "device", "ndim", "requires_grad", "is_cuda"})


class CannotReuse(Exception):
    """The model does something that only torch's own results can answer for."""


class _Node(NamedTuple):
    """A node of an earlier call: its nodes by their number, tensors that were given as `_Given`."""

    target: Any
    args: Any
    kwargs: Any
    name: str
    meta: dict[str, Any]


class _Given(NamedTuple):
    number: int


class _Own(NamedTuple):
    number: int


class _Result(NamedTuple):
    node: int
    elem: Tensor  # on meta
    mode: FakeTensorMode
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True)
class _Earlier:
    nodes: Sequence[_Node]
    results: Sequence[_Result]
    kind: type | None  # of the results' sequence; None: there is one result


class _Left(NamedTuple):
    """To torch, each time."""

    changes: bool  # some of what it is given


class _GradientAnchor(torch.autograd.Function):
    """A tensor that has come from others, as far as one can see."""

    @staticmethod
    def forward(_ctx: Any, _anchor: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()


_stand: Any = super(torch.autograd.Function, _GradientAnchor).apply  # past the patched one


def _autocast() -> Any:
    """All that decides in which precision an operation runs."""
    if not torch._C._is_any_autocast_enabled():
        return None
    return tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
    )


class _Other(Exception):
    """An argument that a key cannot hold."""


class OperationCache(TorchFunctionMode):
    def __init__(self, line: Callable[[FrameType | None], str]) -> None:
        """`line` tells the model's line for a frame of the stack."""
        super().__init__()
        self._line = line
        self._known: dict[Any, _Earlier | _Left] = {}
        self._anchor = torch.zeros((), requires_grad=True)
        self._cast: dict[int, bool] = {}  # parameters seen under autocast: whether in a repeat
        self._tracer: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        owner = getattr(func, "__self__", None)
        if getattr(func, "__name__", "") == "__get__" and getattr(owner, "__name__", "") in _FACTS:
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            raise CannotReuse
        proxies = get_proxy_mode()
        if proxies is None or torch._C._functorch.peek_interpreter_stack():
            return func(*args, **kwargs)
        self._tracer = self._tracer or proxies.tracer
        tensors: list[Tensor] = []
        quiet = torch._C.DisableTorchFunction  # what is done here is none of the model's doing
        try:
            with quiet():
                key = (
                    func,
                    torch.is_grad_enabled(),
                    torch.get_default_dtype(),
                    _autocast(),
                    self._key((args, kwargs), tensors, {}),
                )
                earlier = self._known.get(key)
        except (_Other, TypeError):  # or it is not hashable
            return self._new(func, args, kwargs, None)
        if (
            not tensors
            or proxies.tracer is not self._tracer
            or self._was_cast(tensors, isinstance(earlier, _Earlier))
        ):
            return func(*args, **kwargs)
        if earlier is None:
            return self._new(func, args, kwargs, (key, tensors))
        if isinstance(earlier, _Left):
            if earlier.changes and any(getattr(tensor, "_repeated", False) for tensor in tensors):
                raise CannotReuse
            return func(*args, **kwargs)
        with quiet():
            return self._again(earlier, tensors)

    def _was_cast(self, tensors: Sequence[Tensor], is_repeat: bool) -> bool:
        """Whether a parameter may be in the cache of autocast, which casts each one once."""
        if not (torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled()):
            return False
        with torch._C.DisableTorchFunction():
            parameters = [tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
        known = [self._cast[id(parameter)] for parameter in parameters if id(parameter) in self._cast]
        if any(known):
            raise CannotReuse  # its cast was written down, but torch does not know it
        for parameter in parameters:
            self._cast.setdefault(id(parameter), is_repeat)
        return bool(known)

    # ------------------------------------------------------------ what a call depends on

    def _key(self, arg: Any, tensors: list[Tensor], seen: dict[int, int]) -> Any:
        kind = type(arg)
        if kind in _PLAIN:
            return kind, arg
        if kind is tuple or kind is list:
            return kind, *[self._key(item, tensors, seen) for item in arg]
        if kind is dict:
            return kind, *[(name, self._key(item, tensors, seen)) for name, item in arg.items()]
        if isinstance(arg, FakeTensor):
            if id(arg) in seen:
                return "again", seen[id(arg)]
            seen[id(arg)] = len(tensors)
            tensors.append(arg)
            if arg.layout != torch.strided or arg.constant is not None:
                raise _Other
            sizes = (*arg.shape, *arg.stride(), arg.storage_offset())
            return (
                arg.dtype,
                arg.fake_device,
                arg.requires_grad,
                arg.is_conj(),
                arg.is_neg(),
                *[size if type(size) is int else size.node.expr for size in sizes],
            )
        if isinstance(arg, torch.SymInt):
            return torch.SymInt, arg.node.expr
        if kind is slice:
            return kind, *[self._key(item, tensors, seen) for item in (arg.start, arg.stop, arg.step)]
        if kind is torch.Size:
            return kind, *[self._key(item, tensors, seen) for item in arg]
        if isinstance(arg, _PLAIN_TOO):
            return kind, arg
        raise _Other

    # ------------------------------------------------------------ for the first time

    def _new(self, func: Any, args: Any, kwargs: Any, known: tuple[Any, list[Tensor]] | None) -> Any:
        graph = self._tracer.graph
        last = graph._root._prev
        result = func(*args, **kwargs)
        nodes = []
        node = last._next
        while node is not graph._root:
            nodes.append(node)
            node = node._next
        changes = any(isinstance(n.target, OpOverload) and n.target._schema.is_mutable for n in nodes)
        if changes:
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            if any(getattr(leaf, "_repeated", False) for leaf in leaves if isinstance(leaf, Tensor)):
                raise CannotReuse
        if known is not None:
            key, tensors = known
            with torch._C.DisableTorchFunction():
                earlier = None if changes else self._remember(result, nodes, tensors)
            self._known[key] = earlier or _Left(changes)
        return result

    def _remember(self, result: Any, nodes: Sequence[fx.Node], tensors: Sequence[Tensor]) -> _Earlier | None:
        """None where it cannot be written down again."""
        kind = None if isinstance(result, Tensor) else type(result)
        if kind is not None and not issubclass(kind, tuple | list):
            return None
        found: Sequence[Any] = [result] if kind is None else list(result)
        if not found or not all(isinstance(tensor, FakeTensor) for tensor in found):
            return None
        given: dict[fx.Node, Any] = {}
        for index, tensor in enumerate(tensors):
            slot = self._slot(tensor)
            if slot is None or slot.constant is not None:
                return None
            given[slot.proxy.node] = _Given(index)
        own: dict[fx.Node, int] = {}
        written: list[_Node] = []
        for node in nodes:
            value = node.meta.get("val")
            leaves = torch.utils._pytree.tree_leaves(value)
            if node.target in CHECKS:
                continue
            if node.op != "call_function" or not leaves or free_unbacked_symbols(leaves):
                return None
            if all(isinstance(leaf, int | torch.SymInt) for leaf in leaves):
                continue  # equal sizes are one, whatever they were read off
            for arg in node.all_input_nodes:
                is_value = any(
                    isinstance(v, Tensor) for v in torch.utils._pytree.tree_leaves(arg.meta.get("val"))
                )
                if arg not in given and arg not in own and (is_value or arg.op != "call_function"):
                    return None

            def place(arg: fx.Node) -> Any:
                return _Own(own[arg]) if arg in own else given.get(arg, arg)

            args, kwargs = fx.node.map_aggregate(
                (node.args, node.kwargs), lambda arg: place(arg) if isinstance(arg, fx.Node) else arg
            )
            own[node] = len(written)
            written.append(_Node(node.target, args, kwargs, node.name, dict(node.meta)))
        results = []
        for tensor in found:
            slot = self._slot(tensor)
            if (
                slot is None
                or slot.constant is not None
                or slot.proxy.node not in own
                or tensor.constant is not None
            ):
                return None
            if any(tensor is argument for argument in tensors) or tensor.layout != torch.strided:
                return None
            with torch.no_grad(), in_kernel_invocation_manager(tensor.fake_mode):
                elem = torch.ops.aten.alias.default(tensor)
            if type(elem) is not Tensor:
                return None
            results.append(
                _Result(
                    own[slot.proxy.node], elem, tensor.fake_mode, tensor.fake_device, tensor.requires_grad
                )
            )
        return _Earlier(written, results, kind)

    def _slot(self, tensor: Tensor) -> Any:
        return get_proxy_slot(tensor, self._tracer, None)

    # ------------------------------------------------------------ and again

    def _again(self, earlier: _Earlier, tensors: Sequence[Tensor]) -> Any:
        tracer = self._tracer
        given = [self._slot(tensor).proxy.node for tensor in tensors]
        stack = {
            key: (path, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")
            for key, (path, kind) in tracer.module_stack.items()
        }
        line = self._line(sys._getframe(2))
        made: list[fx.Node] = []

        def node_of(arg: Any) -> Any:
            if type(arg) is _Given:
                return given[arg.number]
            return made[arg.number] if type(arg) is _Own else arg

        for node in earlier.nodes:
            args, kwargs = _filled((node.args, node.kwargs), node_of)
            new = tracer.graph.create_node("call_function", node.target, args, kwargs, node.name)
            new.meta = {**node.meta, "nn_module_stack": dict(stack), "stack_trace": line}
            made.append(new)
        results = [self._result(result, made[result.node]) for result in earlier.results]
        if earlier.kind is None:
            return results[0]
        return earlier.kind(results)

    def _result(self, result: _Result, node: fx.Node) -> Any:
        def make() -> Tensor:
            return FakeTensor(result.mode, result.elem, result.device)

        tensor: Any = make() if not result.requires_grad else _stand(self._anchor, make)
        tensor._repeated = True
        set_proxy_slot(tensor, self._tracer, _ProxyTensor(fx.Proxy(node, self._tracer), None))
        return tensor


def _filled(arg: Any, node_of: Callable[[Any], Any]) -> Any:
    kind = type(arg)
    if kind is _Given or kind is _Own:
        return node_of(arg)
    if isinstance(arg, tuple):
        return tuple(_filled(item, node_of) for item in arg)
    if isinstance(arg, list):
        return [_filled(item, node_of) for item in arg]
    if isinstance(arg, dict):
        return {name: _filled(item, node_of) for name, item in arg.items()}
    if kind is slice:
        return slice(*[_filled(item, node_of) for item in (arg.start, arg.stop, arg.step)])
    return arg
