"""Starts a job from its list of machines: `python -m varuna.run_varuna ... script.py ARGS`.

On one machine, this one, it is the launcher with a memory: what a job was started with is kept, so
that `--resume` needs no more than the folder of the code.
"""

import argparse
import hashlib
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from varuna.codec import decode, encode
from varuna.launcher import (
    SWITCHES,
    Job,
    add_common_arguments,
    free_port,
    launch,
    prepare,
    say,
    split_command,
)
from varuna.leading import JobFolder, lead
from varuna.morph.machines import is_loopback, parse_environment, read_machines, require_machines
from varuna.morph.placement import Layout, lay_out
from varuna.morph.state import Proposal, Settings


class LaunchArguments(msgspec.Struct, frozen=True, kw_only=True):
    """What a job was started with, as it is kept for `--resume`; None stands for the default."""

    machine_list: str | None = None
    gpus_per_node: int | None = None
    manager_ip: str | None = None
    no_morphing: bool | None = None
    exclude_slow: bool | None = None
    ssh: str | None = None
    python: str | None = None
    env_file: str | None = None
    profile_folder: str | None = None
    nstages: int | None = None
    batch_size: int | None = None
    chunk_size: int | None = None
    worker_args: bool | None = None
    command: tuple[str, ...] = ()


def update(saved: LaunchArguments, given: LaunchArguments) -> LaunchArguments:
    """What is given now wins over what was given then."""
    fields = msgspec.structs.asdict(given)
    return msgspec.structs.replace(
        saved, **{name: value for name, value in fields.items() if value not in (None, ())}
    )


def saved_path(home: Path, code_dir: Path) -> Path:
    """One file for each folder of code: its last job."""
    return home / "jobs" / f"{hashlib.sha256(str(code_dir.resolve()).encode()).hexdigest()[:16]}.json"


def read_saved(path: Path, code_dir: Path) -> LaunchArguments:
    if not path.is_file():
        raise ValueError(
            f"--resume finds no earlier job of {code_dir} (start it once without --resume, "
            "or name its folder with --code_dir)"
        )
    return decode(path.read_bytes(), LaunchArguments, str(path))


def save(path: Path, arguments: LaunchArguments) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(encode(arguments))
    part.replace(path)


def read_file(path: str, what: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ValueError(f"the {what} {path!r} cannot be read: {error.strerror}") from None


def user_environment(arguments: LaunchArguments) -> dict[str, str]:
    """The file that was named, or `varuna.env` where there is one."""
    named = arguments.env_file
    path = named or ("varuna.env" if Path("varuna.env").is_file() else None)
    found = parse_environment(read_file(path, "env file"), source=path) if path else {}
    return found | ({"VARUNA_MANAGER_IP": arguments.manager_ip} if arguments.manager_ip else {})


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m varuna.run_varuna",
        usage="python -m varuna.run_varuna [options] script.py [its arguments]",
        description="Starts a job on the machines of a list (for now: on this one, 127.0.0.1).",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--machine_list", help="file with an address a line (default: available_machines.out)"
    )
    parser.add_argument("--gpus_per_node", type=int, help="workers on each machine (default: 4)")
    parser.add_argument("--manager_ip", help="handed to the workers as VARUNA_MANAGER_IP")
    parser.add_argument(
        "--no_morphing",
        action="store_true",
        default=None,
        help="keep to the machines of the start, and end with the first failure",
    )
    parser.add_argument("--ssh", help="the ssh client and its options, such as 'ssh -F FILE' (default: ssh)")
    parser.add_argument("--python", help="the interpreter of other machines (default: as here)")
    parser.add_argument(
        "--exclude_slow",
        action="store_true",
        default=None,
        help="go on without machines that compute more slowly than others; all are in slow_machines.out",
    )
    parser.add_argument(
        "--env_file", help="KEY=VALUE lines for the workers (default: varuna.env, if it is there)"
    )
    parser.add_argument(
        "--profile_folder", help="profiles to choose --nstages and --chunk_size from (not yet)"
    )
    parser.add_argument("--resume", action="store_true", help="start the last job of --code_dir again")
    add_common_arguments(parser)
    return parser


