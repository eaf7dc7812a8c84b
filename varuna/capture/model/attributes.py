"""Attributes of a model's modules, such as `model.temperature`: finds those that a script has changed.

A trace bakes attributes into its graph, and notes which ones it has read. Before each step, these are
compared with their values at the trace. A change of any of them needs another capture.
"""

import copy
import re
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from varuna.errors import CaptureError

INTERNAL = frozenset((*vars(nn.Module()), "forward", "_varuna_opaque"))
"""Attributes that do not count. The mode of a module (`training`) is compared separately."""
PLAIN = (
    bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, type,
    FunctionType, BuiltinFunctionType,
)  # fmt: skip
COLLECTION = (list, tuple, set, frozenset, deque)
_HOLDERS = (dict, *COLLECTION)
MOST_ENTRIES = 5000
"""Larger objects are compared by identity only."""

MOST_CAPTURES = 8
"""Captures with other attributes are kept for this number of changes: a script may change to and fro."""


class AttributeChange(NamedTuple):
    """A change by the script, as all ranks compare it."""

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name} changed from {self.before} to {self.after}"


class Cell(NamedTuple):
    """A dict or collection, and a copy of it as it was."""

    current: Any
    copy: Any


def full_name(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors of an attribute: itself, or those directly in a collection or dict."""
    inside = (
        value.values() if isinstance(value, dict) else value if isinstance(value, COLLECTION) else (value,)
    )
    return [one for one in inside if isinstance(one, Tensor)]


def plain_cells(value: object) -> list[Cell] | None:
    """Return the dicts and collections inside a value; None if it is no plain data."""
    cells: list[Cell] = []
    seen: set[int] = set()
    waiting = [value]
    entries = 0
    while waiting:
        one = waiting.pop()
        if isinstance(one, PLAIN) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor | nn.Module | ModuleType | MethodType) or hasattr(one, "__array__"):
            return None
        inside: Any = one if isinstance(one, _HOLDERS) else getattr(one, "__dict__", None)
        if inside is None:
            continue
        waiting.extend(inside.values() if isinstance(inside, Mapping) else inside)
        entries += len(inside)
        if entries > MOST_ENTRIES or not isinstance(inside, _HOLDERS):
            return None
        cells.append(Cell(inside, copy.copy(inside)))
    return cells


class _Snapshot:
    """The attributes of one module that traces have read, as they were."""

    def __init__(self, module: nn.Module, reads: Iterable[str], cells: dict[int, list[Cell] | None]) -> None:
        held = vars(module)
        self.size = len(held)
        self.values: dict[str, Any] = {}  # plain values, and objects that hold only such
        self.identities: dict[str, tuple[int, ...]] = {}  # of all others: tensors must not be kept alive
        for name in sorted(name for name in reads if name in held):
            value = held[name]
            if not isinstance(value, PLAIN) and id(value) not in cells:
                cells[id(value)] = plain_cells(value)
            if isinstance(value, PLAIN) or cells[id(value)] is not None:
                self.values[name] = value
            else:
                self.identities[name] = _identity(value)
        self.children = {name: id(child) for name, child in module._modules.items()}
        self.child_ids = tuple(self.children.values())
        # For the comparison in each step. A tuple compares objects by identity first.
        self.get: Callable[[Any], Any] = itemgetter(*self.values) if self.values else len
        self.expected: Any = self.get(self.values) if self.values else self.size

    def has_others(self, held: dict[str, Any]) -> bool:
        """Return whether submodules, tensors and other objects are those of the snapshot."""
        if tuple(map(id, held["_modules"].values())) != self.child_ids:
            return False
        return all(_identity(held[name]) == was for name, was in self.identities.items())


def _identity(value: Any) -> tuple[int, ...]:
    """Return numbers that change if an object is replaced, or if tensors in it are."""
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, _HOLDERS) and (tensors := tensors_in(value)):
        numbers = ((id(tensor), tensor._version) for tensor in tensors)
        return id(value), len(value), *(number for pair in numbers for number in pair)
    return (id(value),)


class _WatchedModule:
    """A module of the script's model, or the copy on `meta` once the script has dropped it."""

    def __init__(self, path: str, module: nn.Module, meta: nn.Module) -> None:
        self.path = path
        self.meta = meta
        self.reads: set[str] = set()
        self.snapshot: _Snapshot | None = None
        self.live: Callable[[], nn.Module | None] = weakref.ref(module)

    @property
    def module(self) -> nn.Module:
        return self.live() or self.meta


class _FoundChange(NamedTuple):
    key: str  # "" for a mode
    before: Hashable
    after: Hashable
    shown: AttributeChange


class ModelAttributes:
    """The attributes of one model. Keeps no reference to the model or its tensors."""

    def __init__(self, model: nn.Module, meta_model: nn.Module) -> None:
        copies = dict(meta_model.named_modules())
        self._watched = [_WatchedModule(path, one, copies[path]) for path, one in model.named_modules()]
        self._cells: dict[int, list[Cell] | None] = {}  # by identity of the object
        self._first: dict[str, Hashable] = {}  # values of changed attributes at the first capture
        self._current: dict[str, Hashable] = {}
        self._found: list[_FoundChange] = []
        self.modes = [watched.module.training for watched in self._watched]
        self._first_modes = self.modes
        self.num_changes = 0  # number of calls of `accept`
        self.recent: deque[Hashable] = deque([()], maxlen=MOST_CAPTURES)  # keys of captures to keep
        self.key: Hashable = ()  # all changes since the first capture; captures with equal keys are equal

    @property
    def root(self) -> nn.Module:
        """The script's model, or its copy on `meta` once the script has dropped it."""
        return self._watched[0].module

    @property
    def modes_by_path(self) -> dict[str, bool]:
        return {watched.path: mode for watched, mode in zip(self._watched, self.modes, strict=True)}

    def has_plain(self, name: str) -> bool:
        """Return whether the model has an attribute of this name that is no module, tensor or method."""
        absent = object()
        value = getattr(self.root, name, absent)
        return value is not absent and not isinstance(value, nn.Module | Tensor | MethodType)

    def assign(self, name: str, value: object) -> bool:
        """Set an attribute of the model; return False if it has none, and its forward looks for none."""
        root = self.root
        if name in root._modules or name in root._parameters or name in root._buffers:
            raise AttributeError(
                f"{name!r} of the model cannot be replaced once it is wrapped (copy values in place, into "
                "the wrapper's parameters() or buffers(); or replace it before you wrap the model)"
            )
        known = self.has_plain(name) or (name in self._watched[0].reads and not hasattr(root, name))
        if known:
            setattr(root, name, value)
        return known

    def watch(self, reads: Mapping[str, Iterable[str]]) -> None:
        """Compare these attributes, by path of their module, from now on."""
        for watched in self._watched:
            new = set(reads.get(watched.path, ())) - watched.reads
            if new or watched.snapshot is None:
                watched.reads |= new
                watched.snapshot = _Snapshot(watched.module, watched.reads, self._cells)

    def apply(self, *, training: bool) -> None:
        """Give the copy on `meta` the current attributes and modes, before it is traced."""
        as_a_whole = not any(self.modes)  # a model that came in eval mode trains as a whole
        for watched, mode in zip(self._watched, self.modes, strict=True):
            watched.meta.training = training and (mode or as_a_whole)
        memo: dict[int, Any] = {}
        for watched in self._watched:
            held, copied = vars(watched.module), vars(watched.meta)
            for name in () if held is copied else held.keys() - INTERNAL:
                value = held[name]
                if isinstance(value, PLAIN):
                    copied[name] = value
                elif self._current and plain_cells(value):
                    with suppress(Exception):  # locks, files and similar are shared
                        copied[name] = copy.deepcopy(value, memo)

    def changes(self) -> list[AttributeChange]:
        """Return the attributes that the script has changed since `watch` or `accept`."""
        stale, modes = self._compare()
        contents = [
            cells for cells in self._cells.values() if cells and any(now != was for now, was in cells)
        ]
        new_modes = modes != self.modes and any(modes)
        if not stale and not contents and not new_modes:
            return []
        self._found = [change for watched in stale for change in self._of_module(watched)]
        changed = {id(cells) for cells in contents}
        for watched in self._watched if changed else ():
            self._found += self._inside(watched, changed)
        if new_modes:
            self._found += self._of_modes(modes)
        if not self._found:  # another attribute, or an equal value
            self._take_snapshots()
        return [change.shown for change in self._found]

    def _compare(self) -> tuple[list[_WatchedModule], list[bool]]:
        """Return the modules with other attributes, and the modes of all. One loop: it runs in each step."""
        stale: list[_WatchedModule] = []
        modes: list[bool] = []
        for watched in self._watched:
            module, snapshot = watched.live(), watched.snapshot
            if module is None:  # the script has dropped it
                module = watched.meta
                watched.live = partial(_itself, module)
                watched.snapshot = snapshot = _Snapshot(module, watched.reads, self._cells)
            held = module.__dict__
            modes.append(held["training"])
            if snapshot is None:
                continue
            try:
                current = len(held) == snapshot.size and snapshot.get(held) == snapshot.expected
                if current and (snapshot.child_ids or snapshot.identities):
                    current = snapshot.has_others(held)
            except Exception:  # an attribute is gone, or an object cannot be compared
                current = False
            if not current:
                stale.append(watched)
        return stale, modes

    @property
    def any_training(self) -> bool:
        """True if any module is in train mode."""
        return any(watched.module.training for watched in self._watched)

    def accept(self) -> None:
        """Use the changes that were found last."""
        for change in (change for change in self._found if change.key):
            self._first.setdefault(change.key, change.before)
            self._current[change.key] = change.after
        modes = [watched.module.training for watched in self._watched]
        self.modes = modes if any(modes) else self.modes
        changed = {key: value for key, value in self._current.items() if value != self._first[key]}
        modes_key = tuple(self.modes) if self.modes != self._first_modes else ()
        self.key = (frozenset(changed.items()), modes_key) if changed or modes_key else ()
        if self.key in self.recent:
            self.recent.remove(self.key)
        self.recent.append(self.key)
        self.num_changes += 1
        self._found = []
        self._take_snapshots()

    def _take_snapshots(self) -> None:
        self._cells.clear()
        for watched in self._watched:
            watched.snapshot = _Snapshot(watched.module, watched.reads, self._cells)

    def _of_module(self, watched: _WatchedModule) -> Iterator[_FoundChange]:
        """Yield the attributes that were set to other values."""
        snapshot, module = watched.snapshot, watched.module
        assert snapshot is not None
        held = vars(module)
        for name, child in module._modules.items():
            if id(child) != snapshot.children.get(name, id(child)):
                raise CaptureError(
                    f"the script has replaced the module {full_name(watched.path, name)!r} since the model "
                    "was wrapped. Replace it before you wrap the model, or wrap the model again."
                )
        for name in sorted(watched.reads):
            default = getattr(type(module), name, None)
            now, full = held.get(name, default), full_name(watched.path, name)
            if name in snapshot.identities:
                if name not in held or _identity(now) != snapshot.identities[name]:
                    raise CaptureError(_refusal(full, now))
                continue
            before = snapshot.values.get(name, default)
            if now is before:
                continue
            if not isinstance(now, PLAIN) and plain_cells(now) is None:
                raise CaptureError(_refusal(full, now))
            old, new = _token(before, self._cells.get(id(before))), _token(now)
            if old != new:
                yield _FoundChange(full, old, new, AttributeChange(full, _text(before), _text(now)))

    def _inside(self, watched: _WatchedModule, changed: set[int]) -> Iterator[_FoundChange]:
        """Yield the entries of objects that were changed in place, such as `model.config.alpha`."""
        held = vars(watched.module)
        for name in sorted(watched.reads & held.keys()):
            cells = self._cells.get(id(held[name]))
            if cells is None or id(cells) not in changed:
                continue
            changed.discard(id(cells))  # once, though many modules may hold it
            if plain_cells(held[name]) is None:
                raise CaptureError(_refusal(full_name(watched.path, name), held[name]))
            full = full_name(watched.path, name)
            old, new = _token(held[name], cells), _token(held[name])
            yield _FoundChange(full, old, new, _difference(full, held[name], cells))

    def _of_modes(self, modes: list[bool]) -> Iterator[_FoundChange]:
        names = {True: "train mode", False: "eval mode"}
        for watched, old, new in zip(self._watched, self.modes, modes, strict=True):
            if old != new:
                name = watched.path or type(watched.module).__name__
                yield _FoundChange("", old, new, AttributeChange(name, names[old], names[new]))
                return


def _itself(module: nn.Module) -> nn.Module:
    return module


def _token(value: Any, cells: list[Cell] | None = None) -> Hashable:
    """Return a value that is equal for equal attributes; `cells`: as the object was when they were copied."""
    if isinstance(value, PLAIN):
        return type(value), value
    return repr(
        [cell.copy for cell in plain_cells(value) or ()] if cells is None else [c.copy for c in cells]
    )


def _text(value: object) -> str:
    if isinstance(value, FunctionType | type):
        return value.__qualname__
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # which differs from rank to rank
    return text if len(text) <= 60 else f"{text[:57]}..."


def _difference(name: str, value: object, cells: list[Cell]) -> AttributeChange:
    """Return the first entry that differs from its copy."""
    now, was = next(cell for cell in cells if cell.current != cell.copy)
    if isinstance(now, dict):
        for key in (*now, *was):
            if key not in now or key not in was or now[key] != was[key]:
                entry = f"{name}[{key!r}]" if isinstance(value, dict) else f"{name}.{key}"
                return AttributeChange(entry, _text(was.get(key)), _text(now.get(key)))
    return AttributeChange(name, _text(was), _text(now))


def _refusal(name: str, value: object) -> str:
    kind = "a tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    return (
        f"{name!r} is {kind} that forward reads, and the script has changed it since the model was wrapped. "
        "A captured model uses the earlier value. Pass it as an input of the model, or make it a buffer "
        "(self.register_buffer) and change it in place; plain numbers and strings may be changed."
    )
