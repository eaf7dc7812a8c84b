"""Parameters, buffers and attributes of a partitioned module: those of this rank, or of the whole model."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


class PartMembers(nn.Module):
    """Yields this rank's parameters and buffers. Before the first call, these are all of them.

    With `from_global` the methods yield all of the model's; those that other ranks hold are on `meta`.
    """

    _model: nn.Module
    _partitioned: Any

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes of the model, such as `temperature`, in the model."""
        model = self.__dict__.get("_model")
        is_own = name in self.__dict__ or name.startswith("_") or hasattr(type(self), name)
        if model is None or is_own:
            return super().__setattr__(name, value)
        if self._partitioned is None:
            is_set = name in vars(model) or hasattr(type(model), name)
            if is_set:
                setattr(model, name, value)
        else:
            is_set = self._partitioned.source.attributes.assign(name, value)
        if not is_set:
            super().__setattr__(name, value)

    def _named_members(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        for name, tensor in super()._named_members(*args, **kwargs):
            if self._partitioned is None or not tensor.is_meta:
                yield name, tensor

    def parameters(self, recurse: bool = True, *, from_global: bool = False) -> Iterator[nn.Parameter]:
        for _, parameter in self.named_parameters(recurse=recurse, from_global=from_global):
            yield parameter

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
        *,
        from_global: bool = False,
    ) -> Iterator[tuple[str, nn.Parameter]]:
        if from_global:
            return self._model.named_parameters(prefix, recurse, remove_duplicate)
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def buffers(self, recurse: bool = True, *, from_global: bool = False) -> Iterator[Tensor]:
        for _, buffer in self.named_buffers(recurse=recurse, from_global=from_global):
            yield buffer

    def named_buffers(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
        *,
        from_global: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        if from_global:
            return self._model.named_buffers(prefix, recurse, remove_duplicate)
        return super().named_buffers(prefix, recurse, remove_duplicate)