class Typed(msgspec.Struct, frozen=True):
    """What was typed, made sense of."""

    job: Job
    arguments: LaunchArguments
    machines: tuple[str, ...]
    resume: bool
    folder: Path


def parse(argv: Sequence[str], *, home: Path) -> Typed:
    parser = make_parser()
    own, command = split_command(argv, (*SWITCHES, "--no_morphing", "--exclude_slow", "--resume"))
    options = parser.parse_args(own)
    try:
        code_dir = Path(options.code_dir or ".").absolute()
        memory = saved_path(home, code_dir)
        arguments = LaunchArguments(
            **{
                name: getattr(options, name)
                for name in LaunchArguments.__struct_fields__
                if name != "command"
            },
            command=tuple(command),
        )
        if options.resume:
            arguments = update(read_saved(memory, code_dir), arguments)
        machine_list = arguments.machine_list or "available_machines.out"
        machines, problems = read_machines(read_file(machine_list, "machine list"))
        for problem in problems:
            say(problem)
        require_machines(machines)
        environment = user_environment(arguments)
        job = prepare(
            arguments.command,
            num_machines=len(machines),
            devices_per_machine=4 if arguments.gpus_per_node is None else arguments.gpus_per_node,
            num_stages=arguments.nstages,
            num_replicas=0,
            batch_size=arguments.batch_size,
            microbatch_size=arguments.chunk_size,
            code_dir=str(code_dir),
            log_dir=options.log_dir,
            worker_args=arguments.worker_args,
            resume_step=options.resume_step,
        )
        # Kept whole: `--resume` may be typed in another folder.
        arguments = absolute(arguments, machine_list)
        save(memory, arguments)
    except ValueError as error:
        parser.error(str(error))
    job = msgspec.structs.replace(job, environment=environment, master_port=free_port())
    return Typed(job, arguments, machines, options.resume, memory.with_suffix(""))


def absolute(arguments: LaunchArguments, machine_list: str) -> LaunchArguments:
    env_file = arguments.env_file and str(Path(arguments.env_file).absolute())
    return msgspec.structs.replace(
        arguments, machine_list=str(Path(machine_list).absolute()), env_file=env_file
    )


def home_folder() -> Path:
    return Path(os.environ.get("VARUNA_HOME") or Path.home() / ".varuna")


def main() -> None:
    typed = parse(sys.argv[1:], home=home_folder())
    job = typed.job
    if typed.arguments.no_morphing and len(typed.machines) == 1 and is_loopback(typed.machines[0]):
        say(f"one machine, this one: {len(job.ranks)} workers of {job.devices_per_machine} devices")
        sys.exit(launch(job))
    try:
        sys.exit(morph(typed))
    except (ValueError, OSError) as error:
        sys.exit(f"varuna: {error}")


def morph(typed: Typed) -> int:
    job, arguments = typed.job, typed.arguments
    assert arguments.machine_list is not None
    return lead(
        job,
        machine_list=arguments.machine_list,
        machines=typed.machines,
        planner=partial(plan_by_hand, job),
        folder=JobFolder(typed.folder),
        resume=typed.resume,
        manager_ip=arguments.manager_ip,
        leaves_slow=bool(arguments.exclude_slow),
        ssh=shlex.split(arguments.ssh or "ssh"),
        python=arguments.python or sys.executable,
        settings=Settings(morphs=not arguments.no_morphing),
    )


def plan_by_hand(job: Job, machines: tuple[str, ...]) -> Proposal:
    """As many replicas as there is room for, of the stages and micro-batches that were typed."""
    layout = lay_out(
        len(machines) * job.devices_per_machine,
        job.layout.depth,
        batch_size=job.layout.batch_size,
        microbatch_size=job.layout.microbatch_size,
    )
    return Proposal(machines, used_machines(layout, machines, job.devices_per_machine), layout)


def used_machines(layout: Layout, machines: tuple[str, ...], devices_per_machine: int) -> tuple[str, ...]:
    return machines[: -(-layout.num_ranks // devices_per_machine)]


if __name__ == "__main__":
    main()
