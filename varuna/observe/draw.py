"""Draws timelines as text or SVG: one lane per rank, time from left to right.

Several timelines, for example predicted and measured, are drawn below each other on the same time scale.
"""

import math
from collections.abc import Mapping
from html import escape

from varuna.observe.record import COMPUTE, LOOKS, bubble, look
from varuna.types import Interval, Timeline
from varuna.units import duration

_LABEL, _WIDTH, _SHARE = 118, 1100, 84  # across, in pixels: names, the time axis, the bubble
_LANE, _BAR, _STRIP = 28, 17, 5  # down, in pixels: a lane; its compute bars; the strip below for the rest


def to_text(timeline: Timeline | Mapping[str, Timeline], *, width: int = 100) -> str:
    """Return a line per rank. Each column is a time slice and shows what filled most of it."""
    panels = _panels(timeline)
    seconds = max(panel.seconds for panel in panels.values())
    lines = []
    for name, panel in panels.items():
        if name:
            lines.append(name)
        shares = bubble(panel)
        lanes = _lanes(panel)
        label = max((len(_name(place)) for place in lanes), default=0)
        lines += [
            f"{_name(place):<{label}} |{_columns(lane, seconds, width)}| bubble {shares[place[1]]:.0%}"
            for place, lane in lanes.items()
        ]
    return "\n".join([*lines, f"{width} columns are {duration(seconds)}", ""])


def to_svg(timeline: Timeline | Mapping[str, Timeline], title: str = "") -> str:
    """Return a self-contained SVG. Each bar shows its times as a tooltip."""
    panels = _panels(timeline)
    seconds = max(panel.seconds for panel in panels.values())
    scale = _WIDTH / seconds if seconds else 0.0
    body: list[str] = []
    y = 12
    if title:
        y += 20
        body.append(f'<text x="12" y="{y - 8}" class="title">{escape(title)}</text>')
    y = _draw_legend(body, panels, y)
    for name, panel in panels.items():
        if name:
            y += 22
            label = f"{name}: {duration(panel.seconds)}"
            body.append(f'<text x="12" y="{y - 7}" class="panel">{escape(label)}</text>')
        y = _draw_panel(body, panel, y, seconds=seconds, scale=scale)
    width, height = _LABEL + _WIDTH + _SHARE, y + 8
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
            "<style>.title{font-size:15px;font-weight:bold}.panel{font-size:13px;font-weight:bold}"
            ".number{font-size:9px;fill:#fff;text-anchor:middle}.dark{fill:#222}.faint{fill:#666}</style>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            *body,
            "</svg>",
            "",
        ]
    )


Place = tuple[int, int]  # rank, stage


def _panels(timeline: Timeline | Mapping[str, Timeline]) -> Mapping[str, Timeline]:
    panels = {"": timeline} if isinstance(timeline, Timeline) else timeline
    if not panels:
        raise ValueError("no timeline to draw (give at least one)")
    return panels


def _lanes(timeline: Timeline) -> dict[Place, list[Interval]]:
    """Return the intervals of each rank, from the first stage to the last."""
    lanes: dict[Place, list[Interval]] = {}
    for interval in sorted(timeline.intervals, key=lambda i: (i.stage, i.rank, i.start_seconds)):
        lanes.setdefault((interval.rank, interval.stage), []).append(interval)
    return lanes


def _name(place: Place) -> str:
    return f"stage {place[1]}, rank {place[0]}"


def _columns(lane: list[Interval], seconds: float, width: int) -> str:
    """Return a letter per column: compute if it fills at least half, else what else does, else a dot."""
    computing: list[dict[str, float]] = [{} for _ in range(width)]
    beside: list[dict[str, float]] = [{} for _ in range(width)]
    for interval in (i for i in lane if i.what != "wait" and seconds):
        shares = computing if interval.what in COMPUTE else beside
        first = interval.start_seconds / seconds * width
        stop = interval.stop_seconds / seconds * width
        for column in range(max(0, int(first)), min(width, math.ceil(stop))):
            part = min(stop, column + 1) - max(first, column)
            shares[column][interval.what] = shares[column].get(interval.what, 0.0) + part
    return "".join(
        _letter(share) or _letter(other) or "." for share, other in zip(computing, beside, strict=True)
    )


def _letter(share: dict[str, float]) -> str:
    half = 0.5 - 1e-9  # tolerates rounding at the middle of a column
    return max(share, key=lambda what: share[what])[0] if sum(share.values()) >= half else ""


def _draw_legend(body: list[str], panels: Mapping[str, Timeline], y: int) -> int:
    present = {interval.what for panel in panels.values() for interval in panel.intervals}
    known = [what for what in LOOKS if what in present]
    x = _LABEL
    for what in [*known, *sorted(present - LOOKS.keys())]:
        label, colour, _ = look(what)
        body.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        body.append(f'<text x="{x + 17}" y="{y + 10}">{escape(label)}</text>')
        x += 17 + 7 * len(label) + 18
    return y + 22


def _draw_panel(body: list[str], panel: Timeline, y: int, *, seconds: float, scale: float) -> int:
    lanes = _lanes(panel)
    shares = bubble(panel)
    bottom = y + _LANE * len(lanes)
    for tick in _ticks(seconds):
        x = _LABEL + tick * scale
        body.append(f'<path d="M{x:.1f} {y}V{bottom + 4}" stroke="#ddd"/>')
        body.append(
            f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" class="faint">{duration(tick)}</text>'
        )
    for place, lane in lanes.items():
        body.append(f'<text x="12" y="{y + 15}">{_name(place)}</text>')
        body.append(f'<rect x="{_LABEL}" y="{y + 2}" width="{_WIDTH}" height="{_BAR}" fill="#f4f4f4"/>')
        for interval in lane:
            _draw_bar(body, interval, y, scale=scale)
        body.append(
            f'<text x="{_LABEL + _WIDTH + 8}" y="{y + 15}" class="faint">bubble {shares[place[1]]:.0%}</text>'
        )
        y += _LANE
    return bottom + 24


def _draw_bar(body: list[str], interval: Interval, y: int, *, scale: float) -> None:
    computes = interval.what in COMPUTE
    x = _LABEL + interval.start_seconds * scale
    seconds = interval.stop_seconds - interval.start_seconds
    width = max(0.3, seconds * scale)
    top, height = (y + 2, _BAR) if computes else (y + 2 + _BAR + 1, _STRIP)
    number = "" if interval.microbatch < 0 else str(interval.microbatch)
    tooltip = f"{interval.what}{number} from {duration(interval.start_seconds)} for {duration(seconds)}"
    _, colour, _ = look(interval.what)
    edge = ' stroke="#fff" stroke-width="0.6"' if width > 3 else ""
    body.append(
        f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{height}" fill="{colour}"{edge}>'
        f"<title>{escape(tooltip)}</title></rect>"
    )
    if computes and number and width >= 4 + 6 * len(number):
        shade = "number dark" if interval.what in "RI" else "number"
        middle = f"{x + width / 2:.1f}"
        body.append(f'<text x="{middle}" y="{y + 14}" class="{shade}" pointer-events="none">{number}</text>')


def _ticks(seconds: float) -> list[float]:
    """Return about ten round times, from zero."""
    if not seconds:
        return [0.0]
    step = 10.0 ** math.floor(math.log10(seconds / 8))
    step *= next(factor for factor in (1, 2, 5, 10) if seconds / (step * factor) <= 10)
    return [index * step for index in range(int(seconds / step * 1.0001) + 1)]
