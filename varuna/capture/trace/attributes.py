"""Attributes that a traced forward reads, and those it changes: a graph holds them as they were.

A number that forward changes, such as `self.calls += 1`, must not reach the results; nor must a tensor that
one forward keeps for the next one.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from varuna.capture.model.attributes import COLLECTION, INTERNAL, full_name, tensors_in
from varuna.capture.trace.opaque_module import is_opaque
from varuna.capture.trace.refusals import current_line
from varuna.errors import CaptureError


class CountedNumber:
    """A number that forward changes. It notes the first line that uses it other than to compute the next."""

    def __init__(self, value: Any, uses: list[str]) -> None:
        self._value = value
        self._uses = uses

    def _use(self) -> Any:
        self._uses.append(current_line())
        return self._value

    def __repr__(self) -> str:
        return repr(self._value)

    def __format__(self, spec: str) -> str:
        return format(self._value, spec)

    def __hash__(self) -> int:
        return hash(self._use())


def _arithmetic(function: Callable[[Any, Any], Any], *, reflected: bool) -> Callable[[Any, Any], Any]:
    def compute(number: CountedNumber, other: Any) -> Any:
        if not isinstance(other, int | float | CountedNumber):
            number._use()
        value = other._value if isinstance(other, CountedNumber) else other
        operands = (value, number._value) if reflected else (number._value, value)
        return CountedNumber(function(*operands), number._uses)

    return compute


def _use(function: Callable[..., Any]) -> Callable[..., Any]:
    def compute(number: CountedNumber, *others: Any) -> Any:
        values = [other._value if isinstance(other, CountedNumber) else other for other in others]
        return function(number._use(), *values)

    return compute


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    for _reflected in (False, True):
        _method = _arithmetic(getattr(operator, _name), reflected=_reflected)
        setattr(CountedNumber, f"__{'r' if _reflected else ''}{_name}__", _method)
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "index", "neg", "abs"):
    setattr(CountedNumber, f"__{_name}__", _use(getattr(operator, _name)))
for _name, _type in (("bool", bool), ("int", int), ("float", float), ("round", round)):
    setattr(CountedNumber, f"__{_name}__", _use(_type))


class EmptiedFirst:
    """Marks collections that forward empties before it reads them: nothing stays from call to call."""

    emptied = was_read = False

    def clear(self) -> None:
        self.emptied = self.emptied or not self.was_read
        super().clear()  # type: ignore[misc]


class WatchedList(EmptiedFirst, list[Any]):
    pass


class WatchedDict(EmptiedFirst, dict[Any, Any]):
    pass


def _noted(name: str) -> Any:
    def method(self: Any, *args: Any) -> Any:
        self.was_read = True
        return getattr(super(EmptiedFirst, self), name)(*args)

    return method


for _name in ("iter", "len", "getitem", "contains", "eq"):
    setattr(EmptiedFirst, f"__{_name}__", _noted(f"__{_name}__"))
for _name in ("pop", "copy", "index", "count"):
    setattr(WatchedList, _name, _noted(_name))
for _name in ("pop", "copy", "get", "items", "values", "keys"):
    setattr(WatchedDict, _name, _noted(_name))


def _watch_empty_collections(model: nn.Module) -> list[EmptiedFirst]:
    """Replace the empty lists and dicts of a copied model, and return them; shared ones stay shared."""
    watched: dict[int, EmptiedFirst] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) not in (list, dict) or value or name in INTERNAL:
                continue
            kind = WatchedList if isinstance(value, list) else WatchedDict
            vars(module)[name] = watched.setdefault(id(value), kind())
    return list(watched.values())


@dataclass
class AttributeLog:
    """The attributes that the forward of a model has read and changed, by path of the module and name."""

    model: nn.Module
    reads: dict[str, set[str]] = field(default_factory=dict)
    counted: set[tuple[str, str]] = field(default_factory=set)  # numbers that forward reads and changes
    kept: set[tuple[str, str]] = field(default_factory=set)  # that forward sets to tensors
    changed: set[tuple[str, str]] = field(default_factory=set)
    _written: set[tuple[str, str]] = field(default_factory=set)  # before any read

    def __post_init__(self) -> None:
        opaque = [path for path, module in self.model.named_modules() if is_opaque(module)]
        self._modules = dict(self.model.named_modules())
        inside = [p for p in self._modules if any(f"{p}.".startswith(f"{o}.") or not o for o in opaque)]
        # An opaque module runs its own code: it may read any attribute, and keeps its state itself.
        self._opaque = {path: set(vars(self._modules[path])) - INTERNAL for path in inside}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Note the attributes that this forward reads and changes; refuse tensors kept for the next one."""
        paths = {id(module): path for path, module in self._modules.items()}
        reads: dict[int, set[str]] = {key: set() for key in paths}
        watched = _watch_empty_collections(self.model)
        before = {path: _values(module) for path, module in self._modules.items()}
        for collection in watched:
            collection.was_read = False
        set_attribute = nn.Module.__setattr__

        def read(module: Any, name: str) -> Any:
            found = reads.get(id(module))
            if found is not None:
                found.add(name)
            return object.__getattribute__(module, name)

        def write(module: nn.Module, name: str, value: Any) -> None:
            key = id(module)
            if key in reads and name not in reads[key]:
                self._written.add((paths[key], name))
            set_attribute(module, name, value)

        nn.Module.__getattribute__, nn.Module.__setattr__ = read, write  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            del nn.Module.__getattribute__
            nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign]
            for key, path in paths.items():
                self.reads.setdefault(path, set()).update(reads[key] - INTERNAL)
        for path, names in self._opaque.items():
            self.reads[path].update(names)
        for path, module in self._modules.items():
            if path not in self._opaque:
                self._compare(path, module, before[path])

    def _compare(self, path: str, module: nn.Module, before: Mapping[str, tuple[Any, Any]]) -> None:
        for name, (value, content) in _values(module).items():
            old, old_content = before.get(name, (None, None))
            if (name in before and value is old and content == old_content) or _equal(old, value):
                continue
            self.changed.add((path, name))
            emptied = isinstance(value, EmptiedFirst) and value.emptied
            reads_first = name in self.reads[path] and (path, name) not in self._written and not emptied
            if any(map(_depends_on_inputs, tensors_in(value))):
                self.kept.add((path, name))
                if reads_first:
                    raise CaptureError(_refusal_of_kept(full_name(path, name), module, name))
            elif reads_first and _is_number(value) and _is_number(old):
                self.counted.add((path, name))

    @contextmanager
    def watched_numbers(self, counted: Set[tuple[str, str]]) -> Iterator[None]:
        """Refuse numbers that forward changes if its results depend on them."""
        if not counted:
            yield
            return
        uses: dict[tuple[str, str], list[str]] = {key: [] for key in sorted(counted)}
        for (path, name), lines in uses.items():
            held = self._modules[path].__dict__
            held[name] = CountedNumber(held[name], lines)
        failed: Exception | None = None
        try:
            yield
        except Exception as error:  # torch takes no such number: forward has used one
            failed = error
        used = {key: lines[0] for key, lines in uses.items() if lines}
        if failed is not None and not used:
            used = {next(iter(uses)): ""}
        for (path, name), line in used.items():
            raise CaptureError(_refusal_of_counter(full_name(path, name), name, line)) from failed


