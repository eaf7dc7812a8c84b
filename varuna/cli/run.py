"""Starts a job from its list of machines: `python -m varuna.run_varuna ... script.py ARGS`.

What a job was started with is kept, so that `--resume` needs no more than the folder of the code. With
`--no_morphing` on one machine, this one, it is the launcher with that memory.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import msgspec

from varuna.cli.launch import (
    SWITCHES,
    Job,
    add_common_arguments,
    free_port,
    launch,
    prepare,
    say,
    split_command,
)
from varuna.cli.manage import StarterName, lead
from varuna.codec import decode, encode
from varuna.environment import VarunaEnvironment
from varuna.files import write_atomic
from varuna.morph.interval import SaveRhythm
from varuna.morph.machines import is_loopback, parse_environment, read_machines, require_machines
from varuna.morph.run.job_folder import JobFolder, home_folder, saved_path
from varuna.morph.run.worker_env import ranks_of_machine
from varuna.morph.state import Proposal, Settings
from varuna.plan.plan_file import read_plan
from varuna.plan.profile_file import read_profile
from varuna.plan.search.choose import Choice, Wanted, choose


class LaunchArguments(msgspec.Struct, frozen=True, kw_only=True):
    """What a job was started with, as it is kept for `--resume`; None stands for the default."""

    machine_list: str | None = None
    gpus_per_node: int | None = None
    manager_ip: str | None = None
    no_morphing: bool | None = None
    exclude_slow: bool | None = None
    save_every: str | None = None
    hang_seconds: float | None = None
    starter: StarterName | None = None
    starter_options: str | None = None
    ssh: str | None = None
    python: str | None = None
    cloud: str | None = None
    cloud_url: str | None = None
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


def read_saved(path: Path, code_dir: Path) -> LaunchArguments:
    if not path.is_file():
        raise ValueError(
            f"--resume finds no earlier job of {code_dir} (start it once without --resume, "
            "or name its folder with --code_dir)"
        )
    return decode(path.read_bytes(), LaunchArguments, str(path))


def save(path: Path, arguments: LaunchArguments) -> None:
    write_atomic(path, encode(arguments))


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
    return found | VarunaEnvironment(manager_ip=arguments.manager_ip).write()


def make_parser() -> argparse.ArgumentParser:
    by_name = sys.argv[0] == "varuna run"
    prog = sys.argv[0] if by_name else "python -m varuna.run_varuna"
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [options] script.py [its arguments]",
        description="Starts a job on the machines of a list, and leads it while they come and go.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--machine_list", help="file with an address a line (default: available_machines.out)"
    )
    parser.add_argument("--gpus_per_node", type=int, help="workers on each machine (default: 4)")
    parser.add_argument(
        "--manager_ip", help="where agents find this machine (default: the address that faces them)"
    )
    parser.add_argument(
        "--no_morphing",
        action="store_true",
        default=None,
        help="keep to the machines of the start, and end with the first failure",
    )
    parser.add_argument(
        "--starter", choices=get_args(StarterName), help="who starts other machines' agents (default: ssh)"
    )
    parser.add_argument("--starter_options", help="sbatch's options with --starter slurm, in one word")
    parser.add_argument("--ssh", help="the ssh client and its options, such as 'ssh -F FILE' (default: ssh)")
    parser.add_argument("--python", help="the interpreter of other machines (default: as here)")
    parser.add_argument(
        "--cloud", choices=["aws", "azure", "gcp"], help="listen for its notices on every machine"
    )
    parser.add_argument("--cloud_url", help="where its metadata service is, if not where it always is")
    parser.add_argument(
        "--exclude_slow",
        action="store_true",
        default=None,
        help="go on without machines that compute more slowly than others; all are in slow_machines.out",
    )
    parser.add_argument(
        "--save_every",
        help="seconds from one save to the next that the job makes by itself, or off (default: auto, from "
        "what a save costs and how often something fails)",
    )
    parser.add_argument(
        "--hang_seconds",
        type=float,
        help="so long without progress in a step, and ten step times, is a hang (default: 60)",
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


class Typed(msgspec.Struct, frozen=True):
    """What was typed, made sense of."""

    job: Job
    choice: Choice
    wanted: Wanted
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
        every = read_every(arguments.save_every)
        environment = user_environment(arguments)
        devices = 4 if arguments.gpus_per_node is None else arguments.gpus_per_node
        wanted = read_wanted(arguments)
        choice = choose(wanted, num_machines=len(machines), devices_per_machine=devices)
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
        arguments = absolute(arguments, machine_list)
        save(memory, arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    job = msgspec.structs.replace(
        job,
        environment=environment
        | VarunaEnvironment(saves=msgspec.json.encode(SaveRhythm(every_seconds=every)).decode()).write(),
        planned=tell_workers(choice, arguments.profile_folder),
        master_port=free_port(),
    )
    return Typed(job, choice, wanted, arguments, machines, options.resume, memory.with_suffix(""))


def read_wanted(arguments: LaunchArguments) -> Wanted:
    """What the user typed, and what is in the files that it names."""
    return Wanted(
        batch_size=arguments.batch_size,
        num_stages=arguments.nstages,
        microbatch_size=arguments.chunk_size,
        profile=read_profile(arguments.profile_folder) if arguments.profile_folder else None,
        pinned=read_plan(arguments.plan) if arguments.plan else None,
    )


def read_every(text: str | None) -> float | None:
    """Seconds from one save to the next; 0: never; None: as it loses the least."""
    if text in (None, "auto"):
        return None
    if text == "off":
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"--save_every takes auto, off, or seconds, not {text!r}")
    return seconds


def tell_workers(choice: Choice, profile_folder: str | None) -> dict[str, str]:
    """The plan itself, for machines without a common disk; and the profile, for those that can read it."""
    return VarunaEnvironment(
        plan=None if choice.proposal is None else msgspec.json.encode(choice.proposal).decode(),
        profile=None if profile_folder is None else str(Path(profile_folder).absolute()),
    ).write()


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
    typed = parse(sys.argv[1:], home=home_folder())
    job = typed.job
    if typed.arguments.no_morphing and len(typed.machines) == 1 and is_loopback(typed.machines[0]):
        for reason in typed.choice.reasons:
            say(reason)
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
        planner=partial(make_plan, typed),
        folder=JobFolder(typed.folder),
        resume=typed.resume,
        manager_ip=arguments.manager_ip,
        leaves_slow=bool(arguments.exclude_slow),
        save_every_seconds=read_every(arguments.save_every),
        starter=arguments.starter or "ssh",
        starter_options=shlex.split(arguments.starter_options or ""),
        ssh=shlex.split(arguments.ssh or "ssh"),
        python=arguments.python or sys.executable,
        cloud=arguments.cloud or "",
        cloud_url=arguments.cloud_url or "",
        settings=read_settings(arguments),
    )


def read_settings(arguments: LaunchArguments) -> Settings:
    settings = Settings(morphs=not arguments.no_morphing)
    if arguments.hang_seconds is None:
        return settings
    return msgspec.structs.replace(settings, hang_seconds=arguments.hang_seconds)


def make_plan(typed: Typed, machines: tuple[str, ...]) -> Proposal:
    """What to run on these machines, by the plan, profile or sizes that were typed."""
    devices = typed.job.devices_per_machine
    choice = choose(typed.wanted, num_machines=len(machines), devices_per_machine=devices)
    ranks = {
        machine: ranks_of_machine(choice.layout, index, devices_per_machine=devices)
        for index, machine in enumerate(machines)
    }
    used = tuple(machine for machine in machines if ranks[machine])
    return Proposal(
        machines,
        used,
        tuple(ranks[machine] for machine in used),
        choice.layout,
        plan="" if choice.proposal is None else encode(choice.proposal.plan),
        environment=tell_workers(choice, typed.arguments.profile_folder),
        reasons=choice.reasons,
    )


if __name__ == "__main__":
    main()
