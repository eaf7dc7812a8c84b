"""The autosave interval minimises the lost time."""

from concurrent.futures import Future

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from varuna.cli.run import parse_save_every
from varuna.morph.interval import PRIOR_SECONDS, SaveRhythm, count_failures, failure_seconds, interval_seconds
from varuna.train.saving.autosave import AutosaveTimer, parse_rhythm


def share_lost(interval: float, cost: float, mean: float) -> float:
    """Return the lost share of time: saves, and half an interval repeated after each failure."""
    return cost / (interval + cost) + (interval + cost) / 2 / mean


@settings(deadline=None)
@given(st.floats(0.01, 60), st.floats(600, 1e6))
def test_no_other_interval_loses_much_less(cost: float, mean: float) -> None:
    best = share_lost(interval_seconds(cost, mean), cost, mean)
    for factor in (0.5, 0.8, 1.25, 2):
        assert best <= share_lost(interval_seconds(cost, mean) * factor, cost, mean) * 1.02


def test_more_failures_or_cheaper_saves_mean_more_checkpoints() -> None:
    assert interval_seconds(2.0, 3600.0) == pytest.approx(118.6, abs=1)
    assert interval_seconds(0.02, 3600.0) < interval_seconds(2.0, 600.0) < interval_seconds(2.0, 3600.0)
    assert failure_seconds(10, 3600.0) < failure_seconds(0, 3600.0)
    assert interval_seconds(0.0, 3600.0) == 0.0
    assert interval_seconds(100.0, 10.0) == 10.0


def test_the_first_save_comes_at_once_and_later_ones_at_the_best_interval() -> None:
    """The clock is a number. Saves of the script restart the interval."""
    now = 1000.0
    saves = AutosaveTimer(SaveRhythm(), clock=lambda: now)
    assert saves.due
    under_way: Future[str] = Future()
    saves.saved(under_way, 2.0, autosave=True)
    assert saves.every_seconds == pytest.approx(interval_seconds(2.0, PRIOR_SECONDS))
    now += saves.every_seconds
    assert not saves.due, "the save before is not over"
    under_way.set_result("there")
    assert saves.due
    saves.saved(under_way, 99.0, autosave=False)
    now += saves.every_seconds / 2
    assert not saves.due and saves.every_seconds == pytest.approx(240, abs=5), "at the cost of its own"
    now += saves.every_seconds
    saves.failed()
    assert not saves.due
    now += 600
    assert saves.due
    saves.turn_off()
    assert not saves.due and not saves.every_seconds


def test_the_setting_of_the_manager_decides_the_interval() -> None:
    every = AutosaveTimer(parse_rhythm('{"every_seconds": 30}'), clock=lambda: 0.0)
    assert every.every_seconds == 30 and not every.due
    for nothing in (None, '{"every_seconds": 0}'):
        assert not AutosaveTimer(parse_rhythm(nothing)).due
    calm = SaveRhythm(save_seconds=1.0)
    failing = SaveRhythm(save_seconds=1.0, failures=9, observed_seconds=3600.0)
    often, seldom = (AutosaveTimer(rhythm).every_seconds for rhythm in (failing, calm))
    assert 30 < often < seldom / 2


def test_losses_that_needed_no_checkpoint_hardly_count() -> None:
    """A floor remains: many losses in place make saves more frequent than none."""
    restarts, in_place, none = count_failures(9, 0), count_failures(9, 9), count_failures(0, 0)
    assert none == 0 < in_place < 1 < restarts == 9
    assert count_failures(2, 5) < 1, "a manager that was restarted knows fewer"
    often, seldom = (
        SaveRhythm(failures=failures).interval(save_seconds=1.0, more_seconds=0.0)
        for failures in (restarts, in_place)
    )
    assert often is not None and seldom is not None and often < seldom / 2
    assert parse_rhythm('{"failures": 3}') == SaveRhythm(failures=3.0)


@pytest.mark.parametrize(
    ("typed", "seconds"), [(None, None), ("auto", None), ("off", 0.0), ("600", 600.0), ("0.5", 0.5)]
)
def test_save_every_is_parsed(typed: str | None, seconds: float | None) -> None:
    assert parse_save_every(typed) == seconds


@pytest.mark.parametrize("typed", ["-1", "0", "nan", "inf", "often", ""])
def test_an_invalid_interval_is_refused(typed: str) -> None:
    with pytest.raises(ValueError, match="--save-every must be auto, off, or a number of seconds"):
        parse_save_every(typed)
