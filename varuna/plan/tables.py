"""Terminal tables of plans and profiles. Imports no torch."""

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from varuna.plan.plan_file import PinnedPlan
from varuna.types import LinkCost, Plan, Profile, Proposal, ReduceCost, format_widths, show_widths
from varuna.units import count, duration, memory


def console() -> Console:
    """Return a console; lines wrap only in a terminal."""
    return Console(width=None if sys.stdout.isatty() else 1000, highlight=False)


def table(*columns: str) -> Table:
    """Return a table. A column "name>" is right-aligned; only the last column wraps."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        right, last = name.endswith(">"), index == len(columns) - 1
        made.add_column(name.rstrip(">"), justify="right" if right else "left", no_wrap=not last)
    return made


def headline(plan: Plan) -> str:
    stages, replicas = count(plan.depth, "stage"), format_widths(plan.widths)
    return f"{stages} x {replicas}, micro-batches of {plan.microbatch_size}, {plan.schedule}"


def spans(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: "0 to 3, 7, 8". Only the first four ranges are shown."""
    by_offset = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in by_offset]
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(texts[:4]) + (", ..." if len(texts) > 4 else "")


def samples_per_second(proposal: Proposal) -> float:
    return proposal.plan.batch_size / proposal.forecast.seconds


def bubble(proposal: Proposal) -> float:
    """Return the mean bubble of the stages."""
    return fmean(stage.bubble for stage in proposal.forecast.stages)


def fullest(proposal: Proposal) -> int:
    return max(stage.memory.total for stage in proposal.forecast.stages)


def recomputing(plan: Plan) -> str:
    number = sum(stage.recompute for stage in plan.stages)
    return "no" if not number else "all" if number == plan.depth else f"{number} of {plan.depth}"


def layouts(proposals: Sequence[Proposal]) -> Table:
    made = table(
        *("stages>", "replicas>", "micro-batch>", "schedule", "recompute", "a step>", "samples/s>"),
        *("bubble>", "memory>", "idle>", "why"),
    )
    for index, proposal in enumerate(proposals):
        plan = proposal.plan
        made.add_row(
            str(plan.depth),
            show_widths(plan.widths),
            str(plan.microbatch_size),
            plan.schedule,
            recomputing(plan),
            duration(proposal.forecast.seconds),
            f"{samples_per_second(proposal):.4g}",
            f"{bubble(proposal):.1%}",
            memory(fullest(proposal)),
            str(len(proposal.idle)),
            proposal.reason,
            style=None if index else "green",
        )
    return made


def stages(proposal: Proposal) -> Table:
    """Return the parts of the step time of each stage."""
    made = table(
        *("stage>", "segments", "ranks", "recompute", "compute>", "waiting>", "all-reduce>", "optimizer>"),
        *("bubble>", "memory>"),
    )
    for index, (stage, of) in enumerate(zip(proposal.plan.stages, proposal.forecast.stages, strict=True)):
        parts = (of.compute_seconds, of.waiting_seconds, of.reduce_seconds, of.optimizer_seconds)
        made.add_row(
            str(index),
            spans(range(stage.first, stage.stop)),
            spans(stage.ranks),
            "yes" if stage.recompute else "no",
            *map(duration, parts),
            f"{of.bubble:.1%}",
            memory(of.memory.total),
        )
    return made


def memories(proposal: Proposal) -> Table:
    """Return the memory of each stage by purpose."""
    parts = ("fixed", "parameters", "gradients", "buckets", "optimizer", "activations", "boundaries")
    made = table("stage>", *(f"{part}>" for part in parts), "working>", "in all>")
    for index, stage in enumerate(proposal.forecast.stages):
        numbers = [getattr(stage.memory, part) for part in (*parts, "working")]
        made.add_row(str(index), *map(memory, numbers), memory(stage.memory.total))
    return made


def differences(left: PinnedPlan, right: PinnedPlan) -> list[tuple[str, str, str]]:
    """Return (what, here, there) for each difference."""

    def describe(pinned: PinnedPlan) -> dict[str, str]:
        plan = pinned.plan
        return {
            "stages": str(plan.depth),
            "replicas": show_widths(plan.widths),
            "batch": str(plan.batch_size),
            "micro-batch": str(plan.microbatch_size),
            "schedule": plan.schedule,
            "precision": plan.precision,
            "model": plan.fingerprint or "-",
            "cuts before": spans(stage.first for stage in plan.stages[1:]) or "-",
            "recompute": spans(i for i, stage in enumerate(plan.stages) if stage.recompute) or "-",
            "ranks": "; ".join(spans(stage.ranks) for stage in plan.stages),
            "optimizer": "sharded" if pinned.shard_optimizer else "whole",
            "cluster": "-" if pinned.cluster is None else str(pinned.cluster),
            "idle": ", ".join(pinned.idle) or "-",
            "a step": duration(pinned.forecast.seconds),
            "samples/s": f"{samples_per_second(pinned):.4g}",
            "bubble": f"{bubble(pinned):.1%}",
            "memory": memory(fullest(pinned)),
        }

    here, there = describe(left), describe(right)
    return [(name, here[name], there[name]) for name in here if here[name] != there[name]]


def kinds(profile: Profile) -> Table:
    """Return the costs of each kind of segment at each size."""
    made = table(
        *("kind>", "segments", "weights>", "micro-batch>", "forward>", "backward>", "in two parts>"),
        *("activations>", "working>"),
    )
    for index, kind in enumerate(profile.kinds):
        where = [place for place, one in enumerate(profile.segments) if one == index]
        for row, size in enumerate(kind.sizes):
            made.add_row(
                *(("", "", "") if row else (str(index), spans(where), memory(kind.parameter_bytes))),
                str(size.microbatch_size),
                *(
                    f"{duration(d.seconds)} ± {d.spread / d.seconds:.0%}"
                    for d in (size.forward, size.backward)
                ),
                f"{duration(size.backward_inputs.seconds)} + {duration(size.backward_weights.seconds)}",
                memory(size.activation_bytes),
                memory(size.working_bytes),
            )
    return made


