"""Cache of traced operations: a deep model repeats its layers, and each operation is traced once.

The model's own code runs from its first line to its last. But for a call with the same function, shapes,
dtypes and constants as an earlier one, torch would only compute the same nodes again, in 1 to 2 ms. The
cache instead copies the nodes of the earlier call for the new tensors, and makes results like the earlier
ones. A call that may differ is left to torch.

Copied results differ from torch's own: they are not views, share a storage, and have a substitute for a
`grad_fn`. `CannotReuse` requests a trace without the cache where that would show: the model changes one in
place, passes it to a nested graph, or uses a parameter that autocast would have cached.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental.proxy_tensor import _ProxyTensor, get_proxy_mode, get_proxy_slot, set_proxy_slot
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from varuna.capture.trace.recorder import CHECKS

_CONSTANTS = {int, float, bool, complex, str, type(None), type(...)} | {
    *(torch.dtype, torch.device, torch.layout, torch.memory_format)
}
_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "requires_grad", "is_cuda"})


class CannotReuse(Exception):
    """The model does something that needs torch's own results."""


class _Unhashable(Exception):
    """A key cannot hold this argument."""


@dataclass(frozen=True)
class _NodeRef:
    """Refers to the node of a call's tensor, or to a node that the call itself made."""

    is_input: bool
    number: int


class _CachedNode(NamedTuple):
    target: Any
    args: Any  # with _NodeRef in place of nodes
    kwargs: Any
    name: str
    meta: dict[str, Any]


class _CachedResult(NamedTuple):
    node: int
    elem: Tensor  # on meta
    mode: FakeTensorMode
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True)
class _CachedCall:
    nodes: Sequence[_CachedNode]
    results: Sequence[_CachedResult]
    sequence: type | None  # type of the results' sequence; None: a single result


