"""The frozen base of a model with adapters: checkpoints have its hashes instead of its values."""

from collections.abc import Iterable

from torch import Tensor

from varuna.checkpoint.format.manifest import Json, hash_of
from varuna.checkpoint.format.tensors import as_plain, memory_of, spec_of
from varuna.checkpoint.select import NamedTensors


class FrozenBase:
    """Tensors of a stage that the script loads with its model, as long as their values stay the same."""

    def __init__(self, stage: NamedTensors, names: Iterable[str] = ()) -> None:
        self._stage = stage
        self._versions = {name: stage.tensor(name)._version for name in names}
        self._hashes: dict[str, str] = {}

    def __contains__(self, name: object) -> bool:
        """Return whether a tensor has the values that the script has loaded; False once it was trained."""
        if name not in self._versions:
            return False
        tensor = self._stage.tensor(str(name))
        return not tensor.requires_grad and tensor._version == self._versions[str(name)]

    def forget(self, name: str) -> None:
        """Treat a tensor as trained: a checkpoint had other values for it."""
        self._versions.pop(name, None)

    def describe(self, name: str) -> Json:
        """Return what checkpoints save of a tensor."""
        spec = spec_of(name, self._stage.tensor(name))
        return {"dtype": spec.dtype, "shape": list(spec.shape), "hash": self.hash(name)}

    def hash(self, name: str) -> str:
        """Return the hash of a tensor's values. Those of the base are read once."""
        if name in self and name in self._hashes:
            return self._hashes[name]
        found = hash_values(name, self._stage.tensor(name))
        if name in self:
            self._hashes[name] = found
        return found


def hash_values(name: str, tensor: Tensor) -> str:
    plain = as_plain(name, tensor)
    return hash_of(memory_of(plain))
