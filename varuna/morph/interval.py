"""Autosave interval that minimises lost time: the Young/Daly formula.

With a save that takes C seconds and M seconds between failures, the best interval is about
sqrt(2 C M) - C (J. W. Young, 1974; J. T. Daly, 2006, for the higher-order terms).
"""

import math

import msgspec

PRIOR_SECONDS = 4 * 3600.0
"""Assumed time between failures of a job without history."""
SURVIVED_SHARE = 1 / 16
"""A loss that was survived in place counts as this many failures: the next one may not be survived."""


def count_failures(losses: int, survived: int) -> float:
    """Return the failures that count: losses that needed a checkpoint, and a share of the others.

    `survived`: losses after which the other workers went on in place.
    """
    survived = min(losses, survived)
    return losses - survived + survived * SURVIVED_SHARE


def failure_seconds(failures: float, observed_seconds: float) -> float:
    """Estimate the mean time between failures; the prior counts as one failure."""
    return (PRIOR_SECONDS + max(observed_seconds, 0.0)) / (1 + failures)


def interval_seconds(save_seconds: float, between_failures_seconds: float) -> float:
    """Return the time from the end of a save to the start of the next (Daly, equation 37)."""
    cost, mean = save_seconds, between_failures_seconds
    if cost <= 0:
        return 0.0
    if cost >= 2 * mean:
        return mean
    root = math.sqrt(cost / (2 * mean))
    return math.sqrt(2 * cost * mean) * (1 + root / 3 + root**2 / 9) - cost


class SaveRhythm(msgspec.Struct, frozen=True, kw_only=True):
    """Autosave setting of a job, and the facts that determine the interval."""

    every_seconds: float | None = None  # fixed interval; 0: off; None: the best interval
    failures: float = 0.0  # that needed a checkpoint, see `count_failures`
    observed_seconds: float = 0.0  # time in which these failures happened
    save_seconds: float = 0.0  # time that a save blocks training; 0: unknown

    def interval(self, *, save_seconds: float, more_seconds: float) -> float | None:
        """Return the interval after `more_seconds` without a failure; None: autosave is off.

        An unknown save time counts as 0, so the first save comes at once and measures it.
        """
        if self.every_seconds is not None:
            return self.every_seconds or None
        return interval_seconds(
            save_seconds, failure_seconds(self.failures, self.observed_seconds + more_seconds)
        )
