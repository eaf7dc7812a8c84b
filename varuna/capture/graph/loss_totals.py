"""Makes the loss of a micro-batch its part of the loss of the whole batch.

The model divides by a count of its own micro-batch. After these edits it divides by the total of the whole
batch, which comes as one more input, a vector:

    [samples, counted labels, sum of a mask, ...]    computed from the inputs before the step, and summed

Then the losses of all micro-batches and replicas add up to the loss of the batch, and so do the gradients.
Without the vector, a micro-batch counts as the whole batch: the loss is the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.proxy import GraphAppendingTracer
from torch.utils import _pytree as pytree
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from varuna.capture.graph.checks import where
from varuna.capture.graph.flat_graph import FlatGraph
from varuna.capture.graph.flow import Flow, base_name, written
from varuna.capture.graph.loss_kinds import BATCH_SIZE, SUM_REDUCTION, Edit
from varuna.capture.graph.randomness import bound
from varuna.capture.model.lengths import Place
from varuna.errors import CaptureError
from varuna.types import LOSS_TOTALS

aten = torch.ops.aten
SIZE = aten.sym_size.int


def whole_batch(
    local: Tensor, totals: Tensor | None, first: int, stop: int, mean: bool, like: Tensor | None = None
) -> Tensor:
    """Return the total of a value over the whole batch, as its dtype or that of `like`."""
    if totals is None:
        return local
    total = totals[first:stop] / totals[0] if mean else totals[first:stop]
    dtype = local.dtype if like is None else like.dtype
    return total.view(local.shape).to(dtype)


def whole_size(size: int, totals: Tensor | None) -> int | Tensor:
    """Return the number of samples of the whole batch."""
    return size if totals is None else totals[0]


def as_operand(number: Any, other: Tensor) -> Any:
    """Return a number of the whole batch in a precision that does not change the other operand's."""
    if not isinstance(number, Tensor):
        return number
    return number.to(other.dtype if other.is_floating_point() else torch.get_default_dtype())


def widened(other: Tensor, number: Any) -> Tensor:
    """Return a value in fp32 if it has a lower precision, which would round the number of the batch."""
    is_low = other.dtype in (torch.float16, torch.bfloat16) and isinstance(number, Tensor)
    return other.float() if is_low else other


def narrowed(value: Tensor, like: Tensor) -> Tensor:
    """Return a value in the precision that the operation has without `widened`."""
    return value if like.dtype == value.dtype or not like.is_floating_point() else value.to(like.dtype)


def share_of(value: Any, size: int, totals: Tensor | None) -> Any:
    """Multiply a value by the micro-batch's share of all samples."""
    if totals is None:
        return value
    share = size / totals[0]
    if not isinstance(value, Tensor):
        return value * share.to(torch.get_default_dtype())
    if value.dtype in (torch.float16, torch.bfloat16):  # which would round the share
        return (value.float() * share.float()).to(value.dtype)
    return value * share.to(value.dtype)


