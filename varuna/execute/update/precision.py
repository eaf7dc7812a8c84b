"""Loss scale: none in fp32 and bf16, static or dynamic in fp16; equal on all ranks.

Every rank sees the same overflow, because it comes from the step's last reduction. So the scales stay equal
without a message of their own.
"""

import sys
from collections.abc import Mapping

from varuna.types import PrecisionName


class LossScale:
    """A constant scale; without a value, no scaling."""

    def __init__(self, value: float | None = None) -> None:
        self.value = 1.0 if value is None else value
        self.checks_overflow = value is not None

    def update(self, *, overflow: bool) -> None:
        """Call it once per step, with the same value on all ranks."""

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the result of `state_dict`, also on another layout."""


class DynamicLossScale(LossScale):
    """Halves on an overflow, doubles after `growth_interval` steps without one."""

    def __init__(self, initial: float, minimum: float, growth_interval: int = 2000) -> None:
        super().__init__(initial)
        self.minimum = minimum
        self.growth_interval = growth_interval
        self.good_steps = 0

    def update(self, *, overflow: bool) -> None:
        if overflow:
            self.value = max(self.value / 2, self.minimum)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.value *= 2
            self.good_steps = 0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = float(state["value"])
        self.good_steps = int(state["good_steps"])


def make_loss_scale(
    precision: PrecisionName,
    loss_scale: float | str,
    init_loss_scale: float,
    min_loss_scale: float | None,  # None: no minimum
) -> LossScale:
    if precision != "fp16":
        return LossScale()
    if loss_scale == "dynamic":
        min_loss_scale = sys.float_info.min if min_loss_scale is None else min_loss_scale
        if not 0 < min_loss_scale <= init_loss_scale:
            raise ValueError(
                f"0 < min_loss_scale <= init_loss_scale must hold, not {min_loss_scale} and {init_loss_scale}"
            )
        return DynamicLossScale(float(init_loss_scale), float(min_loss_scale))
    if isinstance(loss_scale, str) or not loss_scale > 0:
        raise ValueError(f"loss_scale must be a positive number or 'dynamic', not {loss_scale!r}")
    return LossScale(float(loss_scale))
