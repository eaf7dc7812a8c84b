"""The commands `varuna plan`, `explain` and `simulate`: layouts chosen, told and drawn without any device."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from rich.text import Text

from varuna.codec import encode
from varuna.errors import PlanError
from varuna.files import write_atomic
from varuna.observe import to_perfetto, to_svg, to_text
from varuna.plan import tables
from varuna.plan.cluster_file import read_cluster, read_machines, read_network, with_links
from varuna.plan.cost.forecast import forecast_plan
from varuna.plan.cost.simulate import Simulation
from varuna.plan.plan_file import AssumedNetwork, PinnedPlan, read_plan, write_plan
from varuna.plan.profile_file import read_profile
from varuna.plan.search.messages import why_slower
from varuna.plan.search.search import HEADROOM, Ranking, search
from varuna.types import Cluster, Forecast, Profile, Proposal, Timeline, in_few
from varuna.units import MEMORY, count, duration, memory, read_numbers, read_quantity

MOST_BATCH = 1 << 20
MOST_RUNNERS_UP = 100
MOST_SEED = (1 << 31) - 1
MOST_NOTES = 4
"""Of several clusters together."""

ProfileArgument = Annotated[
    Path, typer.Argument(metavar="PROFILE", help="The folder that `varuna profile` wrote, or its file.")
]
PerMachine = Annotated[int, typer.Option("--per-machine", help="Devices of one machine.")]
ClusterOption = Annotated[
    Path | None, typer.Option("--cluster", help="A file of machines that differ, in place of --devices.")
]
Memory = Annotated[
    str, typer.Option(help="What if: of each device, such as 40GiB. That of the profiled one if not given.")
]
NetworkOption = Annotated[str, typer.Option("--network", help="What if: between machines, such as 25Gbit.")]
Latency = Annotated[str, typer.Option(help="Of that network, such as 50us.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
Picture = Annotated[Path | None, typer.Option("--svg", help="Draw the step's timeline into this file.")]


class Asked(NamedTuple):
    """What to plan for, as it was typed."""

    devices: int
    per_machine: int
    cluster: Path | None
    memory: str
    network: str
    latency: str


class Wishes(NamedTuple):
    """What is asked of a layout, as `search` takes it."""

    batch_size: int
    depths: Sequence[int] | None
    microbatch_sizes: Sequence[int] | None
    schedules: Sequence[str] | None
    recompute: bool | None
    shard_optimizer: bool
    headroom: float


class Ground(NamedTuple):
    """What to plan for: the profile with the network that is asked about, and the machines."""

    profile: Profile
    cluster: Cluster
    network: AssumedNetwork | None  # None: as it was measured


class Point(msgspec.Struct, frozen=True):
    """What some number of devices would give."""

    num_devices: int
    num_machines: int
    best: Proposal | None
    samples_per_second: float | None
    efficiency: float | None  # of a device, against those of the fewest
    refused: str = ""


def plan(
    profile_folder: ProfileArgument,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Of the whole job, each step.")],
    devices: Annotated[
        str, typer.Option(help="Of all machines; several numbers (8,16,32) are set side by side.")
    ] = "",
    per_machine: PerMachine = 8,
    cluster: ClusterOption = None,
    memory: Memory = "",
    network: NetworkOption = "",
    latency: Latency = "",
    stages: Annotated[str, typer.Option(help="Only these depths, such as 2,4.")] = "",
    chunk_size: Annotated[str, typer.Option(help="Only these micro-batch sizes.")] = "",
    schedule: Annotated[str, typer.Option(help="Only these schedules.")] = "",
    recompute: Annotated[bool | None, typer.Option(help="Everywhere or nowhere, not by need.")] = None,
    shard_optimizer: Annotated[
        bool, typer.Option("--shard-optimizer", help="Its state spread over the replicas.")
    ] = False,
    headroom: Annotated[float, typer.Option(help="Share of each device's memory to leave free.")] = HEADROOM,
    runners_up: Annotated[int, typer.Option(help="How many other depths to tell of.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Pin the best plan to this file.")] = None,
    svg: Picture = None,
    as_json: AsJson = False,
) -> None:
    """Choose the fastest layout for a cluster, and say why the others lost."""
    _refuse_beyond("--batch-size", batch_size, 1, MOST_BATCH)
    _refuse_beyond("--runners-up", runners_up, 0, MOST_RUNNERS_UP)
    wishes = Wishes(
        batch_size,
        read_numbers(stages, "--stages") or None,
        read_numbers(chunk_size, "--chunk-size") or None,
        [name.strip() for name in schedule.split(",")] if schedule else None,
        recompute,
        shard_optimizer,
        headroom,
    )
    numbers = read_numbers(devices, "--devices")
    asked = Asked(0, per_machine, cluster, memory, network, latency)
    profile = read_profile(profile_folder)
    if len(numbers) > 1:
        if out is not None or svg is not None:
            raise ValueError("--out and --svg are for one plan (give one number of --devices)")
        _tell_gains(_sweep([_look(profile, asked._replace(devices=n)) for n in numbers], wishes), as_json)
        return
    ground = _look(profile, asked._replace(devices=sum(numbers)))
    ranking = rank(ground.profile, ground.cluster, wishes, runners_up=runners_up)
    best = ranking.best
    if out is not None:
        write_plan(out, _pinned(ranking, ground, shard_optimizer=shard_optimizer))
    if svg is not None:
        idle = _idle(ground.cluster, best)
        _, simulation = forecast_plan(
            ground.profile, ground.cluster, best.plan, idle=idle, shard_optimizer=shard_optimizer
        )
        _draw(svg, simulation, best)
    if as_json:
        typer.echo(encode(ranking))
        return
    console = tables.console()
    console.print(
        Text(f"{ground.cluster}, batches of {batch_size}, {profile.precision} on {profile.device}\n")
    )
    console.print(tables.layouts(ranking.proposals))
    console.print(Text(f"\n{tables.headline(best.plan)}:"))
    console.print(tables.stages(best))
    console.print()
    tables.show_rest(console, best, ranking.refused)


def explain(
    file: Annotated[
        Path, typer.Argument(metavar="PLAN", help="What `varuna plan --out` wrote; or a profile.")
    ],
    against: Annotated[Path | None, typer.Option("--diff", help="Another pinned plan.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show where the time and memory of a pinned plan go, what sets two apart, or what a profile holds."""
    if file.is_dir() or _has(file, "kinds"):
        if against is not None:
            raise ValueError(f"--diff sets two plans side by side, but {file} is a profile")
        _explain_profile(read_profile(file), as_json)
        return
    pinned = read_plan(file)
    if against is not None:
        found = tables.differences(pinned, read_plan(against))
        if as_json:
            typer.echo(encode([{"what": what, "here": here, "there": there} for what, here, there in found]))
        else:
            told = "\n".join(f"{what}: {here} -> {there}" for what, here, there in found)
            typer.echo(told or "the plans are the same")
    elif as_json:
        typer.echo(encode(pinned))
    else:
        tables.show_plan(tables.console(), pinned)


