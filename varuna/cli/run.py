"""The command `varuna run`, also `python -m varuna.run_varuna`: starts a job on a list of machines.

It saves its options, so that `--resume` needs only the folder of the code. With `--no-morphing` on this
machine alone it runs the workers itself; otherwise it starts a manager.
"""

import shlex
import socket
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, get_args

import msgspec
import typer

from varuna.addresses import is_loopback
from varuna.cli.config import CONFIG_FILE, options_of_the_default_file, show_config, use_config
from varuna.cli.launch import ScriptOptions, launch, script_spec
from varuna.cli.ledger import OnDemandPrice, prices_of
from varuna.cli.manage import manage
from varuna.cli.options import add_command, exit_2_on_error, new_app, run_app, say, takes
from varuna.cli.status.viewers import ViewerOptions
from varuna.codec import decode, encode
from varuna.environment import RUN_PREFIX, VarunaEnvironment
from varuna.errors import check_name
from varuna.files import write_atomic
from varuna.morph.interval import SaveRhythm
from varuna.morph.machines import parse_environment, read_machines, require_machines
from varuna.morph.run.job_folder import JobFolder, home_folder, saved_path
from varuna.morph.run.worker_env import forced, ranks_of_machine
from varuna.morph.state import MachinePlan, ManagerSettings
from varuna.page.serve import open_listener, require_aiohttp
from varuna.plan.plan_file import read_plan
from varuna.plan.profile_file import read_profile
from varuna.plan.search.choose import Choice, LayoutRequest, choose
from varuna.simulate.planner import machine_plan
from varuna.types import JobSpec, MachineWorkers, StarterName

DEFAULT_DEVICES = 4
DEFAULT_MACHINE_LIST = "available_machines.out"
DEFAULT_ENV_FILE = "varuna.env"
SHOWN_DEFAULTS: Mapping[str, object] = {
    "machine_list": DEFAULT_MACHINE_LIST,
    "gpus_per_node": DEFAULT_DEVICES,
    "save_every": "auto",
    "hang_seconds": ManagerSettings().hang_seconds,
    "starter": "ssh",
    "ssh": "ssh",
    "python": sys.executable,
    **dict.fromkeys(("no_morphing", "greedy", "exclude_slow", "page"), False),
    "hot": True,
}
"""Values of options that nobody has given, as `--show-config` prints them."""
NOT_SAVED = {
    *("code_dir", "log_dir", "resume_step", "resume", "force", "config", "show_config"),
    *("plain", "no_status"),
}


def read_options(context: typer.Context, path: str | None) -> str | None:
    return use_config(context, path, RunOptions)


