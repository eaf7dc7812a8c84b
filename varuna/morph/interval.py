"""How often to save: often enough that little is lost, seldom enough that little is spent.

J. W. Young (1974), and J. T. Daly (2006) for its higher order: with a save that costs C and failures that
come every M on average, the best time between two saves is about sqrt(2 C M) - C.
"""

import math

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