def show(
    file: Annotated[
        Path, typer.Argument(metavar="DEPLOYMENT", help="What RaNNCModule.save_deployment wrote.")
    ],
    as_json: AsJson = False,
) -> None:
    """Show how a model is spread: stages, ranks, times, memory, and plain data parallel beside it."""
    pinned = read_plan(file)
    if as_json:
        typer.echo(encode(pinned))
    else:
        tables.show_plan(tables.console(), pinned)


def simulate(
    profile_folder: ProfileArgument,
    file: Annotated[Path, typer.Argument(metavar="PLAN", help="What `varuna plan --out` wrote.")],
    devices: Annotated[int, typer.Option(help="What if: of all machines. As planned if not given.")] = 0,
    per_machine: PerMachine = 8,
    cluster: ClusterOption = None,
    memory: Memory = "",
    network: NetworkOption = "",
    latency: Latency = "",
    seed: Annotated[int, typer.Option(help="Let times vary as they were seen to; 0: not at all.")] = 0,
    svg: Picture = None,
    trace: Annotated[Path | None, typer.Option(help="The same for ui.perfetto.dev.")] = None,
    as_json: AsJson = False,
) -> None:
    """Play a step of a pinned plan: as planned, or on another cluster or network."""
    _refuse_beyond("--seed", seed, 0, MOST_SEED)
    profile, pinned = read_profile(profile_folder), read_plan(file)
    asked = Asked(devices, per_machine, cluster, memory, network, latency)
    elsewhere = devices or cluster is not None or pinned.cluster is None
    ground = _look(profile, asked) if elsewhere else _look_again(profile, pinned, asked)
    idle = [] if elsewhere else _idle(ground.cluster, pinned)
    forecast, simulation = forecast_plan(
        ground.profile,
        ground.cluster,
        pinned.plan,
        idle=idle,
        seed=seed,
        shard_optimizer=pinned.shard_optimizer,
    )
    _refuse_too_little_memory(pinned, forecast, ground.cluster, idle)
    if svg is not None:
        _draw(svg, simulation, pinned)
    if trace is not None:
        write_atomic(trace, to_perfetto(_timeline(simulation, pinned)))
    if as_json:
        typer.echo(encode(forecast))
        return
    typer.echo(to_text(_timeline(simulation, pinned)), nl=False)
    change = forecast.seconds / pinned.forecast.seconds - 1
    rate = pinned.plan.batch_size / forecast.seconds
    typer.echo(
        f"{duration(forecast.seconds)} a step, {rate:.4g} samples/s"
        + (f"; planned: {duration(pinned.forecast.seconds)} ({change:+.1%})" if abs(change) >= 5e-4 else "")
    )
    for what in forecast.estimates:
        typer.echo(f"note: {what}")


