"""Greedy changes against changes by expected samples, simulated: `python -m benchmarks.policies [TRACE ...]`.

Plays traces (formats: docs/simulate.md) and made-up markets with three sets of costs, each with no notice and
with notices of 30 s and 120 s. Prints a table in Markdown: samples relative to those with `--greedy`.
"""

import argparse
import random
from pathlib import Path

from varuna.plan.search.choose import LayoutRequest
from varuna.simulate.compare import Question, simulate_policy
from varuna.simulate.costs import PUBLISHED_RESTART, Costs, read_costs
from varuna.simulate.planner import CachedPlanner
from varuna.simulate.traces import MachineChange, MarketTrace, read_trace

MEASURED = Path(__file__).parent / "results" / "market-costs.json"
NOTICES = (0.0, 30.0, 120.0)
Event = tuple[float, str, str]


def poisson(
    name: str, seed: int, *, life: float, away: float, hours: float, machines: int = 24, named: bool = False
) -> MarketTrace:
    """Machines that stay and are away for random times. `named`: they come back under their names."""
    numbers, events = random.Random(seed), []
    for index in range(machines):
        at, changes, machine = 0.0, 0, f"m{index}"
        events.append((at, "add", machine))
        while (at := at + numbers.expovariate(1 / (away if changes % 2 else life))) < hours * 3600:
            changes += 1
            if changes % 2 == 0 and not named:
                machine = f"m{index}.{changes}"
            events.append((at, "remove" if changes % 2 else "add", machine))
    return _market(name, events, hours)


def flapping(name: str, *, stable: int, flapping: int, up: float, down: float, hours: float) -> MarketTrace:
    """Machines that stay, and some that come and go in a fixed rhythm."""
    events = [(0.0, "add", f"s{index}") for index in range(stable)]
    for index in range(flapping):
        at = 7.0 * index
        while at < hours * 3600:
            events.append((at, "add", f"f{index}"))
            if at + up < hours * 3600:
                events.append((at + up, "remove", f"f{index}"))
            at += up + down
    return _market(name, events, hours)


def _market(name: str, events: list[Event], hours: float) -> MarketTrace:
    changes = [
        MachineChange(at, (machine,) if what == "remove" else (), (machine,) if what == "add" else ())
        for at, what, machine in sorted(events)
    ]
    return MarketTrace(name, tuple(changes), hours * 3600)


def markets(seed: int) -> list[MarketTrace]:
    return [
        poisson("24 machines stay 24 h", seed, life=86400, away=3600, hours=24),
        poisson("24 machines stay 100 min", seed, life=6000, away=1200, hours=12),
        poisson("24 machines stay 20 min", seed, life=1200, away=300, hours=8),
        poisson(
            "12 machines stay 10 min, same names", seed, life=600, away=60, hours=6, machines=12, named=True
        ),
        flapping("12 stay, 2 flap: 60 s up, 60 s down", stable=12, flapping=2, up=60, down=60, hours=4),
        flapping("12 stay, 3 flap: 300 s up, 60 s down", stable=12, flapping=3, up=300, down=60, hours=4),
        flapping("3 stay, 1 flaps: 60 s up, 60 s down", stable=3, flapping=1, up=60, down=60, hours=4),
    ]


def samples(trace: MarketTrace, costs: Costs, *, notice: float, hot: bool, greedy: bool) -> tuple[int, float]:
    """Return the samples and the goodput of a job."""
    request = LayoutRequest(batch_size=512, num_stages=1, microbatch_size=1)
    planner = CachedPlanner(request, devices_per_machine=1, steps={24: 4.0})
    question = Question(trace=trace, costs=costs, notice_seconds=notice, hot=hot, greedy=greedy)
    ledger = simulate_policy("varuna", question, planner)
    return ledger.samples, ledger.amounts["useful"] / sum(ledger.amounts.values())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE")
    parser.add_argument("--seed", type=int, default=1, help="draw of the random markets")
    arguments = parser.parse_args()
    measured = read_costs(MEASURED)
    kinds = (("in place", measured, True), ("restart", measured, False), ("50 s", PUBLISHED_RESTART, False))
    cells = [f"{name}, {notice:.0f} s" for name, _, _ in kinds for notice in NOTICES]
    print(f"| market | changes | {' | '.join(cells)} |")
    print("|---" * (2 + len(cells)) + "|")
    for trace in [*map(read_trace, arguments.traces), *markets(arguments.seed)]:
        cells = []
        for _, costs, hot in kinds:
            for notice in NOTICES:
                greedy, before = samples(trace, costs, notice=notice, hot=hot, greedy=True)
                ours, after = samples(trace, costs, notice=notice, hot=hot, greedy=False)
                cells.append(f"{ours / max(1, greedy) - 1:+.2%} ({before:.1%} → {after:.1%})")
        print(f"| {Path(trace.source).name} | {len(trace.changes)} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
