"""Starts a job from its list of machines: `python -m varuna.run_varuna ... script.py ARGS`.

What a job was started with is kept, so that `--resume` needs no more than the folder of the code. With
`--no_morphing` on one machine, this one, it is the launcher with that memory.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import msgspec

from varuna.cli.launch import (
    SWITCHES,
    add_common_arguments,
    free_port,
    launch,
    prepare,
    say,
    split_command,
)
from varuna.cli.manage import manage
from varuna.codec import decode, encode
from varuna.environment import VarunaEnvironment
from varuna.files import write_atomic
from varuna.morph.interval import SaveRhythm
from varuna.morph.machines import is_loopback, parse_environment, read_machines, require_machines
from varuna.morph.run.job_folder import JobFolder, home_folder, saved_path
from varuna.morph.run.worker_env import ranks_of_machine
from varuna.morph.state import MachinePlan
from varuna.plan.plan_file import read_plan
from varuna.plan.profile_file import read_profile
from varuna.plan.search.choose import Choice, LayoutRequest, choose
from varuna.types import JobSpec, MachineWorkers, StarterName


class JobOptions(msgspec.Struct, frozen=True, kw_only=True):
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


def update(saved: JobOptions, given: JobOptions) -> JobOptions:
    """What is given now wins over what was given then."""
    fields = msgspec.structs.asdict(given)
    return msgspec.structs.replace(
        saved, **{name: value for name, value in fields.items() if value not in (None, ())}
    )


def read_saved(path: Path, code_dir: Path) -> JobOptions:
    if not path.is_file():
        raise ValueError(
            f"--resume finds no earlier job of {code_dir} (start it once without --resume, "
            "or name its folder with --code_dir)"
        )
    return decode(path.read_bytes(), JobOptions, str(path))


def save(path: Path, arguments: JobOptions) -> None:
    write_atomic(path, encode(arguments))


def read_file(path: str, what: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ValueError(f"the {what} {path!r} cannot be read: {error.strerror}") from None


def user_environment(arguments: JobOptions) -> dict[str, str]:
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


class PreparedRun(msgspec.Struct, frozen=True):
    """A job that is ready to start."""

    job: JobSpec
    choice: Choice
    wanted: LayoutRequest
    machines: tuple[str, ...]
    resume: bool
    folder: Path
    planned: Mapping[str, str]  # variables of the workers under the layout chosen
    profile_folder: str | None


def parse(argv: Sequence[str], *, home: Path) -> PreparedRun:
    parser = make_parser()
    own, command = split_command(argv, (*SWITCHES, "--no_morphing", "--exclude_slow", "--resume"))
    options = parser.parse_args(own)
    try:
        code_dir = Path(options.code_dir or ".").absolute()
        memory = saved_path(home, code_dir)
        arguments = JobOptions(
            **{name: getattr(options, name) for name in JobOptions.__struct_fields__ if name != "command"},
            command=tuple(command),
        )
        if options.resume:
            arguments = update(read_saved(memory, code_dir), arguments)
        arguments = absolute(arguments)
        assert arguments.machine_list is not None
        machines, problems = read_machines(read_file(arguments.machine_list, "machine list"))
        for problem in problems:
            say(problem)
        require_machines(machines)
        job = job_spec(
            arguments, code_dir=str(code_dir), log_dir=options.log_dir, resume_step=options.resume_step
        )
        wanted = read_wanted(arguments)
        choice = choose(wanted, num_machines=len(machines), devices_per_machine=job.devices_per_machine)
        save(memory, arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    planned = planned_environment(choice, arguments.profile_folder)
    return PreparedRun(
        job,
        choice,
        wanted,
        machines,
        options.resume,
        memory.with_suffix(""),
        planned,
        arguments.profile_folder,
    )


def job_spec(arguments: JobOptions, *, code_dir: str, log_dir: str, resume_step: int | None) -> JobSpec:
    """Return the job with all defaults filled in."""
    job = prepare(
        arguments.command,
        devices_per_machine=4 if arguments.gpus_per_node is None else arguments.gpus_per_node,
        code_dir=code_dir,
        log_dir=log_dir,
        worker_args=arguments.worker_args,
        resume_step=resume_step,
    )
    return msgspec.structs.replace(
        job,
        environment=user_environment(arguments),
        machine_list=arguments.machine_list,
        slow_file=str(Path("slow_machines.out").absolute()),
        exclude_slow=bool(arguments.exclude_slow),
        morphing=not arguments.no_morphing,
        hang_seconds=arguments.hang_seconds,
        save_every_seconds=read_every(arguments.save_every),
        manager_ip=arguments.manager_ip or "",
        starter=arguments.starter or "ssh",
        starter_options=tuple(shlex.split(arguments.starter_options or "")),
        ssh=tuple(shlex.split(arguments.ssh or "ssh")),
        python=arguments.python or sys.executable,
        cloud=arguments.cloud or "",
        cloud_url=arguments.cloud_url or "",
    )


def read_wanted(arguments: JobOptions) -> LayoutRequest:
    """What the user typed, and what is in the files that it names."""
    return LayoutRequest(
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


def planned_environment(choice: Choice, profile_folder: str | None) -> dict[str, str]:
    """The plan itself, for machines without a common disk; and the profile, for those that can read it."""
    return VarunaEnvironment(
        plan=None if choice.proposal is None else msgspec.json.encode(choice.proposal).decode(),
        profile=None if profile_folder is None else str(Path(profile_folder).absolute()),
    ).write()


def absolute(arguments: JobOptions) -> JobOptions:
    """Make paths absolute: `--resume` may be typed in another folder."""
    paths = {"machine_list": arguments.machine_list or "available_machines.out"} | {
        name: path
        for name in ("env_file", "profile_folder", "plan")
        if (path := getattr(arguments, name)) is not None
    }
    return msgspec.structs.replace(
        arguments, **{name: str(Path(path).absolute()) for name, path in paths.items()}
    )


def main() -> None:
    run = parse(sys.argv[1:], home=home_folder())
    if not run.job.morphing and len(run.machines) == 1 and is_loopback(run.machines[0]):
        sys.exit(run_here(run))
    try:
        code = manage(
            run.job,
            machines=run.machines,
            planner=partial(make_plan, run),
            folder=JobFolder(run.folder),
            resume=run.resume,
        )
    except (ValueError, OSError) as error:
        sys.exit(f"varuna: {error}")
    sys.exit(code)


def run_here(run: PreparedRun) -> int:
    """Run a job on this machine alone, without a manager."""
    job, layout = run.job, run.choice.layout
    rhythm = SaveRhythm(every_seconds=job.save_every_seconds)
    saves = VarunaEnvironment(saves=msgspec.json.encode(rhythm).decode())
    group = MachineWorkers(
        job=job,
        layout=layout,
        ranks=ranks_of_machine(layout, 0, devices_per_machine=job.devices_per_machine),
        master_addr="127.0.0.1",
        master_port=free_port(),
        resume_step=job.resume_step,
        environment={**run.planned, **saves.write()},
    )
    for reason in run.choice.reasons:
        say(reason)
    say(f"one machine, this one: {len(group.ranks)} workers of {job.devices_per_machine} devices")
    return launch(group)


def make_plan(run: PreparedRun, machines: tuple[str, ...]) -> MachinePlan:
    """Return the layout for these machines, by the plan, profile or sizes that the user gave."""
    devices = run.job.devices_per_machine
    choice = choose(run.wanted, num_machines=len(machines), devices_per_machine=devices)
    ranks = {
        machine: ranks_of_machine(choice.layout, index, devices_per_machine=devices)
        for index, machine in enumerate(machines)
    }
    used = tuple(machine for machine in machines if ranks[machine])
    return MachinePlan(
        machines,
        used,
        tuple(ranks[machine] for machine in used),
        choice.layout,
        plan="" if choice.proposal is None else encode(choice.proposal.plan),
        environment=planned_environment(choice, run.profile_folder),
        reasons=choice.reasons,
    )


if __name__ == "__main__":
    main()