# ---------------------------------------------------------------- choosing


def rank(profile: Profile, cluster: Cluster, wishes: Wishes, *, runners_up: int) -> Ranking:
    """The best layout of all, and beside it the best of some other depths.

    A search looks no closer at a depth than it must to know that it cannot win. So that what is told of a
    runner-up is the best that it can do, each is searched for by itself.
    """
    found = _search(profile, cluster, wishes)
    best = found.best
    seen = [proposal.plan.depth for proposal in found.proposals[1:]]
    possible = wishes.depths or range(1, min(len(profile.segments), cluster.num_devices) + 1)
    ranked = [best]
    for depth in other_depths(best.plan.depth, seen, possible)[:runners_up]:
        try:
            ways = _search(profile, cluster, wishes._replace(depths=[depth])).proposals
        except PlanError:  # it does not fit, as `refused` tells
            continue
        # Unequal replicas that are hardly faster than the best do not win, and so are not told of.
        ranked.append(next((way for way in ways if way.forecast.seconds >= best.forecast.seconds), ways[-1]))
    ranked.sort(key=lambda proposal: proposal.forecast.seconds)
    told = [
        msgspec.structs.replace(other, reason=why_slower(other.forecast, ranked[0].forecast))
        for other in ranked[1:]
    ]
    first = msgspec.structs.replace(ranked[0], reason=best.reason)
    return msgspec.structs.replace(found, proposals=(first, *told))


def _search(profile: Profile, cluster: Cluster, wishes: Wishes) -> Ranking:
    asked: dict[str, Any] = wishes._asdict()
    return search(profile, cluster, **asked)


