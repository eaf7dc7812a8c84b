"""Data flow through the graph: which values share memory, which nodes change it, which need a gradient."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, fx

from varuna.capture.graph.flat_graph import FlatGraph

aten = torch.ops.aten

# Operations that update running statistics, which their schemas do not say: argument indices and flag.
_STATISTICS: dict[Any, tuple[tuple[int, ...], int]] = {
    aten.batch_norm.default: ((3, 4), 5),
    aten.native_batch_norm.default: ((3, 4), 5),
    aten.instance_norm.default: ((3, 4), 5),
}
_WITHOUT_GRADIENT = frozenset(
    {"detach", "detach_", "bernoulli", "multinomial"}
    | {f"{what}_like" for what in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")}
    | {f"new_{what}" for what in ("zeros", "ones", "full", "empty", "empty_strided")}
)


class Flow:
    """Facts about every node of a graph, computed once."""

    def __init__(self, flat: FlatGraph) -> None:
        self.flat = flat
        self.order: dict[fx.Node, int] = {node: i for i, node in enumerate(flat.graph.nodes)}
        self.root: dict[fx.Node, fx.Node] = {}  # the node that made the memory of a node's value
        self.writes: dict[fx.Node, tuple[fx.Node, ...]] = {}  # node → the roots that it changes
        self.writers: dict[fx.Node, list[fx.Node]] = {}  # root → the nodes that change it, in order
        self.needs_grad: set[fx.Node] = set()
        state = set(flat.state.values())
        inputs = {flat.inputs[name] for name in flat.gradients if name in flat.inputs}
        for node in flat.graph.nodes:
            source = _aliased(node)
            self.root[node] = node if source is None else self.root[source]
            self.writes[node] = tuple(dict.fromkeys(self.root[arg] for arg in written(node)))
            for root in self.writes[node]:
                self.writers.setdefault(root, []).append(node)
            if node in inputs or self._needs_grad(node, state):
                self.needs_grad.add(node)
                # x.add_(y) gives x a gradient too.
                self.needs_grad.update(self.writes[node])

    @cached_property
    def gets_grad(self) -> set[fx.Node]:
        """The nodes whose values get a gradient: some result depends on them and is not detached."""
        return self.leading_to(self.flat.results)

    def leading_to(self, results: Sequence[fx.Node]) -> set[fx.Node]:
        """Return the nodes that get a gradient if these results do."""
        pending = list(results)
        pending += [writer for result in results for writer in self.writers.get(self.root[result], ())]
        reached: set[fx.Node] = set()
        while pending:
            node = pending.pop()
            if node in self.needs_grad and node not in reached:
                reached.add(node)
                pending.extend(self.dependencies(node))
        return reached

    def momentum(self, of_modules: Mapping[str, float | None]) -> dict[str, float]:
        """Return the momentum of BatchNorm's statistics over one run, which may use one twice."""
        found: dict[str, float] = {}
        for name, root in self.flat.state.items():
            uses: list[Any] = [
                writer.args[6] if writer.target in _STATISTICS else of_modules.get(name)
                for writer in self.writers.get(root, ())
            ]
            if uses and None not in uses:
                found[name] = uses[0] if len(uses) == 1 else 1 - math.prod(1 - share for share in uses)
        return found

    def writers_before(self, root: fx.Node, position: int) -> Iterator[fx.Node]:
        return (writer for writer in self.writers.get(root, ()) if self.order[writer] < position)

    def dependencies(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes that must run before a node: its arguments, and earlier changes of their memory."""
        for arg in node.all_input_nodes:
            yield arg
            yield from self.writers_before(self.root[arg], self.order[node])

    def _needs_grad(self, node: fx.Node, state: set[fx.Node]) -> bool:
        if node.op == "placeholder":
            value = node.meta.get("val")
            return node in state and isinstance(value, Tensor) and value.requires_grad
        if node.op != "call_function" and node.op != "call_module":
            return False
        if node.meta.get("no_grad") or base_name(node) in _WITHOUT_GRADIENT:
            return False
        if not any(arg in self.needs_grad for arg in _differentiated(node)):
            return False
        return any(value.is_floating_point() or value.is_complex() for value in tensors_of(node))


def _differentiated(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that get a gradient. An item of broadcast tensors depends on one tensor alone."""
    source = node.args[0] if getattr(node.target, "__name__", "") == "getitem" else None
    if isinstance(source, fx.Node) and source.target is aten.broadcast_tensors.default:
        tensors: Any = source.args[0]
        return [tensors[node.args[1]]]
    return node.all_input_nodes


def written(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node changes in place."""
    if node.op == "call_module":
        return list(node.meta.get("writes", ()))
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    if node.target in _STATISTICS:
        indices, flag = _STATISTICS[node.target]
        changed = [node.args[i] for i in indices] if node.args[flag] else []
        return [arg for arg in changed if isinstance(arg, fx.Node)]
    values = _arguments(node, _written_arguments(node.target))
    return [arg for arg in torch.utils._pytree.tree_leaves(values) if isinstance(arg, fx.Node)]


def _arguments(node: fx.Node, places: Sequence[tuple[int, str]]) -> list[Any]:
    """Return the arguments with these indices and names."""
    return [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in places]


@cache
def _written_arguments(target: torch._ops.OpOverload) -> list[tuple[int, str]]:
    """Return index and name of the arguments that an operation changes."""
    return [
        (i, argument.name)
        for i, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _aliased(node: fx.Node) -> fx.Node | None:
    """Return the argument whose memory a node's value may share."""
    if node.op != "call_function":
        return None
    if getattr(node.target, "__name__", "") == "getitem":
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if _returns_its_argument(node):
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    values = _arguments(node, _aliased_arguments(node.target))
    return next((value for value in values if isinstance(value, fx.Node)), None)


def _returns_its_argument(node: fx.Node) -> bool:
    """Return whether an operation returns its first argument itself, which its schema does not say."""
    name = base_name(node)
    if name == "type_as":
        source, other = (arg.meta.get("val") for arg in node.all_input_nodes[:1] + node.all_input_nodes[-1:])
        return isinstance(source, Tensor) and isinstance(other, Tensor) and source.dtype == other.dtype
    if name in ("dropout", "feature_dropout", "alpha_dropout"):
        return len(node.args) > 2 and bool(node.args[1] == 0 or node.args[2] is False)
    return name in ("atleast_1d", "atleast_2d", "atleast_3d")


@cache
def _aliased_arguments(target: torch._ops.OpOverload) -> list[tuple[int, str]]:
    """Return index and name of the arguments whose memory an operation's results may share."""
    schema = target._schema
    returned = {
        name for result in schema.returns if result.alias_info for name in result.alias_info.before_set
    }
    return [
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if (info := argument.alias_info) is not None
        # `split(Tensor(a -> *) self) -> Tensor(a)[]` names the set on both sides.
        and (info.before_set & returned or (info.is_write and "*" in info.after_set))
    ]


def tensors_of(node: fx.Node) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def base_name(node: fx.Node) -> str:
    return getattr(getattr(node.target, "overloadpacket", node.target), "__name__", "")
