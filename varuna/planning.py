"""The commands `varuna plan`, `explain` and `simulate`: layouts chosen, told and drawn without any device."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from varuna.auto_config import equal_machines
from varuna.codec import decode, encode
from varuna.observe import to_perfetto, to_svg, to_text
from varuna.plan.costs import with_network
from varuna.plan.forecast import forecast_plan
from varuna.plan.search import search
from varuna.plan.simulate import Simulation
from varuna.profile_file import read_profile
from varuna.types import Cluster, Forecast, Plan, Profile, Proposal

ProfileArgument = Annotated[
    Path, typer.Argument(metavar="PROFILE", help="The folder that `varuna.Profiler` wrote, or its file.")
]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="What `varuna plan --out` wrote.")]
Devices = Annotated[int, typer.Option("--devices", help="Of all machines.")]
PerMachine = Annotated[int, typer.Option("--per-machine", help="Devices of one machine.")]
Memory = Annotated[str, typer.Option(help="Of a device, such as 80GiB; the profiled one's if not given.")]
Network = Annotated[str, typer.Option(help="What if: between machines, such as 25Gbit.")]
Latency = Annotated[str, typer.Option(help="Of that network, such as 20us.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


def register(app: typer.Typer) -> None:
    for command in (plan, explain, simulate):
        app.command()(command)


def plan(
    profile_folder: ProfileArgument,
    devices: Devices,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Of the whole job, each step.")],
    per_machine: PerMachine = 8,
    memory: Memory = "",
    network: Network = "",
    latency: Latency = "20us",
    stages: Annotated[list[int] | None, typer.Option(help="Only this depth; may be given again.")] = None,
    chunk_size: Annotated[list[int] | None, typer.Option(help="Only this micro-batch size.")] = None,
    schedule: Annotated[list[str] | None, typer.Option(help="Only this schedule.")] = None,
    recompute: Annotated[bool | None, typer.Option(help="Everywhere or nowhere, not by need.")] = None,
    shard_optimizer: Annotated[bool, typer.Option("--shard-optimizer")] = False,
    headroom: Annotated[float, typer.Option(help="Share of each device's memory to leave free.")] = 0.05,
    out: Annotated[Path | None, typer.Option(help="Pin the plan to this file.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw its timeline.")] = None,
    as_json: AsJson = False,
) -> None:
    """Choose the fastest layout for a cluster, and say why the others lost."""
    profile, cluster = _ground(profile_folder, devices, per_machine, memory, network, latency)
    ranking = search(
        profile,
        cluster,
        batch_size=batch_size,
        depths=stages or None,
        microbatch_sizes=chunk_size or None,
        schedules=schedule or None,  # type: ignore[arg-type]  # names are checked by the search
        recompute=recompute,
        shard_optimizer=shard_optimizer,
        headroom=headroom,
    )
    if out is not None:
        out.write_text(encode(ranking.best))
    if svg is not None:
        _, simulation = _replay(profile, cluster, ranking.best, shard_optimizer=shard_optimizer)
        svg.write_text(to_svg(simulation.timeline(), _headline(ranking.best.plan)))
    if as_json:
        typer.echo(encode(ranking))
        return
    console = _console()
    console.print(_layouts(ranking.proposals))
    console.print(_stages(ranking.best))
    _say_rest(ranking.best, ranking.refused)


def explain(
    pinned: PlanArgument,
    against: Annotated[Path | None, typer.Option("--diff", help="Another pinned plan.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show where the time and memory of a pinned plan go, or what sets two of them apart."""
    proposal = _read(pinned)
    if against is not None:
        differences = _differences(proposal, _read(against))
        typer.echo(encode(differences) if as_json else "\n".join(differences) or "the plans are the same")
    elif as_json:
        typer.echo(encode(proposal))
    else:
        _console().print(_stages(proposal))
        _say_rest(proposal)


def simulate(
    profile_folder: ProfileArgument,
    pinned: PlanArgument,
    devices: Devices,
    per_machine: PerMachine = 8,
    memory: Memory = "",
    network: Network = "",
    latency: Latency = "20us",
    seed: Annotated[int, typer.Option(help="Vary all times as they were measured to; 0: not.")] = 0,
    shard_optimizer: Annotated[bool, typer.Option("--shard-optimizer")] = False,
    svg: Annotated[Path | None, typer.Option(help="A picture of the timeline.")] = None,
    trace: Annotated[Path | None, typer.Option(help="The same for ui.perfetto.dev.")] = None,
    as_json: AsJson = False,
) -> None:
    """Play a step of a pinned plan, here or on another cluster or network."""
    profile, cluster = _ground(profile_folder, devices, per_machine, memory, network, latency)
    proposal = _read(pinned)
    forecast, simulation = _replay(profile, cluster, proposal, seed=seed, shard_optimizer=shard_optimizer)
    timeline = simulation.timeline()
    if svg is not None:
        svg.write_text(to_svg(timeline, _headline(proposal.plan)))
    if trace is not None:
        trace.write_text(to_perfetto(timeline))
    if as_json:
        typer.echo(encode(forecast))
    else:
        typer.echo(to_text(timeline), nl=False)
        typer.echo(f"{forecast.seconds:.4g} s a step")


