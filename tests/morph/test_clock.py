"""Time that its owner slept through did not pass."""

from varuna.morph.clock import SuspendAwareClock


def test_a_clock_stands_still_while_nobody_looks_at_it() -> None:
    """V43: a manager that was stopped blames nobody for the silence."""
    readings = iter([0.0, 0.5, 1.0, 301.0, 301.25])
    clock = SuspendAwareClock(lambda: next(readings))
    assert [clock.now() for _ in range(4)] == [0.5, 1.0, 1.0, 1.25]