def other_depths(best: int, seen: Sequence[int], possible: Sequence[int]) -> list[int]:
    """Those that somebody would ask about: what came near, twice and half of it, one more and one fewer."""
    wanted = [*seen[:1], best * 2, best // 2, best + 1, best - 1, *seen[1:], best * 4, best + 2]
    return [depth for depth in dict.fromkeys(wanted) if depth in possible and depth != best]


def _sweep(grounds: Sequence[Ground], wishes: Wishes) -> list[Point]:
    points: list[Point] = []
    first: float | None = None  # samples a second and device
    for profile, cluster, _ in grounds:
        size = cluster.num_devices, len(cluster.machines)
        try:
            best = _search(profile, cluster, wishes).best
        except PlanError as error:
            points.append(Point(*size, None, None, None, str(error)))
            continue
        rate = tables.samples_per_second(best)
        first = first or rate / size[0]
        points.append(Point(*size, best, rate, rate / size[0] / first))
    if first is None:
        raise PlanError(points[-1].refused)
    return points


def _pinned(ranking: Ranking, ground: Ground, *, shard_optimizer: bool) -> PinnedPlan:
    best, *others = ranking.proposals
    return PinnedPlan(
        best.plan,
        best.forecast,
        best.idle,
        best.reason,
        runners_up=tuple(others),
        refused=ranking.refused,
        cluster=ground.cluster,
        network=ground.network,
        shard_optimizer=shard_optimizer,
    )


def _tell_gains(points: Sequence[Point], as_json: bool) -> None:
    if as_json:
        typer.echo(encode(points))
        return
    made = tables.table(
        *("devices>", "machines>", "stages>", "replicas>", "micro-batch>", "schedule", "a step>"),
        *("samples/s>", "gain>", "efficiency>", "idle>"),
    )
    gains = tables.gains([point.samples_per_second for point in points])
    for point, gain in zip(points, gains, strict=True):
        size = (str(point.num_devices), str(point.num_machines))
        if point.best is None:
            made.add_row(*size, *("-" * 9))
            continue
        layout = point.best.plan
        made.add_row(
            *size,
            *(str(layout.depth), in_few(layout.widths), str(layout.microbatch_size), layout.schedule),
            duration(point.best.forecast.seconds),
            f"{point.samples_per_second:.4g}",
            gain,
            f"{point.efficiency:.0%}",
            str(len(point.best.idle)),
        )
    console = tables.console()
    console.print(made)
    notes: dict[str, None] = {}
    for point in points:
        if point.best is None:
            console.print(Text(f"{count(point.num_devices, 'device')}: {point.refused}"))
        else:
            notes.update(dict.fromkeys(point.best.forecast.estimates))
    for what in list(notes)[:MOST_NOTES]:
        console.print(Text(f"note: {what}"))
    if len(notes) > MOST_NOTES:
        console.print(Text(f"note: {len(notes) - MOST_NOTES} more estimates (planning for each tells them)"))


# ---------------------------------------------------------------- reading


def _refuse_beyond(key: str, number: int, least: int, most: int) -> None:
    if not least <= number <= most:
        raise ValueError(f"{key} must be {least} to {most}, not {number}")


def _look(profile: Profile, asked: Asked) -> Ground:
    network = read_network(asked.network, asked.latency)
    if asked.cluster is None:
        if not asked.devices:
            raise ValueError("how many devices are there? (--devices 16 --per-machine 8, or --cluster FILE)")
        cluster = read_machines(asked.devices, asked.per_machine, memory_bytes=profile.device_memory_bytes)
    elif asked.devices:
        raise ValueError("--devices and --cluster exclude each other (the file says how many there are)")
    else:
        cluster, told = read_cluster(asked.cluster, memory_bytes=profile.device_memory_bytes)
        network = network or told
    cluster = _with_memory(cluster, asked.memory)
    return Ground(with_links(profile, cluster, network), cluster, network)


def _look_again(profile: Profile, pinned: PinnedPlan, asked: Asked) -> Ground:
    """At the machines that a plan was made for."""
    assert pinned.cluster is not None
    network = read_network(asked.network, asked.latency) or pinned.network
    cluster = _with_memory(pinned.cluster, asked.memory)
    return Ground(with_links(profile, cluster, network), cluster, network)


def _with_memory(cluster: Cluster, text: str) -> Cluster:
    if not text:
        return cluster
    memory_bytes = int(read_quantity(text, MEMORY, "--memory"))
    return Cluster(
        tuple(msgspec.structs.replace(machine, memory_bytes=memory_bytes) for machine in cluster.machines)
    )


def _has(file: Path, key: str) -> bool:
    """Whether it holds an object with this key: a plan and a profile are told apart by that."""
    try:
        return key in msgspec.json.decode(file.read_bytes(), type=dict[str, msgspec.Raw])
    except (OSError, msgspec.DecodeError):
        return False  # whoever reads it as a plan will say so


def _idle(cluster: Cluster, proposal: Proposal) -> list[int]:
    names = [f"{m.name}:{index}" for m in cluster.machines for index in range(m.devices)]
    idle = set(proposal.idle)
    return [device for device, name in enumerate(names) if name in idle]


def _refuse_too_little_memory(
    pinned: PinnedPlan, forecast: Forecast, cluster: Cluster, idle: Sequence[int]
) -> None:
    left_out = set(idle)
    every = [machine.memory_bytes for machine in cluster.machines for _ in range(machine.devices)]
    has = [number for device, number in enumerate(every) if device not in left_out]
    for index, (stage, of) in enumerate(zip(pinned.plan.stages, forecast.stages, strict=True)):
        smallest = min(has[rank] for rank in stage.ranks)
        if of.memory.total > smallest:
            raise PlanError(
                f"the plan does not fit: stage {index} needs {memory(of.memory.total)}, its device has "
                f"{memory(smallest)}, {memory(of.memory.total - smallest)} too little (plan anew for these)"
            )


# ---------------------------------------------------------------- telling


def _timeline(simulation: Simulation, proposal: Proposal) -> Timeline:
    return simulation.timeline([stage.ranks for stage in proposal.plan.stages])


def _draw(file: Path, simulation: Simulation, proposal: Proposal) -> None:
    title = f"{tables.headline(proposal.plan)}: {duration(simulation.seconds)} a step"
    write_atomic(file, to_svg(_timeline(simulation, proposal), title))


def _explain_profile(profile: Profile, as_json: bool) -> None:
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
