"""Places where a model may be cut: `CutPoint`, and `cut_after` for models that you do not edit."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from varuna.capture.trace.recorder import TraceRecorder, active
from varuna.errors import CaptureError


class CutPoint(nn.Module):
    """A place between two operations where the model may be cut. Returns its arguments.

        x = self.cutpoint(x)                # one tensor
        x, mask = self.cutpoint(x, mask)    # or several

    Operations after it belong to the next segment. You need not pass every value through it: all values
    that later segments use are found and sent.
    """

    def forward(self, *tensors: Any) -> Any:
        recorder = active()
        if recorder is not None:
            tensors = recorder.mark(self, recorder.name_of(self), tensors)
        return tensors[0] if len(tensors) == 1 else tensors


class _CutAfterHook:
    """A forward hook that marks the first tensor of a module's output."""

    def __init__(self) -> None:
        self.cutpoint = CutPoint()

    def __call__(self, module: nn.Module, _args: object, output: Any) -> Any:
        recorder = active()
        if recorder is None:
            return None
        name = recorder.name_of(module)
        marked, found = _replace_first(
            output, lambda x: recorder.mark(self.cutpoint, f"after {name!r}", (x,))[0]
        )
        if not found:
            raise CaptureError(
                f"cut_after: the module {name!r} returns no tensor ({type(output).__name__}). "
                "Name a module that returns its activations."
            )
        return marked


def _replace_first(value: Any, change: Any) -> tuple[Any, bool]:
    """Return the structure with its first tensor changed, and whether there is one."""
    if isinstance(value, Tensor):
        return change(value), True
    if isinstance(value, Mapping):
        for key, item in value.items():
            changed, found = _replace_first(item, change)
            if found:
                # Change mappings in place, so that a ModelOutput keeps its class.
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
    """Put a CutPoint after every module whose name matches, and return the names.

    A `*` matches one part of the dotted name: "transformer.h.*" is every block, and nothing inside the
    blocks. The model keeps its code, its modules and the names of its state.
    """
    matched = modules_named(model, patterns)
    for name in matched:
        module = model.get_submodule(name)
        if not any(isinstance(hook, _CutAfterHook) for hook in module._forward_hooks.values()):
            module.register_forward_hook(_CutAfterHook())
    return matched


def modules_named(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the module names that match any pattern, in the model's order."""
    names = [name for name, _ in model.named_modules() if name]
    matched: list[str] = []
    for pattern in patterns:
        wanted = pattern.split(".")
        found = [
            name
            for name in names
            if name.count(".") == len(wanted) - 1 and all(map(fnmatchcase, name.split("."), wanted))
        ]
        if not found:
            similar = difflib.get_close_matches(pattern, names, n=5, cutoff=0.3) or names[:5]
            raise CaptureError(
                f"no module matches {pattern!r}; similar names: {', '.join(similar)}. "
                "See model.named_modules(); a * matches one part of a dotted name."
            )
        matched += [name for name in found if name not in matched]
    return sorted(matched, key=names.index)


def cutpoints(model: nn.Module) -> Iterator[tuple[str, CutPoint]]:
    """Yield every CutPoint with its path: submodules, items of attributes, and those of `cut_after`."""
    seen: set[int] = set()

    def new(path: str, value: object) -> Iterator[tuple[str, CutPoint]]:
        if isinstance(value, CutPoint) and id(value) not in seen:
            seen.add(id(value))
            yield path, value

    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        yield from new(name, module)
        for hook in module._forward_hooks.values():
            if isinstance(hook, _CutAfterHook):
                yield from new(f"after {name!r}", hook.cutpoint)
        for attribute, value in vars(module).items():
            if attribute.startswith("_") and attribute in nn.Module().__dict__:
                continue
            yield from new(prefix + attribute, value)
            if isinstance(value, list | tuple):
                value = dict(enumerate(value))
            for key, item in value.items() if isinstance(value, dict) else ():
                yield from new(f"{prefix}{attribute}[{key!r}]", item)


def require_all_met(model: nn.Module, recorder: TraceRecorder) -> None:
    """Raise if a CutPoint of the model was never called: its cut would be lost."""
    missed = [path for path, cutpoint in cutpoints(model) if not recorder.has_met(cutpoint)]
    if missed:
        raise CaptureError(
            f"the CutPoint {', '.join(missed)} was never called in the forward pass. "
            "Call it where the model may be cut, or delete it."
        )
