"""The command `varuna chaos`: a real job on this machine, under faults, compared with an undisturbed run."""

import logging
import os
import signal
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from varuna.chaos.faults.kinds import FAULTS
from varuna.chaos.hosts.lab import require_tools
from varuna.chaos.market import fit_trace, names_of
from varuna.chaos.run import ChaosRequest, ChaosRun
from varuna.chaos.script import read_script
from varuna.cli.options import AsJson, takes
from varuna.cli.run import parse_save_every
from varuna.codec import encode
from varuna.files import write_atomic
from varuna.observe.progress_bar import parts_progress
from varuna.plan import tables
from varuna.simulate.traces import MarketTrace, read_trace

MOST_MACHINES = 64
MOST_LOOPBACK = 250


class ChaosOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `varuna chaos`."""

    script: Annotated[Path | None, typer.Argument(help="Training script, as for `varuna run`.")] = None
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGUMENTS", help="Arguments of the script.")
    ] = None
    minutes: Annotated[float | None, typer.Option(help="Time of random faults, or of a trace.")] = None
    seed: Annotated[int, typer.Option(help="Seed of the random choices.")] = 0
    faults: Annotated[
        Path | None,
        typer.Option("--script", metavar="FILE", help="TOML file with the faults, in place of random ones."),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Spot trace, as for `varuna simulate`: it adds and takes machines."
        ),
    ] = None
    speedup: Annotated[float, typer.Option(help="Play the trace this many times as fast.")] = 1.0
    notice: Annotated[
        float, typer.Option(min=0.0, help="Announce each removal of the trace this many seconds before.")
    ] = 0.0
    machines: Annotated[int, typer.Option(help="Machines; of a trace: at most, at any time.")] = 4
    hosts: Annotated[
        bool,
        typer.Option(
            "--hosts", help="Network namespaces as machines (root): slow and cut links, full disks, too."
        ),
    ] = False
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per step of the whole job.")] = 48
    chunk_size: Annotated[int, typer.Option(min=1, help="Samples per micro-batch.")] = 4
    nstages: Annotated[int, typer.Option("--nstages", "--stages", min=1, help="Pipeline stages.")] = 1
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Workers on each machine.")] = 1
    save_every: Annotated[
        str | None, typer.Option(help="As for `varuna run`: seconds between automatic checkpoints, or off.")
    ] = None
    hot: Annotated[bool, typer.Option("--hot/--no-hot", help="As for `varuna run`.")] = True
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Relative difference of losses that counts as rounding.")
    ] = 1e-3
    patience: Annotated[
        float, typer.Option(min=1.0, help="The job is stuck after this many seconds without a step.")
    ] = 120.0
    out: Annotated[Path | None, typer.Option(help="Keep logs, ledger, losses and report there.")] = None
    list_faults: Annotated[bool, typer.Option("--list", help="List the kinds of faults, and exit.")] = False
    as_json: AsJson = False


@takes(ChaosOptions)
def chaos(options: ChaosOptions) -> None:
    """Run a script on machines of this computer, inject faults, and compare it with an undisturbed run.

    Exit status: 0 if the losses are equal and nothing is left behind, 1 if not, 2 for invalid input.
    """
    if options.list_faults:
        show_kinds()
        return
    request = make_request(options)
    raise typer.Exit(carry_out(request, as_json=options.as_json))


def make_request(options: ChaosOptions) -> ChaosRequest:
    """Check all input. Start nothing."""
    if options.script is None:
        raise ValueError("no training script (varuna chaos train.py --minutes 5)")
    if not options.script.is_file():
        raise ValueError(f"no script {str(options.script)!r}")
    if not 1 <= options.machines <= MOST_MACHINES:
        raise ValueError(f"--machines must be 1 to {MOST_MACHINES}, not {options.machines}")
    if options.faults is not None and options.trace is not None:
        raise ValueError("--script and --trace exclude each other")
    if options.faults is not None and options.minutes is not None:
        raise ValueError("--minutes is the time of random faults: a --script has its own times")
    if options.minutes is not None and not 0 < options.minutes < 1e5:
        raise ValueError(f"--minutes must be above 0, not {options.minutes:g}")
    parse_save_every(options.save_every)
    if options.hosts:
        try:
            require_tools()
        except RuntimeError as error:
            raise ValueError(f"--hosts: {error}") from None
    listed = []
    if options.faults is not None:
        listed = read_script(options.faults, machines=options.machines, hosts=options.hosts)
    every = [] if options.save_every is None else ["--save_every", options.save_every]
    return ChaosRequest(
        script=(str(options.script.resolve()), *(options.arguments or ())),
        code_dir=Path.cwd(),
        batch_size=options.batch_size,
        chunk_size=options.chunk_size,
        stages=options.nstages,
        per_machine=options.gpus_per_node,
        machines=options.machines,
        hosts=options.hosts,
        seed=options.seed,
        seconds=60 * (5.0 if options.minutes is None else options.minutes),
        faults=tuple(listed),
        trace=None if options.trace is None else shorten(read_trace(options.trace), options),
        notice_seconds=options.notice,
        tolerance=options.tolerance,
        patience_seconds=options.patience,
        run_options=(*every, "--hot" if options.hot else "--no-hot"),
        out=options.out,
    )


def carry_out(request: ChaosRequest, *, as_json: bool) -> int:
    """Run it; return the exit status. SIGTERM cleans up like Ctrl-C."""
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.getLogger("varuna").setLevel(logging.WARNING)
    with parts_progress(console) as progress:
        run = ChaosRun(
            request,
            os.environ,
            say=lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True),
            progress=progress,
        )
        try:
            report = run.run()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):  # a second Ctrl-C must not stop the cleaning
                signal.signal(number, signal.SIG_IGN)
            run.close()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler)
    if request.out is not None:
        write_atomic(request.out / "report.json", encode(report) + "\n")
    if as_json:
        typer.echo(encode(report))
    else:
        report.show(tables.console())
    return report.exit_code


def shorten(trace: MarketTrace, options: ChaosOptions) -> MarketTrace:
    """Return the part of a trace that is played."""
    if not 0 < options.speedup < 1e6:
        raise ValueError(f"--speedup must be above 0, not {options.speedup:g}")
    found = fit_trace(trace, most=options.machines, speedup=options.speedup)
    if options.minutes is not None:
        found = found.cut(60 * options.minutes)
    most = MOST_MACHINES if options.hosts else MOST_LOOPBACK
    if len(names_of(found)) > most:
        raise ValueError(
            f"the trace has {len(names_of(found))} machines, one after the other; {most} are possible (give "
            "fewer --machines or --minutes)"
        )
    return found


def show_kinds() -> None:
    table = tables.table("kind", "fault", "keys", "machines")
    for name, kind in FAULTS.items():
        table.add_row(name, kind.meaning, ", ".join(kind.options), "--hosts" if kind.needs_hosts else "any")
    tables.console().print(table)
