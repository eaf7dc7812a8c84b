"""Starts one machine's workers and watches them: `python -m varuna.launcher ... script.py ARGS`.

Starting, log files and error files are torch elastic's (`torch.distributed.elastic.multiprocessing`).
What this adds: the layout, the blame where a worker fails, and that no process outlives the job.
"""

import argparse
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from varuna.morph.failures import WorkerFailure, describe, find_cause
from varuna.morph.run import orphan_guard, worker
from varuna.morph.run.worker_env import (
    WORKER_DEFAULTS,
    WORKER_FLAGS,
    flags_taken,
    name_idle,
    ranks_of_machine,
    worker_arguments,
    worker_environment,
)
from varuna.morph.run.worker_logs import last_lines, read_error
from varuna.plan.search.choose import lay_out_as_typed
from varuna.types import JobSpec, MachineWorkers, format_stage_map

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs, SubprocessContext

POLL_SECONDS = 0.05
LAST_WORD_SECONDS = 3.0
"""How long a failing worker may take to leave, and the one to blame to speak up after those that quote it."""
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Those that torch elastic turns into a `SignalException`."""
CLOSE_SECONDS = 5
"""From SIGTERM to SIGKILL."""


# ---------------------------------------------------------------- running a job


def launch(group: MachineWorkers) -> int:
    """Run this machine's workers until they end. Return the exit status."""
    announce(group)
    if not group.ranks:
        say("finished: this machine has no rank in this layout")
        return 0
    started = time.monotonic()
    guard = start_guard()
    hold_signals()
    try:
        return run_workers(group, guard, started)
    finally:
        guard.communicate("done\n")


def run_workers(group: MachineWorkers, guard: subprocess.Popen[str], started: float) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException

    logs = group.job.log_dir
    workers: SubprocessContext | None = None
    try:
        workers = start_workers(group)
        print(*workers.pids().values(), sep="\n", file=guard.stdin, flush=True)
        forward_usr1(workers)
        release_signals()
        failures = watch(group, workers)
    except SignalException as caught:
        say(f"{caught.sigval.name}: ending all workers", error=True)
        return 128 + caught.sigval
    finally:
        if workers is not None:
            end(workers)
    if failures:
        cause = find_cause(failures)
        reason = describe(cause, group.layout, last_lines=last_lines(log_path(group, cause.rank, "err")))
        say(f"failed: {reason}\n\nall workers have ended; logs in {logs}", error=True)
        return 1
    seconds = time.monotonic() - started
    say(f"finished: every worker ended normally, after {seconds:.1f} s; logs in {logs}")
    return 0


def announce(group: MachineWorkers) -> None:
    layout, job = group.layout, group.job
    say(f"{layout}; stage to rank map {format_stage_map(layout.stage_map)!r}; logs in {job.log_dir}")
    if layout.idle:
        idle = name_idle(layout, devices_per_machine=job.devices_per_machine)
        total = layout.num_ranks + len(layout.idle)
        say(f"{layout.num_ranks} of {total} devices are used; idle: {idle}")


def say(text: str, *, error: bool = False) -> None:
    print(f"varuna: {text}", file=sys.stderr if error else sys.stdout, flush=True)


# ---------------------------------------------------------------- the workers


def start_workers(group: MachineWorkers) -> "SubprocessContext":
    from torch.distributed.elastic.multiprocessing import SubprocessContext, start_processes

    # Its notes on signals sent to workers would stand between the user and the reason.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    unset = {name: value for name, value in WORKER_DEFAULTS.items() if name not in os.environ}
    job, local_ranks = group.job, range(len(group.ranks))
    runner = ("-P", worker.__file__, str(os.getpid()), job.code_dir, job.script)
    args = {local_rank: (*runner, *worker_arguments(group, local_rank)) for local_rank in local_ranks}
    environments = {
        local_rank: {**unset, **job.environment, **worker_environment(group, local_rank)}
        for local_rank in local_ranks
    }
    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    context = start_processes(
        name="rank",
        entrypoint=sys.executable,
        args=args,
        envs=environments,
        logs_specs=logs_specs(group),
        log_line_prefixes={0: f"[rank {group.ranks[0]}] "},
    )
    if under_nohup:  # torch elastic has set its own handler, and the job would end with its terminal
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert isinstance(context, SubprocessContext)
    return context


def logs_specs(group: MachineWorkers) -> "LogsSpecs":
    """rank_N.out and rank_N.err for every worker; the machine's first is shown in the terminal too."""
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class RankLogs(LogsSpecs):
        @property
        def root_log_dir(self) -> str:
            return group.job.log_dir

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            out, err, errors = (
                {local_rank: str(log_path(group, rank, kind)) for local_rank, rank in enumerate(group.ranks)}
                for kind in ("out", "err", "error.json")
            )
            for local_rank, place in errors.items():
                envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = place
            return LogsDest(
                stdouts=out,
                stderrs=err,
                tee_stdouts={0: out[0]},
                tee_stderrs={0: err[0]},
                error_files=errors,
            )

    Path(group.job.log_dir).mkdir(parents=True, exist_ok=True)
    return RankLogs()


def log_path(group: MachineWorkers, rank: int, kind: str) -> Path:
    return Path(group.job.log_dir) / f"rank_{rank}.{kind}"


def hold_signals() -> None:
    """Until all workers are known, so that none can be missed; the workers let go of them by themselves."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {*ENDING_SIGNALS, signal.SIGUSR1})


def release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*ENDING_SIGNALS, signal.SIGUSR1})


def forward_usr1(workers: "SubprocessContext") -> None:
    """To the workers alone: what they have started would die of it."""

    def forward(signum: int, frame: FrameType | None) -> None:
        for handler in workers.subprocess_handlers.values():
            if handler.proc.poll() is None:
                handler.proc.send_signal(signum)

    signal.signal(signal.SIGUSR1, forward)


def watch(group: MachineWorkers, workers: "SubprocessContext") -> list[WorkerFailure]:
    """Waits until all have ended well, which is no failure, or until one to blame is known."""
    deadline = float("inf")
    while True:
        codes = {
            rank: workers.subprocess_handlers[local_rank].proc.poll()
            for local_rank, rank in enumerate(group.ranks)
        }
        failures = [
            WorkerFailure(rank, code, error)
            for rank, code in codes.items()
            if (error := read_error(log_path(group, rank, "error.json"))) is not None or code
        ]
        if failures:
            deadline = min(deadline, time.monotonic() + LAST_WORD_SECONDS)
            known = not find_cause(failures).second_hand
            leaving = any(failure.exit_code is None for failure in failures)
            if (known and not leaving) or None not in codes.values() or time.monotonic() > deadline:
                return failures
        elif None not in codes.values():
            return []
        time.sleep(POLL_SECONDS)


def end(workers: "SubprocessContext") -> None:
    """Ends every worker, then what is left of what they had started; a second Ctrl-C does not stop it."""
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        workers.close(timeout=CLOSE_SECONDS)
    finally:
        for group in workers.pids().values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)


def start_guard() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", orphan_guard.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is not for it
        text=True,
    )


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
    return tuple(sorted(flags_taken(script.read_text(errors="replace"))))


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
