"""Reads the recorded steps of all workers: from the log folder, the others from their machines."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from varuna.addresses import is_loopback
from varuna.codec import UNDECODABLE, decode
from varuna.morph.protocol.generations import read_machines
from varuna.morph.protocol.messages import JobStatus
from varuna.observe.job_view import NAME as VIEW
from varuna.observe.job_view import JobView
from varuna.observe.trace_file import StepTrace, TraceFile, decode_traces, read_traces
from varuna.page.log_reader import AskManager

MAX_BYTES = 64 * 2**20
"""Bytes that are read of one file of another machine."""


class CollectedTraces(NamedTuple):
    traces: list[StepTrace]
    answered: Collection[str]  # machines whose files are read
    refusals: Mapping[str, str]  # by machine: why its files could not be fetched


def collect_traces(log_dir: Path, ask_manager: AskManager) -> CollectedTraces:
    """Return all steps that the workers keep; those of other machines only while the job runs.

    Raise OSError if the log folder cannot be read.
    """
    found, answered, refusals = read_traces(log_dir), set[str](), dict[str, str]()
    try:
        status = decode(ask_manager("status").status, JobStatus, "the manager's answer")
    except (OSError, ValueError):  # the job is over
        return CollectedTraces(found, answered, refusals)
    for machine in status.machines:
        name = machine.machine
        if machine.agent_pid is None:
            refusals[name] = "it is not connected"
            continue
        try:
            found += _fetch(name, log_dir, ask_manager)
            answered.add(name)
        except (OSError, ValueError, *UNDECODABLE) as error:
            refusals[name] = str(error)
    return CollectedTraces(found, answered, refusals)


def _fetch(machine: str, log_dir: Path, ask_manager: AskManager) -> list[StepTrace]:
    """Return the steps in the files of a machine that this log folder lacks. Raise OSError or ValueError."""
    reply = ask_manager("logs", machine=machine, stream="traces")
    assert reply.log is not None
    files = msgspec.json.decode(reply.log.data, type=list[TraceFile])
    # Newest first: a file that is replaced meanwhile is then read again by its older name.
    missing = (file for file in sorted(files) if not file.path(log_dir).exists())
    return [trace for file in missing for trace in decode_traces(_read(file, machine, ask_manager))]


def _read(file: TraceFile, machine: str, ask_manager: AskManager) -> bytes:
    place = {"machine": machine, "generation": file.generation, "rank": file.rank, "stream": file.stream}
    data = b""
    while len(data) < MAX_BYTES:
        page = ask_manager("logs", **place, start=len(data)).log
        if page is None or not page.data:
            break
        data += page.data
    return data


def missing_lines(log_dir: Path, steps: Iterable[list[StepTrace]], collected: CollectedTraces) -> list[str]:
    """Say which ranks these steps lack, why, and where their files are: a line for each machine."""
    gaps: dict[str, tuple[set[int], set[int]]] = {}  # by place: ranks, steps
    kept = {(trace.generation, trace.rank) for trace in collected.traces}
    for traces in steps:
        number, present = traces[0].generation, {trace.rank for trace in traces}
        machines = read_machines(log_dir, number)
        for rank in set(range(traces[0].num_ranks)) - present:
            place = machines.get(rank, "another machine")
            if (number, rank) in kept or place in collected.answered:
                place = ""
            ranks, numbers = gaps.setdefault(place, (set(), set()))
            ranks.add(rank)
            numbers.add(traces[0].step)
    return [
        f"the trace lacks {_several('rank', ranks)} in {_several('step', numbers)}: "
        + (_where(place, log_dir, collected.refusals) if place else "its worker has not kept them (yet)")
        for place, (ranks, numbers) in sorted(gaps.items())
    ]


def _where(machine: str, log_dir: Path, refusals: Mapping[str, str]) -> str:
    why = f" ({refusals[machine]})" if machine in refusals else ""
    return (
        f"their files are on {machine}{why}, {_original(log_dir)}/generation_*/rank_*.trace* (copy them to "
        f"the same names in {log_dir}, and repeat)"
    )


def where_all_are(log_dir: Path, collected: CollectedTraces) -> str:
    """Say where the files of the last generation are; "" if none are elsewhere, or no machine is known."""
    numbers = (path.name.removeprefix("generation_") for path in log_dir.glob("generation_*"))
    newest = max((int(number) for number in numbers if number.isdecimal()), default=0)
    machines = dict.fromkeys(read_machines(log_dir, newest).values())
    is_original = _original(log_dir) == str(log_dir.absolute())
    elsewhere = [
        machine
        for machine in machines
        if machine not in collected.answered and not (is_original and is_loopback(machine))
    ]
    return "; ".join(_where(machine, log_dir, collected.refusals) for machine in elsewhere)


def _original(log_dir: Path) -> str:
    """Return the name of the log folder on all machines, also if this is a copy of it."""
    try:
        return msgspec.json.decode((log_dir / VIEW).read_bytes(), type=JobView).log_dir
    except (OSError, *UNDECODABLE):
        return str(log_dir.absolute())


def _several(what: str, numbers: set[int]) -> str:
    """Return "rank 1", "ranks 1, 3" or "steps 4 to 90"."""
    found = sorted(numbers)
    if len(found) == 1:
        return f"{what} {found[0]}"
    shown = ", ".join(map(str, found)) if len(found) <= 8 else f"{found[0]} to {found[-1]}"
    return f"{what}s {shown}"
