"""Finds the last step that every rank of the first replica has finished, in the workers' trace files.

A worker keeps its file over morphs, named by the generation and rank of its start. So the file of a rank is
the one whose newest step has that rank. Files that are not in this log folder are read through the agent of
the rank's machine.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from varuna.codec import UNDECODABLE
from varuna.morph.run.log_pages import read_page
from varuna.observe.job_view import LayoutView
from varuna.observe.trace_file import StepTrace, TraceFile, list_traces
from varuna.page.log_reader import AskManager
from varuna.page.trace_tail import ReadFrom, TraceTail

SEARCH_SECONDS = 2.0
"""Time between two searches for the files of ranks."""
SEARCH_BYTES = 16 * 2**20
"""Bytes that one search reads; the next one continues."""
REMOTE_SECONDS = 5.0
"""Time between two requests for the new steps of another machine, and between two searches there."""
MAX_REMOTE_FILES = 32
"""Files of another machine that one search requests, the newest first."""


class LastStepReader:
    """Reads the last step of a job that may run, change its machines, or be over. For one thread."""

    def __init__(self, log_dir: Path, ask_manager: AskManager) -> None:
        self._log_dir = log_dir
        self._ask_manager = ask_manager
        self._tails: dict[tuple[str, TraceFile], TraceTail] = {}  # by machine ("": this folder) and file
        self._found: dict[int, TraceTail] = {}  # by rank of the present generation
        self._generation = 0
        self._traces: list[StepTrace] = []
        self._search_folder_at = self._search_machines_at = self._remote_at = 0.0
        self.problem = ""
        """The ranks whose steps cannot be read, and why."""

    def update(self, layout: LayoutView, machines: Mapping[int, str]) -> list[StepTrace]:
        """Return the last step of the first replica, one trace for each stage; empty: none is known.

        The list is the same object until there is a newer step. `machines` are those of all ranks. Raise
        OSError if the log folder cannot be read.
        """
        if layout.generation != self._generation:
            self._generation, self._found = layout.generation, {}
            self._search_folder_at = self._search_machines_at = 0.0
            for tail in self._tails.values():
                tail.forget()
        ranks = [ranks[0] for ranks in layout.stage_map]
        self._update_known()
        self._search_folder(ranks)
        missing = [rank for rank in ranks if rank not in self._found]
        if missing:
            self._search_machines(missing, machines)
        missing = [rank for rank in ranks if rank not in self._found]
        if missing:
            self.problem = self.problem or f"this log folder has no trace of rank {missing[0]} yet"
            return []
        self.problem = ""
        return self._newest(ranks)

    def _update_known(self) -> None:
        reads_remote = time.monotonic() >= self._remote_at
        if reads_remote:
            self._remote_at = time.monotonic() + REMOTE_SECONDS
        for tail in self._found.values():
            if reads_remote or not tail.is_remote:
                # Its machine may be lost, or its worker may replace the file now.
                with suppress(OSError, ValueError):
                    tail.update()

    def _newest(self, ranks: Sequence[int]) -> list[StepTrace]:
        tails = [self._found[rank] for rank in ranks]
        common = [tail.steps(self._generation, rank) for tail, rank in zip(tails, ranks, strict=True)]
        steps = set.intersection(*common)
        newest = self._generation, max(steps, default=-1)
        if steps and not (self._traces and newest == (self._traces[0].generation, self._traces[0].step)):
            with suppress(*UNDECODABLE):
                self._traces = [tail.trace(newest[1]) for tail in tails]
        return self._traces

    # ------------------------------------------------------------ search

    def _search_folder(self, ranks: Sequence[int]) -> None:
        """Search this log folder for the files of the ranks, the newest generation first."""
        if all(rank in self._found for rank in ranks) or time.monotonic() < self._search_folder_at:
            return
        self._search_folder_at = time.monotonic() + SEARCH_SECONDS
        self._search("", list_traces(self._log_dir), ranks)

    def _search_machines(self, missing: Sequence[int], machines: Mapping[int, str]) -> None:
        """Search the machines of these ranks for files that this log folder lacks."""
        if time.monotonic() < self._search_machines_at:
            return
        self._search_machines_at = time.monotonic() + REMOTE_SECONDS
        self.problem = ""
        for machine in dict.fromkeys(machines[rank] for rank in missing if rank in machines):
            try:
                self._search_machine(machine, missing)
            except (OSError, ValueError, *UNDECODABLE) as error:
                self.problem = f"the steps of {machine} cannot be read: {error}"

    def _search_machine(self, machine: str, ranks: Sequence[int]) -> None:
        reply = self._ask_manager("logs", machine=machine, stream="traces")
        assert reply.log is not None
        listed = msgspec.json.decode(reply.log.data, type=list[TraceFile])
        files = [file for file in listed if not file.path(self._log_dir).exists()]
        self._search(machine, files, ranks)

    def _search(self, machine: str, files: Sequence[TraceFile], ranks: Sequence[int]) -> None:
        num_bytes = 0
        candidates = self._candidates(files, ranks)
        for file in candidates[:MAX_REMOTE_FILES] if machine else candidates:
            tail = self._tail(machine, file)
            with suppress(FileNotFoundError):  # its worker replaces it now
                num_bytes += tail.update()
            self._match(tail, ranks)
            if num_bytes >= SEARCH_BYTES or all(rank in self._found for rank in ranks):
                return

    def _candidates(self, files: Sequence[TraceFile], ranks: Sequence[int]) -> list[TraceFile]:
        """Return the newer file of each worker, those most likely first."""
        newer = [file for file in files if file.stream == "trace" and file.generation <= self._generation]
        return sorted(newer, key=lambda file: (-file.generation, file.rank not in ranks, file.rank))

    def _tail(self, machine: str, file: TraceFile) -> TraceTail:
        read = self._read_remote(machine, file) if machine else self._read_local(file)
        return self._tails.setdefault((machine, file), TraceTail(read, is_remote=bool(machine)))

    def _match(self, tail: TraceTail, ranks: Sequence[int]) -> None:
        newest = tail.newest
        if newest is not None and newest.generation == self._generation and newest.rank in ranks:
            self._found.setdefault(newest.rank, tail)
        else:
            tail.forget()

    def _read_local(self, file: TraceFile) -> ReadFrom:
        def read(start: int) -> tuple[bytes, int]:
            page = read_page(file.path(self._log_dir), start, None)
            return page.data, page.stop

        return read

    def _read_remote(self, machine: str, file: TraceFile) -> ReadFrom:
        place = {"machine": machine, "generation": file.generation, "rank": file.rank, "stream": file.stream}

        def read(start: int) -> tuple[bytes, int]:
            page = self._ask_manager("logs", **place, start=start).log
            if page is None:
                raise ValueError("there is no such file")
            return page.data, page.stop

        return read