def _values(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return each attribute with the identity of what it contains."""
    return {name: (value, _content(value)) for name, value in vars(module).items() if name not in INTERNAL}


def _content(value: Any) -> Any:
    if isinstance(value, dict):
        return [*map(id, value), *map(id, value.values())]
    return list(map(id, value)) if isinstance(value, COLLECTION) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | CountedNumber) and not isinstance(value, bool)


def _equal(one: Any, two: Any) -> bool:
    plain = bool | int | float | str | None
    return isinstance(one, plain) and isinstance(two, plain) and type(one) is type(two) and one == two


def _depends_on_inputs(tensor: Tensor) -> bool:
    """Return whether a traced tensor depends on inputs or weights, and not on sizes and constants only."""
    mode = get_proxy_mode()
    if mode is None:
        return False
    inner: Any = tensor
    with suppress(Exception):
        while isinstance(inner, torch._subclasses.functional_tensor.FunctionalTensor):
            inner = torch._from_functional_tensor(inner.elem)
    slot: Any = get_proxy_slot(inner, mode.tracer, None)
    if slot is None:
        return False
    waiting, seen = [slot.proxy.node], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            return True
        waiting.extend(arg for arg in node.all_input_nodes if isinstance(arg.meta.get("val"), Tensor))
    return False


def _refusal_of_kept(name: str, module: nn.Module, leaf: str) -> str:
    return (
        f"forward of {type(module).__name__} keeps tensors in {name!r} and reads those of an earlier call. A "
        f"captured model does not keep them. Make {leaf!r} a buffer (self.register_buffer) that forward "
        "changes in place, or pass it as an input and return it as an output; or keep the module eager "
        "with varuna.opaque."
    )


def _refusal_of_counter(name: str, leaf: str, line: str) -> str:
    return (
        f"{line + ': ' if line else ''}forward changes {name!r}, and its results depend on it. A captured "
        f"model would use the same number in every step. Make it a buffer: self.register_buffer({leaf!r}, "
        f"torch.zeros(())), changed in place; or pass it as an input."
    )
