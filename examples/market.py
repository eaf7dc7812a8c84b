"""Plays a made-up spot market: how much of the paid time trains, with and without notices.

    python examples/market.py

No device is needed, and nothing is trained. Docs: docs/simulate.md.
"""

import random

from varuna.plan.search.choose import LayoutRequest
from varuna.simulate.compare import POLICIES, Question, compare
from varuna.simulate.costs import Costs
from varuna.simulate.planner import CachedPlanner
from varuna.simulate.traces import MachineChange, MarketTrace

MACHINES, HOURS = 16, 8.0


def make_market(seed: int = 0) -> MarketTrace:
    """Return 16 machines; about every ten minutes, one is replaced or taken away for a while."""
    numbers = random.Random(seed)
    live = [f"m{index}" for index in range(MACHINES)]
    changes, at, count = [MachineChange(0.0, added=tuple(live))], 0.0, MACHINES
    while (at := at + numbers.expovariate(1 / 600)) < HOURS * 3600:
        if len(live) > MACHINES // 2 and numbers.random() < 0.5:
            changes.append(MachineChange(at, removed=(live.pop(numbers.randrange(len(live))),)))
        elif len(live) < MACHINES:
            live.append(f"m{count}")
            count += 1
            changes.append(MachineChange(at, added=(live[-1],)))
    return MarketTrace("made up", tuple(changes), HOURS * 3600)


def main() -> None:
    market = make_market()
    request = LayoutRequest(batch_size=512, num_stages=2, microbatch_size=2)
    planner = CachedPlanner(request, devices_per_machine=1, steps={MACHINES: 4.0})
    for notice in (0.0, 120.0):
        print(f"\nnotice of {notice:.0f} s, {len(market.changes)} changes in {HOURS:.0f} hours")
        question = Question(trace=market, costs=Costs(), notice_seconds=notice)
        for result in compare(POLICIES, question, planner):
            lost = result.report.lost_seconds
            worst = max(lost, key=lambda cause: lost[cause])
            print(f"  {result.policy:14} {result.report.goodput:6.1%} trained; most was lost to {worst}")


if __name__ == "__main__":
    main()
