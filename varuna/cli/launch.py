"""Starts one machine's workers and watches them: `python -m varuna.launcher ... script.py ARGS`.

The supervisor (`varuna.morph.run.supervisor`) starts and ends the workers. This file adds the layout,
the signals, the terminal output, and the failure that caused the others.
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from varuna.morph.failures import WorkerFailure, describe_failure, find_cause
from varuna.morph.run.supervisor import Supervisor, last_lines
from varuna.morph.run.worker_env import WORKER_FLAGS, accepted_flags, name_idle_devices, ranks_of_machine
from varuna.plan.search.choose import lay_out_as_typed
from varuna.types import JobSpec, MachineWorkers, format_stage_map

POLL_SECONDS = 0.05
LAST_ERROR_SECONDS = 3.0
"""Time limit for a failing worker to exit, and for the cause to show after failures that quote it."""
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
CLOSE_SECONDS = 5
"""Time from SIGTERM to SIGKILL."""


# ---------------------------------------------------------------- running a job


def launch(group: MachineWorkers) -> int:
    """Run this machine's workers until they end. Return the exit status."""
    announce(group)
    if not group.ranks:
        say("finished: this machine has no rank in this layout")
        return 0
    return asyncio.run(run_workers(group))


async def run_workers(group: MachineWorkers) -> int:
    started, log_dir = time.monotonic(), group.job.log_dir
    supervisor = Supervisor()
    received = catch_signals(supervisor)
    try:
        await supervisor.open(group.job.environment)
        supervisor.start_workers(group, Path(log_dir))
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
            print(f"[rank {group.ranks[0]}] {line}", file=sys.stderr if is_stderr else sys.stdout, flush=True)


def announce(group: MachineWorkers) -> None:
    layout, job = group.layout, group.job
    say(f"{layout}; stage to rank map {format_stage_map(layout.stage_map)!r}; logs in {job.log_dir}")
    if layout.idle:
        idle = name_idle_devices(layout, devices_per_machine=job.devices_per_machine)
        total = layout.num_ranks + len(layout.idle)
        say(f"{layout.num_ranks} of {total} devices are used; idle: {idle}")


def say(text: str, *, error: bool = False) -> None:
    print(f"varuna: {text}", file=sys.stderr if error else sys.stdout, flush=True)


# ---------------------------------------------------------------- the command line


def split_command(argv: Sequence[str], switches: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own options, and from the script on the user's; argparse would take some of the latter for ours."""
    index = 0
    while index < len(argv) and argv[index].startswith("-"):
        if argv[index] == "--":
            return list(argv[:index]), list(argv[index + 1 :])
        index += 1 if argv[index] in switches or "=" in argv[index] else 2
    return list(argv[:index]), list(argv[index:])


def find_script(script: str, code_dir: Path) -> Path:
    for place in (code_dir / script, Path(script)):
        if place.is_file():
            return place.resolve()
    raise ValueError(
        f"no script {script!r} in {code_dir} (the path is taken from --code_dir, then from here)"
    )


def choose_flags(script: Path, passed: bool | None) -> tuple[str, ...]:
    """All with --worker_args, none with --no_worker_args, else those that the script's source names."""
    if passed is not None:
        return WORKER_FLAGS if passed else ()
    return tuple(sorted(accepted_flags(script.read_text(errors="replace"))))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def new_log_dir(root: str) -> str:
    return str(Path(root).absolute() / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}"))


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nstages", type=int, help="pipeline stages")
    parser.add_argument("--batch_size", "--batch-size", type=int, help="samples per step, of the whole job")
    parser.add_argument("--chunk_size", "--chunk-size", type=int, help="samples in a micro-batch")
    parser.add_argument("--code_dir", help="working directory of the workers (default: this one)")
    parser.add_argument("--log_dir", default="varuna_logs", help="where each job makes a folder of logs")
    parser.add_argument("--resume_step", type=int, help="handed to the workers: the checkpoint to go on from")
    parser.add_argument(
        "--worker_args",
        action="store_true",
        default=None,
        help="pass --rank, --stage_to_rank_map, ... to the script (default: those that its source names)",
    )
    parser.add_argument(
        "--no_worker_args",
        action="store_false",
        dest="worker_args",
        default=None,
        help="pass the script none of them: it reads the environment",
    )


SWITCHES = ("-h", "--help", "--worker_args", "--no_worker_args")


def prepare(
    command: Sequence[str],
    *,
    devices_per_machine: int,
    code_dir: str | None,
    log_dir: str,
    worker_args: bool | None,
    resume_step: int | None,
) -> JobSpec:
    """Everything that can be wrong with what the user typed is found here, before anything starts."""
    if not command:
        raise ValueError(
            "no training script was given (it comes after the options, its own arguments behind it)"
        )
    folder = Path(code_dir or ".").absolute()
    if not folder.is_dir():
        raise ValueError(f"--code_dir {folder} is no folder")
    script = find_script(command[0], folder)
    return JobSpec(
        script=str(script),
        arguments=tuple(command[1:]),
        code_dir=str(folder),
        log_dir=new_log_dir(log_dir),
        devices_per_machine=devices_per_machine,
        resume_step=resume_step,
        worker_flags=choose_flags(script, worker_args),
    )


def parse(argv: Sequence[str]) -> MachineWorkers:
    parser = argparse.ArgumentParser(
        prog="python -m varuna.launcher",
        usage="python -m varuna.launcher [options] script.py [its arguments]",
        description="Starts this machine's workers of a job and watches them.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ngpus_per_server", type=int, default=4, help="workers on each machine (default: 4)"
    )
    parser.add_argument("--nservers", type=int, default=1, help="machines in the job (default: 1)")
    parser.add_argument("--node_rank", type=int, default=0, help="which of them this is (default: 0)")
    parser.add_argument(
        "--gpus_per_stage", type=int, default=0, help="replicas of each stage (0: all it can)"
    )
    parser.add_argument("--master_addr", default="127.0.0.1", help="address of machine 0")
    parser.add_argument(
        "--master_port", type=int, help="port on machine 0 (default: a free one; 29500 with several machines)"
    )
    add_common_arguments(parser)
    own, command = split_command(argv, SWITCHES)
    options = parser.parse_args(own)
    try:
        if not 0 <= options.node_rank < max(options.nservers, 1):
            raise ValueError(
                f"--node_rank {options.node_rank} is none of the {options.nservers} machines, from 0 on"
            )
        layout = lay_out_as_typed(
            options.nstages,
            batch_size=options.batch_size,
            microbatch_size=options.chunk_size,
            num_machines=options.nservers,
            devices_per_machine=options.ngpus_per_server,
            num_replicas=options.gpus_per_stage,
        )
        job = prepare(
            command,
            devices_per_machine=options.ngpus_per_server,
            code_dir=options.code_dir,
            log_dir=options.log_dir,
            worker_args=options.worker_args,
            resume_step=options.resume_step,
        )
    except ValueError as error:
        parser.error(str(error))
    # Machines that start apart must agree on a port without a word; one machine alone takes any.
    port = options.master_port or (free_port() if options.nservers == 1 else 29500)
    return MachineWorkers(
        job=job,
        layout=layout,
        ranks=ranks_of_machine(layout, options.node_rank, devices_per_machine=options.ngpus_per_server),
        master_addr=options.master_addr,
        master_port=port,
        resume_step=job.resume_step,
    )


def main() -> None:
    sys.exit(launch(parse(sys.argv[1:])))


if __name__ == "__main__":
    main()
