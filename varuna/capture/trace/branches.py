"""Branches on data whose outcome is known without the data."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from varuna.capture.trace.recorder import TraceRecorder
from varuna.capture.trace.refusals import current_line, opaque_call
from varuna.errors import CaptureError

NUMBER_READS = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")
"""Methods of a tensor that return a number."""


class KnownBranches(TorchFunctionMode):
    """Decides `if torch.rand([]) < p` for p = 0 and p = 1, and lets `assert` on data pass.

    An assertion that fails would stop the model in a plain process too.
    """

    def __init__(self, recorder: TraceRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._drawn: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__lt__", "lt") and len(args) == 2 and any(args[0] is drawn for drawn in self._drawn):
            limit = args[1]
            if isinstance(limit, int | float) and not 0 < limit < 1:
                return limit >= 1
            raise CaptureError(
                f"{current_line()}: this line skips a layer at random with probability {limit}, which a "
                "traced graph cannot do. Set layerdrop to 0, or keep the module eager with "
                f"{opaque_call(self._recorder.running)}."
            )
        if name in NUMBER_READS and not self._recorder.inside_leaf:
            source = current_line().partition(": ")[2]
            if source.startswith("assert ") and args[0].dtype == torch.bool:
                return True
            self._recorder.reader = self._recorder.running
        result = func(*args, **(kwargs or {}))
        if name == "rand" and isinstance(result, Tensor) and result.dim() == 0:
            self._drawn.append(result)
        return result
