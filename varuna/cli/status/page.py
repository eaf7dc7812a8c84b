"""The command `varuna page`: shows a running or finished job in a browser on this machine."""

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from varuna.cli.options import say
from varuna.morph.run.job_folder import home_folder
from varuna.page.serve import open_listener, require_aiohttp, serve_page
from varuna.processes import yield_to_workers


def page(
    folder: Annotated[Path, typer.Argument(metavar="LOGDIR", help="Log folder of a job.")],
    port: Annotated[
        int | None, typer.Option(help="Port on 127.0.0.1; 0: any free one. Default: 8737, or a free one.")
    ] = None,
    listener: Annotated[int | None, typer.Option(hidden=True)] = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve the page of a job until Ctrl-C. Open the address that this prints."""
    require_aiohttp()
    if parent is None:  # a job that begins has no files yet
        check_log_folder(folder)
    opened = open_listener(port) if listener is None else socket.socket(fileno=listener)

    def announce(url: str, file: Path) -> None:
        if parent is not None:
            typer.echo(f"{url} {file.name}")
        else:
            announce_page(url, file)
            say("Ctrl-C ends the page only")

    yield_to_workers()
    serve_page(folder.absolute(), opened, home=home_folder(), announce=announce, parent=parent)


def announce_page(url: str, file: Path, say: Callable[[str], None] = say) -> None:
    """Print the address on a terminal. Elsewhere name the file: others might read the output."""
    if sys.stdout.isatty():
        say(f"page: {url}")
    else:
        say(f"page: open the address in {file}")


def check_log_folder(folder: Path) -> None:
    names = ("events.jsonl", "ledger.json", "generation_*", "rank_*.out")
    if not folder.is_dir() or not any(next(folder.glob(name), None) for name in names):
        raise ValueError(
            f"{folder} is not the log folder of a job (`varuna run` prints it when it starts and ends, and "
            "`varuna status` shows it)"
        )