class RunOptions(ScriptOptions, frozen=True, kw_only=True):
    """Options of `varuna run`. All but NOT_SAVED are saved for --resume. None: not given."""

    machine_list: Annotated[
        str | None, typer.Option(help=f"File with one address per line. Default: {DEFAULT_MACHINE_LIST}.")
    ] = None
    gpus_per_node: Annotated[
        int | None, typer.Option(help=f"Workers on each machine. Default: {DEFAULT_DEVICES}.")
    ] = None
    profile_folder: Annotated[
        str | None, typer.Option(help="Profile of the model. Choose --nstages and --chunk-size from it.")
    ] = None
    plan: Annotated[str | None, typer.Option(help="Use the plan that `varuna plan --out` wrote.")] = None
    env_file: Annotated[
        str | None,
        typer.Option(help=f"KEY=VALUE lines for workers. Default: {DEFAULT_ENV_FILE}, if present."),
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the last job of --code-dir. New options take precedence.")
    ] = False
    force: Annotated[
        bool,
        typer.Option("--force", help="Take over the store of checkpoints if another job writes there."),
    ] = False
    no_morphing: Annotated[
        bool | None,
        typer.Option("--no-morphing", help="Keep the machines. End with the first failure."),
    ] = None
    hot: Annotated[
        bool | None,
        typer.Option(
            "--hot/--no-hot",
            help="Workers that can, change the layout in place, without a restart. Default: on.",
        ),
    ] = None
    greedy: Annotated[
        bool | None,
        typer.Option(
            "--greedy/--no-greedy",
            help="Change the layout whenever a machine joins or has a notice, worth its pause or not. "
            "Default: off.",
        ),
    ] = None
    save_every: Annotated[
        str | None,
        typer.Option(
            help="Seconds between automatic checkpoints, or off. Default: auto, from the cost of a "
            "checkpoint and the rate of failures."
        ),
    ] = None
    hang_seconds: Annotated[
        float | None,
        typer.Option(
            help="Declare a hang after max(SECONDS, 10 x step time) without progress in a step. Default: 60."
        ),
    ] = None
    exclude_slow: Annotated[
        bool | None,
        typer.Option("--exclude-slow", help="Drop slow machines. slow_machines.out always lists them."),
    ] = None
    manager_ip: Annotated[
        str | None, typer.Option(help="Address of this machine for agents. Default: the one on their route.")
    ] = None
    starter: Annotated[
        str | None, typer.Option(help="Start agents on other machines by ssh, slurm or ray. Default: ssh.")
    ] = None
    starter_options: Annotated[str | None, typer.Option(help="Options of sbatch for --starter slurm.")] = None
    ssh: Annotated[str | None, typer.Option(help="ssh client and its options. Default: ssh.")] = None
    python: Annotated[str | None, typer.Option(help="Python on other machines. Default: as here.")] = None
    cloud: Annotated[
        str | None, typer.Option(help="Watch for preemption notices of this cloud: aws, azure or gcp.")
    ] = None
    cloud_url: Annotated[
        str | None, typer.Option(help="Metadata service of the cloud. Default: the cloud's own address.")
    ] = None
    price: Annotated[
        str | None,
        typer.Option(help="Price of a machine-hour, or a file with lines MACHINE,PRICE, for the ledger."),
    ] = None
    on_demand_price: OnDemandPrice = None
    track: Annotated[
        list[str] | None,
        typer.Option(help="Write the curves to tensorboard, wandb, mlflow or trackio. Can be repeated."),
    ] = None
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Serve metrics for Prometheus on this port of 127.0.0.1. 0: choose a free one."),
    ] = None
    plain: Annotated[
        bool, typer.Option("--plain", help="Show the status as plain lines, also in a terminal.")
    ] = False
    no_status: Annotated[
        bool, typer.Option("--no-status", help="Show events and the output of workers only.")
    ] = False
    page: Annotated[
        bool | None, typer.Option("--page", help="Serve a live page of the job to browsers on this machine.")
    ] = None
    page_port: Annotated[
        int | None,
        typer.Option(help="Serve the page on this port; 0: any free one. Default: 8737, or a free one."),
    ] = None
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            is_eager=True,
            callback=read_options,
            help=f"TOML file whose table `run` has options; flags win. Default: {CONFIG_FILE}, if present.",
        ),
    ] = None
    show_config: Annotated[
        bool,
        typer.Option("--show-config", help="Print all options and where they come from; start nothing."),
    ] = False


class PreparedRun(msgspec.Struct, frozen=True):
    """A job that is ready to start."""

    job: JobSpec
    choice: Choice
    request: LayoutRequest
    machines: tuple[str, ...]
    folder: Path
    planned: Mapping[str, str]  # variables of the workers under the chosen layout
    profile_folder: str | None
    viewers: ViewerOptions
    page: bool = False
    page_port: int | None = None  # None: the default one


@takes(RunOptions)
def run(options: RunOptions) -> None:
    """Start a job on the machines of a list. Adapt it as machines join, leave or fail."""
    if options.resume:
        options = without_options(options, options_of_the_default_file() - NOT_SAVED)
    with exit_2_on_error():
        if options.show_config:
            typer.echo(used_config(options, home=home_folder()))
            raise typer.Exit
        ready = prepare(options, home=home_folder())
        listener = open_page(ready)
    if runs_here(ready):
        raise typer.Exit(run_here(ready))
    code = manage(
        ready.job,
        machines=ready.machines,
        planner=partial(make_plan, ready),
        folder=JobFolder(ready.folder),
        resume=options.resume,
        viewers=msgspec.structs.replace(ready.viewers, page=listener),
    )
    raise typer.Exit(code)


