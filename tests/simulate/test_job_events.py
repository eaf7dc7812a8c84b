"""Costs that only the log of events shows: preparations, pauses, and the detection of losses (B5)."""

import json
from pathlib import Path

import pytest

from varuna.observe.ledger import Interruption, LayoutPeriod, Ledger
from varuna.simulate.costs import calibrate
from varuna.simulate.job_events import MeasuredEvents, Removal, measure_events, note_removal


def write_events(folder: Path, *events: tuple[float, str, str]) -> None:
    rows = [
        {"at": f"2026-01-01T00:00:{at:06.3f}+00:00", "what": what, "why": why} for at, what, why in events
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "events.jsonl").write_text(text + '{"at": "2026-01-0')  # the job was killed within a line


def test_events_give_preparations_pauses_and_detections(tmp_path: Path) -> None:
    """B5, PRO-3"""
    assert measure_events(tmp_path) == MeasuredEvents()
    write_events(
        tmp_path,
        (1.0, "preparing", "b builds the model for generation 2 (b joins)"),
        (3.5, "generation", "2: 1 stage x 2 replicas on a, b, in place (b joins)"),
        (4.0, "morphed", "2: in place, pause 0.250 s, 0 bytes moved"),
        (5.0, "preparing", "c builds the model for generation 3 (c joins)"),
        (6.0, "machine lost", "b: it disconnected"),
        (6.5, "generation", "4: 1 stage x 1 replica on a, in place (b was lost)"),
    )
    start = 1767225600.0
    note_removal(tmp_path, Removal(start + 5.9, "b"))
    note_removal(tmp_path, Removal(start + 5.9, "c"))  # the job did not use it
    with (tmp_path / "removed.jsonl").open("a") as file:
        file.write('{"at": 17672')  # the disk was full
    found = measure_events(tmp_path)
    assert found.prepare_seconds == pytest.approx((2.5,))
    assert found.morph_seconds == (0.25,)
    assert found.detect_seconds == pytest.approx((0.1,), abs=1e-3)


def test_calibrated_costs_are_means_and_the_first_start_counts_for_itself() -> None:
    """B5, PRO-3: costs add up to what the job has lost."""
    parts = [("start", 9.0), ("loss", 2.0), ("loss", 2.0), ("loss", 5.0)]
    ledger = Ledger(
        interruptions=[
            Interruption(at=0.0, why="", kind=kind, machines=2, seconds={"starting": seconds})  # type: ignore[arg-type]
            for kind, seconds in parts
        ],
        join_seconds=[4.0, 4.0, 10.0],
        periods=[LayoutPeriod(at=0.0, generation=1, layout="", machines=2, step_seconds=0.5)],
    )
    measured = MeasuredEvents(prepare_seconds=(1.0, 2.0), detect_seconds=(0.25,))
    costs = calibrate(ledger, source="test", measured=measured)
    assert (costs.first_start, costs.start_seconds, costs.join_seconds) == (9.0, 3.0, 6.0)
    assert (costs.prepare, costs.detect_seconds) == (1.5, 0.25)
    without = calibrate(ledger, source="test")
    assert without.prepare == without.start_seconds and "morph_seconds" in without.estimated
    assert "detect_seconds" in without.estimated and "detect_seconds" not in costs.estimated
