"""Commands for a job that a manager leads: varuna run, status, stop, drain, logs."""

import sys
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from varuna.codec import decode, encode
from varuna.morph.protocol.messages import JobStatus, ManagerReply
from varuna.morph.run.client import request_manager

CodeDir = Annotated[
    str, typer.Option("--code-dir", "--code_dir", help="The folder that the job was started with.")
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


def register(app: typer.Typer) -> None:
    app.command(
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    )(run)
    for command in (status, stop, drain, logs):
        app.command()(command)


def run(context: typer.Context) -> None:
    """Start a job on the machines of a list, and lead it while they come and go."""
    from varuna.cli import run as run_varuna

    sys.argv = ["varuna run", *context.args]
    run_varuna.main()


def status(code_dir: CodeDir = ".", as_json: AsJson = False) -> None:
    """Show how a job is doing, and on which machines."""
    found = decode(request_manager(code_dir, "status").status, JobStatus, "the manager's answer")
    if as_json:
        typer.echo(encode(found))
        return
    typer.echo(f"{found.job}: {found.phase} for {found.phase_seconds:.0f} s ({found.reason})")
    if found.generation is not None:
        typer.echo(f"generation {found.generation}: {found.layout}, iteration {found.iteration}")
    if found.store:
        saved = "nothing saved yet" if found.saved_step is None else f"saved step {found.saved_step}"
        cost = f" in {found.save_seconds:.2g} s" if found.save_seconds else ""
        every = f"; by itself every {found.save_every_seconds:.1f} s" if found.save_every_seconds else ""
        typer.echo(f"checkpoints: {found.store}, {saved}{cost}{every}")
    if found.slow_machines:
        typer.echo(f"slow: {', '.join(found.slow_machines)}")
    Console(width=None if sys.stdout.isatty() else 1000).print(table_of(found))
    typer.echo(f"logs: {found.log_dir}")


def table_of(found: JobStatus) -> Table:
    table = Table("machine", "state", "ranks", "compute s", "step s", "seen s ago", box=None, pad_edge=False)
    for machine in found.machines:
        table.add_row(
            machine.machine,
            machine.state,
            ", ".join(str(worker.rank) for worker in machine.workers) or "-",
            ", ".join(f"{worker.compute_seconds:.3g}" for worker in machine.workers) or "-",
            ", ".join(f"{worker.step_seconds:.3g}" for worker in machine.workers) or "-",
            "-" if machine.seen_seconds_ago is None else f"{machine.seen_seconds_ago:.1f}",
        )
    return table


def stop(
    code_dir: CodeDir = ".",
    now: Annotated[bool, typer.Option("--now", help="Without a checkpoint.")] = False,
    as_json: AsJson = False,
) -> None:
    """Save a checkpoint and end the job."""
    tell(request_manager(code_dir, "stop", save=not now, why="`varuna stop`"), as_json)


def drain(
    machine: Annotated[str, typer.Argument(help="As the list has it.")],
    code_dir: CodeDir = ".",
    seconds: Annotated[float | None, typer.Option(help="It will be gone by then.")] = None,
    as_json: AsJson = False,
) -> None:
    """Save, and go on without a machine, until it is listed anew."""
    tell(request_manager(code_dir, "drain", machine=machine, seconds=seconds, why="`varuna drain`"), as_json)


def logs(
    rank: Annotated[int, typer.Argument(help="Whose.")],
    code_dir: CodeDir = ".",
    lines: Annotated[int, typer.Option(help="How many of the last.")] = 50,
    generation: Annotated[int | None, typer.Option(help="The current one if not given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the last lines that a worker has written."""
    tell(request_manager(code_dir, "logs", rank=rank, lines=lines, generation=generation), as_json)


def tell(answer: ManagerReply, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode({"ok": answer.ok, "text": answer.text}).decode())
    elif answer.ok:
        typer.echo(answer.text)
    if not answer.ok:
        raise ValueError(answer.text)
