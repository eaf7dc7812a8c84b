"""Where a model may be cut: CutPoint, and a way to put CutPoints into a model that one does not edit."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from varuna.capture.trace.recorder import TraceRecorder, active
from varuna.errors import CaptureError


class CutPoint(nn.Module):
    """A place between two operations where the model may be cut. Gives back what it is given.

        x = self.cutpoint(x)            # one tensor
        x, mask = self.cutpoint(x, mask)    # or several

    Whatever runs after it belongs to the next segment. Other values need not pass through it:
    all that is used on the other side is found and carried over.
    """

    def forward(self, *tensors: Any) -> Any:
        recorder = active()
        if recorder is not None:
            tensors = recorder.mark(self, recorder.name_of(self), tensors)
        return tensors[0] if len(tensors) == 1 else tensors


class _CutAfter:
    """A forward hook that marks the first tensor of a module's output."""

    def __init__(self) -> None:
        self.cutpoint = CutPoint()

    def __call__(self, module: nn.Module, _args: object, output: Any) -> Any:
        recorder = active()
        if recorder is None:
            return None
        marked, found = _replace_first(output, lambda x: self._mark(recorder, module, x))
        if not found:
            raise CaptureError(
                f"cut_after: {recorder.name_of(module)!r} returns no tensor "
                f"({type(output).__name__}), so there "
                "is nothing to cut after it (name a module that returns its activations)"
            )
        return marked

    def _mark(self, recorder: TraceRecorder, module: nn.Module, x: Tensor) -> Tensor:
        marked: Tensor = recorder.mark(self.cutpoint, f"after {recorder.name_of(module)!r}", (x,))[0]
        return marked


def _replace_first(value: Any, change: Any) -> tuple[Any, bool]:
    """The same structure with its first tensor changed, and whether there was one."""
    if isinstance(value, Tensor):
        return change(value), True
    if isinstance(value, Mapping):
        for key, item in value.items():
            changed, found = _replace_first(item, change)
            if found:
                # ModelOutput and plain dicts alike are changed in place: they keep their class.
                value[key] = changed  # type: ignore[index]
                return value, True
    if isinstance(value, tuple | list):
        for i, item in enumerate(value):
            changed, found = _replace_first(item, change)
            if found:
                items = [*value[:i], changed, *value[i + 1 :]]
                if isinstance(value, list):
                    return items, True
                return (type(value)(*items) if hasattr(value, "_fields") else tuple(items)), True
    return value, False


def cut_after(model: nn.Module, *patterns: str) -> list[str]:
    """Puts a CutPoint after every module whose name matches; gives the names.

    A `*` stands for one part of the dotted name: "transformer.h.*" is every block, and nothing
    inside the blocks. The model keeps its code, its modules and the names of its state.
    """
    matched = modules_named(model, patterns)
    for name in matched:
        module = model.get_submodule(name)
        if not any(isinstance(hook, _CutAfter) for hook in module._forward_hooks.values()):
            module.register_forward_hook(_CutAfter())
    return matched


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(
        re.fullmatch(fnmatch.translate(want), part) for part, want in zip(parts, wanted, strict=True)
    )


def modules_named(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The names that match, in the model's order; a * stands for one part between dots."""
    names = [name for name, _ in model.named_modules() if name]
    matched: list[str] = []
    for pattern in patterns:
        found = [name for name in names if _matches(name, pattern)]
        if not found:
            near = difflib.get_close_matches(pattern, names, n=5, cutoff=0.3) or names[:5]
            raise CaptureError(
                f"no module is named {pattern!r}; near names: {', '.join(near)} "
                "(see model.named_modules(); a * stands for one part between dots)"
            )
        matched += [name for name in found if name not in matched]
    return sorted(matched, key=names.index)


def cutpoints(model: nn.Module) -> Iterator[tuple[str, CutPoint]]:
    """Every CutPoint that the model holds, with its path: as a submodule, in a list, tuple or dict
    of an attribute, or put there by `cut_after`."""
    seen: set[int] = set()

    def new(path: str, value: object) -> Iterator[tuple[str, CutPoint]]:
        if isinstance(value, CutPoint) and id(value) not in seen:
            seen.add(id(value))
            yield path, value

    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        yield from new(name, module)
        for hook in module._forward_hooks.values():
            if isinstance(hook, _CutAfter):
                yield from new(f"after {name!r}", hook.cutpoint)
        for attribute, value in vars(module).items():
            if attribute.startswith("_") and attribute in nn.Module().__dict__:
                continue
            if isinstance(value, CutPoint):
                yield from new(prefix + attribute, value)
            elif isinstance(value, list | tuple):
                for i, item in enumerate(value):
                    yield from new(f"{prefix}{attribute}[{i}]", item)
            elif isinstance(value, dict):
                for key, item in value.items():
                    yield from new(f"{prefix}{attribute}[{key!r}]", item)


def require_all_met(model: nn.Module, recorder: TraceRecorder) -> None:
    """A CutPoint that is there but was never called would be a cut that never happens."""
    missed = [path for path, cutpoint in cutpoints(model) if not recorder.has_met(cutpoint)]
    if missed:
        raise CaptureError(
            f"the CutPoint {', '.join(missed)} was never called in the forward pass, expected once "
            "(call it where the model may be cut, or delete it)"
        )