def count_labels(labels: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the number of labels that a loss counts, or the sum of their classes' weights."""
    counted = labels != ignore_index
    if weight is None:
        return counted.sum()
    return torch.where(counted, weight[torch.where(counted, labels, 0)], 0).sum()


@dataclass(frozen=True)
class TotalsProgram:
    """Computes the vector of totals from inputs of any number of samples."""

    graph_module: fx.GraphModule
    inputs: tuple[str, ...]
    state: tuple[str, ...]  # buffers that it reads
    means: tuple[bool, ...]

    def __call__(
        self, tensor: Callable[[str], Tensor], inputs: Mapping[str, object], size: int, device: torch.device
    ) -> Tensor:
        """`tensor` returns a buffer by name. Inputs on the host are read there, unless a buffer is needed."""
        given = [inputs[name] for name in self.inputs]
        places = {value.device for value in given if isinstance(value, Tensor)}
        where = device if self.state or len(places) != 1 else places.pop()
        arguments = [value.to(where) if isinstance(value, Tensor) else value for value in given]
        with torch.no_grad():
            values = self.graph_module(*(tensor(name).to(where) for name in self.state), *arguments)
            parts = [torch.full((1,), size, dtype=torch.float64, device=where)]
            for value, mean in zip(values, self.means, strict=True):
                parts.append(value.reshape(-1).to(where, torch.float64) * (size if mean else 1))
            return torch.cat(parts)


class LossEdits:
    """Applies the edits of one graph, which may have been found in another capture of the same model."""

    def __init__(
        self,
        flat: FlatGraph,
        edits: Sequence[Edit],
        counterpart: Callable[[fx.Node], fx.Node],
        dims: Mapping[str, int],  # batch dimension of each batched input
        lengths: Mapping[sympy.Symbol, Place | int],  # lengths of the edits: where to read them
    ) -> None:
        self._flat, self._counterpart, self._dims, self._lengths = flat, counterpart, dims, lengths
        self._parts: list[tuple[fx.Node, bool]] = []
        self._spans: dict[tuple[fx.Node, bool], tuple[int, int]] = {}
        self.num_totals = 1
        first = next(iter(flat.graph.nodes))
        with flat.graph.inserting_before(first):
            self._totals = flat.graph.placeholder("loss_totals")
        # Sums last: an edit of an argument finds the argument of the model.
        for edit in sorted(edits, key=lambda edit: edit.action == "sum"):
            getattr(self, f"_{edit.action}")(edit, counterpart(edit.user))
        self._totals.meta = {
            "val": torch.empty(self.num_totals, dtype=torch.float64, device="meta"),
            "segment": 0,
        }
        flat.inputs[LOSS_TOTALS] = self._totals

    # ------------------------------------------------------------ one method for each action

    def _total(self, edit: Edit, user: fx.Node) -> None:
        like = None
        if edit.mask is not None:
            local = self._count(user, self._counterpart(edit.mask), edit.each)
            like = next(arg for arg in user.all_input_nodes if isinstance(arg.meta.get("val"), Tensor))
        else:
            local = self._counterpart(edit.value)
        _replace_leaf(user, edit.argument, self._whole(user, local, edit.mean, like))

    def _number(self, edit: Edit, user: fx.Node) -> None:
        other = next(arg for arg in user.all_input_nodes if isinstance(arg.meta.get("val"), Tensor))
        number = self._expression(user, edit.value)
        if written(user):  # its value is the operand's memory
            _replace_leaf(user, edit.argument, self._insert(user, as_operand, (number, other), None))
            return
        wide = self._insert(user, widened, (other, number), other)
        user.replace_input_with(other, wide)
        _replace_leaf(user, edit.argument, self._insert(user, as_operand, (number, wide), None))
        new = self._insert(user.next, narrowed, (user, other), user)
        new.meta["segment"] = user.meta["segment"]
        user.replace_all_uses_with(new, delete_user_cb=lambda node: node is not new)

    def _expression(self, user: fx.Node, number: Any) -> Any:
        """Compute a number from the batch size again, with that of the whole batch."""
        if number == BATCH_SIZE:
            return self._insert(user, whole_size, (self._size, self._totals), None)
        if not isinstance(number, tuple):
            return self._number_of(number)
        operation, args = number
        return self._insert(user, operation, tuple(self._expression(user, arg) for arg in args), None)

    def _fraction(self, edit: Edit, user: fx.Node) -> None:
        leaves, _ = pytree.tree_flatten((list(user.args), dict(user.kwargs)))
        value = leaves[edit.argument]
        like = value if isinstance(value, fx.Node) else None
        new = self._insert(user, share_of, (value, self._size, self._totals), like)
        _replace_leaf(user, edit.argument, new)

    def _sum(self, edit: Edit, user: fx.Node) -> None:
        given = bound(user.target, user.args, user.kwargs)
        if edit.mask is not None:
            local = self._count(user, self._counterpart(edit.mask), edit.each)
        else:
            weight = given["weight"]
            args = (given["target"], weight, given["ignore_index"])
            local = self._insert(user, count_labels, args, weight)
            local.meta["val"] = torch.empty(
                (), dtype=torch.int64 if weight is None else weight.meta["val"].dtype, device="meta"
            )
        _make_sum(user)
        whole = self._whole(user, local, False, None)
        following = user.next
        new = self._insert(following, _quotient, (user, whole), user)
        new.meta["segment"] = user.meta["segment"]
        user.replace_all_uses_with(new, delete_user_cb=lambda other: other is not new)

    # ------------------------------------------------------------ helpers

    @property
    def _size(self) -> Any:
        """The number of samples of the micro-batch."""
        flat = self._flat
        if flat.symbol is None:
            return 1
        if flat.batch is None or flat.batch not in flat.graph.find_nodes(op="call_function", target=SIZE):
            name, dim = next((name, dim) for name, dim in self._dims.items() if name in flat.inputs)
            last = [node for node in flat.graph.nodes if node.op == "placeholder"][-1]
            with flat.graph.inserting_after(last):
                flat.batch = flat.graph.call_function(SIZE, (flat.inputs[name], dim))
            flat.batch.meta = {"val": flat.inputs[name].meta["val"].shape[dim], "segment": 0}
        return flat.batch

    def _number_of(self, number: Any) -> Any:
        """Return a number, or the node that computes it from lengths of the inputs."""
        if not isinstance(number, sympy.Expr):
            return number
        places = {symbol: self._lengths[symbol] for symbol in number.free_symbols}
        number = number.subs({symbol: size for symbol, size in places.items() if isinstance(size, int)})
        if number.is_Integer:
            return int(number)
        graph = self._flat.graph
        last = [node for node in graph.nodes if node.op == "placeholder"][-1]
        before = set(graph.nodes)
        with graph.inserting_before(last.next):
            tracer = GraphAppendingTracer(graph)
            known = {
                symbol: fx.Proxy(graph.call_function(SIZE, (self._flat.inputs[place[0]], place[1])), tracer)
                for symbol, place in places.items()
                if not isinstance(place, int)
            }
            found: Any = sympy_interp(PythonReferenceAnalysis, known, number)
        for node in graph.nodes:
            if node not in before:
                node.meta = {"val": None, "segment": 0, "size": number}
        return found.node

    def _count(self, user: fx.Node, mask: fx.Node, each: int | sympy.Expr) -> fx.Node:
        counted = self._insert(user, aten.count_nonzero.default, (mask,), None)
        counted.meta["val"] = torch.empty((), dtype=torch.int64, device="meta")
        if each == 1:
            return counted
        return self._insert(user, aten.mul.Tensor, (counted, self._number_of(each)), counted)

    def _whole(self, user: fx.Node, local: fx.Node, mean: bool, like: fx.Node | None) -> fx.Node:
        key = local, mean
        if key not in self._spans:
            self._parts.append(key)
            length = local.meta["val"].numel()
            if not isinstance(length, int):
                raise CaptureError(
                    f"{where(user)}: the model divides its loss by a count for each position of a varying "
                    "length. Pad the inputs to one length, or pass loss_weight=."
                )
            self._spans[key] = self.num_totals, self.num_totals + length
            self.num_totals += length
        args = (local, self._totals, *self._spans[key], mean, like)
        return self._insert(user, whole_batch, args, local)

    def _insert(self, before: fx.Node, target: Any, args: tuple[Any, ...], like: fx.Node | None) -> fx.Node:
        with self._flat.graph.inserting_before(before):
            new = self._flat.graph.call_function(target, args)
        last = self._flat.num_segments - 1
        new.meta = {"segment": last if before.op == "output" else before.meta["segment"]}
        if like is not None:
            new.meta["val"] = like.meta["val"]
        return new

    def program(self) -> TotalsProgram:
        """Return the program that computes the totals; call it when all edits are made."""
        flat = self._flat
        flow = Flow(flat)
        pending = [local for local, _ in self._parts]
        needed: set[fx.Node] = set()
        while pending:  # also what changes the memory of a counted value before it is counted
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending += flow.dependencies(node)
        nodes = [node for node in flat.graph.nodes if node in needed]
        state = {name: node for name, node in flat.state.items() if node in needed}
        inputs = {name: node for name, node in flat.inputs.items() if node in needed}
        assert self._totals not in needed, "a total depends on another one"
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in (*state.values(), *inputs.values()):
            copies[node] = graph.placeholder(node.name)
        for node in nodes:
            if node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[local] for local, _ in self._parts))
        names = {str(node.target) for node in nodes if node.op == "get_attr"}
        root = torch.nn.Module()
        for name in names:
            value = flat.attributes[name]
            setattr(root, name, value)
        module = fx.GraphModule(root, graph, class_name="Totals")
        return TotalsProgram(module, tuple(inputs), tuple(state), tuple(mean for _, mean in self._parts))


def _quotient(total: Tensor, count: Tensor) -> Tensor:
    return total / count.to(total.dtype)


def _make_sum(node: fx.Node) -> None:
    """Turn a mean into the sum of the same elements."""
    if base_name(node) == "mean":
        is_of_all = node.target is aten.mean.default
        node.target = aten.sum.default if is_of_all else aten.sum.dim_IntList
        return
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    place = names.index("reduction")
    if place < len(node.args):
        node.args = (*node.args[:place], SUM_REDUCTION, *node.args[place + 1 :])
    else:
        node.kwargs = {**node.kwargs, "reduction": SUM_REDUCTION}


def _replace_leaf(node: fx.Node, index: int, new: Any) -> None:
    leaves, structure = pytree.tree_flatten((list(node.args), dict(node.kwargs)))
    leaves[index] = new
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    node.args, node.kwargs = tuple(args), kwargs
