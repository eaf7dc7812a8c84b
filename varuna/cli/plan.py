"""The commands `varuna plan`, `explain`, `show` and `simulate`: they choose, show and draw layouts.

They need a profile or a plan file, and no device.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer
from rich.text import Text

from varuna.cli.options import AsJson, takes
from varuna.codec import UNDECODABLE, encode
from varuna.errors import PlanError
from varuna.files import write_atomic
from varuna.observe import to_perfetto, to_svg, to_text
from varuna.observe.ledger import MOST_PRICE
from varuna.plan import tables
from varuna.plan.cluster_file import read_cluster, read_machines, read_network, with_links
from varuna.plan.cost.forecast import forecast_plan
from varuna.plan.cost.simulate import Simulation
from varuna.plan.plan_file import AssumedNetwork, PinnedPlan, read_plan, write_plan
from varuna.plan.profile_file import read_profile
from varuna.plan.search.search import HEADROOM, Ranking, SearchOptions, rank_depths, search
from varuna.types import Cluster, Forecast, Profile, Proposal, Timeline, show_widths
from varuna.units import MEMORY, count, duration, memory, read_numbers, read_quantity

MAX_NOTES = 4
"""Notes that are printed for several clusters together."""

PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="File that `varuna plan --out` wrote.")]


M = "Spot machines"
PROFILE_HELP = "Folder that `varuna profile` wrote, or its file."


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options shared by the commands that plan for a cluster."""

    per_machine: Annotated[int, typer.Option(help="Devices per machine.")] = 8
    cluster: Annotated[
        Path | None, typer.Option(help="File that describes unequal machines. Replaces --devices.")
    ] = None
    memory: Annotated[
        str, typer.Option(help="What if: memory per device, such as 40GiB. Default: as profiled.")
    ] = ""
    network: Annotated[
        str, typer.Option(help="What if: bandwidth between machines, such as 25Gbit. Default: as profiled.")
    ] = ""
    latency: Annotated[str, typer.Option(help="Latency of --network, such as 50us.")] = ""
    svg: Annotated[Path | None, typer.Option(help="Draw the timeline of a step to this file.")] = None
    as_json: AsJson = False


class PlanOptions(ClusterOptions, frozen=True, kw_only=True):
    profile_folder: Annotated[Path, typer.Argument(metavar="PROFILE", help=PROFILE_HELP)]
    batch_size: Annotated[int, typer.Option(help="Samples per step of the whole job.")]
    devices: Annotated[
        str, typer.Option(help="Devices of all machines. Several numbers (8,16,32) are compared.")
    ] = ""
    stages: Annotated[str, typer.Option(help="Consider only these numbers of stages, such as 2,4.")] = ""
    chunk_size: Annotated[str, typer.Option(help="Consider only these micro-batch sizes, in samples.")] = ""
    schedule: Annotated[str, typer.Option(help="Consider only these schedules.")] = ""
    recompute: Annotated[
        bool | None,
        typer.Option(help="Recompute in all stages or in none. Default: as memory requires."),
    ] = None
    shard_optimizer: Annotated[
        bool, typer.Option("--shard-optimizer", help="Divide the optimizer state among the replicas.")
    ] = False
    headroom: Annotated[float, typer.Option(help="Fraction of each device's memory to keep free.")] = HEADROOM
    runners_up: Annotated[int, typer.Option(help="Number of other depths to show.")] = 4
    out: Annotated[Path | None, typer.Option(help="Write the best plan to this file.")] = None


