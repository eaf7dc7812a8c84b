"""Draws ledgers as self-contained pages: bars of causes, machines and layouts over time, tables."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import TypeVar

from varuna.observe.ledger import (
    CAUSES,
    HOUR,
    LOST,
    Cause,
    Ledger,
    LedgerReport,
    amounts_by_cause,
    describe_averaged,
    describe_unpriced,
    hours,
    paid_seconds,
    price_of,
    report_ledger,
)

T = TypeVar("T")

COLOURS: Mapping[Cause, str] = {
    "useful": "#3a8f5c",
    "saving": "#3b6fb6",
    "redoing": "#c0392b",
    "morphing": "#e08e2b",
    "waiting": "#8e7cc3",
    "idle": "#b8b8b8",
}
MEANINGS: Mapping[Cause, str] = {
    "useful": "steps that count",
    "saving": "training stands still for a checkpoint",
    "redoing": "steps that were interrupted or run again",
    "morphing": "from the end of one generation to the first step of the next",
    "waiting": "machines start, or the job waits for machines",
    "idle": "the layout does not use the machine",
}
LAYOUT_COLOURS = ("#4f81bd", "#9bbb59", "#f79646", "#8064a2", "#4bacc6", "#c0504d", "#7f7f7f", "#d4b84a")
WIDTH, HEIGHT, LEFT = 1000, 220, 60
MOST_POINTS = 4000
"""Points of a line that are drawn, and layouts: four for each pixel. More of them are thinned."""
MOST_ROWS = 50
STYLE = (
    "body{font-family:sans-serif;font-size:14px;margin:24px;max-width:1100px;color:#222}"
    "table{border-collapse:collapse;margin:8px 0 20px}td,th{padding:3px 12px 3px 0;text-align:left}"
    "td.n,th.n{text-align:right}h2{font-size:17px;margin:22px 0 6px}.faint{color:#666}"
    ".key{display:inline-block;width:11px;height:11px;margin-right:6px}"
)


def ledger_page(ledger: Ledger, title: str) -> str:
    """Return one HTML page without links to other files."""
    report = report_ledger(ledger, num_worst=MOST_ROWS)
    begun = datetime.fromtimestamp(ledger.begun_at, UTC)
    return page(
        title,
        [
            f"<p>Begun {begun:%Y-%m-%d %H:%M:%S} UTC, {report.seconds / HOUR:,.2f} hours.</p>",
            cause_bar(amounts_by_cause(ledger)),
            cause_table(report),
            money_table(report),
            "<h2>Machines and layouts over time</h2>",
            layout_chart(ledger),
            "<h2>Most expensive interruptions</h2>",
            interruption_table(ledger, report),
            "<h2>Machines</h2>",
            machine_table(ledger),
        ],
    )


def page(title: str, body: Sequence[str]) -> str:
    return "\n".join(
        [
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *body,
            "</body></html>",
            "",
        ]
    )


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; columns whose title starts with ">" are numbers. Cells are HTML."""
    classes = [' class="n"' if title.startswith(">") else "" for title in head]
    titles = "".join(
        f"<th{kind}>{escape(title.removeprefix('>'))}</th>" for kind, title in zip(classes, head, strict=True)
    )
    lines = [
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(classes, row, strict=True)) + "</tr>"
        for row in rows
    ]
    return f"<table><tr>{titles}</tr>{''.join(lines)}</table>"


def cause_bar(amounts: Mapping[Cause, float], *, height: int = 26) -> str:
    total = sum(amounts.values()) or 1.0
    x, parts = 0.0, []
    for cause in CAUSES:
        width = amounts[cause] / total * WIDTH
        tip = f"<title>{cause}: {amounts[cause] / total:.2%}, {hours(amounts[cause])}</title>"
        parts.append(
            f'<rect x="{x:.2f}" width="{max(width, 0):.2f}" height="{height}" '
            f'fill="{COLOURS[cause]}">{tip}</rect>'
        )
        x += width
    return f'<svg width="{WIDTH}" height="{height}">{"".join(parts)}</svg>'


def cause_table(report: LedgerReport) -> str:
    amounts: dict[Cause, float] = {
        "useful": report.useful_seconds,
        **{c: report.lost_seconds[c] for c in LOST},
    }
    rows = [
        (
            f'<span class="key" style="background:{COLOURS[cause]}"></span>{cause}',
            f"{amounts[cause] / HOUR:,.2f}",
            f"{amounts[cause] / report.paid_seconds:.2%}" if report.paid_seconds else "-",
            MEANINGS[cause],
        )
        for cause in CAUSES
    ]
    rows.append(("<b>paid</b>", f"<b>{report.paid_seconds / HOUR:,.2f}</b>", "", ""))
    return html_table(("cause", ">machine-hours", ">share", "meaning"), rows)


