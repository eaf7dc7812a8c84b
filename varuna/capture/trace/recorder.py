"""State of the one forward pass that a capture traces: running modules, CutPoints, opaque calls.

One recorder is active at a time, and only while a model is traced. CutPoints and opaque modules look it up
with `active()`, which returns None outside a capture.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from varuna.errors import CaptureError

library: Any = torch.library.Library("varuna", "DEF")  # type: ignore[no-untyped-call]
library.define("cut(Tensor x, int index) -> Tensor")
library.impl("cut", lambda x, index: x.view_as(x), "CompositeImplicitAutograd")

CUT: Any = torch.ops.varuna.cut.default

aten = torch.ops.aten
CHECKS = {
    aten._assert_tensor_metadata.default,
    aten._assert_async.default,
    aten._assert_async.msg,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
    torch._check,
}
"""Assertions that torch.export adds and a capture drops."""


def _key(module: nn.Module) -> int:
    """Return what is the same for a module and its proxies: torch.export has one for each further name."""
    return id(module.__dict__)


class TraceRecorder:
    def __init__(self, model: nn.Module, on_progress: Callable[[int], None] | None = None) -> None:
        """Call `on_progress` with the number of modules that have run."""
        self._model = model
        self._on_progress = on_progress
        self._done: set[int] = set()
        self._names: dict[int, str] = {_key(module): name for name, module in model.named_modules()}
        self._running: list[nn.Module] = []
        compiled = (name for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule))
        self.scripted = next(compiled, "")  # path of a module that torch.jit has compiled
        self._cuts: list[nn.Module] = []
        self.inside_leaf: str | None = None  # path of the opaque module that is running
        self.reader: str | None = None  # path of the module that last read a number from a tensor
        self.varying_lengths = False  # sizes other than the batch size are symbolic
        self.leaf_calls: list[Any] = []  # calls of opaque modules, in order
        self.checks: list[Any] = []  # conditions that the captured path relies on
        self.lists: list[Any] = []  # rows of the batch of which the model has made a list
        self.size_reads: list[tuple[Any, str, str]] = []  # conditions on the batch size: line and module

    def name_of(self, module: nn.Module) -> str:
        return self._names.get(_key(module), "")

    def names_of(self, module: nn.Module) -> list[str]:
        """Return all names of a module."""
        named = self._model.named_modules(remove_duplicate=False)
        return [name for name, other in named if _key(other) == _key(module)]

    @property
    def running(self) -> str:
        """Path of the innermost running module."""
        return next(reversed(self._paths), "")

    @property
    def _paths(self) -> list[str]:
        return [self._names[_key(module)] for module in self._running if _key(module) in self._names]

    @property
    def reading(self) -> str:
        """Path of the innermost running module that contains the last reader, which may pass numbers on."""
        holders = [path for path in self._paths if f"{self.reader}.".startswith(f"{path}.")]
        return holders[-1] if holders else self.running

    def mark(self, cutpoint: nn.Module, path: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Mark a cut in the graph: later operations belong to the next segment."""
        where = path or f"in {self.running or 'the model'}"
        if self.has_met(cutpoint):
            names = self.names_of(cutpoint)
            same = f" (also named {', '.join(names[1:])}: one object)" if names[1:] else ""
            raise CaptureError(
                f"the CutPoint {where}{same} is called twice in one forward pass. Use a separate CutPoint() "
                "for each place, and none in a module that runs several times."
            )
        if self.inside_leaf is not None:
            raise CaptureError(
                f"the CutPoint {where} is inside the opaque module {self.inside_leaf!r}, which cannot be "
                "cut. Move the CutPoint out of it, or make a smaller module opaque."
            )
        first = next((i for i, value in enumerate(values) if isinstance(value, Tensor)), None)
        if first is None:
            raise CaptureError(
                f"the CutPoint {where} got no tensor. Pass it the activations: x = cutpoint(x)."
            )
        index = len(self._cuts)
        self._cuts.append(cutpoint)
        return tuple(CUT(value, index) if i == first else value for i, value in enumerate(values))

    @contextmanager
    def inside(self, leaf: str) -> Iterator[None]:
        self.inside_leaf = leaf
        try:
            yield
        finally:
            self.inside_leaf = None

    def has_met(self, cutpoint: nn.Module) -> bool:
        return _key(cutpoint) in map(_key, self._cuts)

    @property
    def num_cuts(self) -> int:
        return len(self._cuts)

    def _enter(self, module: nn.Module, _args: object) -> None:
        self._running.append(module)

    def _leave(self, module: nn.Module, _args: object, _output: object) -> None:
        # A module that raised stays on the stack until here, so that an error can name it.
        while self._running and self._running.pop() is not module:
            pass
        if self._on_progress is not None and _key(module) in self._names:
            self._done.add(_key(module))
            self._on_progress(len(self._done))


_active: TraceRecorder | None = None


def active() -> TraceRecorder | None:
    return _active


@contextmanager
def recording(model: nn.Module, on_progress: Callable[[int], None] | None = None) -> Iterator[TraceRecorder]:
    global _active
    if _active is not None:
        raise RuntimeError("another capture is already running in this process")
    _active = recorder = TraceRecorder(model, on_progress)
    try:
        with register_module_forward_pre_hook(recorder._enter), register_module_forward_hook(recorder._leave):
            yield recorder
    finally:
        _active = None
