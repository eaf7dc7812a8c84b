"""Finds out how the loss of a batch follows from the losses of its micro-batches.

Each value of the graph is of one kind:

    SHARED    does not depend on samples        the same in every micro-batch
    SAMPLES   one row or more for each sample   micro-batches hold rows of the batch
    SUM       a sum over samples or tokens      the batch has the sum of its micro-batches
    MEAN      a mean over samples               the batch has the mean, weighted by numbers of samples

A sum that follows from the inputs alone (counted labels, a sum of a mask) is *free*: its total over the whole
batch can be known before the step. Where the model divides by such a sum, clamps it or compares it, it must
get the total, and the result is SHARED. An `Edit` describes one such place. What no rule covers counts as a
mean with a *doubt*, which names the operation.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from varuna.capture.graph.checks import find_coupling, where
from varuna.capture.graph.flat_graph import FlatGraph
from varuna.capture.graph.flow import Flow, base_name, tensors_of
from varuna.capture.graph.randomness import bound

aten = torch.ops.aten
MEAN_REDUCTION, SUM_REDUCTION = 1, 2

LABEL_LOSSES = frozenset({"cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d"})
"""Losses that leave out the labels `ignore_index`, and divide by the weights of the others."""
ELEMENT_LOSSES = frozenset(
    {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss", "poisson_nll_loss"}
    | {"binary_cross_entropy", "binary_cross_entropy_with_logits", "hinge_embedding_loss"}
    | {"margin_ranking_loss"}
)
"""Losses whose mean is their sum, divided by the number of elements."""
SAMPLE_LOSSES = frozenset(
    {
        "multilabel_margin_loss",
        "multi_margin_loss",
        "triplet_margin_loss",
        "cosine_embedding_loss",
        "ctc_loss",
    }
)
_SUMS = frozenset({"sum", "nansum", "count_nonzero"})
_CONTRACTIONS = frozenset({"mm", "matmul", "dot", "vdot", "inner", "einsum", "tensordot", "bmm", "mv"})
_NEW = frozenset(f"new_{what}" for what in ("zeros", "ones", "full", "empty", "empty_strided"))
_STRUCTURE = frozenset(
    {"alias", "clone", "contiguous", "detach", "view", "reshape", "_unsafe_view", "_reshape_alias", "squeeze"}
    | {"unsqueeze", "expand", "expand_as", "permute", "transpose", "t", "movedim", "flatten", "unflatten"}
    | {"to", "_to_copy", "type_as", "select", "slice", "narrow", "split", "split_with_sizes", "chunk"}
    | {"unbind", "getitem", "sum", "mean", "neg", "negative", "positive", "repeat", "tile", "nan_to_num"}
    | {"cumsum", "flip", "roll", "diagonal", "trace", "lift_fresh_copy", "lift_fresh", "conj", "real"}
)
"""Linear operations of one tensor."""
_JOINS = frozenset({"add", "sub", "subtract", "stack", "cat", "copy", "hstack", "vstack", "concat"})
_CHOICES = frozenset({"where", "masked_fill"})
_PRODUCTS = frozenset({"mul", "multiply", "outer"}) | _CONTRACTIONS
_QUOTIENTS = frozenset({"div", "divide", "true_divide"})
_WITH_NUMBERS = frozenset({"add", "sub", "mul", "div"})
"""Operations that take a number which depends on the batch size, such as x.size(0)."""
_COUNTS = frozenset({"histc", "bincount"})
_GROUP_SIZES = frozenset({"offs", "offsets"})
"""Arguments of grouped products: how many rows of the micro-batch each expert has."""
_FILTERS = frozenset({"index", "masked_select", "nonzero", "nonzero_numpy", "where", "argwhere"})


BATCH_SIZE = "batch size"
"""Stands for the batch size in the expression of a number."""


class Kind(Enum):
    SHARED = 0
    SAMPLES = 1
    SUM = 2
    MEAN = 3


@dataclass(frozen=True)
class Fact:
    kind: Kind
    free: bool = False  # follows from inputs and buffers alone
    doubt: fx.Node | None = None  # the operation that no rule covers

    @property
    def is_reduced(self) -> bool:
        return self.kind in (Kind.SUM, Kind.MEAN)


@dataclass(frozen=True)
class Edit:
    """A place where the graph must take the whole batch into account.

    total      the argument becomes its total over the whole batch, or that of the true elements of `mask`
    number     the argument, which depends on the batch size, becomes that of the whole batch
    fraction   the argument is multiplied by the micro-batch's share of the samples
    sum        the mean over counted labels or elements becomes a sum, divided by their total
    """

    action: str
    user: fx.Node
    argument: int = -1  # index among the leaves of (args, kwargs)
    value: Any = None  # the argument; of a number, its expression
    mean: bool = False  # the total of a mean
    mask: fx.Node | None = None  # counts the elements of a sum, `each` for every true one
    each: int | sympy.Expr = 1  # of the lengths that vary


@dataclass
class LossForm:
    """Rules by which the results of a batch follow from those of its micro-batches."""

    kinds: Sequence[Fact]  # of each result
    edits: Sequence[Edit] = ()
    rows: frozenset[fx.Node] = frozenset()  # values of which each sample has a row, without doubt
    coupling: fx.Node | None = None  # an operation that may couple samples; the rules allow it

    @property
    def sums(self) -> tuple[bool, ...]:
        """True for each result that is a sum over micro-batches, else it is a mean weighted by samples."""
        return tuple(fact.kind is Kind.SUM for fact in self.kinds)

    @property
    def doubt(self) -> str | None:
        """The line of the model that no rule covers."""
        return next((where(fact.doubt) for fact in self.kinds if fact.doubt is not None), None)


def find_form(flat: FlatGraph, flow: Flow, batched: Mapping[str, int]) -> LossForm:
    """Analyse a graph with a symbolic batch size; it stays as it is."""
    return replace(_find_form(flat, flow, batched), coupling=find_coupling(flat))


def _find_form(flat: FlatGraph, flow: Flow, batched: Mapping[str, int]) -> LossForm:
    analysis = _Analysis(flat, flow, batched)
    for node in flat.graph.nodes:
        analysis.visit(node)
    kinds = [analysis.fact(node) for node in flat.results]
    edits = analysis.edits
    rows = frozenset(node for node in flat.nodes if _has_rows(analysis, node))
    if any(fact.kind is Kind.SUM for fact in kinds):
        return LossForm(kinds, edits, rows)
    # Without a sum among the results, only means over samples are left: the totals are not needed, unless
    # a mean itself uses one, which then makes it a sum.
    if not edits:
        return LossForm(kinds, rows=rows)
    output = flat.graph.output_node()
    scaled = [
        Edit("fraction", output, number, node)
        for number, (node, fact) in enumerate(zip(flat.results, kinds, strict=True))
        if fact.kind in (Kind.MEAN, Kind.SHARED) and _is_float(node)
    ]
    summed = {edit.argument for edit in scaled}
    kinds = [replace(fact, kind=Kind.SUM) if number in summed else fact for number, fact in enumerate(kinds)]
    return LossForm(kinds, [*edits, *scaled], rows)


@dataclass
class _Analysis:
    flat: FlatGraph
    flow: Flow
    batched: Mapping[str, int]
    facts: dict[fx.Node, Fact] = field(default_factory=dict)
    edits: list[Edit] = field(default_factory=list)
    _changed: dict[fx.Node, list[tuple[fx.Node, Fact]]] = field(default_factory=dict)  # by root
    _counts: dict[sympy.Symbol, fx.Node] = field(default_factory=dict)  # sizes that a free mask decides

    # ------------------------------------------------------------ nodes in order

    def visit(self, node: fx.Node) -> None:
        if node.op == "output":
            return
        if node.op == "placeholder":
            self.facts[node] = self._given(node)
            return
        if node.op == "get_attr":
            self.facts[node] = Fact(Kind.SHARED, free=True)
            return
        fact = self._made(node)
        self.facts[node] = fact
        self._note_size(node)
        for root in self.flow.writes[node] if not _is_norm(node) else ():
            self._changed.setdefault(root, []).append((node, fact))

    def fact(self, node: fx.Node) -> Fact:
        """Return the fact of a value, with later changes of its memory."""
        fact = self.facts[node]
        for writer, change in self._changed.get(self.flow.root[node], ()):
            if writer is node or self.flow.order[writer] < self.flow.order[node]:
                continue
            if change.kind is not fact.kind:
                fact = Fact(change.kind, doubt=fact.doubt or change.doubt or writer)
            elif change.doubt is not None or not change.free:
                fact = replace(fact, doubt=fact.doubt or change.doubt, free=fact.free and change.free)
        return fact

    def _given(self, node: fx.Node) -> Fact:
        for name, placeholder in self.flat.inputs.items():
            if placeholder is node:
                kind = Kind.SAMPLES if name in self.batched else Kind.SHARED
                return Fact(kind, free=name not in self.flat.gradients)
        names = [name for name, placeholder in self.flat.state.items() if placeholder is node]
        fixed = bool(names) and names[0] not in self.flat.parameters and node not in self.flow.writers
        return Fact(Kind.SHARED, free=fixed)

    def _made(self, node: fx.Node) -> Fact:
        operands = [arg for arg in node.all_input_nodes if arg in self.facts and self._is_value(arg)]
        facts = [self.fact(arg) for arg in operands]
        doubt = next((fact.doubt for fact in facts if fact.doubt is not None), None)
        free = all(fact.free for fact in facts) and node.op == "call_function" and "random" not in node.meta
        if self._is_batched(node, facts):
            return self._of_samples(node, operands, facts, Fact(Kind.SAMPLES, free, doubt))
        if not tensors_of(node) and not operands:
            return Fact(Kind.SHARED, free=True)  # a number; users look at it themselves
        if any(fact.kind is Kind.SAMPLES for fact in facts):
            return self._reduced(node, operands, facts, Fact(Kind.MEAN, free, doubt))
        return self._combined(node, operands, facts, free, doubt)

    def _is_value(self, node: fx.Node) -> bool:
        """A tensor, or a number that was read from one. Sizes are no values."""
        if tensors_of(node):
            return True
        return node.op == "call_function" and base_name(node) in ("item", "_local_scalar_dense")

    def _is_batched(self, node: fx.Node, facts: Sequence[Fact]) -> bool:
        sizes = [self._symbols(size) for value in tensors_of(node) for size in value.shape]
        of_samples = any(fact.kind is not Kind.SHARED for fact in facts)
        return any(of_samples or self.flat.symbol in symbols for symbols in sizes if symbols)

    def _symbols(self, size: Any) -> set[Any]:
        """Return the symbols of a size, without lengths: these are equal in all micro-batches."""
        return _symbols(size) - self.flat.lengths.keys()

    def _note_size(self, node: fx.Node) -> None:
        """Remember the mask that decides a size of the node's value, such as that of x[mask]."""
        if base_name(node) not in _FILTERS:
            return
        masks = [arg for arg in node.all_input_nodes if self._is_mask(arg)]
        if base_name(node) in ("nonzero", "nonzero_numpy", "argwhere"):
            masks = node.all_input_nodes[:1]
        if len(masks) != 1 or not self.facts[masks[0]].free:
            return
        for value in tensors_of(node):
            for size in value.shape:
                for symbol in self._symbols(size) - {self.flat.symbol}:
                    self._counts.setdefault(symbol, masks[0])

    @staticmethod
    def _is_mask(node: fx.Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, Tensor) and value.dtype is torch.bool

    # ------------------------------------------------------------ rules

    def _of_samples(
        self, node: fx.Node, operands: Sequence[fx.Node], facts: Sequence[Fact], found: Fact
    ) -> Fact:
        """Values with a batch dimension: row by row, unless they use a sum over the batch."""
        if node.op != "call_function" or _is_norm(node):
            return found  # opaque modules may see micro-batches, and so does BatchNorm
        for size in (size for value in tensors_of(node) for size in value.shape):
            dim = self.flat.dim(size)
            is_odd = dim is None and self.flat.symbol in _symbols(size)
            if is_odd or (dim is not None and dim.per_sample and dim.fixed):
                found = replace(found, doubt=found.doubt or node)
        for arg, fact in zip(operands, facts, strict=True):
            if fact.is_reduced:
                found = self._with_total(node, arg, fact, found)
        return self._with_numbers(node, found)

    def _with_total(self, node: fx.Node, arg: fx.Node, fact: Fact, found: Fact) -> Fact:
        """Let a node use the total of an argument, if that can be known before the step."""
        if not fact.free or fact.doubt is not None:
            return replace(found, free=False, doubt=found.doubt or fact.doubt or node)
        for index in self._places(node, arg):
            self.edits.append(Edit("total", node, index, arg, mean=fact.kind is Kind.MEAN))
        return replace(found, free=False)

    def _with_numbers(self, node: fx.Node, found: Fact) -> Fact:
        """Let arithmetic with a size of the batch use that of the whole batch."""
        name = base_name(node).rstrip("_")
        if not isinstance(node.target, torch._ops.OpOverload) or name not in (*_WITH_NUMBERS, "pow"):
            return found
        for index, leaf in enumerate(_leaves(node)):
            if not isinstance(leaf, fx.Node) or tensors_of(leaf) or self._is_value(leaf):
                continue
            unknown = self._symbols(leaf.meta.get("val")) - {self.flat.symbol}
            if self.flat.lengths and _number_symbols(leaf) <= self.flat.lengths.keys():
                continue  # equal in all micro-batches
            count = self._count([leaf.meta["val"]], unknown) if unknown else None
            size = self._size_expression(leaf) if count is None else None
            if name not in _WITH_NUMBERS or (count is None and size is None):
                return replace(found, free=False, doubt=found.doubt or node)
            if count is None:
                self.edits.append(Edit("number", node, index, size))
            else:
                self.edits.append(Edit("total", node, index, mask=count[0], each=count[1]))
            found = replace(found, free=False)
        return found

    def _size_expression(self, number: Any) -> Any:
        """Return how a number is computed from the batch size alone; None if it is not."""
        if not isinstance(number, fx.Node):
            return number if isinstance(number, int | float) else None
        if number is self.flat.batch:
            return BATCH_SIZE
        if self.flat.lengths and isinstance(number.meta.get("val"), torch.SymInt):
            return self._linear(number.meta["val"].node.expr)
        if number.target is torch.sym_float:
            return self._size_expression(number.args[0])
        args = tuple(map(self._size_expression, number.args))
        is_arithmetic = getattr(number.target, "__module__", "") == "_operator"
        return (number.target, args) if is_arithmetic and None not in args else None

    def _linear(self, size: sympy.Expr) -> Any:
        """Return a size as `batch size * a + b`, where a and b may be expressions of the lengths."""
        per_sample = size.expand().coeff(self.flat.symbol)
        fixed = (size - per_sample * self.flat.symbol).expand()
        if (per_sample.free_symbols | fixed.free_symbols) - self.flat.lengths.keys():
            return None
        found: Any = BATCH_SIZE
        if per_sample != 1:
            found = (operator.mul, (found, _plain(per_sample)))
        return (operator.add, (found, _plain(fixed))) if fixed != 0 else found

    def _reduced(
        self, node: fx.Node, operands: Sequence[fx.Node], facts: Sequence[Fact], found: Fact
    ) -> Fact:
        """A value without batch dimension, made of values with one."""
        name = base_name(node).rstrip("_")
        other = replace(found, free=False, doubt=found.doubt or node)
        if node.op != "call_function" or name in _NEW:
            return Fact(Kind.SHARED, free=True) if name in _NEW else other
        if any(fact.is_reduced for fact in facts):
            return other
        if name in _SUMS:
            return replace(found, kind=Kind.SUM)
        if name in _COUNTS and _divides_rows(node):
            return Fact(Kind.SHARED, doubt=found.doubt)
        if name == "mean":
            return self._mean(node, operands[0], found)
        if name in _CONTRACTIONS and [fact.kind for fact in facts] == [Kind.SAMPLES] * 2:
            return replace(found, kind=Kind.SUM)
        if name in LABEL_LOSSES:
            return self._label_loss(node, found)
        if name in ELEMENT_LOSSES or name in SAMPLE_LOSSES:
            reduction = bound(node.target, node.args, node.kwargs)["reduction"]
            if reduction == SUM_REDUCTION:
                return replace(found, kind=Kind.SUM)
            if reduction == MEAN_REDUCTION and name in SAMPLE_LOSSES:
                return found if not self._unknown_sizes(operands) else other
            return self._mean(node, operands[0], found) if reduction == MEAN_REDUCTION else other
        return other

    def _unknown_sizes(self, operands: Sequence[fx.Node]) -> set[sympy.Symbol]:
        sizes = [size for arg in operands for value in tensors_of(arg) for size in value.shape]
        return {symbol for size in sizes for symbol in self._symbols(size)} - {self.flat.symbol}

    def _mean(self, node: fx.Node, source: fx.Node, found: Fact) -> Fact:
        """A mean over samples, or over elements that a free mask selects."""
        other = replace(found, free=False, doubt=found.doubt or node)
        unknown = self._unknown_sizes([source])
        if not unknown:
            return found
        count = self._count(source.meta["val"].shape, unknown)
        if base_name(node) == "mean" and node.target is not aten.mean.default:
            dims = bound(node.target, node.args, node.kwargs).get("dim")
            shape = source.meta["val"].shape
            chosen = range(len(shape)) if dims is None else dims if isinstance(dims, list) else [dims]
            count = self._count([shape[dim] for dim in chosen], unknown)
        if count is None:
            return other
        mask, each = count
        self.edits.append(Edit("sum", node, mask=mask, each=each))
        return Fact(Kind.SUM, doubt=found.doubt)

    def _count(self, sizes: Sequence[Any], unknown: set[sympy.Symbol]) -> tuple[fx.Node, Any] | None:
        """Return the mask that counts these elements, and the number of elements for each true one."""
        expressions = [size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes]
        (symbol, *more) = unknown
        if more or symbol not in self._counts:
            return None
        each = sympy.simplify(sympy.Mul(*expressions) / symbol)
        is_known = each.is_Integer or (each.is_polynomial() and each.free_symbols <= self.flat.lengths.keys())
        return (self._counts[symbol], _plain(each)) if is_known else None

    def _label_loss(self, node: fx.Node, found: Fact) -> Fact:
        given = bound(node.target, node.args, node.kwargs)
        if given["reduction"] == SUM_REDUCTION:
            return replace(found, kind=Kind.SUM)
        labels, weight = given["target"], given["weight"]
        if labels.meta["val"].is_floating_point():
            return self._mean(node, given["self"], found) if weight is None else found
        counted = [self.fact(arg) for arg in (labels, weight) if arg is not None]
        if given["reduction"] != MEAN_REDUCTION or not all(fact.free for fact in counted):
            return replace(found, doubt=found.doubt or node)
        self.edits.append(Edit("sum", node))
        return Fact(Kind.SUM, doubt=found.doubt)

    def _combined(
        self,
        node: fx.Node,
        operands: Sequence[fx.Node],
        facts: Sequence[Fact],
        free: bool,
        doubt: fx.Node | None,
    ) -> Fact:
        """A value without batch dimension, made of others without one."""
        name = base_name(node).rstrip("_")
        shared = self._with_numbers(node, Fact(Kind.SHARED, free, doubt))
        reduced = [(arg, fact) for arg, fact in zip(operands, facts, strict=True) if fact.is_reduced]
        if not reduced:
            return self._filled(node, shared)
        if node.op == "call_function" and name in _STRUCTURE and len(reduced) == 1:
            return replace(shared, kind=reduced[0][1].kind, free=free)
        chooses = name in _CHOICES and all(
            fact.kind is Kind.SHARED for arg, fact in zip(operands, facts, strict=True) if self._is_mask(arg)
        )
        if name in _JOINS or chooses:
            return self._joined(node, facts, shared)
        kept = None
        if name in _PRODUCTS or name in _QUOTIENTS:
            # One factor stays a sum or mean; the others must be known for the whole batch.
            kept = self._kept_factor(node, reduced, name in _QUOTIENTS)
        for arg, fact in reduced:
            if arg is not kept:
                shared = self._with_total(node, arg, fact, shared)
        if kept is not None:
            kind = next(fact.kind for arg, fact in reduced if arg is kept)
            return replace(shared, kind=kind, free=len(reduced) == 1 and shared.free)
        return shared if shared.doubt is None else replace(shared, kind=Kind.MEAN)

    def _kept_factor(
        self, node: fx.Node, reduced: Sequence[tuple[fx.Node, Fact]], is_quotient: bool
    ) -> fx.Node | None:
        kept = next((arg for arg, fact in reduced if not fact.free), reduced[0][0])
        if is_quotient:
            kept = _leaves(node)[0]
        is_found = any(arg is kept for arg, _ in reduced)
        return kept if is_found and len(self._places(node, kept)) == 1 else None  # x * x is not linear

    def _filled(self, node: fx.Node, shared: Fact) -> Fact:
        """A tensor made of the batch size, such as torch.tensor(len(x)), is a sum over the batch."""
        if base_name(node) not in ("scalar_tensor", "full"):
            return shared
        sizes = [leaf for leaf in _leaves(node) if isinstance(leaf, fx.Node) and not tensors_of(leaf)]
        if not sizes:
            return shared
        dim = self.flat.dim(sizes[-1].meta.get("val")) if len(sizes) == 1 else None
        if dim is None or dim.fixed:
            return replace(shared, kind=Kind.MEAN, doubt=node)
        return replace(shared, kind=Kind.SUM)

    def _joined(self, node: fx.Node, facts: Sequence[Fact], shared: Fact) -> Fact:
        """A sum or list of several values: of one kind, or each made a sum over micro-batches."""
        leaves = [
            (index, leaf) for index, leaf in enumerate(_leaves(node)) if self._is_term(node, index, leaf)
        ]
        kinds = {fact.kind for fact in facts}
        constants = any(not isinstance(leaf, fx.Node) and leaf != 0 for _, leaf in leaves)
        if Kind.SUM not in kinds:
            return replace(shared, kind=Kind.MEAN)
        free = all(fact.free for fact in facts) and shared.free
        if kinds == {Kind.SUM} and not constants:
            return replace(shared, kind=Kind.SUM, free=free)
        if free and shared.doubt is None:
            # A count plus a constant (eps): the whole is known before the step.
            for _, leaf in leaves:
                if isinstance(leaf, fx.Node) and self.fact(leaf).is_reduced:
                    shared = self._with_total(node, leaf, self.fact(leaf), shared)
            return shared
        for index, leaf in leaves:
            is_sum = isinstance(leaf, fx.Node) and leaf in self.facts and self.fact(leaf).kind is Kind.SUM
            if not is_sum and (isinstance(leaf, fx.Node) or leaf != 0):
                self.edits.append(Edit("fraction", node, index, leaf))
        return replace(shared, kind=Kind.SUM, free=False)

    def _is_term(self, node: fx.Node, index: int, leaf: Any) -> bool:
        """Return whether a leaf of the arguments is a joined value, not an option such as `alpha`."""
        if isinstance(leaf, fx.Node):
            return not self._is_mask(leaf)
        takes_numbers = base_name(node).rstrip("_") in ("add", "sub", "subtract", *_CHOICES)
        return takes_numbers and index < len(node.args) and isinstance(leaf, int | float)

    @staticmethod
    def _places(node: fx.Node, arg: fx.Node) -> list[int]:
        return [index for index, leaf in enumerate(_leaves(node)) if leaf is arg]


