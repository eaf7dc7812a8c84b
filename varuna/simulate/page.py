"""Draws a comparison of policies as one self-contained HTML page."""

from collections.abc import Mapping, Sequence
from html import escape

from varuna.observe.ledger import HOUR, LOST, Ledger, amounts_by_cause
from varuna.observe.ledger_page import (
    COLOURS,
    MEANINGS,
    cause_bar,
    html_table,
    interruption_table,
    layout_chart,
    money_table,
    page,
)
from varuna.simulate import compare
from varuna.simulate.compare import PolicyName, PolicyResult, Question, SaveInterval


def simulation_page(
    question: Question,
    results: Sequence[PolicyResult],
    ledgers: Mapping[PolicyName, Ledger],
    intervals: Sequence[SaveInterval],
    *,
    why_none: str = "",
) -> str:
    trace = question.trace
    body = [
        f"<p>{escape(trace.source)}: {trace.end / HOUR:,.1f} hours, {trace.mean_machines:.1f} machines on "
        f"average, {trace.most_machines} at most, {len(trace.changes)} changes. "
        f"Notice before a removal: {question.notice_seconds:.0f} s.</p>",
        *(f'<p class="faint">{escape(note)}</p>' for note in trace.notes),
        _legend(),
        _comparison(results, ledgers),
    ]
    for result in results:
        ledger = ledgers[result.policy]
        body += [
            f"<h2>{escape(result.policy)}</h2>",
            f'<p class="faint">{escape(compare.MEANINGS[result.policy])}. Costs: {escape(result.costs)}.</p>',
            layout_chart(ledger),
            money_table(result.report) if result.report.money is not None else "",
        ]
        if result.report.worst:
            body.append(interruption_table(ledger, result.report))
    if intervals:
        rows = [(f"{one.seconds:,.0f}", f"{one.goodput:.2%}") for one in intervals]
        body += ["<h2>Save intervals</h2>", html_table((">seconds", ">goodput"), rows)]
    else:
        body.append(f'<p class="faint">Best fixed save interval: not searched: {escape(why_none)}.</p>')
    return page(f"Simulation of {trace.source}", body)


def _legend() -> str:
    keys = (
        f'<span class="key" style="background:{COLOURS[cause]}"></span>'
        f'<span title="{escape(MEANINGS[cause])}">{cause}</span>'
        for cause in COLOURS
    )
    return f"<p>{' &nbsp; '.join(keys)}</p>"


def _comparison(results: Sequence[PolicyResult], ledgers: Mapping[PolicyName, Ledger]) -> str:
    head = ("policy", ">goodput", ">samples/s", *(f">{cause}" for cause in LOST), ">cost", "")
    rows = []
    for one in results:
        report = one.report
        total = report.paid_seconds or 1.0
        rows.append(
            (
                escape(one.policy),
                f"<b>{report.goodput:.2%}</b>",
                f"{one.samples_per_second:,.4g}",
                *(f"{report.lost_seconds[cause] / total:.2%}" for cause in LOST),
                "-" if report.money is None else f"{report.money.paid:,.2f}",
                f'<div style="width:320px;overflow:hidden">{_small_bar(ledgers[one.policy])}</div>',
            )
        )
    return html_table(head, rows)


def _small_bar(ledger: Ledger) -> str:
    bar = cause_bar(amounts_by_cause(ledger), height=14)
    return bar.replace(
        'width="1000" height="14">',
        'width="320" height="14" viewBox="0 0 1000 14" preserveAspectRatio="none">',
        1,
    )
