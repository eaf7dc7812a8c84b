"""Outputs of a model, put together from micro-batches and replicas."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from varuna.errors import CaptureError
from varuna.execute.comm.frames import TensorMeta, meta_of
from varuna.execute.step.scatter import MicroBatch, join, put_in_order
from varuna.types import TensorSpec

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class ModelOutput:
    """One output tensor: its batch dimension, and the number of rows of each sample."""

    spec: TensorSpec
    dim: int | None  # None: one value for all samples
    per_sample: int = 1
    reduction: Reduction = "mean"  # over micro-batches, if it has no batch dimension

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return dtype

    @property
    def is_summed(self) -> bool:
        """True if the values of several micro-batches add up."""
        return self.dim is None and self.dtype.is_floating_point

    def meta(self, num_samples: int) -> TensorMeta:
        shape = tuple(0 if dim is None else dim.size(num_samples) for dim in self.spec.dims)
        return meta_of(torch.float64 if self.is_summed else self.dtype, shape)

    def rows(self, tensor: Tensor, first: int, stop: int) -> Tensor:
        """Return the samples `first` to `stop - 1`."""
        if self.dim is None:
            return tensor
        return tensor.narrow(self.dim, first * self.per_sample, (stop - first) * self.per_sample)

    def combine_microbatches(
        self, values: Sequence[Tensor], microbatches: Sequence[MicroBatch], total: float
    ) -> Tensor | None:
        """Put the values of this rank's micro-batches together; `total` is the weight of the global batch."""
        if not values:
            return None
        if self.dim is not None:
            runs = [microbatch.spans for microbatch in microbatches]
            return put_in_order(values, runs, self.dim, each=self.per_sample)
        if not self.is_summed:
            return self._single_value(values)
        whole = torch.zeros(values[0].shape, dtype=torch.float64, device=values[0].device)
        for value, microbatch in zip(values, microbatches, strict=True):
            share = self.share(microbatch, total)
            if share:  # the loss of a micro-batch with weight 0 may not be finite
                whole.add_(value.double(), alpha=share)
        return whole

    def share(self, microbatch: MicroBatch, total: float) -> float:
        """Return the share of a micro-batch in a value without batch dimension."""
        return microbatch.weight / total if self.reduction == "mean" else 1.0

    def combine_ranks(self, values: Sequence[Tensor], device: torch.device) -> Tensor:
        """Put the values of several ranks together."""
        if self.dim is not None:
            if not values:
                meta = self.meta(0)
                return torch.empty(meta.shape, dtype=meta.dtype, device=device)
            return join(values, self.dim)
        if self.is_summed:
            return torch.stack(list(values)).sum(0).to(self.dtype)
        return self._single_value(values)

    def _single_value(self, values: Sequence[Tensor]) -> Tensor:
        if any(not torch.equal(value, values[0]) for value in values):
            raise CaptureError(
                f"the output {self.spec} has no batch dimension and differs between micro-batches, so it "
                "has no single value (return one value for each sample, and sum them outside the model)"
            )
        return values[0]


def classify_output(spec: TensorSpec, reduction: Reduction) -> ModelOutput:
    """Find the batch dimension; raise CaptureError if the output cannot be put together."""
    batched = [(place, dim) for place, dim in enumerate(spec.dims) if dim is None or dim.per_sample]
    if not batched:
        return ModelOutput(spec, None, reduction=reduction)
    place, dim = batched[0]
    if len(batched) == 1 and dim is not None and not dim.fixed:
        return ModelOutput(spec, place, dim.per_sample)
    raise CaptureError(
        f"it is not clear which part of the output {spec} belongs to which sample (expected one dimension "
        "that is the batch or a multiple of it, or no batch dimension, as in a loss)"
    )