# ---------------------------------------------------------------- reading


def _ground(
    folder: Path, devices: int, per_machine: int, memory: str, network: str, latency: str
) -> tuple[Profile, Cluster]:
    profile = read_profile(folder)
    if network:
        bits = _quantity(network, "network", {"gbit": 1e9, "mbit": 1e6})
        profile = with_network(profile, _quantity(latency, "latency", {"us": 1e-6, "ms": 1e-3}), bits / 8)
    units = {"gib": 2.0**30, "mib": 2.0**20, "gb": 1e9, "mb": 1e6}
    memory_bytes = int(_quantity(memory, "memory", units)) if memory else profile.device_memory_bytes
    return profile, equal_machines(devices, per_machine, memory_bytes=memory_bytes)


def _quantity(text: str, name: str, units: dict[str, float]) -> float:
    match = re.fullmatch(r"([0-9.]+)\s*([a-zA-Z]+)", text.strip())
    if match is None or match[2].lower() not in units:
        raise ValueError(f"--{name} {text!r} is no number with a unit (one of {', '.join(units)})")
    return float(match[1]) * units[match[2].lower()]


def _read(path: Path) -> Proposal:
    return decode(path.read_text(), Proposal, str(path))


def _replay(
    profile: Profile, cluster: Cluster, proposal: Proposal, *, seed: int = 0, shard_optimizer: bool = False
) -> tuple[Forecast, Simulation]:
    """The same devices idle, as far as the cluster has them."""
    names = [f"{m.name}:{index}" for m in cluster.machines for index in range(m.devices)]
    idle = [device for device, name in enumerate(names) if name in set(proposal.idle)]
    return forecast_plan(
        profile, cluster, proposal.plan, idle=idle, seed=seed, shard_optimizer=shard_optimizer
    )


# ---------------------------------------------------------------- telling


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 1000)  # where nobody looks, lines may be long


def _headline(plan: Plan) -> str:
    return f"{plan.depth} x {plan.width}, micro-batches of {plan.microbatch_size}, {plan.schedule}"


def _layouts(proposals: tuple[Proposal, ...]) -> Table:
    table = Table("stages", "replicas", "micro-batch", "schedule", "recompute", "s a step", "idle", "why")
    for proposal in proposals:
        plan = proposal.plan
        table.add_row(
            str(plan.depth),
            str(plan.width),
            str(plan.microbatch_size),
            plan.schedule,
            f"{sum(stage.recompute for stage in plan.stages)} of {plan.depth}",
            f"{proposal.forecast.seconds:.4g}",
            str(len(proposal.idle)),
            proposal.reason,
        )
    return table


def _stages(proposal: Proposal) -> Table:
    table = Table(
        "stage", "segments", "compute ms", "waiting ms", "all-reduce ms", "optimizer ms", "bubble", "GiB"
    )
    for index, (stage, of) in enumerate(zip(proposal.plan.stages, proposal.forecast.stages, strict=True)):
        parts = (of.compute_seconds, of.waiting_seconds, of.reduce_seconds, of.optimizer_seconds)
        table.add_row(
            str(index),
            f"{stage.first} to {stage.stop - 1}" + (", recompute" if stage.recompute else ""),
            *(f"{seconds * 1e3:.4g}" for seconds in parts),
            f"{of.bubble:.1%}",
            f"{of.memory.total / 2**30:.3g}",
        )
    return table


def _say_rest(proposal: Proposal, refused: tuple[str, ...] = ()) -> None:
    if proposal.idle:
        typer.echo(f"idle: {', '.join(proposal.idle[:8])}" + (" ..." if len(proposal.idle) > 8 else ""))
    for what in refused:
        typer.echo(f"refused: {what}")
    for what in proposal.forecast.estimates:
        typer.echo(f"estimated: {what}")


def _differences(left: Proposal, right: Proposal) -> list[str]:
    """What differs, field by field, first against second."""
    fields: dict[str, Callable[[Proposal], object]] = {
        "stages": lambda p: p.plan.depth,
        "replicas": lambda p: p.plan.width,
        "batch": lambda p: p.plan.batch_size,
        "micro-batch": lambda p: p.plan.microbatch_size,
        "schedule": lambda p: p.plan.schedule,
        "precision": lambda p: p.plan.precision,
        "model": lambda p: p.plan.fingerprint,
        "cuts": lambda p: [stage.first for stage in p.plan.stages[1:]],
        "recompute": lambda p: [index for index, stage in enumerate(p.plan.stages) if stage.recompute],
        "ranks": lambda p: [list(stage.ranks) for stage in p.plan.stages],
        "idle": lambda p: list(p.idle),
        "seconds": lambda p: float(f"{p.forecast.seconds:.4g}"),
    }
    return [
        f"{name}: {msgspec.json.encode(get(left)).decode()} -> {msgspec.json.encode(get(right)).decode()}"
        for name, get in fields.items()
        if get(left) != get(right)
    ]
