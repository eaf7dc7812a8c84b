"""The command `varuna trace`: writes the last steps of a job as a trace that ui.perfetto.dev opens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from varuna.cli.options import say
from varuna.cli.status.page import check_log_folder
from varuna.codec import UNDECODABLE
from varuna.files import write_atomic
from varuna.morph.run.job_folder import home_folder
from varuna.observe import bubble, to_perfetto
from varuna.observe.job_view import NAME as VIEW
from varuna.observe.job_view import JobView
from varuna.observe.trace_file import (
    BETWEEN_STEPS,
    StepTrace,
    choose_steps,
    step_timeline,
    whole_timeline,
)
from varuna.page.log_reader import AskManager
from varuna.page.manager_link import ManagerLink
from varuna.page.timeline_reader import ReportReader
from varuna.page.trace_reader import collect_traces, missing_lines, where_all_are
from varuna.types import Timeline


def trace(
    folder: Annotated[Path, typer.Argument(metavar="LOGDIR", help="Log folder of a job.")],
    steps: Annotated[
        str | None, typer.Option(metavar="FIRST:STOP", help="Steps, for example 10:20. Default: the last 10.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "--into", help="File to write. Default: LOGDIR/trace.json.")
    ] = None,
) -> None:
    """Write a trace of all ranks for ui.perfetto.dev, and show how long each stage was idle."""
    check_log_folder(folder)
    link = ManagerLink(folder, home_folder())
    collected = collect_traces(folder, link.request)
    found = collected.traces
    if not found:
        where = where_all_are(folder, collected)
        raise ValueError(
            f"{folder} has no recorded steps: {where or 'no worker has finished a step of `Varuna.step` yet'}"
        )
    kept = sorted({trace.step for trace in found})
    first, stop = parse_steps(steps, kept) if steps is not None else last_steps(found)
    chosen = choose_steps(found, first, stop)
    if not chosen:
        raise ValueError(
            f"no step from {first} to {stop - 1} is kept: the workers keep the last ones, {kept[0]} to "
            f"{kept[-1]} (choose some of them: --steps {max(kept[0], kept[-1] - 9)}:{kept[-1] + 1})"
        )
    file = out or folder / "trace.json"
    write_atomic(file, to_perfetto(whole_timeline(list(chosen.values()))))
    numbers = list(chosen)
    if len(numbers) < stop - first:
        say(f"not all of these steps are kept: the trace has {numbers[0]} to {numbers[-1]}")
    for line in missing_lines(folder, chosen.values(), collected):
        say(line)
    ranks = len(chosen[numbers[-1]])
    typer.echo(f"{file}: {len(numbers)} steps of {ranks} ranks (open it in ui.perfetto.dev)")
    for line in bubble_lines(list(chosen.values()), predicted_bubbles(folder, link.request)):
        typer.echo(line)


def last_steps(found: Sequence[StepTrace]) -> tuple[int, int]:
    """Return the range of the last ten steps, up to one that all ranks have written, if there is one."""
    kept = choose_steps(found, 0, max(trace.step for trace in found) + 1)
    whole = [step for step, traces in kept.items() if len(traces) == traces[0].num_ranks]
    last = max(whole or kept)
    return max(min(kept), last - 9), last + 1


def parse_steps(text: str, kept: Sequence[int]) -> tuple[int, int]:
    """Return the first step and the one after the last. Raise ValueError."""
    first, colon, stop = text.partition(":")
    if not colon or not first.isdecimal() or not stop.isdecimal() or int(first) >= int(stop):
        raise ValueError(
            f"--steps must be FIRST:STOP with FIRST below STOP, such as 10:20, not {text!r} (kept are steps "
            f"{kept[0]} to {kept[-1]})"
        )
    return int(first), int(stop)


def predicted_bubbles(folder: Path, ask_manager: AskManager) -> dict[int, float]:
    """Return the share of the predicted step in which each stage is idle; empty without a prediction.

    The first rank of the job writes it to the log folder of its machine.
    """
    try:
        layout = msgspec.json.decode((folder / VIEW).read_bytes(), type=JobView).layout
    except (OSError, *UNDECODABLE):
        layout = None
    reader = ReportReader(folder, ask_manager)
    reader.update(None if layout is None else layout.stage_map[0][0])
    found = reader.found
    return {} if found is None or found.predicted is None else bubble(found.predicted)


def bubble_lines(steps: Sequence[Sequence[StepTrace]], predicted: dict[int, float]) -> list[str]:
    """Return the share of the time in which each stage did not compute, measured and predicted."""
    shares: dict[int, list[float]] = {}
    for traces in steps:
        timeline = step_timeline(traces)
        within = tuple(i for i in timeline.intervals if i.what not in BETWEEN_STEPS)
        for stage, share in bubble(Timeline(within)).items():
            shares.setdefault(stage, []).append(share)
    lines = []
    for stage, found in sorted(shares.items()):
        line = f"stage {stage}: idle {sum(found) / len(found):.1%} of a step"
        lines.append(f"{line}, predicted {predicted[stage]:.1%}" if stage in predicted else line)
    return lines
