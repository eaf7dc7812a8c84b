"""`varuna simulate --trace FILE`: plays a trace of spot machines through the manager's decisions."""

import re
import time
from collections.abc import Collection
from pathlib import Path
from typing import get_args

import msgspec
import typer
from rich.text import Text

from varuna.cli.ledger import prices_of
from varuna.cli.options import printable, warn
from varuna.codec import encode
from varuna.errors import check_name
from varuna.files import write_atomic
from varuna.morph.ledger_file import read_ledger
from varuna.observe.ledger import HOUR, LOST, Ledger, describe_unpriced
from varuna.observe.ledger_page import layout_chart
from varuna.plan import tables
from varuna.plan.profile_file import read_profile
from varuna.plan.search.choose import LayoutRequest
from varuna.simulate.compare import (
    INTERVALS,
    MEANINGS,
    POLICIES,
    PolicyName,
    PolicyResult,
    Question,
    SaveInterval,
    best_interval,
    compare,
)
from varuna.simulate.costs import Costs, calibrate, read_costs, write_costs
from varuna.simulate.job_events import measure_events
from varuna.simulate.page import simulation_page
from varuna.simulate.planner import CachedPlanner
from varuna.simulate.traces import MarketTrace, read_trace

SOURCE_LETTERS = 20
"""Length of the source of costs in the table; the line below has all of it."""
QUICK_SECONDS = 3.0
"""A simulation that takes less, without its plans, is repeated to find the best save interval."""


class MarketOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `varuna simulate` for a trace; its help explains them."""

    trace: Path | None
    profile: Path | None
    batch_size: int | None
    stages: int | None
    chunk_size: int | None
    step_seconds: float | None
    per_machine: int
    costs: Path | None
    calibrate: Path | None
    out: Path | None
    notice: float
    save_every: float | None  # 0: never; None: automatic
    best_interval: bool | None  # search it; None: if that takes seconds
    hot: bool
    greedy: bool
    hours: float | None
    policies: str
    price: str | None
    on_demand_price: float | None
    html: Path | None
    svg: Path | None
    as_json: bool


class MarketAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `varuna simulate --trace FILE --json`."""

    trace: str
    hours: float
    mean_machines: float
    most_machines: int
    changes: int
    notes: tuple[str, ...]
    costs: Costs
    policies: tuple[PolicyResult, ...]
    save_intervals: tuple[SaveInterval, ...]  # the best one first
    save_intervals_note: str  # why there are none
    simulated_in_seconds: float  # all policies, without planning
    planned_in_seconds: float


def play_market(options: MarketOptions) -> None:
    """Carry out `varuna simulate` for a trace, or for the calibration of costs alone."""
    if options.trace is None:
        _show_costs(options)
        return
    costs = _costs(options)
    trace, policies = _trace(options, options.trace), _policies(options.policies)
    no_search = _why_no_search(options, trace, policies)
    if no_search and options.best_interval:
        raise ValueError(f"--best-interval: {no_search}")
    question = Question(
        trace=trace,
        costs=costs,
        devices_per_machine=options.per_machine,
        notice_seconds=options.notice,
        save_every_seconds=options.save_every,
        hot=options.hot,
        greedy=options.greedy,
        prices=prices_of(options.price),
        on_demand_price=options.on_demand_price or 0.0,
    )
    planner = _planner(options, costs, trace)
    _check_layouts(planner, trace)
    ledgers: dict[PolicyName, Ledger] = {}
    took: dict[PolicyName, float] = {}
    started = time.perf_counter() - planner.planning_seconds

    def note(policy: PolicyName, ledger: Ledger) -> None:
        seconds = time.perf_counter() - planner.planning_seconds - started
        ledgers[policy], took[policy] = ledger, seconds - sum(took.values())

    results = compare(policies, question, planner, on_result=note)
    if not (no_search or options.best_interval) and took["varuna"] >= QUICK_SECONDS:
        no_search = f"a simulation takes {took['varuna']:.0f} s, and it needs several (give --best-interval)"
    intervals = [] if no_search else best_interval(question, planner)
    if options.html is not None:
        write_atomic(options.html, simulation_page(question, results, ledgers, intervals, why_none=no_search))
    if options.svg is not None:
        write_atomic(options.svg, layout_chart(next(iter(ledgers.values()))))
    answer = MarketAnswer(
        trace=trace.source,
        hours=trace.end / HOUR,
        mean_machines=trace.mean_machines,
        most_machines=trace.most_machines,
        changes=len(trace.changes),
        notes=trace.notes,
        costs=costs,
        policies=tuple(results),
        save_intervals=tuple(intervals),
        save_intervals_note=no_search,
        simulated_in_seconds=round(sum(took.values()), 3),
        planned_in_seconds=round(planner.planning_seconds, 3),
    )
    if options.as_json:
        typer.echo(encode(answer))
    else:
        _show(answer, planner)


def _show_costs(options: MarketOptions) -> None:
    if options.best_interval:
        raise ValueError("--best-interval plays a trace of machines: give --trace FILE")
    if options.calibrate is None:
        raise ValueError(
            "give PROFILE and PLAN to simulate a step, --trace FILE to play a trace of machines, or "
            "--calibrate LOGDIR to measure costs"
        )
    costs = _costs(options)
    if options.out is None:
        typer.echo(encode(costs))


