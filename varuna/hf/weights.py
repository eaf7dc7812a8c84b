"""`initialize=hf_weights(folder)`: each rank reads its stage from a Hugging Face folder."""

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from varuna.capture.model.tied_weights import named_tensors
from varuna.errors import CheckpointError, list_some
from varuna.hf.folder import TensorPlace, find_tensors
from varuna.hf.names import NameMatch, match_names

log = logging.getLogger("varuna")


def hf_weights(
    folder: str | os.PathLike[str], *, strict: bool = True, ignore_mismatched_sizes: bool = False
) -> "HfWeights":
    """Return initial values for `Varuna(..., initialize=)` and `RaNNCModule(..., initialize=)`.

    `folder` is a local Hugging Face folder with model.safetensors, or with shards and their index. The
    model may be on `meta`. Floating-point values are converted to the model's dtype. Weights outside the base
    model that the folder lacks (a new head) keep the model's values, or are initialized by the model.
    `strict=False` allows differing names in the base model, too. `ignore_mismatched_sizes=True` treats
    weights of another shape as absent.
    """
    return HfWeights(os.fspath(folder), strict=strict, ignore_mismatched_sizes=ignore_mismatched_sizes)


@dataclass(eq=False)
class HfWeights:
    """Reads tensors of a Hugging Face folder by the names of the model that it is bound to."""

    folder: str
    strict: bool = True
    ignore_mismatched_sizes: bool = False
    bytes_read: int = 0  # by this process
    _places: dict[str, TensorPlace] | None = None
    _chosen: dict[str, list[TensorPlace]] = field(default_factory=dict)
    _model: "weakref.ref[nn.Module] | None" = None

    def bind(self, model: nn.Module, ties: Sequence[tuple[str, ...]]) -> None:
        """Choose the tensor in the folder for each of the model's; refuse a folder of another model."""
        if self._model is not None and self._model() is model:
            return
        if self._places is None:
            self._places = find_tensors(self.folder)
        match = match_names(model, ties, self._places)
        if not match.found:
            raise CheckpointError(
                f"{self.folder} belongs to another model: it has no weight of {type(model).__name__}, but "
                f"{list_some(sorted(self._places))} (build the model from the folder's config.json)"
            )
        self._refuse_differing_names(match, type(model).__name__)
        resized = self._resized(match, model)
        self._chosen = {
            name: [self._places[key] for key in keys]
            for name, keys in match.found.items()
            if name not in resized
        }
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._log(match, resized)
        self._model = weakref.ref(model)

    def __contains__(self, name: object) -> bool:
        return name in self._chosen

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the values of one of the model's tensors."""
        place, *others = self._chosen[name]
        if place.dtype.is_floating_point != dtype.is_floating_point or (
            place.dtype != dtype and not dtype.is_floating_point
        ):
            raise CheckpointError(
                f"{place.spec.key!r} of {place.path} is {place.dtype}, but the model has {dtype}: the folder "
                "has quantized weights or belongs to another model (convert it to floating point)"
            )
        for other in others:
            if (other.dtype, other.spec.shape) != (place.dtype, place.spec.shape) or not place.equals(other):
                raise CheckpointError(
                    f"{self.folder} has different values for {place.spec.key!r} and {other.spec.key!r}, but "
                    "the model ties them (build it with tie_word_embeddings=False in its config)"
                )
        self.bytes_read += place.stop - place.first
        return place.read(dtype, device)

    def _refuse_differing_names(self, match: NameMatch, model: str) -> None:
        if not self.strict:
            match.new += match.missing
            match.unused += match.unexpected
            return
        found = []
        if match.missing:
            found.append(f"it lacks {list_some(match.missing)}")
        if match.unexpected:
            found.append(f"{model} has no {list_some(match.unexpected)}")
        if found:
            raise CheckpointError(
                f"{self.folder} does not fit the model: {', and '.join(found)} (build the model from the "
                "folder's config.json; if transformers converts these weights, load the folder with "
                "from_pretrained and save it with save_pretrained(..., save_original_format=False); "
                "hf_weights(folder, strict=False) initializes missing weights and ignores unknown ones)"
            )

    def _resized(self, match: NameMatch, model: nn.Module) -> dict[str, str]:
        """Return the tensors whose shape differs; refuse them unless they are to be ignored."""
        assert self._places is not None
        shapes = {name: list(tensor.shape) for name, tensor in named_tensors(model).items()}
        found = {name: list(self._places[keys[0]].spec.shape) for name, keys in match.found.items()}
        resized = {
            name: f"{name} ({shape} in the folder, {shapes[name]} in the model)"
            for name, shape in found.items()
            if shape != shapes[name]
        }
        if resized and not self.ignore_mismatched_sizes:
            raise CheckpointError(
                f"weights of {self.folder} have other shapes than the model's: "
                f"{list_some(list(resized.values()))} (build the model from the folder's config.json, or "
                "initialize them as new: hf_weights(folder, ignore_mismatched_sizes=True))"
            )
        return resized

    def _log(self, match: NameMatch, resized: Mapping[str, str]) -> None:
        if new := [*match.new, *resized]:
            log.warning(
                "not in %s, so initialized as new or as the model has them: %s", self.folder, ", ".join(new)
            )
        if match.unused:
            log.info("weights of %s that the model does not use: %s", self.folder, ", ".join(match.unused))