class SimulateOptions(ClusterOptions, frozen=True, kw_only=True):
    """Options of `varuna simulate`: of a step of a plan, or of a trace of machines."""

    profile_folder: Annotated[
        Path | None,
        typer.Argument(metavar="PROFILE", help="Folder that `varuna profile` wrote, or its file."),
    ] = None
    file: Annotated[
        Path | None, typer.Argument(metavar="PLAN", help="File that `varuna plan --out` wrote.")
    ] = None
    devices: Annotated[int, typer.Option(help="What if: devices of all machines. Default: as planned.")] = 0
    seed: Annotated[int, typer.Option(help="Vary times as measured, with this seed. 0: do not vary.")] = 0
    trace: Annotated[Path | None, typer.Option(help="Trace of spot machines to play.", rich_help_panel=M)] = (
        None
    )
    perfetto: Annotated[
        Path | None, typer.Option(help="Write the timeline of the step for ui.perfetto.dev to this file.")
    ] = None
    profile: Annotated[Path | None, typer.Option(help="Trace: profile of the model.", rich_help_panel=M)] = (
        None
    )
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples per step of the whole job.", rich_help_panel=M)
    ] = None
    stages: Annotated[
        int | None, typer.Option(min=1, help="Stages. Default: as planned.", rich_help_panel=M)
    ] = None
    chunk_size: Annotated[
        int | None, typer.Option(min=1, help="Micro-batch size. Default: as planned.", rich_help_panel=M)
    ] = None
    step_seconds: Annotated[
        float | None,
        typer.Option(
            help="Without a profile: step time at the average number of machines.", rich_help_panel=M
        ),
    ] = None
    costs: Annotated[
        Path | None, typer.Option(help="File with the costs of a change of machines.", rich_help_panel=M)
    ] = None
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Measure the costs from the log folder of a job.", rich_help_panel=M),
    ] = None
    out: Annotated[
        Path | None, typer.Option(help="Write the costs of --calibrate to this file.", rich_help_panel=M)
    ] = None
    notice: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds from a notice to the removal.", rich_help_panel=M),
    ] = 0.0
    save_every: Annotated[
        str | None, typer.Option(help="Seconds between automatic checkpoints, or off.", rich_help_panel=M)
    ] = None
    best_interval: Annotated[
        bool | None,
        typer.Option(
            "--best-interval/--no-best-interval",
            help="Search the best fixed save interval. Default: if it takes seconds.",
            rich_help_panel=M,
        ),
    ] = None
    hot: Annotated[
        bool,
        typer.Option(
            "--hot/--no-hot", help="Workers morph in place, as with `varuna run`.", rich_help_panel=M
        ),
    ] = True
    greedy: Annotated[
        bool,
        typer.Option("--greedy", help="Change at every chance, as `varuna run --greedy`.", rich_help_panel=M),
    ] = False
    hours: Annotated[
        float | None, typer.Option(help="Play this many hours of the trace.", rich_help_panel=M)
    ] = None
    policies: Annotated[
        str,
        typer.Option(
            help="Policies to compare: varuna, restart, torchrun, drop-replicas, on-demand, or all.",
            rich_help_panel=M,
        ),
    ] = "all"
    price: Annotated[
        str | None,
        typer.Option(help="Price of a machine-hour, or a file with lines MACHINE,PRICE.", rich_help_panel=M),
    ] = None
    on_demand_price: Annotated[
        float | None,
        typer.Option(min=0.0, max=MOST_PRICE, help="Price of a machine-hour on demand.", rich_help_panel=M),
    ] = None
    html: Annotated[
        Path | None, typer.Option(help="Write a self-contained page to this file.", rich_help_panel=M)
    ] = None


class PlanningTarget(NamedTuple):
    """The profile, with the network to plan for, and the machines."""

    profile: Profile
    cluster: Cluster
    network: AssumedNetwork | None  # None: as measured


class SweepPoint(msgspec.Struct, frozen=True):
    """The best layout for one number of devices."""

    num_devices: int
    num_machines: int
    best: Proposal | None
    samples_per_second: float | None
    efficiency: float | None  # per device, relative to the smallest cluster
    refused: str = ""