def facts(profile: Profile) -> list[str]:
    """Return the other numbers of a profile, one line each."""
    optimizer, overheads = profile.optimizer, profile.overheads
    whole = sum(kind.parameter_bytes for kind in map(profile.segment, range(len(profile.segments))))
    tied = sum((len(tie.segments) - 1) * tie.num_bytes for tie in profile.ties)
    return [
        f"{count(len(profile.segments), 'segment')} of {count(len(profile.kinds), 'kind')}, "
        f"{memory(whole - tied)} of weights, in {profile.precision} on {profile.device} with "
        f"{memory(profile.device_memory_bytes)}; model {profile.fingerprint[:12]}",
        f"optimizer: {optimizer.name}, {duration(optimizer.fixed_seconds)} and "
        f"{duration(optimizer.seconds_per_element * 1e6)} for a million weights, "
        f"{optimizer.state_bytes_per_element:.3g} bytes of state for each",
        f"engine: {duration(overheads.instruction_seconds)} an instruction, "
        f"{duration(overheads.step_seconds)} a step",
        f"link within a machine: {_link(profile.within)}",
        f"link between machines: {_link(profile.between)}",
        f"all-reduce within a machine: {_reductions(profile.reductions, between=False)}",
        f"all-reduce between machines: {_reductions(profile.reductions, between=True)}",
        *(f"not measured: {note}" for note in profile.notes),
    ]


def _link(link: LinkCost | None) -> str:
    if link is None:
        return "not measured"
    small, large = link.messages[0], link.messages[-1]
    rate = large.num_bytes / large.one_way.seconds / 1e9
    return (
        f"{memory(small.num_bytes)} in {duration(small.one_way.seconds)}, {memory(large.num_bytes)} in "
        f"{duration(large.one_way.seconds)} ({rate:.3g} GB/s)"
    )


def _reductions(costs: Sequence[ReduceCost], *, between: bool) -> str:
    found = [cost for cost in costs if cost.between_machines == between]
    if not found:
        return "not measured"
    groups = sorted({cost.group_size for cost in found})
    largest = max((cost for cost in found if cost.group_size == groups[-1]), key=lambda cost: cost.num_bytes)
    return (
        f"over {spans(groups)} ranks; {memory(largest.num_bytes)} over {groups[-1]} in "
        f"{duration(largest.duration.seconds)}"
    )


def show_plan(on: Console, pinned: PinnedPlan) -> None:
    """Print a plan with its stages, its memory and the plans it was preferred to."""
    where = "" if pinned.cluster is None else f"{pinned.cluster}, "
    on.print(Text(f"{where}batches of {pinned.plan.batch_size}, {pinned.plan.precision}"))
    if pinned.basis:
        on.print(Text(f"times are {pinned.basis}"))
    on.print()
    on.print(layouts([pinned, *pinned.runners_up]))
    on.print(Text(f"\n{headline(pinned.plan)}:"))
    on.print(stages(pinned))
    if pinned.contents:
        on.print(Text("\nwhat they hold:"))
        on.print(contents(pinned))
    on.print(Text("\nmemory:"))
    on.print(memories(pinned))
    if plain := data_parallel(pinned):
        on.print(Text(f"\n{plain}"))
    on.print()
    show_rest(on, pinned, pinned.refused)


def contents(pinned: PinnedPlan) -> Table:
    """Return what each stage contains, and its ranks."""
    made = table("stage>", "operations>", "parameters>", "replicas>", "ranks")
    for index, (stage, held) in enumerate(zip(pinned.plan.stages, pinned.contents, strict=True)):
        made.add_row(
            str(index),
            f"{held.num_operations:,}",
            f"{held.num_parameters:,}",
            str(len(stage.ranks)),
            spans(stage.ranks),
        )
    return made


def data_parallel(pinned: PinnedPlan) -> str | None:
    """Return a line on plain data parallelism: one stage, a replica on every rank; None if unknown."""
    by_depth = {proposal.plan.depth: proposal for proposal in (*pinned.runners_up, pinned)}
    proposal = by_depth.get(1, pinned.plain)
    if proposal is None:
        return None
    here = " (this plan)" if proposal is pinned else ""
    need = f", and needs {memory(fullest(proposal))}" if proposal is pinned.plain else ""
    if need and pinned.cluster and (machines := pinned.cluster.machines):
        need += f" of {memory(min(machine.memory_bytes for machine in machines))}"
    return f"plain data parallel{here}: {duration(proposal.forecast.seconds)} a step{need}"


def show_rest(on: Console, proposal: Proposal, refused: Sequence[str] = ()) -> None:
    if proposal.idle:
        more = f" and {len(proposal.idle) - 8} more" if len(proposal.idle) > 8 else ""
        on.print(Text(f"idle: {', '.join(proposal.idle[:8])}{more}"))
    for what in refused:
        on.print(Text(f"refused: {what}"))
    for what in proposal.forecast.estimates:
        on.print(Text(f"note: {what}"))


def gains(rates: Sequence[float | None]) -> list[str]:
    """Return the gain of each rate over the one before; "-" if one of them is unknown."""
    pairs = pairwise(rates)
    return ["-", *(f"{after / before - 1:+.1%}" if before and after else "-" for before, after in pairs)]