class _GradientAnchor(torch.autograd.Function):
    """Gives a tensor a grad_fn."""

    @staticmethod
    def forward(_ctx: Any, _anchor: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()


# The apply of the base class, which patches.function_apply does not replace.
_with_grad_fn: Any = super(torch.autograd.Function, _GradientAnchor).apply


class OperationCache(TorchFunctionMode):
    def __init__(self, line: Callable[[FrameType | None], str]) -> None:
        """`line` returns the model's line for a stack frame."""
        super().__init__()
        self._line = line
        # A bool stands for a call that torch must trace every time: whether it changes some argument.
        self._known: dict[Any, _CachedCall | bool] = {}
        self._anchor = torch.zeros((), requires_grad=True)
        self._autocast_parameters: dict[int, bool] = {}  # by id: first used under autocast in a reused call
        self._tracer: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        owner = getattr(func, "__self__", None)
        if getattr(func, "__name__", "") == "__get__" and getattr(owner, "__name__", "") in _ATTRIBUTES:
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            raise CannotReuse
        proxies = get_proxy_mode()
        if proxies is None or torch._C._functorch.peek_interpreter_stack():
            return func(*args, **kwargs)
        self._tracer = self._tracer or proxies.tracer
        tensors: list[Tensor] = []
        try:
            with torch._C.DisableTorchFunction():
                key = (
                    func,
                    torch.is_grad_enabled(),
                    torch.get_default_dtype(),
                    *[(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")],
                    _key((args, kwargs), tensors, {}),
                )
                earlier = self._known.get(key)
        except (_Unhashable, TypeError):
            return self._traced(func, args, kwargs, None)
        reusable = isinstance(earlier, _CachedCall)
        if not tensors or proxies.tracer is not self._tracer or self._in_autocast_cache(tensors, reusable):
            return func(*args, **kwargs)
        if earlier is None:
            return self._traced(func, args, kwargs, (key, tensors))
        if isinstance(earlier, bool):
            if earlier and any(getattr(tensor, "_reused", False) for tensor in tensors):
                raise CannotReuse
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return self._reused(earlier, tensors)

    def _in_autocast_cache(self, tensors: Sequence[Tensor], reusable: bool) -> bool:
        """Return whether autocast, which casts each parameter once, may have cached one of the tensors."""
        if not (torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled()):
            return False
        with torch._C.DisableTorchFunction():
            parameters = [tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
        seen = self._autocast_parameters
        known = [seen[id(parameter)] for parameter in parameters if id(parameter) in seen]
        if any(known):
            raise CannotReuse  # the graph holds its cast, but torch's cache does not
        for parameter in parameters:
            seen.setdefault(id(parameter), reusable)
        return bool(known)

    def _traced(self, func: Any, args: Any, kwargs: Any, known: tuple[Any, list[Tensor]] | None) -> Any:
        graph = self._tracer.graph
        last = next(iter(reversed(graph.nodes)), None)  # torch 2.11 has no iterator there
        result = func(*args, **kwargs)
        nodes = list(takewhile(lambda node: node is not last, reversed(graph.nodes)))[::-1]
        in_place = any(isinstance(n.target, OpOverload) and n.target._schema.is_mutable for n in nodes)
        if in_place:
            leaves = tree_leaves((args, kwargs))
            if any(getattr(leaf, "_reused", False) for leaf in leaves if isinstance(leaf, Tensor)):
                raise CannotReuse
        if known is not None:
            key, tensors = known
            with torch._C.DisableTorchFunction():
                cached = None if in_place else self._cached(result, nodes, tensors)
            self._known[key] = cached or in_place
        return result

    def _cached(self, result: Any, nodes: Sequence[fx.Node], tensors: Sequence[Tensor]) -> _CachedCall | None:
        """Return what is needed to repeat a call; None if it cannot be repeated."""
        sequence = None if isinstance(result, Tensor) else type(result)
        if sequence is not None and not issubclass(sequence, tuple | list):
            return None
        outputs: Sequence[Any] = [result] if sequence is None else list(result)
        if not outputs or not all(isinstance(tensor, FakeTensor) for tensor in outputs):
            return None
        inputs: dict[fx.Node, int] = {}
        for index, tensor in enumerate(tensors):
            node = self._node_of(tensor)
            if node is None:
                return None
            inputs[node] = index
        own: dict[fx.Node, int] = {}
        cached = _cached_nodes(nodes, inputs, own)
        if cached is None:
            return None
        results = [self._cached_result(tensor, tensors, own) for tensor in outputs]
        found = [result for result in results if result is not None]
        return _CachedCall(cached, found, sequence) if len(found) == len(results) else None

    def _cached_result(
        self, tensor: FakeTensor, inputs: Sequence[Tensor], own: dict[fx.Node, int]
    ) -> _CachedResult | None:
        node = self._node_of(tensor)
        if node is None or node not in own or tensor.constant is not None:
            return None
        if any(tensor is given for given in inputs) or tensor.layout != torch.strided:
            return None
        with torch.no_grad(), in_kernel_invocation_manager(tensor.fake_mode):
            elem = torch.ops.aten.alias.default(tensor)
        if type(elem) is not Tensor:
            return None
        return _CachedResult(own[node], elem, tensor.fake_mode, tensor.fake_device, tensor.requires_grad)

    def _node_of(self, tensor: Tensor) -> fx.Node | None:
        """Return the node of a traced tensor; None for a constant or a tensor that is not traced."""
        slot: Any = get_proxy_slot(tensor, self._tracer, None)
        if slot is None or slot.constant is not None:
            return None
        node: fx.Node = slot.proxy.node
        return node

    def _reused(self, earlier: _CachedCall, tensors: Sequence[Tensor]) -> Any:
        tracer = self._tracer
        inputs = [get_proxy_slot(tensor, tracer).proxy.node for tensor in tensors]
        stack = {
            key: (path, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")
            for key, (path, kind) in tracer.module_stack.items()
        }
        line = self._line(sys._getframe(2))
        made: list[fx.Node] = []

        def node_of(arg: Any) -> Any:
            return (inputs if arg.is_input else made)[arg.number] if isinstance(arg, _NodeRef) else arg

        for node in earlier.nodes:
            args, kwargs = map_aggregate((node.args, node.kwargs), node_of)
            new = tracer.graph.create_node("call_function", node.target, args, kwargs, node.name)
            new.meta = {**node.meta, "nn_module_stack": dict(stack), "stack_trace": line}
            made.append(new)
        results = [self._new_result(result, made[result.node]) for result in earlier.results]
        return results[0] if earlier.sequence is None else earlier.sequence(results)

    def _new_result(self, result: _CachedResult, node: fx.Node) -> Any:
        def make() -> Tensor:
            return FakeTensor(result.mode, result.elem, result.device)

        tensor: Any = make() if not result.requires_grad else _with_grad_fn(self._anchor, make)
        tensor._reused = True
        set_proxy_slot(tensor, self._tracer, _ProxyTensor(fx.Proxy(node, self._tracer), None))
        return tensor


def _key(arg: Any, tensors: list[Tensor], seen: dict[int, int]) -> Any:
    """Return a hashable description of an argument, and append its tensors."""
    kind = type(arg)
    if kind in _CONSTANTS:
        return kind, arg
    if kind in (tuple, list, torch.Size):
        return kind, *[_key(item, tensors, seen) for item in arg]
    if kind is dict:
        return kind, *[(name, _key(item, tensors, seen)) for name, item in arg.items()]
    if isinstance(arg, FakeTensor):
        if id(arg) in seen:
            return "same tensor", seen[id(arg)]
        seen[id(arg)] = len(tensors)
        tensors.append(arg)
        if arg.layout != torch.strided or arg.constant is not None:
            raise _Unhashable
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
        return kind, *[_key(item, tensors, seen) for item in (arg.start, arg.stop, arg.step)]
    raise _Unhashable


def _cached_nodes(
    nodes: Sequence[fx.Node], inputs: dict[fx.Node, int], own: dict[fx.Node, int]
) -> list[_CachedNode] | None:
    """Describe the nodes of a call and number them in `own`; None if they cannot be copied."""
    cached: list[_CachedNode] = []

    def reference(arg: Any) -> Any:
        if isinstance(arg, fx.Node) and arg in own:
            return _NodeRef(False, own[arg])
        return _NodeRef(True, inputs[arg]) if isinstance(arg, fx.Node) and arg in inputs else arg

    for node in nodes:
        leaves = tree_leaves(node.meta.get("val"))
        if node.target in CHECKS:
            continue
        if node.op != "call_function" or not leaves or free_unbacked_symbols(leaves):
            return None
        if all(isinstance(leaf, int | torch.SymInt) for leaf in leaves):
            continue  # equal sizes are one node, whatever tensor they were read from
        for arg in node.all_input_nodes:
            holds_tensor = any(isinstance(leaf, Tensor) for leaf in tree_leaves(arg.meta.get("val")))
            if arg not in inputs and arg not in own and (holds_tensor or arg.op != "call_function"):
                return None
        args, kwargs = map_aggregate((node.args, node.kwargs), reference)
        own[node] = len(cached)
        cached.append(_CachedNode(node.target, args, kwargs, node.name, dict(node.meta)))
    return cached