def _has_rows(analysis: _Analysis, node: fx.Node) -> bool:
    """Return whether a value of the weights has one row for each sample, in order and without doubt."""
    flat, flow, fact = analysis.flat, analysis.flow, analysis.fact(node)
    if fact.kind is not Kind.SAMPLES or fact.free or fact.doubt is not None or not _is_float(node):
        return False
    dims = [flat.dim(size) for size in node.meta["val"].shape]
    batched = [dim for dim in dims if dim is None or dim.per_sample]
    one = [dim for dim in batched if dim is not None and (dim.per_sample, dim.fixed) == (1, 0)]
    return len(batched) == len(one) == 1 and flow.root[node] not in flow.writers


def _is_norm(node: fx.Node) -> bool:
    """BatchNorm and its relatives, which see micro-batches, as documented."""
    return base_name(node).endswith("_norm")


def _divides_rows(node: fx.Node) -> bool:
    """Return whether a value only divides the rows of a micro-batch among experts, each with own weights."""
    return bool(node.users) and all(
        _divides_rows(user) if base_name(user) in _STRUCTURE else _is_group_size(node, user)
        for user in node.users
    )


def _is_group_size(value: fx.Node, user: fx.Node) -> bool:
    if not isinstance(user.target, torch._ops.OpOverload):
        return False
    names = [name for name, arg in bound(user.target, user.args, user.kwargs).items() if arg is value]
    return bool(names) and _GROUP_SIZES.issuperset(names)


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def _leaves(node: fx.Node) -> list[Any]:
    return pytree.tree_leaves((list(node.args), dict(node.kwargs)))


def _plain(number: sympy.Expr) -> int | sympy.Expr:
    return int(number) if number.is_Integer else number


def _number_symbols(number: fx.Node) -> set[Any]:
    """Return the symbols of a node that computes a number."""
    value, found = number.meta.get("val"), number.meta.get("size")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        found = value.node.expr
    return set(found.free_symbols) if found is not None else {None}


def _symbols(size: Any) -> set[Any]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()
