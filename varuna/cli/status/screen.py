"""The terminal of a job: events and worker output, with a live status below or plain lines between.

Threads of their own write, so a terminal or a pipe that blocks or is closed delays nothing. Lines that cannot
be shown in time are dropped; the log files have them.
"""

import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Literal, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from varuna.cli.options import only_colours, printable, worker_line
from varuna.cli.status.render import live_status, plain_line
from varuna.observe.job_view import JobView

StatusStyle = Literal["live", "plain", "off"]

PLAIN_SECONDS = 15.0
"""Time between two plain lines."""
REFRESH_SECONDS = 0.5
"""Time between two views of a live status."""
LOOK_SECONDS = 2.0
"""Time after which a screen without a live status looks whether a plain line is due."""
MAX_LINES = 20_000
"""Lines that wait for a slow terminal."""
CLOSE_SECONDS = 2.0
"""Time limit for a slow terminal to show the last lines."""


class Screen(Protocol):
    """Shows a job. No method waits for the terminal for long, and none raises."""

    refresh_seconds: float
    """Time between two looks at `needs_view`."""

    @property
    def needs_view(self) -> bool:
        """Return whether `update` would show something now. A view costs CPU time that workers lack."""

    def say(self, text: str, *, error: bool = False) -> None:
        """Show an event."""

    def worker_output(self, rank: int, text: str, *, is_stderr: bool) -> None:
        """Show lines that a worker wrote."""

    def update(self, view: JobView) -> None:
        """Show the present status."""

    def close(self) -> None:
        """Show the last lines and leave the terminal as it was."""


class LineWriter:
    """Writes lines to a stream from a thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._added = 0  # lines so far
        self._changed = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="varuna lines", daemon=True)
        self._thread.start()

    def add(self, line: str) -> None:
        self._lines.append(line)
        self._added += 1
        self._changed.set()

    def close(self) -> None:
        """Write the last lines."""
        self._closing = True
        self._changed.set()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        file = own_file(self._stream)
        self._write_lines(file)
        if file is not self._stream:
            with suppress(OSError):
                file.close()

    def _write_lines(self, file: TextIO) -> None:
        shown = 0
        closing = False
        while not closing:
            self._changed.wait()
            self._changed.clear()
            closing = self._closing
            waiting, added = len(self._lines), self._added
            if (dropped := added - shown - waiting) > 0:
                self._write(file, f"[{dropped} lines are not shown: see the log files]")
            for _ in range(waiting):
                self._write(file, self._lines.popleft())
            shown = added

    def _write(self, file: TextIO, line: str) -> None:
        with suppress(OSError, ValueError):  # the terminal is gone, or its file is on a full disk
            print(line, file=file, flush=True)


def own_file(stream: TextIO) -> TextIO:
    """Return a file of this thread: one that hangs in a write must not hold the lock of sys.stdout."""
    try:
        return open(os.dup(stream.fileno()), "w", errors="backslashreplace")
    except (OSError, ValueError):  # a test or a notebook has replaced it
        return stream


class PlainScreen:
    """Prints lines; the status is one of them, every few seconds."""

    refresh_seconds = LOOK_SECONDS

    def __init__(self, *, status_seconds: float | None = PLAIN_SECONDS) -> None:
        """`status_seconds` None: no status."""
        self._status_seconds = status_seconds
        self._next = time.monotonic() + (status_seconds or 0.0)
        self._shown = ""
        self._writers = {False: LineWriter(sys.stdout), True: LineWriter(sys.stderr)}  # True: of errors

    @property
    def needs_view(self) -> bool:
        return self._status_seconds is not None and time.monotonic() >= self._next

    def say(self, text: str, *, error: bool = False) -> None:
        self._writers[error].add(f"varuna: {printable(text)}")

    def worker_output(self, rank: int, text: str, *, is_stderr: bool) -> None:
        for line in text.splitlines():
            self._writers[is_stderr].add(worker_line(rank, line))

    def update(self, view: JobView) -> None:
        if self._status_seconds is None or not self.needs_view or view.phase == "over":
            return
        self._next = time.monotonic() + self._status_seconds
        line = plain_line(view)
        if line != self._shown:
            self._shown = line
            self.say(f"status: {line}")

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class LiveScreen:
    """Shows a status that renews itself, below all other output."""

    refresh_seconds = REFRESH_SECONDS
    needs_view = True

    def __init__(self, descriptor: int) -> None:
        """`descriptor` is a terminal."""
        self._file = open(os.dup(descriptor), "w", errors="replace")  # noqa: SIM115
        self._console = Console(file=self._file, force_terminal=True)
        self._lines: deque[Text] = deque(maxlen=MAX_LINES)
        self._added = 0  # lines so far
        self._view: JobView | None = None
        self._changed = threading.Event()
        self._closing = False
        self._errors = None if os.isatty(2) else LineWriter(sys.stderr)  # None: shown here
        self._thread = threading.Thread(target=self._run, name="varuna status", daemon=True)
        self._thread.start()

    def say(self, text: str, *, error: bool = False) -> None:
        if error and self._errors is not None:
            self._errors.add(f"varuna: {printable(text)}")
        else:
            self._add(Text(f"varuna: {printable(text)}", style="red" if error else "cyan"))

    def worker_output(self, rank: int, text: str, *, is_stderr: bool) -> None:
        for line in text.splitlines():
            if is_stderr and self._errors is not None:
                self._errors.add(worker_line(rank, line))
                continue
            self._add(Text.assemble((f"[rank {rank}] ", "dim"), Text.from_ansi(only_colours(line))))

    def _add(self, line: Text) -> None:
        self._lines.append(line)
        self._added += 1
        self._changed.set()

    def update(self, view: JobView) -> None:
        self._view = view
        self._changed.set()

    def close(self) -> None:
        self._closing = True
        self._changed.set()
        self._thread.join(CLOSE_SECONDS)
        if self._errors is not None:
            self._errors.close()

    def _run(self) -> None:
        with suppress(OSError, ValueError):  # the terminal is closed: the job continues without it
            self._show()

    def _show(self) -> None:
        live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False,
                    redirect_stderr=False)  # fmt: skip
        live.start()
        self._console.show_cursor(True)  # a process that is killed cannot show it again
        shown = 0
        try:
            while not self._closing:
                self._changed.wait()
                self._changed.clear()
                shown = self._print_lines(shown)
                if self._view is not None and not self._closing:
                    width, height = self._console.size
                    live.update(live_status(self._view, height=height, width=width), refresh=True)
                    self._file.flush()
        finally:
            live.stop()
        self._print_lines(shown)
        self._file.flush()

    def _print_lines(self, shown: int) -> int:
        """Print the lines that wait above the status. Return the number of lines so far."""
        waiting = len(self._lines)
        added = self._added
        if (dropped := added - shown - waiting) > 0:
            self._console.print(Text(f"[{dropped} lines are not shown: see the log files]", style="yellow"))
        for _ in range(waiting):
            self._console.print(self._lines.popleft(), soft_wrap=True, highlight=False)
        return added


def open_screen(style: StatusStyle) -> Screen:
    """Return the screen of this process: a live one needs a terminal that can move its cursor."""
    if style == "live" and sys.stdout.isatty() and not Console().is_dumb_terminal:
        with suppress(OSError, ValueError):
            return LiveScreen(sys.stdout.fileno())
    return PlainScreen(status_seconds=None if style == "off" else PLAIN_SECONDS)
