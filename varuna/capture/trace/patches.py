"""Spares torch.export the work of which a capture reads nothing: a deep model's would take minutes.

The graph is the same without it. What is spared is code that nobody runs, texts that nobody reads, and
rounds of the garbage collector that find nothing.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch.fx.proxy
from torch import fx
from torch.fx.graph import _PyTreeCodeGen


@contextmanager
def quick(line: Callable[[FrameType | None], str]) -> Iterator[None]:
    """`line` tells the model's line for a frame of the stack."""

    class Lines(list[str]):
        """In the place of torch's own, which reads the texts of a hundred frames for every operation."""

        extract = staticmethod(lambda: Lines())

        def summary(self) -> list[str]:
            found = line(sys._getframe(1))
            return Lines([found] if found else [])

        def format(self) -> list[str]:
            return self

    with ExitStack() as stack:
        stack.enter_context(_uncollected())
        stack.enter_context(patch.object(fx.GraphModule, "recompile", _recompile_when_called))
        stack.enter_context(patch.object(torch.fx.proxy, "CapturedTraceback", Lines))
        stack.enter_context(
            patch.object(torch.fx.proxy.TracerBase, "_filter_traceback_frames", lambda _, lines: lines)
        )
        yield


@contextmanager
def _uncollected() -> Iterator[None]:
    """All that a trace makes stays until its end, so looking for garbage meanwhile finds none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_recompile: Any = fx.GraphModule.recompile


def _recompile_when_called(module: fx.GraphModule) -> None:
    """torch.export edits graphs in many passes and makes code after each; few are ever run."""
    codegen = module.graph._codegen
    if isinstance(codegen, _PyTreeCodeGen):
        module._in_spec, module._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec

    def forward(self: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        _recompile(self)
        return self.forward(*args, **kwargs)

    type(module).forward = forward  # each has a class of its own