def open_page(ready: PreparedRun) -> socket.socket | None:
    """Return the listener of the page, if it is wanted. Raise ValueError before anything starts."""
    if not ready.page:
        return None
    require_aiohttp()
    if runs_here(ready):
        raise ValueError("--page needs a manager, which --no-morphing on one machine does not start")
    return open_listener(ready.page_port)


def runs_here(ready: PreparedRun) -> bool:
    """Return whether the job needs no manager."""
    is_local = len(ready.machines) == 1 and is_loopback(ready.machines[0])
    return is_local and not ready.job.morphing and not ready.viewers.need_manager


def main() -> None:
    app = new_app()
    add_command(app, run, ends_with_script=True, variables=RUN_PREFIX)
    run_app(app, "python -m varuna.run_varuna")


def prepare(options: RunOptions, *, home: Path) -> PreparedRun:
    """Check all input and save the options. Start nothing."""
    code_dir = Path(options.code_dir).absolute()
    saved = saved_path(home, code_dir)
    if options.resume:
        options = resumed(saved, code_dir, options)
    options = with_absolute_paths(options)
    assert options.machine_list is not None
    data = read_file(options.machine_list, "machine list")
    found = read_machines(data, source=options.machine_list)
    for sentence in found.repeated:
        say(sentence)
    machines = require_machines(found, source=options.machine_list)
    job, viewers = job_spec(options), viewer_options(options)
    request = LayoutRequest(
        batch_size=options.batch_size,
        num_stages=options.nstages,
        microbatch_size=options.chunk_size,
        profile=read_profile(options.profile_folder) if options.profile_folder else None,
        pinned=read_plan(options.plan) if options.plan else None,
    )
    choice = choose(request, num_machines=len(machines), devices_per_machine=job.devices_per_machine)
    fields = msgspec.structs.asdict(options)
    kept = {name: value for name, value in fields.items() if name not in NOT_SAVED}
    write_atomic(saved, encode(kept), private=True)
    return PreparedRun(
        job,
        choice,
        request,
        machines,
        saved.with_suffix(""),
        planned_environment(choice, options.profile_folder),
        options.profile_folder,
        viewers,
        bool(options.page) or options.page_port is not None,
        options.page_port,
    )


def viewer_options(options: RunOptions) -> ViewerOptions:
    """Return the options of those who look at the job. Raise ValueError for what cannot work."""
    viewers = ViewerOptions(
        status="off" if options.no_status else "plain" if options.plain else "live",
        trackers=tuple(dict.fromkeys(options.track or ())),
        metrics_port=options.metrics_port,
    )
    viewers.check()
    return viewers


def without_options(options: RunOptions, names: Iterable[str]) -> RunOptions:
    """Return the options as if these had not been given. `--resume` uses the saved ones in their place."""
    return msgspec.structs.replace(options, **dict.fromkeys(names))


def resumed(path: Path, code_dir: Path, given: RunOptions) -> RunOptions:
    """Return the options that the last job saved, overridden by those that are given now."""
    if not path.is_file():
        raise ValueError(
            f"--resume found no earlier job of {code_dir} (start it once without --resume, "
            "or name its folder with --code-dir)"
        )
    saved = decode(path.read_bytes(), RunOptions, str(path))
    fields = msgspec.structs.asdict(given)
    return msgspec.structs.replace(
        saved, **{name: value for name, value in fields.items() if value not in (None, [])}
    )


def used_config(options: RunOptions, *, home: Path) -> str:
    """Return all options that the job would have, and where they come from."""
    if not options.resume:
        return show_config(options, defaults=SHOWN_DEFAULTS)
    code_dir = Path(options.code_dir).absolute()
    merged = resumed(saved_path(home, code_dir), code_dir, options)
    fields = msgspec.structs.asdict(merged)
    saved = {
        name
        for name, value in fields.items()
        if name not in NOT_SAVED and value not in (None, []) and getattr(options, name) in (None, [])
    }
    return show_config(merged, defaults=SHOWN_DEFAULTS, saved=saved)


