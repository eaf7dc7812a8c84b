"""How often to save: often enough that little is lost, seldom enough that little is spent.

J. W. Young (1974), and J. T. Daly (2006) for its higher order: with a save that costs C and failures that
come every M on average, the best time between two saves is about sqrt(2 C M) - C.
"""

import math

import msgspec

PRIOR_SECONDS = 4 * 3600.0
"""Before anything is known of a job's machines: one failure in so long."""


def failure_seconds(failures: int, observed_seconds: float) -> float:
    """The mean time between failures, as far as it has been seen; the prior counts as one of them."""
    return (PRIOR_SECONDS + max(observed_seconds, 0.0)) / (1 + failures)


def interval_seconds(save_seconds: float, between_failures_seconds: float) -> float:
    """From the end of a save to the start of the next (Daly, equation 37)."""
    cost, mean = save_seconds, between_failures_seconds
    if cost <= 0:
        return 0.0
    if cost >= 2 * mean:
        return mean
    root = math.sqrt(cost / (2 * mean))
    return math.sqrt(2 * cost * mean) * (1 + root / 3 + root**2 / 9) - cost


class SaveRhythm(msgspec.Struct, frozen=True, kw_only=True):
    """How often a job saves by itself, and what is known so far that bears on it."""

    every_seconds: float | None = None  # as the user wants it, 0 for never; None: what loses the least
    failures: int = 0
    observed_seconds: float = 0.0  # in which they came
    save_seconds: float = 0.0  # that a save kept training waiting; 0: not known yet

    def interval(self, *, save_seconds: float, more_seconds: float) -> float | None:
        """From one save to the next, after `more_seconds` without a failure; None: never.

        While the cost of a save is not known it is 0: the first one comes at once, and tells.
        """
        if self.every_seconds is not None:
            return self.every_seconds or None
        return interval_seconds(
            save_seconds, failure_seconds(self.failures, self.observed_seconds + more_seconds)
        )
