"""The command `varuna ledger`: shows which part of the paid machine-time trained, and what it cost."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from varuna.cli.options import AsJson, printable
from varuna.codec import encode
from varuna.files import write_atomic
from varuna.morph.ledger_file import read_ledger
from varuna.observe.ledger import (
    HOUR,
    LOST,
    MOST_PRICE,
    LedgerReport,
    ledger_lines,
    read_prices,
    report_ledger,
)
from varuna.observe.ledger_page import ledger_page
from varuna.plan import tables

Price = Annotated[
    str | None, typer.Option(help="Price of a machine-hour, or a file with lines MACHINE,PRICE.")
]
OnDemandPrice = Annotated[
    float | None,
    typer.Option(min=0.0, max=MOST_PRICE, help="Price of a machine-hour that is never taken away."),
]


def ledger(
    folder: Annotated[Path, typer.Argument(metavar="LOGDIR", help="Log folder of a job, or its ledger.")],
    price: Price = None,
    on_demand_price: OnDemandPrice = None,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained page to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show where the paid machine-seconds of a job went."""
    found = read_ledger(folder)
    if price is not None:
        found.prices = prices_of(price)
    if on_demand_price is not None:
        found.on_demand_price = on_demand_price
    report = report_ledger(found)
    if html is not None:
        write_atomic(html, ledger_page(found, f"Ledger of {folder.resolve().name}"))
    if as_json:
        typer.echo(encode(msgspec.structs.replace(report, worst=tuple(found.interruptions))))
    else:
        show_ledger(report)


def prices_of(text: str | None) -> dict[str, float]:
    """Return the prices that an option gives: a number, or the name of a file."""
    if text is None:
        return {}
    path = Path(text)
    if not path.is_file():
        return read_prices(text, source="--price")
    try:
        return read_prices(path.read_text("utf-8-sig"), source=text)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the prices {text!r}: {error}") from None


def show_ledger(report: LedgerReport) -> None:
    console = tables.console()
    for line in ledger_lines(report):
        typer.echo(line)
    table = tables.table("cause", "machine-hours>", "share>")
    amounts = {"useful": report.useful_seconds, **{cause: report.lost_seconds[cause] for cause in LOST}}
    for cause, seconds in amounts.items():
        share = f"{seconds / report.paid_seconds:.2%}" if report.paid_seconds else "-"
        table.add_row(cause, f"{seconds / HOUR:,.3f}", share)
    table.add_row("paid", f"{report.paid_seconds / HOUR:,.3f}", "")
    console.print(table)
    if report.worst:
        console.print()
        table = tables.table("machine-seconds lost>", "interruption")
        for one in report.worst:
            table.add_row(f"{one.total:,.1f}", Text(printable(one.why[:160])))
        console.print(table)
