"""Records of a worker's steps: loss, time, samples, tokens, and the memory of its device."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from varuna.morph.metrics.local import open_metrics
from varuna.observe.devices import peak_flops

TOKEN_INPUTS = ("input_ids", "tokens", "token_ids")
"""Inputs of shape [samples, tokens]."""
DESCRIBE_SECONDS = 1.0
"""Time between two measurements of a device's memory."""


class StepMetrics:
    """Writes the records of one model."""

    def __init__(self, describe_device: Callable[[], dict[str, object]] | None = None) -> None:
        """`describe_device` returns fields of `WorkerFacts`; None: the device is a CPU."""
        self._writer = open_metrics()
        self._describe_device = describe_device
        self._describe_at = 0.0
        self._tokens = 0  # of a sample

    @property
    def watched(self) -> bool:
        return self._writer.watched

    def note_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Note the tokens of a sample, padding included."""
        if self._writer.watched:
            shape: tuple[int, ...] = ()
            for name in TOKEN_INPUTS:
                if name in inputs:
                    shape = getattr(inputs[name], "shape", ())
            self._tokens = shape[1] if len(shape) == 2 else 0

    def describe(self, flops_per_sample: float, device: str, precision: str) -> None:
        """Note the operations of a sample, and the peak of the device that runs them."""
        self._writer.describe(flops_per_sample=flops_per_sample, peak_flops=peak_flops(device, precision))

    def ends_at(self, step: int | None) -> None:
        """Note at which step the training ends."""
        self._writer.describe(num_steps=step or 0)

    def finish_step(
        self, step: int, loss: float | None, *, seconds: float, samples: int, is_first: bool
    ) -> None:
        """Write the record of a step. The first rank writes it for the whole job."""
        if is_first:
            self._writer.step(step, loss, seconds=seconds, samples=samples, tokens=samples * self._tokens)
        else:
            self._writer.last_step = step
        if self._describe_device is not None and (now := time.monotonic()) >= self._describe_at:
            self._describe_at = now + DESCRIBE_SECONDS
            self._writer.describe(**self._describe_device())
