"""Reasons why a layout is slower than the best."""

from statistics import fmean

from varuna.types import Forecast
from varuna.units import duration

EQUAL = 1e-9
"""Steps that differ by less than this share count as equally long."""
PARTS = {
    "compute_seconds": "computing",
    "waiting_seconds": "waiting for other stages",
    "reduce_seconds": "the all-reduce",
    "optimizer_seconds": "the optimizer",
}
"""Parts of a step that a forecast has for each stage."""


def why_slower(forecast: Forecast, best: Forecast) -> str:
    """Name the part of the step on which a layout loses most against the best one."""
    slower = forecast.seconds / best.seconds - 1
    if slower <= EQUAL:
        return "as fast, with more devices or more memory"

    def mean(of: Forecast, part: str) -> float:
        return fmean(getattr(stage, part) for stage in of.stages)

    part = max(PARTS, key=lambda part: mean(forecast, part) - mean(best, part))
    return (
        f"{slower:.1%} slower: {duration(mean(forecast, part))} a step for {PARTS[part]}, "
        f"not {duration(mean(best, part))}"
    )
