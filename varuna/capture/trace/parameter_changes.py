"""Changes of parameters inside `forward`, which torch.export would lose or repeat for each micro-batch.

A trace loses what is made of `weight.data`. Here it is `weight.detach()`, which a graph can hold. Changes of
a parameter in place are refused.
"""

from typing import Any

import torch
from torch import Tensor, nn

from varuna.errors import CaptureError

_NO_CHANGES = frozenset({"requires_grad_", "share_memory_", "detach_", "retain_grad_", "embedding_renorm_"})
"""Functions that end like a change in place. Embeddings that renormalize are refused by their own name."""


class ParameterChanges:
    def __init__(self, model: nn.Module) -> None:
        self._names = {_storage(value): name for name, value in model.named_parameters()}

    def is_data(self, func: Any) -> bool:
        """Return whether a function reads or sets `.data`."""
        return getattr(func, "__self__", None) is torch.Tensor.data

    def changed(self, name: str, func: Any, args: Any, kwargs: Any) -> str | None:
        """Return the name of the parameter that a call changes, if it does."""
        changes = name.endswith("_") and not name.endswith("__") and name not in _NO_CHANGES
        changes |= name == "__setitem__" or (name == "__set__" and self.is_data(func))
        changes |= name.startswith("__i") and name.endswith("__") and name not in ("__int__", "__index__")
        target = args[0] if args and changes else (kwargs or {}).get("out")
        if not isinstance(target, Tensor):
            return None
        return self._names.get(_storage(target))


def _storage(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def refuse_change(line: str, name: str) -> None:
    raise CaptureError(
        f"{line}: forward changes the parameter {name!r}, but each micro-batch would change it, and replicas "
        "would differ. Change it in your script after optimizer.step(), under torch.no_grad(); or compute "
        "the changed weight from the parameter, as torch.nn.utils.parametrize does."
    )
