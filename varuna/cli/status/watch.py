"""`varuna status --watch`: shows the status of a running job until it ends."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import typer
from rich.console import Console
from rich.live import Live

from varuna.cli.status.render import event_text, live_status, plain_line
from varuna.codec import decode
from varuna.morph.protocol.messages import ManagerRequest
from varuna.morph.run.client import JobIsOver, connect_manager
from varuna.observe.job_view import EventView, JobView

WATCH_SECONDS = 1.0
NUM_EVENTS = 8
"""Events that a terminal shows."""


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
                    width, height = console.size
                    status = live_status(view, height=height, width=width, num_events=NUM_EVENTS)
                    live.update(status, refresh=True)
        else:
            events: Sequence[EventView] = ()
            for view, _ in views(code_dir):
                for event in new_events(events, view.events):
                    print(event_text(event), flush=True)
                events = view.events
                if (line := plain_line(view)) != shown:
                    print(line, flush=True)
                    shown = line
    except JobIsOver as over:
        typer.echo(str(over))
    except (KeyboardInterrupt, BrokenPipeError):
        with suppress(OSError):
            sys.stdout.flush()


def new_events(before: Sequence[EventView], now: Sequence[EventView]) -> Sequence[EventView]:
    """Return the events that were not shown before; at first, the last ones."""
    if not before:
        return now[-NUM_EVENTS:]
    seen = {(event.at, event.what, event.why) for event in before}
    return [event for event in now if (event.at, event.what, event.why) not in seen]


def views(code_dir: str) -> Iterator[tuple[JobView, str]]:
    """Yield the view of the job and its JSON, once a second."""
    with connect_manager(code_dir) as (client, job):
        while True:
            text = bytes(client.request(ManagerRequest(job, "view")).status).decode()
            yield decode(text, JobView, "the manager's answer"), text
            time.sleep(WATCH_SECONDS)
