"""The commands `varuna status`, `stop`, `drain` and `logs`: they talk to the manager of a running job."""

import sys
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from varuna.cli.options import AsJson, printable
from varuna.cli.status.watch import watch_job
from varuna.codec import decode, encode
from varuna.morph.protocol.messages import JobStatus, ManagerReply
from varuna.morph.run.client import connect_manager, request_manager
from varuna.observe.ledger import ledger_lines

CodeDir = Annotated[str, typer.Option(help="Code folder that the job was started with.")]


def status(
    code_dir: CodeDir = ".",
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show the status until the job ends.")] = False,
) -> None:
    """Show the state of a job and its machines."""
    if watch:
        watch_job(code_dir, as_json=as_json)
        return
    found = decode(request_manager(code_dir, "status").status, JobStatus, "the manager's answer")
    if as_json:
        typer.echo(encode(found))
        return
    typer.echo(f"{found.job}: {found.phase} for {found.phase_seconds:.0f} s ({printable(found.reason)})")
    for topic, why in found.problems.items():
        typer.echo(f"{topic}: {printable(why)}")
    if found.generation is not None:
        typer.echo(f"generation {found.generation}: {found.layout}, iteration {found.iteration}")
    if found.store:
        saved = "nothing saved yet" if found.saved_step is None else f"saved step {found.saved_step}"
        cost = f" in {found.save_seconds:.2g} s" if found.save_seconds else ""
        every = f"; automatic every {found.save_every_seconds:.1f} s" if found.save_every_seconds else ""
        typer.echo(f"checkpoints: {printable(found.store)}, {saved}{cost}{every}")
    if found.checkpoint_note:
        typer.echo(f"broken checkpoint: {printable(found.checkpoint_note)}")
    if found.slow_machines:
        typer.echo(f"slow: {printable(', '.join(found.slow_machines))}")
    for line in ledger_lines(found.ledger) if found.ledger is not None else ():
        typer.echo(line)
    Console(width=None if sys.stdout.isatty() else 1000).print(machine_table(found))
    typer.echo(f"logs: {found.log_dir}")


def stop(
    code_dir: CodeDir = ".",
    now: Annotated[bool, typer.Option("--now", help="Do not save a checkpoint.")] = False,
    as_json: AsJson = False,
) -> None:
    """Save a checkpoint and end the job."""
    show_answer(request_manager(code_dir, "stop", save=not now, why="`varuna stop`"), as_json)


def drain(
    machine: Annotated[str, typer.Argument(help="Address as the machine list has it.")],
    code_dir: CodeDir = ".",
    seconds: Annotated[
        float | None, typer.Option(help="Seconds until the machine is gone. Default: unknown.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Continue without a machine: in place, or from a checkpoint that is saved now.

    To use the machine again, remove it from the machine list, then add it.
    """
    show_answer(
        request_manager(code_dir, "drain", machine=machine, seconds=seconds, why="`varuna drain`"), as_json
    )


def logs(
    rank: Annotated[int, typer.Argument(help="Worker rank.")],
    code_dir: CodeDir = ".",
    lines: Annotated[int, typer.Option(min=1, help="Number of trailing lines to show.")] = 50,
    generation: Annotated[int | None, typer.Option(help="Generation. Default: the current one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the last lines of a worker's output."""
    with connect_manager(code_dir) as (client, job):
        pieces = client.read_log(job, rank, lines=lines, generation=generation)
        if as_json:
            show_answer(ManagerReply(True, "".join(with_titles(pieces))), as_json)
        else:
            for text in with_titles(pieces):
                typer.echo(text, nl=False)


def with_titles(pieces: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the text with a title before each file. End every file with a newline."""
    last_title = last = ""
    for title, text in pieces:
        if title != last_title:
            newline = "" if last.endswith("\n") or not last_title else "\n"
            yield f"{newline}{title}\n"
        last_title, last = title, text or last
        yield text
    if last and not last.endswith("\n"):
        yield "\n"


def machine_table(found: JobStatus) -> Table:
    table = Table("machine", "state", "ranks", "compute s", "step s", "seen s ago", box=None, pad_edge=False)
    for machine in found.machines:
        table.add_row(
            Text(printable(machine.machine)),
            Text(printable(machine.state)),
            ", ".join(str(worker.rank) for worker in machine.workers) or "-",
            ", ".join(f"{worker.compute_seconds:.3g}" for worker in machine.workers) or "-",
            ", ".join(f"{worker.step_seconds:.3g}" for worker in machine.workers) or "-",
            "-" if machine.seen_seconds_ago is None else f"{machine.seen_seconds_ago:.1f}",
        )
    return table


def show_answer(answer: ManagerReply, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode({"ok": answer.ok, "text": answer.text}).decode())
    elif answer.ok:
        typer.echo(printable(answer.text))
    if not answer.ok:
        raise ValueError(answer.text)
