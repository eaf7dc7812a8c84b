"""Timelines as text, SVG and trace: they are complete, and viewers can read them."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.observe import to_perfetto, to_svg, to_text
from varuna.types import Interval, Timeline

SVG = "{http://www.w3.org/2000/svg}"
STEP = Timeline(
    (
        Interval(0, 0, "F", 0, 0.0, 0.001),
        Interval(0, 0, "B", 0, 0.004, 0.006),
        Interval(0, 0, "reduce", -1, 0.005, 0.008),
        Interval(1, 1, "wait", -1, 0.0, 0.001),
        Interval(1, 1, "F", 0, 0.001, 0.002),
        Interval(1, 1, "B", 0, 0.002, 0.004),
    )
)


@st.composite
def intervals(draw: st.DrawFn) -> Interval:
    rank = draw(st.integers(0, 15))
    what = draw(st.sampled_from(["F", "R", "B", "I", "W", "reduce", "wait", "<save & go>"]))
    start = draw(st.floats(0, 1e4))
    return Interval(rank, rank % 4, what, draw(st.integers(-1, 9)), start, start + draw(st.floats(0, 1e3)))


timelines = st.lists(intervals(), max_size=12).map(lambda found: Timeline(tuple(found)))


def bars(picture: str) -> list[str]:
    """Return the tooltips of the bars."""
    return [str(title.text) for title in ElementTree.fromstring(picture).iter(f"{SVG}title")]


def test_text_shows_a_lane_per_rank_and_its_bubble() -> None:
    """B4"""
    assert to_text(STEP, width=8) == (
        "stage 0, rank 0 |F...BBrr| bubble 62%\nstage 1, rank 1 |.FBB....| bubble 62%\n8 columns are 8 ms\n"
    )


def test_two_timelines_share_one_scale() -> None:
    """B4: predicted and measured, side by side."""
    slow = Timeline((Interval(0, 0, "F", 0, 0.0, 0.016),))
    assert to_text({"predicted": STEP, "measured": slow}, width=8) == (
        "predicted\n"
        "stage 0, rank 0 |F.Br....| bubble 62%\n"
        "stage 1, rank 1 |FB......| bubble 62%\n"
        "measured\n"
        "stage 0, rank 0 |FFFFFFFF| bubble 0%\n"
        "8 columns are 16 ms\n"
    )
    widths = {
        bar.find(f"{SVG}title").text: float(bar.get("width", "0"))  # type: ignore[union-attr]
        for bar in ElementTree.fromstring(to_svg({"predicted": STEP, "measured": slow})).iter(f"{SVG}rect")
        if bar.find(f"{SVG}title") is not None
    }
    assert widths["F0 from 0 for 16 ms"] == pytest.approx(16 * widths["F0 from 0 for 1 ms"], rel=1e-3)


def test_a_picture_is_self_contained_and_names_everything() -> None:
    """B4"""
    picture = to_svg(STEP, title="Step 3 <measured>")
    words = [text.text for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    for word in (
        "Step 3 <measured>",
        "forward",
        "backward",
        "reduce",
        "wait",
        "stage 1, rank 1",
        "bubble 62%",
    ):
        assert word in words
    assert "href" not in picture and "url(" not in picture
    assert "reduce from 5 ms for 3 ms" in bars(picture)


@given(timelines)
def test_every_interval_is_drawn_and_every_form_can_be_read(timeline: Timeline) -> None:
    """B4"""
    assert len(bars(to_svg(timeline, "any"))) == len(timeline.intervals)
    trace = json.loads(to_perfetto(timeline))
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == len(timeline.intervals)
    lanes = {interval.rank for interval in timeline.intervals}
    assert to_text(timeline).count("bubble") == len(lanes)


def test_a_trace_has_a_process_per_rank_and_a_track_for_what_overlaps() -> None:
    """B4: as a Perfetto trace."""
    events = json.loads(to_perfetto(STEP))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"stage 0, rank 0", "stage 1, rank 1"}
    backward = next(event for event in events if event["name"] == "B0" and event["args"]["rank"] == 0)
    reduce = next(event for event in events if event["name"] == "reduce")
    assert (backward["ts"], backward["dur"]) == pytest.approx((4000.0, 2000.0))
    assert backward["pid"] == reduce["pid"] and backward["tid"] != reduce["tid"]


def test_a_trace_of_two_timelines_keeps_their_ranks_apart() -> None:
    """B4: predicted and measured in one trace."""
    events = json.loads(to_perfetto({"predicted": STEP, "measured": STEP}))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [
        f"{name} stage {rank}, rank {rank}" for name in ("predicted", "measured") for rank in (0, 1)
    ]


def test_no_timeline_is_an_error_and_an_empty_step_is_drawn() -> None:
    with pytest.raises(ValueError, match="no timeline to draw"):
        to_svg({})
    assert bars(to_svg(Timeline(()))) == []
    assert to_text(Timeline(()), width=8) == "8 columns are 0\n"
