"""Guards of a trace: the conditions on the sizes of its inputs under which its graph is the model's own.

A trace with symbolic sizes follows the branches that its example takes. torch records every decision, such as
`length <= 512` or `length == 64`. The graph serves all sizes for which the decisions are the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy
import torch
from torch.export import ExportedProgram

from varuna.capture.model.lengths import SMALLEST, LengthGroup, Place, Sizes
from varuna.capture.trace.refusals import line_of_guard


class SizeGuard(NamedTuple):
    condition: sympy.Basic
    line: str  # of the model, if it is known


@dataclass(frozen=True)
class SizeGuards:
    symbols: Mapping[Place, sympy.Symbol]  # of the inputs' sizes that vary
    fixed: Mapping[Place, int]  # the other sizes
    conditions: Sequence[SizeGuard]
    equal: Mapping[sympy.Symbol, sympy.Symbol]  # each symbol → the one that stands for it in the graph
    traced: Mapping[sympy.Symbol, int]  # the sizes of the trace, by symbol of the graph

    def broken(self, sizes: Sizes) -> str | None:
        """Return why the graph does not serve inputs of these sizes; None if it does."""
        if sizes.keys() != self.symbols.keys() | self.fixed.keys():
            return "other inputs"
        for (name, dim), size in self.fixed.items():
            if sizes[name, dim] != size:
                return f"dimension {dim} of {name!r} is {sizes[name, dim]}, not {size}"
        values: dict[sympy.Symbol, int] = {}
        for place, symbol in self.symbols.items():
            size = sizes[place]
            if size < SMALLEST or values.setdefault(self.equal[symbol], size) != size:
                return f"dimension {place[1]} of {place[0]!r} is {size}"
            values[symbol] = size
        for condition, line in self.conditions:
            if condition.xreplace(values) != sympy.true:
                return line or str(condition)
        return None

    def values(self, sizes: Sizes) -> dict[sympy.Symbol, int]:
        """Return the values of the graph's symbols for inputs of these sizes."""
        return {self.equal[symbol]: sizes[place] for place, symbol in self.symbols.items()}

    @property
    def graph_symbols(self) -> dict[Place, sympy.Symbol]:
        """The places from which the graph's symbols can be read."""
        return {place: self.equal[symbol] for place, symbol in self.symbols.items()}

    @property
    def fixing_lines(self) -> dict[sympy.Symbol, str]:
        """The symbols that the model fixes, with the line that does so."""
        found: dict[sympy.Symbol, str] = {}
        for condition, line in self.conditions:
            if isinstance(condition, sympy.Eq) and {type(side) for side in condition.args} != {sympy.Symbol}:
                symbols = [side for side in condition.args if side.is_Symbol]
                if symbols and any(side.is_Integer for side in condition.args):
                    found.setdefault(self.equal.get(symbols[0], symbols[0]), line)
        return found

    @property
    def varies(self) -> bool:
        """True if some size may differ from that of the trace."""
        return bool(set(self.traced) - self.fixing_lines.keys())


def guards_of(exported: ExportedProgram, groups: Sequence[LengthGroup], sizes: Sizes) -> SizeGuards:
    inputs: dict[str, Any] = {
        str(node.target): node.meta["val"]
        for node in exported.graph_module.graph.nodes
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)
    }
    symbols: dict[Place, sympy.Symbol] = {}
    for group in groups:
        for name, dim in group.places:
            size = inputs[name].shape[dim]
            if isinstance(size, torch.SymInt):
                symbols[name, dim] = size.node._expr
    environment: Any = next((value.fake_mode.shape_env for value in inputs.values()), None)
    own = set(symbols.values())
    equal = {symbol: symbol for symbol in own}
    for group in groups:
        named = [symbols[place] for place in group.places if place in symbols]
        free = [environment.replace(symbol) for symbol in named]
        for symbol, found in zip(named, free, strict=True):
            equal[symbol] = found if found.is_Symbol else named[0]
    conditions = []
    for guard in environment.guards if symbols else ():
        condition = guard.expr
        if not condition.free_symbols & own or _is_about_layout(guard):
            continue
        if condition.free_symbols - own:
            condition = environment.simplify(condition)  # the sizes of the batch are equal
            if condition == sympy.true:
                continue
        conditions.append(SizeGuard(condition, line_of_guard(guard)))
    traced = {equal[symbols[p]]: group.size for group in groups for p in group.places if p in symbols}
    fixed = {place: size for place, size in sizes.items() if place not in symbols}
    return SizeGuards(symbols, fixed, tuple(conditions), equal, traced)


_LAYOUT_CHECKS = ("contiguous", "overlapping", "channels_last")


def _is_about_layout(guard: Any) -> bool:
    """Return whether a guard says that a tensor is not contiguous: the graph serves contiguous ones too."""
    place = getattr(guard.sloc.framework_loc, "name", "")
    return isinstance(guard.expr, sympy.Ne) and any(check in place for check in _LAYOUT_CHECKS)
