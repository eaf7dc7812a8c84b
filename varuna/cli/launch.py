"""Starts one machine's workers and watches them: `python -m varuna.launcher ... script.py ARGS`.

The supervisor (`varuna.morph.run.supervisor`) starts and ends the workers. This file adds the layout,
the signals, the terminal output, and the failure that caused the others.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from varuna.cli.job_key import make_job_key, read_job_key
from varuna.cli.options import add_command, exit_2_on_error, new_app, run_app, say, takes, worker_line
from varuna.morph.failures import WorkerFailure, describe_failure, find_cause
from varuna.morph.run.log_pages import last_lines
from varuna.morph.run.supervisor import Supervisor
from varuna.morph.run.worker_env import WORKER_FLAGS, accepted_flags, name_idle_devices, ranks_of_machine
from varuna.plan.search.choose import LayoutRequest, lay_out_as_typed
from varuna.secure.credential import JobCredential, make_credential
from varuna.types import JobSpec, MachineWorkers, format_stage_map

POLL_SECONDS = 0.05
LAST_ERROR_SECONDS = 3.0
"""Time limit for a failing worker to exit, and for the cause to show after failures that quote it."""
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
STORE_SECONDS = 60.0
"""Time limit for the fork server to start and open the store."""
CLOSE_SECONDS = 5
"""Time from SIGTERM to SIGKILL."""


def launch(group: MachineWorkers, credential: JobCredential | None = None) -> int:
    """Run this machine's workers until they end. Return the exit status.

    `credential` is that of a job on several machines; a job on one machine gets its own.
    """
    layout, job = group.layout, group.job
    say(f"{layout}; stage to rank map {format_stage_map(layout.stage_map)!r}; logs in {job.log_dir}")
    if layout.idle:
        idle = name_idle_devices(layout, devices_per_machine=job.devices_per_machine)
        total = layout.num_ranks + len(layout.idle)
        say(f"{layout.num_ranks} of {total} devices are used; idle: {idle}")
    if not group.ranks:
        say("finished: this machine has no rank in this layout")
        return 0
    if credential is None and len(group.ranks) == layout.num_ranks:
        credential = make_credential("launcher")
    if credential is None:
        say(
            "warning: this job has no --job-key, so strangers on the network can read and write its store "
            "(make a key with `python -m varuna.launcher --make-job-key FILE`, copy it to all machines, and "
            "pass --job-key FILE on each)",
            error=True,
        )
    return asyncio.run(run_workers(group, credential))


async def run_workers(group: MachineWorkers, credential: JobCredential | None) -> int:
    started, log_dir = time.monotonic(), group.job.log_dir
    opened: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
    supervisor = Supervisor(
        credential,
        on_store=lambda port, error: opened.set_result((port, error)),
        on_store_end=lambda port, why: say(
            f"warning: the job's store has ended: {why} (training continues; an error of one rank may not "
            "reach the others)",
            error=True,
        ),
    )
    received = catch_signals(supervisor)
    try:
        await supervisor.open(group.job.environment)
        environment = {}
        if credential is not None and 0 in group.ranks:
            supervisor.open_store(group.master_addr, group.master_port)
            port, error = await asyncio.wait_for(opened, STORE_SECONDS)
            if error:
                say(f"failed: the job's store cannot be opened: {error} (see --master-port)", error=True)
                return 1
            group = msgspec.structs.replace(group, master_port=port)
            environment = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # it is open before the workers start
        supervisor.start_workers(group, Path(log_dir), environment=environment)
        if signal.SIGUSR1 in received:  # it came before there were workers
            supervisor.signal_workers(signal.SIGUSR1)
        failures = await watch(supervisor, group, received)
        if failures or ending_signal(received):
            await end_workers(supervisor)
    finally:
        await supervisor.close()
        show_output(supervisor, group)
    if number := ending_signal(received):
        return 128 + number
    if failures:
        cause = find_cause(failures)
        log = supervisor.workers[cause.rank].err
        reason = describe_failure(cause, group.layout, last_lines=last_lines(log))
        say(f"failed: {reason}\n\nall workers have ended; logs in {log_dir}", error=True)
        return 1
    seconds = time.monotonic() - started
    say(f"finished: every worker ended normally, after {seconds:.1f} s; logs in {log_dir}")
    return 0


def catch_signals(supervisor: Supervisor) -> list[int]:
    """Forward SIGUSR1 to the workers. Return the list that collects all signals."""
    received: list[int] = []

    def receive(number: int) -> None:
        received.append(number)
        if number == signal.SIGUSR1:
            supervisor.signal_workers(number)
        elif ending_signal(received[:-1]) is None:
            say(f"{signal.Signals(number).name}: ending all workers", error=True)

    for number in (*ENDING_SIGNALS, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            asyncio.get_running_loop().add_signal_handler(number, receive, number)
    return received


def ending_signal(received: Sequence[int]) -> int | None:
    return next((number for number in received if number in ENDING_SIGNALS), None)


async def watch(supervisor: Supervisor, group: MachineWorkers, received: list[int]) -> list[WorkerFailure]:
    """Wait until all workers have ended or the cause of a failure is known. Return the failures."""
    deadline = float("inf")
    while ending_signal(received) is None:
        show_output(supervisor, group)
        failures = [failure for worker in supervisor.workers.values() if (failure := worker.failure())]
        if failures:
            deadline = min(deadline, time.monotonic() + LAST_ERROR_SECONDS)
            known = not find_cause(failures).second_hand
            exiting = any(failure.exit_code is None for failure in failures)
            if (known and not exiting) or not supervisor.live_workers or time.monotonic() > deadline:
                return failures
        elif not supervisor.live_workers:
            break
        await asyncio.sleep(POLL_SECONDS)
    return []


async def end_workers(supervisor: Supervisor) -> None:
    """Send SIGTERM, and wait; closing the supervisor kills what is left."""
    supervisor.signal_workers(signal.SIGTERM)
    deadline = time.monotonic() + CLOSE_SECONDS
    while supervisor.live_workers and time.monotonic() < deadline:
        await asyncio.sleep(POLL_SECONDS)


def show_output(supervisor: Supervisor, group: MachineWorkers) -> None:
    """Print new output of this machine's first worker."""
    worker = supervisor.workers.get(group.ranks[0])
    for is_stderr, text in worker.new_output() if worker is not None else ():
        for line in text.splitlines():
            stream = sys.stderr if is_stderr else sys.stdout
            print(worker_line(group.ranks[0], line), file=stream, flush=True)


class ScriptOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of every command that starts a training script. None: not given."""

    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGUMENTS]", help="Training script and its arguments.", show_default=False
        ),
    ] = None
    nstages: Annotated[int | None, typer.Option(help="Number of pipeline stages.")] = None
    batch_size: Annotated[int | None, typer.Option(help="Samples per step of the whole job.")] = None
    chunk_size: Annotated[int | None, typer.Option(help="Samples per micro-batch.")] = None
    code_dir: Annotated[
        str, typer.Option(metavar="DIR", help="Working directory of the workers. Also searched for SCRIPT.")
    ] = "."
    log_dir: Annotated[
        str, typer.Option(metavar="DIR", help="Create a folder of logs in this folder for each job.")
    ] = "varuna_logs"
    resume_step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint to load. The workers receive it.")
    ] = None
    worker_args: Annotated[
        bool | None,
        typer.Option(
            help="Pass --rank, --stage_to_rank_map, ... to the script, or pass none of them. "
            "Default: pass those that its argparse parser takes or its source names."
        ),
    ] = None


class LaunchOptions(ScriptOptions, frozen=True, kw_only=True):
    ngpus_per_server: Annotated[int, typer.Option(help="Workers on each machine.")] = 4
    nservers: Annotated[int, typer.Option(help="Number of machines.")] = 1
    node_rank: Annotated[int, typer.Option(help="Number of this machine, from 0.")] = 0
    gpus_per_stage: Annotated[
        int, typer.Option(help="Replicas of each stage. 0: as many as the devices allow.")
    ] = 0
    master_addr: Annotated[str, typer.Option(help="Address of machine 0.")] = "127.0.0.1"
    master_port: Annotated[
        int | None,
        typer.Option(help="Port on machine 0. Default: a free port; 29500 if there are several machines."),
    ] = None
    job_key: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Key of a job on several machines, the same file on each. Keeps strangers out of the job.",
        ),
    ] = None
    make_job_key: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a new key for --job-key, and exit.")
    ] = None


@takes(LaunchOptions)
def launch_script(options: LaunchOptions) -> None:
    """Start this machine's workers of a job, and wait for them."""
    with exit_2_on_error():
        if options.make_job_key is not None:
            make_job_key(options.make_job_key)
            raise typer.Exit(0)
        group = machine_workers(options)
        credential = None if options.job_key is None else read_job_key(options.job_key)
    raise typer.Exit(launch(group, credential))


app = new_app()
add_command(app, launch_script, ends_with_script=True)


def main() -> None:
    run_app(app, "python -m varuna.launcher")


def machine_workers(options: LaunchOptions) -> MachineWorkers:
    """Check all input. Start nothing."""
    if not 0 <= options.node_rank < max(options.nservers, 1):
        raise ValueError(f"--node-rank must be 0 to {options.nservers - 1}, not {options.node_rank}")
    request = LayoutRequest(
        batch_size=options.batch_size, num_stages=options.nstages, microbatch_size=options.chunk_size
    )
    devices = options.ngpus_per_server
    layout = lay_out_as_typed(request, options.nservers * devices, num_replicas=options.gpus_per_stage)
    job = script_spec(options, devices_per_machine=devices)
    return MachineWorkers(
        job=job,
        layout=layout,
        ranks=ranks_of_machine(layout, options.node_rank, devices_per_machine=devices),
        master_addr=options.master_addr,
        # Machines that start separately must use the same port without communicating.
        master_port=options.master_port or (0 if options.nservers == 1 else 29500),
        resume_step=job.resume_step,
    )


def script_spec(options: ScriptOptions, *, devices_per_machine: int) -> JobSpec:
    """Return the part of a job that these options describe."""
    if not options.command:
        raise ValueError("no training script (name it after the options, followed by its own arguments)")
    folder = Path(options.code_dir).absolute()
    if not folder.is_dir():
        raise ValueError(f"--code-dir {folder} is not a folder")
    name, *arguments = options.command
    places = [place.resolve() for place in (folder / name, Path(name)) if place.is_file()]
    if not places:
        raise ValueError(f"no script {name!r} in --code-dir {folder}, nor in the current folder")
    return JobSpec(
        script=str(places[0]),
        arguments=tuple(arguments),
        worker_flags=choose_flags(places[0], options.worker_args),
        offers_flags=options.worker_args is None,
        code_dir=str(folder),
        log_dir=str(Path(options.log_dir).absolute() / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")),
        devices_per_machine=devices_per_machine,
        resume_step=options.resume_step,
    )


def choose_flags(script: Path, worker_args: bool | None) -> tuple[str, ...]:
    """Return the worker flags for the script; None: those that its source names."""
    if worker_args is not None:
        return WORKER_FLAGS if worker_args else ()
    return tuple(sorted(accepted_flags(script.read_text(errors="replace"))))
