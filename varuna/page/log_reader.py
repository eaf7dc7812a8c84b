"""Pages of workers' logs for the page: from the log folder, or from the machine that has them."""

import re
from codecs import getincrementaldecoder
from collections.abc import Callable
from pathlib import Path

import msgspec

from varuna.morph.protocol.generations import read_machines
from varuna.morph.protocol.messages import LogPage, LogStream, ManagerReply
from varuna.morph.run.log_pages import PAGE_BYTES, find_lines, read_page

PAGE_LINES = 500
SCAN_BYTES = 2 * PAGE_BYTES
"""Bytes that a search for the start of a page reads."""

_FOLDER = re.compile(r"generation_(\d{1,9})")
_FILE = re.compile(r"rank_(\d{1,9})\.out")

AskManager = Callable[..., ManagerReply]
"""Sends a request with these fields of `ManagerRequest`. Raises OSError or ValueError."""


class WorkerLog(msgspec.Struct, frozen=True):
    generation: int  # 0: of a job without a manager
    rank: int
    stream: LogStream


class LogText(msgspec.Struct, frozen=True):
    """A part of a log. Numbers are places in the file, in bytes."""

    start: int
    stop: int
    end: int  # of the file
    text: str
    problem: str = ""


class LogIndex(msgspec.Struct, frozen=True):
    generations: list[int]
    ranks: list[int]  # of one of them, on all machines


class LogReader:
    def __init__(self, log_dir: Path, ask_manager: AskManager) -> None:
        self._log_dir = log_dir
        self._ask_manager = ask_manager

    def index(self, generation: int | None) -> LogIndex:
        """Return the generations of the job, and the ranks of one of them (default: the newest)."""
        generations = sorted(_numbers(self._log_dir, _FOLDER))
        if next(self._log_dir.glob("rank_*.out"), None) is not None:
            generations.insert(0, 0)
        chosen = generations[-1] if generation is None and generations else generation or 0
        ranks = {*_numbers(self._folder(chosen), _FILE), *read_machines(self._log_dir, chosen)}
        return LogIndex(generations, sorted(ranks))

    def is_here(self, log: WorkerLog) -> bool:
        """Return whether the log folder has the log; other logs are read through the manager."""
        return self._path(log).is_file()

    def page(self, log: WorkerLog, *, start: int | None, stop: int | None) -> LogText:
        """Read from `start` on, or the last lines before `stop` (default: the end)."""
        path = self._path(log)
        is_here = path.is_file()
        read = self._read_local(path) if is_here else self._read_remote(log)
        try:
            if start is not None:
                page = read(0, max(0, start), None)
                return _text(start, page, end=page.stop)
            found = read(PAGE_LINES, 0, stop)
            first = max(found.start, found.stop - PAGE_BYTES)
            page = read(0, first, found.stop)
            return _text(first, page, end=found.stop)
        except (OSError, ValueError) as error:
            why = str(getattr(error, "strerror", None) or error)
            return LogText(0, 0, 0, "", why if is_here else f"{self._missing(log, path.name)}: {why}")

    def _missing(self, log: WorkerLog, name: str) -> str:
        machine = read_machines(self._log_dir, log.generation).get(log.rank)
        return f"this log folder has no {name}" + (f" (it is on {machine})" if machine else "")

    def _path(self, log: WorkerLog) -> Path:
        return self._folder(log.generation) / f"rank_{log.rank}.{log.stream}"

    def _folder(self, generation: int) -> Path:
        return self._log_dir / f"generation_{generation}" if generation else self._log_dir

    def _read_local(self, path: Path) -> Callable[[int, int, int | None], LogPage]:
        def read(lines: int, start: int, stop: int | None) -> LogPage:
            if lines:
                return find_lines(path, lines, stop=stop, scan_bytes=SCAN_BYTES)
            return read_page(path, start, stop)

        return read

    def _read_remote(self, log: WorkerLog) -> Callable[[int, int, int | None], LogPage]:
        def read(lines: int, start: int, stop: int | None) -> LogPage:
            fields = {"rank": log.rank, "generation": log.generation, "stream": log.stream}
            reply = self._ask_manager("logs", **fields, lines=lines, start=start, stop=stop)
            if reply.log is None:
                raise ValueError(reply.text)
            return reply.log

        return read


def _text(start: int, page: LogPage, *, end: int) -> LogText:
    """Return the text of a page. A character that is not complete yet belongs to the next page."""
    decoder = getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(page.data)
    incomplete, _ = decoder.getstate()
    return LogText(start, page.start - len(incomplete), end, text)


def _numbers(folder: Path, names: re.Pattern[str]) -> list[int]:
    try:
        found = (names.fullmatch(path.name) for path in folder.iterdir())
        return [int(match[1]) for match in found if match]
    except OSError:
        return []