def with_absolute_paths(options: RunOptions) -> RunOptions:
    """`--resume` may be typed in another folder."""
    paths = {"machine_list": options.machine_list or DEFAULT_MACHINE_LIST} | {
        name: path
        for name in ("env_file", "profile_folder", "plan", "price")
        if (path := getattr(options, name)) is not None and (name != "price" or Path(path).is_file())
    }
    return msgspec.structs.replace(
        options, **{name: str(Path(path).absolute()) for name, path in paths.items()}
    )


def job_spec(options: RunOptions) -> JobSpec:
    """Return the job with all defaults filled in."""
    if options.starter is not None:
        check_name("--starter", options.starter, get_args(StarterName))
    if options.cloud is not None:
        check_name("--cloud", options.cloud, ("aws", "azure", "gcp"))
    if options.hang_seconds is not None and not 0 < options.hang_seconds < float("inf"):
        raise ValueError(f"--hang-seconds must be a number of seconds above 0, not {options.hang_seconds}")
    devices = DEFAULT_DEVICES if options.gpus_per_node is None else options.gpus_per_node
    path = options.env_file or (DEFAULT_ENV_FILE if Path(DEFAULT_ENV_FILE).is_file() else None)
    variables = parse_environment(read_file(path, "env file"), source=path) if path else {}
    return msgspec.structs.replace(
        script_spec(options, devices_per_machine=devices),
        environment=variables | VarunaEnvironment(manager_ip=options.manager_ip).write(),
        force=options.force,
        machine_list=options.machine_list,
        slow_file=str(Path("slow_machines.out").absolute()),
        exclude_slow=bool(options.exclude_slow),
        morphing=not options.no_morphing,
        hot=options.hot is not False,
        greedy=bool(options.greedy),
        hang_seconds=options.hang_seconds,
        save_every_seconds=parse_save_every(options.save_every),
        manager_ip=options.manager_ip or "",
        starter=options.starter or "ssh",
        starter_options=tuple(shlex.split(options.starter_options or "")),
        ssh=tuple(shlex.split(options.ssh or "ssh")),
        python=options.python or sys.executable,
        cloud=options.cloud or "",
        cloud_url=options.cloud_url or "",
        prices=prices_of(options.price),
        on_demand_price=options.on_demand_price or 0.0,
    )


def read_file(path: str, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the {what} {path!r}: {error.strerror}") from None


def parse_save_every(text: str | None) -> float | None:
    """Return the seconds between automatic checkpoints; 0: never; None: automatic."""
    if text in (None, "auto"):
        return None
    if text == "off":
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"--save-every must be auto, off, or a number of seconds, not {text!r}")
    return seconds


def run_here(ready: PreparedRun) -> int:
    """Run a job on this machine alone, without a manager."""
    job, layout = ready.job, ready.choice.layout
    rhythm = SaveRhythm(every_seconds=job.save_every_seconds)
    saves = VarunaEnvironment(saves=msgspec.json.encode(rhythm).decode())
    group = MachineWorkers(
        job=job,
        layout=layout,
        ranks=ranks_of_machine(layout, 0, devices_per_machine=job.devices_per_machine),
        master_addr="127.0.0.1",
        master_port=0,  # a free one
        resume_step=job.resume_step,
        environment={**ready.planned, **saves.write(), **forced(job.force)},
    )
    for reason in ready.choice.reasons:
        say(reason)
    say(f"one machine, this one: {len(group.ranks)} workers on {job.devices_per_machine} devices")
    return launch(group)


def make_plan(ready: PreparedRun, machines: tuple[str, ...], devices: int = 0) -> MachinePlan:
    """Return the layout for these machines, from the plan, profile or sizes that the user gave.

    `devices` of each machine are used; 0: all.
    """
    devices = devices or ready.job.devices_per_machine
    choice = choose(ready.request, num_machines=len(machines), devices_per_machine=devices)
    return machine_plan(
        choice,
        machines,
        devices_per_machine=devices,
        plan="" if choice.proposal is None else encode(choice.proposal.plan),
        environment=planned_environment(choice, ready.profile_folder),
    )


def planned_environment(choice: Choice, profile_folder: str | None) -> dict[str, str]:
    """Return the variables that carry the plan, and the profile for workers that can read its folder."""
    return VarunaEnvironment(
        plan=None if choice.proposal is None else msgspec.json.encode(choice.proposal).decode(),
        profile=profile_folder,
    ).write()
