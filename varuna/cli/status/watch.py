"""`varuna status --watch`: shows the status of a running job until it ends."""

import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import typer
from rich.console import Console
from rich.live import Live

from varuna.cli.status.render import live_status, plain_line
from varuna.codec import decode
from varuna.morph.protocol.messages import ManagerRequest
from varuna.morph.run.client import JobIsOver, connect_manager
from varuna.observe.job_view import JobView

WATCH_SECONDS = 1.0


def watch_job(code_dir: str, *, as_json: bool) -> None:
    """Show the status every second. Raise ValueError if the manager does not answer."""
    shown = ""
    console = Console()
    try:
        if as_json:
            for _, text in views(code_dir):
                print(text, flush=True)
        elif console.is_terminal and not console.is_dumb_terminal:
            with Live(console=console, auto_refresh=False) as live:
                console.show_cursor(True)
                for view, _ in views(code_dir):
                    live.update(live_status(view, height=console.size.height), refresh=True)
        else:
            for view, _ in views(code_dir):
                if (line := plain_line(view)) != shown:
                    print(line, flush=True)
                    shown = line
    except JobIsOver as over:
        typer.echo(str(over))
    except (KeyboardInterrupt, BrokenPipeError):
        with suppress(OSError):
            sys.stdout.flush()


def views(code_dir: str) -> Iterator[tuple[JobView, str]]:
    """Yield the view of the job and its JSON, once a second."""
    with connect_manager(code_dir) as (client, job):
        while True:
            text = bytes(client.request(ManagerRequest(job, "view")).status).decode()
            yield decode(text, JobView, "the manager's answer"), text
            time.sleep(WATCH_SECONDS)
