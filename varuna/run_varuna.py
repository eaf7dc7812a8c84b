"""Starts a job from its list of machines: `python -m varuna.run_varuna ... script.py ARGS`.

On one machine, this one, it is the launcher with a memory: what a job was started with is kept, so
that `--resume` needs no more than the folder of the code.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from varuna.choosing import Choice, Wanted, choose
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
from varuna.morph.machines import parse_environment, parse_machines, require_this_machine
from varuna.plan_file import read_plan
from varuna.profile_file import read_profile


class LaunchArguments(msgspec.Struct, frozen=True, kw_only=True):
    """What a job was started with, as it is kept for `--resume`; None stands for the default."""

    machine_list: str | None = None
    gpus_per_node: int | None = None
    manager_ip: str | None = None
    no_morphing: bool | None = None
    env_file: str | None = None
    profile_folder: str | None = None
    nstages: int | None = None
    batch_size: int | None = None
    chunk_size: int | None = None
    plan: str | None = None
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
        "--no_morphing", action="store_true", default=None, help="keep to the machines of the start"
    )
    parser.add_argument(
        "--env_file", help="KEY=VALUE lines for the workers (default: varuna.env, if it is there)"
    )
    parser.add_argument(
        "--profile_folder", help="what varuna.Profiler wrote: --nstages and --chunk_size are chosen from it"
    )
    parser.add_argument("--plan", help="what `varuna plan --out` wrote: used as it is")
    parser.add_argument("--resume", action="store_true", help="start the last job of --code_dir again")
    add_common_arguments(parser)
    return parser


def parse(argv: Sequence[str], *, home: Path) -> tuple[Job, Choice]:
    parser = make_parser()
    own, command = split_command(argv, (*SWITCHES, "--no_morphing", "--resume"))
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
        machines = parse_machines(read_file(machine_list, "machine list"))
        require_this_machine(machines)
        environment = user_environment(arguments)
        devices = 4 if arguments.gpus_per_node is None else arguments.gpus_per_node
        choice = choose(read_wanted(arguments), num_machines=len(machines), devices_per_machine=devices)
        job = prepare(
            arguments.command,
            choice.layout,
            devices_per_machine=devices,
            code_dir=str(code_dir),
            log_dir=options.log_dir,
            worker_args=arguments.worker_args,
            resume_step=options.resume_step,
        )
        # Kept whole: `--resume` may be typed in another folder.
        save(memory, absolute(arguments, machine_list))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    job = msgspec.structs.replace(
        job,
        environment=environment,
        planned=tell_workers(choice, arguments.profile_folder),
        master_port=free_port(),
    )
    return job, choice


def read_wanted(arguments: LaunchArguments) -> Wanted:
    """What the user typed, and what is in the files that it names."""
    return Wanted(
        batch_size=arguments.batch_size,
        num_stages=arguments.nstages,
        microbatch_size=arguments.chunk_size,
        profile=read_profile(arguments.profile_folder) if arguments.profile_folder else None,
        pinned=read_plan(arguments.plan) if arguments.plan else None,
    )


def tell_workers(choice: Choice, profile_folder: str | None) -> dict[str, str]:
    """The plan itself, for machines without a common disk; and the profile, for those that can read it."""
    told = {}
    if choice.proposal is not None:
        told["VARUNA_PLAN"] = msgspec.json.encode(choice.proposal).decode()
    if profile_folder is not None:
        told["VARUNA_PROFILE"] = str(Path(profile_folder).absolute())
    return told


def absolute(arguments: LaunchArguments, machine_list: str) -> LaunchArguments:
    paths = {"machine_list": machine_list} | {
        name: path
        for name in ("env_file", "profile_folder", "plan")
        if (path := getattr(arguments, name)) is not None
    }
    return msgspec.structs.replace(
        arguments, **{name: str(Path(path).absolute()) for name, path in paths.items()}
    )


def main() -> None:
    home = Path(os.environ.get("VARUNA_HOME") or Path.home() / ".varuna")
    job, choice = parse(sys.argv[1:], home=home)
    for reason in choice.reasons:
        say(reason)
    say(f"one machine, this one: {len(job.ranks)} workers of {job.devices_per_machine} devices")
    sys.exit(launch(job))


if __name__ == "__main__":
    main()