def _costs(options: MarketOptions) -> Costs:
    if options.costs is not None and options.calibrate is not None:
        raise ValueError("--costs and --calibrate exclude each other")
    if options.calibrate is not None:
        folder = options.calibrate
        found = calibrate(read_ledger(folder), source=f"measured: {folder}", measured=measure_events(folder))
        if options.out is not None:
            write_costs(options.out, found)
    else:
        found = Costs() if options.costs is None else read_costs(options.costs)
    if options.step_seconds is not None:
        if not 0 < options.step_seconds < 1e6:
            raise ValueError(f"--step-seconds must be above 0, not {options.step_seconds}")
        found = msgspec.structs.replace(found, steps={})
    return found


def _trace(options: MarketOptions, path: Path) -> MarketTrace:
    trace = read_trace(path)
    if options.hours is not None:
        if not 0 < options.hours < 1e6:
            raise ValueError(f"--hours must be above 0, not {options.hours}")
        trace = trace.cut(options.hours * HOUR)
    if trace.end <= 0 or not trace.most_machines:
        raise ValueError(f"{path}: no machine is there for any time (give --hours to let it last)")
    return trace


def _planner(options: MarketOptions, costs: Costs, trace: MarketTrace) -> CachedPlanner:
    if options.per_machine < 1:
        raise ValueError(f"--per-machine must be 1 or more, not {options.per_machine}")
    if options.batch_size is None:
        raise ValueError("--batch-size is missing: the samples per step of the whole job")
    profile = None if options.profile is None else read_profile(options.profile)
    request = LayoutRequest(
        batch_size=options.batch_size,
        num_stages=options.stages if profile is not None or options.stages else 1,
        microbatch_size=options.chunk_size if profile is not None or options.chunk_size else 1,
        profile=profile,
    )
    steps = dict(costs.steps)
    if options.step_seconds is not None:
        steps = {max(1, round(trace.mean_machines)): options.step_seconds}
    if profile is None and not steps:
        raise ValueError(
            "the time of a step is not known: give --profile DIR, or --step-seconds at the average number of "
            "machines, or costs from --calibrate"
        )
    return CachedPlanner(request, devices_per_machine=options.per_machine, steps=steps)


def _check_layouts(planner: CachedPlanner, trace: MarketTrace) -> None:
    """Refuse a job that can never run, with the planner's reason."""
    most = planner.size(trace.most_machines)
    if most.layout is None:
        raise ValueError(f"the job does not run on {trace.most_machines} machines: {most.problem}")


def _why_no_search(options: MarketOptions, trace: MarketTrace, policies: Collection[PolicyName]) -> str:
    """Return why there is no best save interval to search; "" if there is one."""
    if options.best_interval is False:
        return "--no-best-interval is given"
    if options.save_every is not None:
        return "--save-every gives the interval"
    if "varuna" not in policies:
        return "--policies has no varuna"
    if trace.end < INTERVALS[0]:
        return f"the trace lasts {trace.end:.0f} s, and the shortest interval is {INTERVALS[0]:.0f} s"
    return ""


def _policies(text: str) -> tuple[PolicyName, ...]:
    if text == "all":
        return POLICIES
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        check_name("--policies", name, POLICIES)
    found = tuple(policy for policy in get_args(PolicyName) if policy in names)
    if not found:
        raise ValueError(f"--policies must name some of {', '.join(POLICIES)}, or all")
    return found


def _show(answer: MarketAnswer, planner: CachedPlanner) -> None:
    typer.echo(
        f"{answer.trace}: {answer.hours:,.1f} hours, {answer.mean_machines:.1f} machines on average, "
        f"{answer.most_machines} at most, {answer.changes} changes"
    )
    unpriced = (describe_unpriced(one.report.money) for one in answer.policies)
    for note in dict.fromkeys([*answer.notes, *filter(None, unpriced)]):
        warn(note)
    if answer.costs.estimated:
        typer.echo(f"costs that were not measured: {', '.join(answer.costs.estimated)}")
    table = tables.table(
        *("policy", "costs", "goodput>", "samples/s>", "interruptions>"),
        *(f"{cause}>" for cause in LOST),
        "cost>",
    )
    for one in answer.policies:
        report = one.report
        total = report.paid_seconds or 1.0
        table.add_row(
            one.policy,
            Text(printable(re.split("[:,]", one.costs)[0][:SOURCE_LETTERS])),
            f"{report.goodput:.2%}",
            f"{one.samples_per_second:,.4g}",
            str(report.interruptions),
            *(f"{report.lost_seconds[cause] / total:.2%}" for cause in LOST),
            "-" if report.money is None else f"{report.money.paid:,.2f}",
        )
    console = tables.console()
    console.print(table)
    for one in answer.policies:
        typer.echo(f"{one.policy}: {MEANINGS[one.policy]}; costs: {printable(one.costs)}")
    if answer.save_intervals:
        best = answer.save_intervals[0]
        typer.echo(f"best fixed save interval: {best.seconds:.0f} s ({best.goodput:.2%})")
    else:
        typer.echo(f"best fixed save interval: not searched: {answer.save_intervals_note}")
    typer.echo(
        f"simulated in {answer.simulated_in_seconds:.1f} s, {planner.num_plans} plans in "
        f"{answer.planned_in_seconds:.1f} s"
    )
