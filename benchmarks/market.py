"""Goodput on spot markets, simulated: `python -m benchmarks.market TRACE [--costs FILE] [--profile DIR]`.

Prints a table in Markdown for each trace, a file in a format of docs/simulate.md: every policy with the given
costs. With `--large`, it prints how long a simulation of a made-up market takes, 1,000 machines × 30 days by
default, and writes that to a file:

    python -m benchmarks.market --large [--machines 10000] [--days 30] [--out FILE]
"""

import argparse
import json
import random
import time
from pathlib import Path

from benchmarks.report import machine
from varuna.observe.ledger import LOST
from varuna.plan.profile_file import read_profile
from varuna.plan.search.choose import LayoutRequest
from varuna.simulate.compare import POLICIES, Question, compare, simulate_policy
from varuna.simulate.costs import Costs, read_costs
from varuna.simulate.planner import CachedPlanner
from varuna.simulate.traces import MachineChange, MarketTrace, read_trace

DAY = 86400.0


def made_up(machines: int, days: float, *, seed: int = 7, zones: int = 8) -> MarketTrace:
    """Return a market of zones. Each zone changes every 85 minutes on average, as in SkyPilot's V100 trace.

    Half of the changes give a zone all its machines, the others take some or all of them.
    """
    numbers = random.Random(seed)
    by_time: dict[float, tuple[list[str], list[str]]] = {}
    count = 0
    for zone in range(zones):
        size = machines * (zone + 1) // zones - machines * zone // zones
        live: list[str] = []
        at = numbers.uniform(0, 600)
        while at < days * DAY:
            removed, added = by_time.setdefault(at // 60 * 60, ([], []))
            if len(live) < size and (not live or numbers.random() < 0.5):
                new = [f"m{count + index}" for index in range(size - len(live))]
                count += len(new)
                live += new
                added += new
            else:
                taken = len(live) if numbers.random() < 0.2 else numbers.randint(1, max(1, len(live) // 8))
                removed += live[:taken]
                del live[:taken]
            at += 60 + numbers.expovariate(1 / (84 * 60))
    changes = []
    for at in sorted(by_time):
        removed, added = by_time[at]
        both = set(removed) & set(added)
        gone = tuple(name for name in removed if name not in both)
        changes.append(MachineChange(at, gone, tuple(name for name in added if name not in both)))
    return MarketTrace(f"made up, seed {seed}", tuple(changes), days * DAY)


def time_large(
    planner: CachedPlanner, costs: Costs, *, machines: int, days: float
) -> list[dict[str, float | str]]:
    """Simulate a made-up market in place and with restarts; return what each took."""
    trace = made_up(machines, days)
    rows: list[dict[str, float | str]] = []
    for hot in (True, False):
        started, busy, planned = time.perf_counter(), time.process_time(), planner.planning_seconds
        ledger = simulate_policy("varuna", Question(trace=trace, costs=costs, hot=hot), planner)
        seconds, cpu = time.perf_counter() - started, time.process_time() - busy
        row: dict[str, float | str] = {
            "machines": machines,
            "days": days,
            "changes": len(trace.changes),
            "changed": "in place" if hot else "by restarts",
            "generations": len(ledger.periods),
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu, 1),
            "planning_seconds": round(planner.planning_seconds - planned, 1),
            "goodput": round(ledger.amounts["useful"] / sum(ledger.amounts.values()), 4),
        }
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.market", description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE")
    parser.add_argument("--costs", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--step-seconds", type=float, default=4.0, help="without a profile, on 24 machines")
    parser.add_argument("--stages", type=int)
    parser.add_argument("--large", action="store_true", help="time the simulation of a large market")
    parser.add_argument("--machines", type=int, default=1000, help="of the large market")
    parser.add_argument("--days", type=float, default=30.0, help="of the large market")
    parser.add_argument("--out", type=Path, help="JSON file for the times of the large market")
    arguments = parser.parse_args()
    costs = read_costs(arguments.costs) if arguments.costs else Costs()
    request = LayoutRequest(
        batch_size=arguments.batch_size,
        num_stages=arguments.stages if arguments.profile or arguments.stages else 2,
        microbatch_size=None if arguments.profile else 1,
        profile=read_profile(arguments.profile) if arguments.profile else None,
    )
    planner = CachedPlanner(request, devices_per_machine=1, steps={24: arguments.step_seconds})
    for path in arguments.traces:
        trace = read_trace(path)
        print(
            f"\n{path.name}: {trace.end / 3600:.1f} h, {trace.mean_machines:.1f} machines, "
            f"{len(trace.changes)} changes\n"
        )
        print("| notice | policy | costs | goodput | " + " | ".join(LOST) + " |")
        print("|---" * (4 + len(LOST)) + "|")
        for notice, hot in ((0.0, False), (0.0, True), (120.0, False), (120.0, True)):
            question = Question(trace=trace, costs=costs, notice_seconds=notice, hot=hot)
            for one in compare(("varuna",) if hot else POLICIES, question, planner):
                report = one.report
                lost = (f"{report.lost_seconds[cause] / report.paid_seconds:.2%}" for cause in LOST)
                name = one.policy + " --no-hot" * (one.policy == "varuna" and not hot)
                cells = (f"{notice:.0f} s", name, one.costs.split(":")[0], f"{report.goodput:.2%}", *lost)
                print(f"| {' | '.join(cells)} |")
    if arguments.large:
        rows = time_large(planner, costs, machines=arguments.machines, days=arguments.days)
        if arguments.out is not None:
            result = {"machine": machine(), "runs": rows}
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
