"""Simulated against real goodput: jobs under `varuna chaos --trace`, and their traces in `varuna simulate`.

    python -m benchmarks.chaos ONE.csv OTHER.csv --minutes 5 --speedup 60

Each trace in turn measures the costs. The others are only compared: nothing is tuned to them. The tables
show the share of the paid machine-seconds that trained. `--folders` compares runs that were kept before.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.report import machine
from varuna.morph.ledger_file import read_ledger
from varuna.observe.ledger import LOST, report_ledger
from varuna.plan.search.choose import LayoutRequest
from varuna.simulate.compare import Question, simulate_policy
from varuna.simulate.costs import Costs, calibrate
from varuna.simulate.job_events import measure_events
from varuna.simulate.planner import CachedPlanner
from varuna.simulate.traces import read_trace

ROOT = Path(__file__).parent.parent
BATCH_SIZE, CHUNK_SIZE, MACHINES = 48, 4, 4
SAVE_EVERY_SECONDS = 10.0
SAMPLE_SECONDS = 0.02
"""A sample takes this long: it sleeps, so that all machines fit on a few cores."""


class Agreement(msgspec.Struct, frozen=True):
    """One trace: shares of the paid machine-seconds."""

    trace: str
    calibrates: bool
    minutes: float
    changes: int
    real: dict[str, float]
    simulated: dict[str, float]
    losses_equal: bool

    @property
    def difference(self) -> float:
        """Return the difference of goodput, relative to the real one."""
        return self.simulated["useful"] / self.real["useful"] - 1


def play(trace: Path, out: Path, *, minutes: float, speedup: float) -> None:
    """Run the job of the example under a trace."""
    command = [
        *[sys.executable, "-m", "varuna", "chaos", str(ROOT / "examples/chaos.py")],
        *["--trace", str(trace.resolve()), "--speedup", str(speedup), "--minutes", str(minutes)],
        *["--machines", str(MACHINES), "--batch-size", str(BATCH_SIZE), "--chunk-size", str(CHUNK_SIZE)],
        *["--save-every", str(SAVE_EVERY_SECONDS), "--out", str(out)],
        *["--", "--sample-seconds", str(SAMPLE_SECONDS)],
    ]
    subprocess.run(command, cwd=ROOT / "examples", check=True)


def costs_of(folder: Path) -> Costs:
    (logs,) = (folder / "logs").iterdir()
    return calibrate(read_ledger(logs), source=folder.name, measured=measure_events(logs))


def agree(folder: Path, costs: Costs, *, name: str, calibrates: bool) -> Agreement:
    """Simulate what a run has played, and compare."""
    trace = read_trace(folder / "played.csv")
    report = json.loads((folder / "report.json").read_text())
    request = LayoutRequest(batch_size=BATCH_SIZE, num_stages=1, microbatch_size=CHUNK_SIZE)
    planner = CachedPlanner(request, devices_per_machine=1, steps=dict(costs.steps))
    question = Question(trace=trace, costs=costs, hot=True, save_every_seconds=SAVE_EVERY_SECONDS)
    found = report_ledger(simulate_policy("varuna", question, planner))
    real, losses = report["ledger"], report["losses"]
    return Agreement(
        name,
        calibrates,
        round(trace.end / 60, 2),
        len(trace.changes),
        shares(real["useful_seconds"], real["lost_seconds"], real["paid_seconds"]),
        shares(found.useful_seconds, found.lost_seconds, found.paid_seconds),
        losses["first_different"] is None and not losses["missing"],
    )


def shares(useful: float, lost: dict[str, float], paid: float) -> dict[str, float]:
    return {
        name: round(seconds / paid, 4)
        for name, seconds in {"useful": useful, **{cause: lost[cause] for cause in LOST}}.items()
    }


def show(rows: list[Agreement]) -> None:
    print("| trace | minutes | changes | real goodput | simulated | difference | losses |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        name = f"{row.trace} (costs)" if row.calibrates else row.trace
        print(
            f"| {name} | {row.minutes:.1f} | {row.changes} | {row.real['useful']:.1%} | "
            f"{row.simulated['useful']:.1%} | {row.difference:+.1%} | "
            f"{'equal' if row.losses_equal else 'different'} |"
        )
        for side in ("real", "simulated"):
            lost = getattr(row, side)
            print(f"    {side}: " + ", ".join(f"{cause} {lost[cause]:.1%}" for cause in LOST))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", help="spot traces, at least two")
    parser.add_argument("--minutes", type=float, default=5.1)
    parser.add_argument("--speedup", type=float, default=60.0)
    parser.add_argument("--folders", type=Path, nargs="*", help="runs that were kept, one for each trace")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    folders = options.folders or []
    if not folders:
        kept = Path(tempfile.mkdtemp(prefix="varuna-agreement-"))
        for number, trace in enumerate(options.traces):
            folders.append(kept / str(number))
            play(trace, folders[-1], minutes=options.minutes, speedup=options.speedup)
    comparisons = []
    for measured in folders:
        costs = costs_of(measured)
        rows = [
            agree(folder, costs, name=trace.name, calibrates=folder is measured)
            for folder, trace in zip(folders, options.traces, strict=True)
        ]
        show(rows)
        comparisons.append({"costs": msgspec.to_builtins(costs), "runs": msgspec.to_builtins(rows)})
    if options.out is not None:
        result = {"machine": machine(), "comparisons": comparisons}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