def money_table(report: LedgerReport) -> str:
    money = report.money
    if money is None:
        return '<p class="faint">No prices were given: use --price.</p>'
    rows = [
        ("paid", f"{money.paid:,.2f}"),
        ("of it useful", f"{money.useful:,.2f}"),
        *((f"lost: {cause}", f"{amount:,.2f}") for cause, amount in money.lost.items()),
    ]
    if money.per_million_samples is not None:
        rows.append(("per million samples", f"{money.per_million_samples:,.2f}"))
    if money.on_demand is not None:
        rows.append(("the same training on demand", f"{money.on_demand:,.2f}"))
    notes = filter(None, (describe_unpriced(money), describe_averaged(money)))
    lines = [f'<p class="faint">{escape(note)}</p>' for note in notes]
    return html_table(("money", ">amount"), rows) + "".join(lines)


def layout_chart(ledger: Ledger) -> str:
    """Return an SVG: paid machines as a line, machines with workers as areas, coloured by layout."""
    end, begun = ledger.at, ledger.begun_at
    if end <= begun:
        return ""
    most = max([1, *(number for _, number in ledger.num_machines), *(p.machines for p in ledger.periods)])
    scale_x, scale_y = WIDTH / (end - begun), HEIGHT / most
    layouts = list(dict.fromkeys(period.layout for period in ledger.periods))
    body = []
    periods = _thin([(period.at, period) for period in ledger.periods], begun, end)
    stops = [*(at for at, _ in periods[1:]), end]
    for (_, period), stop in zip(periods, stops, strict=False):
        first = period.first_step_at if period.first_step_at is not None else stop
        colour = LAYOUT_COLOURS[layouts.index(period.layout) % len(LAYOUT_COLOURS)]
        height = period.machines * scale_y
        body.append(
            f'<rect x="{LEFT + (first - begun) * scale_x:.2f}" y="{HEIGHT - height:.1f}" '
            f'width="{max((stop - first) * scale_x, 0):.2f}" height="{height:.1f}" fill="{colour}">'
            f"<title>{escape(f'generation {period.generation}: {period.layout}')}</title></rect>"
        )
    points, last = [], 0
    for at, number in _thin(ledger.num_machines, begun, end):
        x = LEFT + (at - begun) * scale_x
        points += [f"{x:.2f},{HEIGHT - last * scale_y:.1f}", f"{x:.2f},{HEIGHT - number * scale_y:.1f}"]
        last = number
    points.append(f"{LEFT + WIDTH},{HEIGHT - last * scale_y:.1f}")
    body.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="#222" stroke-width="1"/>')
    labels = [
        f'<text x="{LEFT - 6}" y="{y}" text-anchor="end">{text}</text>'
        for y, text in ((12, str(most)), (HEIGHT, "0"))
    ]
    labels += [
        f'<text x="{LEFT}" y="{HEIGHT + 18}">0</text>',
        f'<text x="{LEFT + WIDTH}" y="{HEIGHT + 18}" text-anchor="end">{(end - begun) / HOUR:.1f} h</text>',
    ]
    size = f'width="{LEFT + WIDTH + 10}" height="{HEIGHT + 26}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(body)}{"".join(labels)}</svg>'
    )


def _thin(points: Sequence[tuple[float, T]], begin: float, end: float) -> Sequence[tuple[float, T]]:
    """Return at most MOST_POINTS of the points: the last one of each part of the time."""
    if len(points) <= MOST_POINTS:
        return points
    parts = {int((at - begin) / (end - begin) * (MOST_POINTS - 1)): (at, value) for at, value in points}
    return list(parts.values())


def interruption_table(ledger: Ledger, report: LedgerReport) -> str:
    rows = [
        (
            f"{(one.at - ledger.begun_at) / HOUR:,.2f}",
            escape(one.why[:300]),
            f"{one.total:,.0f}",
            escape(", ".join(f"{cause} {amount:,.0f}" for cause, amount in one.lost.items())),
            escape(", ".join(f"{part} {seconds:,.1f}" for part, seconds in one.seconds.items())),
        )
        for one in report.worst
    ]
    return html_table((">hour", "why", ">machine-seconds", "by cause", "seconds of each part"), rows)


def machine_table(ledger: Ledger) -> str:
    paid = sorted(paid_seconds(ledger).items(), key=lambda item: -item[1])
    prices = {name: price_of(name, ledger.prices) for name, _ in paid[:MOST_ROWS]}
    rows = [
        (escape(name), f"{seconds / HOUR:,.2f}", "-" if price is None else f"{seconds / HOUR * price:,.2f}")
        for (name, seconds), price in zip(paid, prices.values(), strict=False)
    ]
    rest = paid[MOST_ROWS:]
    if rest:
        left = sum(seconds for _, seconds in rest)
        rows.append((f"{len(rest)} more", f"{left / HOUR:,.2f}", ""))
    return html_table(("machine", ">paid hours", ">money"), rows)
