"""Rows of values, as trackers get them, from the points of a job's history."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from varuna.observe.history import ScalarPoint, StepPoint

OWN_NAMES = ("loss", "step_seconds", "samples_per_second", "tokens_per_second")
"""Curves that every job has."""
SCRIPT = "script/"
"""Begin of the name of a scalar that the script has given one of these names."""


class MetricRow(NamedTuple):
    """Values of one step."""

    step: int
    at: float  # seconds since 1970
    values: Mapping[str, float]


def rows_of(steps: Sequence[StepPoint], scalars: Sequence[ScalarPoint]) -> list[MetricRow]:
    """Return the rows of new points. A value that is not finite is nan."""
    rows = []
    for point in steps:
        values = {"loss": _number(point.loss)} if point.has_loss else {}
        values["step_seconds"] = point.seconds
        if point.seconds > 0:
            values["samples_per_second"] = point.samples / point.seconds
            if point.tokens:
                values["tokens_per_second"] = point.tokens / point.seconds
        rows.append(MetricRow(point.step, point.at, values))
    by_step: dict[int, MetricRow] = {}
    for scalar in scalars:
        row = by_step.setdefault(scalar.step, MetricRow(scalar.step, scalar.at, {}))
        assert isinstance(row.values, dict)
        name = SCRIPT + scalar.name if scalar.name in OWN_NAMES else scalar.name
        row.values[name] = _number(scalar.value)
    return [*rows, *by_step.values()]


def _number(value: float | None) -> float:
    return math.nan if value is None else value
