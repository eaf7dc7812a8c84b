"""The clock does not count time in which its process was suspended."""

from varuna.morph.clock import SuspendAwareClock


def test_a_clock_stops_while_nobody_reads_it() -> None:
    """V43: a manager that was stopped does not count this time as silence of its agents."""
    readings = iter([0.0, 0.5, 1.0, 301.0, 301.25])
    clock = SuspendAwareClock(lambda: next(readings))
    assert [clock.now() for _ in range(4)] == [0.5, 1.0, 1.0, 1.25]
