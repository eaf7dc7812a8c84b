"""Parameters and buffers of a partitioned module: those of this rank, or of the whole model."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


class PartMembers(nn.Module):
    """Yields this rank's parameters and buffers. Before the first call, these are all of them.

    With `from_global` the methods yield all of the model's; those that other ranks hold are on `meta`.
    """

    _model: nn.Module
    _partitioned: object | None

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