@takes(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Choose the fastest layout for a cluster. Say why the others are slower."""
    _check_range("--batch-size", options.batch_size, 1, 1 << 20)
    _check_range("--runners-up", options.runners_up, 0, 100)
    search_options = SearchOptions(
        options.batch_size,
        read_numbers(options.stages, "--stages") or None,
        read_numbers(options.chunk_size, "--chunk-size") or None,
        [name.strip() for name in options.schedule.split(",")] if options.schedule else None,
        options.recompute,
        options.shard_optimizer,
        options.headroom,
    )
    devices = read_numbers(options.devices, "--devices")
    profile = read_profile(options.profile_folder)
    if len(devices) > 1:
        if options.out is not None or options.svg is not None:
            raise ValueError("--out and --svg need one plan (give one number of --devices)")
        targets = [_planning_target(profile, options, number) for number in devices]
        _show_sweep(_sweep(targets, search_options), options.as_json)
        return
    target = _planning_target(profile, options, sum(devices))
    ranking = rank_depths(target.profile, target.cluster, search_options, runners_up=options.runners_up)
    if options.out is not None:
        write_plan(options.out, _pinned_plan(ranking, target, shard_optimizer=options.shard_optimizer))
    if options.svg is not None:
        best = ranking.best
        _, simulation = forecast_plan(
            target.profile,
            target.cluster,
            best.plan,
            idle=_idle(target.cluster, best),
            shard_optimizer=options.shard_optimizer,
        )
        _draw(options.svg, simulation, best)
    if options.as_json:
        typer.echo(encode(ranking))
    else:
        _show_ranking(ranking, target, options.batch_size)


def explain(
    file: Annotated[
        Path, typer.Argument(metavar="PLAN", help="File that `varuna plan --out` wrote, or a profile.")
    ],
    other: Annotated[Path | None, typer.Option("--diff", help="Compare with this plan file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the times and memory of a plan, the differences of two plans, or the contents of a profile."""
    if file.is_dir() or _has_key(file, "kinds"):
        if other is not None:
            raise ValueError(f"--diff compares two plans, but {file} is a profile")
        _show_profile(read_profile(file), as_json)
        return
    if other is None:
        _show_plan(file, as_json)
        return
    found = tables.differences(read_plan(file), read_plan(other))
    if as_json:
        typer.echo(encode([{"what": what, "here": here, "there": there} for what, here, there in found]))
    else:
        lines = [f"{what}: {here} -> {there}" for what, here, there in found]
        typer.echo("\n".join(lines) or "the plans are the same")


def show(
    file: Annotated[
        Path, typer.Argument(metavar="DEPLOYMENT", help="File that RaNNCModule.save_deployment wrote.")
    ],
    as_json: AsJson = False,
) -> None:
    """Show how a deployment divides a model: stages, ranks, times, memory, compared with data parallel."""
    _show_plan(file, as_json)


@takes(SimulateOptions)
def simulate(options: SimulateOptions) -> None:
    """Simulate a step of a plan, or a whole job on spot machines.

    With PROFILE and PLAN, simulate a step, as planned or on another cluster or network. With --trace, play a
    trace of machines that come and go through the decisions of `varuna run`.
    """
    if options.file is None:
        _simulate_market(options)
        return
    if options.trace is not None:
        raise ValueError(
            "--trace FILE plays a trace of machines, without PLAN (to write the timeline of a step for "
            "ui.perfetto.dev, give --perfetto FILE)"
        )
    assert options.profile_folder is not None
    if options.best_interval:
        raise ValueError("--best-interval plays a trace of machines: give --trace FILE without PLAN")
    _check_range("--seed", options.seed, 0, (1 << 31) - 1)
    profile, pinned = read_profile(options.profile_folder), read_plan(options.file)
    if options.devices or options.cluster is not None or pinned.cluster is None:
        target = _planning_target(profile, options, options.devices)
        idle = []
    else:
        network = read_network(options.network, options.latency) or pinned.network
        cluster = _with_memory(pinned.cluster, options.memory)
        target = PlanningTarget(with_links(profile, cluster, network), cluster, network)
        idle = _idle(target.cluster, pinned)
    forecast, simulation = forecast_plan(
        target.profile,
        target.cluster,
        pinned.plan,
        idle=idle,
        seed=options.seed,
        shard_optimizer=pinned.shard_optimizer,
    )
    _check_memory(pinned, forecast, target.cluster, idle)
    if options.svg is not None:
        _draw(options.svg, simulation, pinned)
    if options.perfetto is not None:
        write_atomic(options.perfetto, to_perfetto(_timeline(simulation, pinned)))
    if options.as_json:
        typer.echo(encode(forecast))
        return
    typer.echo(to_text(_timeline(simulation, pinned)), nl=False)
    change = forecast.seconds / pinned.forecast.seconds - 1
    rate = pinned.plan.batch_size / forecast.seconds
    typer.echo(
        f"{duration(forecast.seconds)} a step, {rate:.4g} samples/s"
        + (f"; planned: {duration(pinned.forecast.seconds)} ({change:+.1%})" if abs(change) >= 5e-4 else "")
    )
    for note in forecast.estimates:
        typer.echo(f"note: {note}")


def _simulate_market(options: SimulateOptions) -> None:
    from varuna.cli.market import MarketOptions, play_market
    from varuna.cli.run import parse_save_every

    if options.profile_folder is not None:
        raise ValueError("PLAN is missing (to play a trace of machines, give --profile DIR instead)")
    if options.perfetto is not None:
        raise ValueError("--perfetto draws a step of a plan: give PROFILE and PLAN")
    given = msgspec.structs.asdict(options) | {"save_every": parse_save_every(options.save_every)}
    play_market(MarketOptions(**{name: given[name] for name in MarketOptions.__struct_fields__}))


def _sweep(targets: Sequence[PlanningTarget], options: SearchOptions) -> list[SweepPoint]:
    points: list[SweepPoint] = []
    first: float | None = None  # samples per second and device
    for profile, cluster, _ in targets:
        size = cluster.num_devices, len(cluster.machines)
        try:
            best = search(profile, cluster, **options._asdict()).best
        except PlanError as error:
            points.append(SweepPoint(*size, None, None, None, str(error)))
            continue
        rate = tables.samples_per_second(best)
        first = first or rate / size[0]
        points.append(SweepPoint(*size, best, rate, rate / size[0] / first))
    if first is None:
        raise PlanError(points[-1].refused)
    return points


def _pinned_plan(ranking: Ranking, target: PlanningTarget, *, shard_optimizer: bool) -> PinnedPlan:
    best = ranking.best
    return PinnedPlan(
        best.plan,
        best.forecast,
        best.idle,
        best.reason,
        runners_up=ranking.proposals[1:],
        refused=ranking.refused,
        cluster=target.cluster,
        network=target.network,
        shard_optimizer=shard_optimizer,
    )


def _check_range(key: str, number: int, least: int, most: int) -> None:
    if not least <= number <= most:
        raise ValueError(f"{key} must be {least} to {most}, not {number}")


def _planning_target(profile: Profile, options: ClusterOptions, devices: int) -> PlanningTarget:
    network = read_network(options.network, options.latency)
    if options.cluster is None:
        if not devices:
            raise ValueError("give --devices (such as --devices 16 --per-machine 8) or --cluster FILE")
        cluster = read_machines(devices, options.per_machine, memory_bytes=profile.device_memory_bytes)
    elif devices:
        raise ValueError("--devices and --cluster exclude each other (the file gives the number of devices)")
    else:
        cluster, described = read_cluster(options.cluster, memory_bytes=profile.device_memory_bytes)
        network = network or described
    cluster = _with_memory(cluster, options.memory)
    return PlanningTarget(with_links(profile, cluster, network), cluster, network)


def _with_memory(cluster: Cluster, text: str) -> Cluster:
    if not text:
        return cluster
    memory_bytes = int(read_quantity(text, MEMORY, "--memory"))
    return Cluster(
        tuple(msgspec.structs.replace(machine, memory_bytes=memory_bytes) for machine in cluster.machines)
    )


def _has_key(file: Path, key: str) -> bool:
    """Return True if the file is a JSON object with this key. A profile has `kinds`, a plan does not."""
    try:
        return key in msgspec.json.decode(file.read_bytes(), type=dict[str, msgspec.Raw])
    except (OSError, *UNDECODABLE):
        return False  # reading it as a plan raises the error


def _idle(cluster: Cluster, proposal: Proposal) -> list[int]:
    names = [f"{m.name}:{index}" for m in cluster.machines for index in range(m.devices)]
    idle = set(proposal.idle)
    return [device for device, name in enumerate(names) if name in idle]


def _check_memory(pinned: PinnedPlan, forecast: Forecast, cluster: Cluster, idle: Sequence[int]) -> None:
    every = [machine.memory_bytes for machine in cluster.machines for _ in range(machine.devices)]
    left_out = set(idle)
    used = [number for device, number in enumerate(every) if device not in left_out]
    for index, (stage, predicted) in enumerate(zip(pinned.plan.stages, forecast.stages, strict=True)):
        smallest = min(used[rank] for rank in stage.ranks)
        needed = predicted.memory.total
        if needed > smallest:
            raise PlanError(
                f"the plan does not fit: stage {index} needs {memory(needed)}, its device has "
                f"{memory(smallest)}, {memory(needed - smallest)} too little (make a plan for these devices)"
            )


def _timeline(simulation: Simulation, proposal: Proposal) -> Timeline:
    return simulation.timeline([stage.ranks for stage in proposal.plan.stages])


def _draw(file: Path, simulation: Simulation, proposal: Proposal) -> None:
    title = f"{tables.headline(proposal.plan)}: {duration(simulation.seconds)} a step"
    write_atomic(file, to_svg(_timeline(simulation, proposal), title))


def _show_ranking(ranking: Ranking, target: PlanningTarget, batch_size: int) -> None:
    profile, best = target.profile, ranking.best
    console = tables.console()
    console.print(
        Text(f"{target.cluster}, batches of {batch_size}, {profile.precision} on {profile.device}\n")
    )
    console.print(tables.layouts(ranking.proposals))
    console.print(Text(f"\n{tables.headline(best.plan)}:"))
    console.print(tables.stages(best))
    console.print()
    tables.show_rest(console, best, ranking.refused)


def _show_plan(file: Path, as_json: bool) -> None:
    pinned = read_plan(file)
    if as_json:
        typer.echo(encode(pinned))
    else:
        tables.show_plan(tables.console(), pinned)


def _show_profile(profile: Profile, as_json: bool) -> None:
    if as_json:
        typer.echo(encode(profile))
        return
    console = tables.console()
    first, *rest = tables.facts(profile)
    console.print(Text(f"{first}\n"))
    console.print(tables.kinds(profile))
    console.print()
    for line in rest:
        console.print(Text(line))


def _show_sweep(points: Sequence[SweepPoint], as_json: bool) -> None:
    if as_json:
        typer.echo(encode(points))
        return
    table = tables.table(
        *("devices>", "machines>", "stages>", "replicas>", "micro-batch>", "schedule", "a step>"),
        *("samples/s>", "gain>", "efficiency>", "idle>"),
    )
    gains = tables.gains([point.samples_per_second for point in points])
    for point, gain in zip(points, gains, strict=True):
        size = (str(point.num_devices), str(point.num_machines))
        if point.best is None:
            table.add_row(*size, *("-" * 9))
            continue
        layout = point.best.plan
        table.add_row(
            *size,
            *(str(layout.depth), show_widths(layout.widths), str(layout.microbatch_size), layout.schedule),
            duration(point.best.forecast.seconds),
            f"{point.samples_per_second:.4g}",
            gain,
            f"{point.efficiency:.0%}",
            str(len(point.best.idle)),
        )
    console = tables.console()
    console.print(table)
    for point in points:
        if point.best is None:
            console.print(Text(f"{count(point.num_devices, 'device')}: {point.refused}"))
    found = [point.best.forecast for point in points if point.best is not None]
    notes = list(dict.fromkeys(note for forecast in found for note in forecast.estimates))
    for note in notes[:MAX_NOTES]:
        console.print(Text(f"note: {note}"))
    if len(notes) > MAX_NOTES:
        console.print(Text(f"note: {len(notes) - MAX_NOTES} more (plan for one cluster to see them)"))
