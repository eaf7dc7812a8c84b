"""Goodput of GPT-2 1.5B on a spot trace, simulated: `python -m benchmarks.gpt2_market TRACE`.

Layouts and step times come from a profile that is estimated from the model's shapes. The costs of a change
are those that small jobs measured, plus the time to move the state of a stage. Every assumption is printed.
"""

import argparse
from pathlib import Path
from typing import Any

import msgspec

from varuna.codec import decode, encode
from varuna.observe.ledger import LOST, Ledger, report_ledger
from varuna.plan.search.choose import LayoutRequest
from varuna.simulate.compare import Question, simulate_policy
from varuna.simulate.costs import PUBLISHED_RESTART, Costs, read_costs
from varuna.simulate.planner import CachedPlanner
from varuna.simulate.traces import MarketTrace, read_trace
from varuna.types import Profile

PARAMETERS = 1.558e9
STATE_BYTES = 12 * PARAMETERS  # fp32 weights and two moments; between steps there are no gradients
LINK = 1.25e9  # bytes per second between machines, for the planner: 10 Gbit/s (p3.2xlarge: "up to 10 Gbit/s")
NETWORK = 1.0e9  # bytes per second at which state moves: 80 % of it
HOST_COPY = 6e9  # bytes per second from a device to host memory, pageable: half of PCIe 3.0 x16
FLOPS = 62e12  # of a V100 in half precision: 50 % of its nominal speed
PAUSE = 0.17  # of a morph in place without its bytes: docs/morphing.md, measured
DETECTION = 1.4  # docs/morphing.md, measured
CONFIGURATIONS = ((128, 1), (512, None))
"""Samples per step, and per micro-batch (None: planned). Parcae's artifact has the first for this model."""
NOTICES = (0.0, 120.0)
MEASURED = Path(__file__).parent / "results" / "market-costs.json"


def estimated_profile() -> Profile:
    import torch
    import transformers as hf

    from varuna.profile.estimate import Speed, assumed_link, estimate_profile

    config = hf.GPT2Config(n_layer=48, n_embd=1600, n_head=25, vocab_size=50257, n_positions=1024)
    with torch.device("meta"):
        model = hf.GPT2LMHeadModel(config)

    def get_batch(size: int, device: Any = None) -> dict[str, Any]:
        ids = torch.zeros(size, 1024, dtype=torch.long, device=device or "cpu")
        return {"input_ids": ids, "labels": ids}

    link = assumed_link(50e-6, LINK)
    return estimate_profile(
        model,
        get_batch,
        (1, 2, 4),
        speed=Speed(flops_per_second=FLOPS, bytes_per_second=700e9, memory_bytes=16 * 2**30),
        within=link,
        between=link,
        precision="fp16",
        shared_weights=[("transformer.wte.weight", "lm_head.weight")],
    )


def costs_of_stage(stage_bytes: float) -> Costs:
    """Return the measured costs of a small job, plus the time that the bytes of a stage take."""
    small = read_costs(MEASURED)
    moved, copied = stage_bytes / NETWORK, stage_bytes / HOST_COPY
    return msgspec.structs.replace(
        small,
        source="measured, plus bytes of a stage",
        detect_seconds=DETECTION,
        start_seconds=small.start_seconds + moved,  # each machine loads its stage
        save_seconds=small.save_seconds + copied,  # then it trains on
        write_seconds=moved,
        morph_seconds=PAUSE + moved,  # a machine receives at most a whole stage
        leave_seconds=small.leave_seconds + copied + moved,
    )


def simulate(planner: CachedPlanner, trace: MarketTrace, costs: Costs, **options: Any) -> Ledger:
    return simulate_policy("varuna", Question(trace=trace, costs=costs, **options), planner)


def best_rate(trace: MarketTrace, planner: CachedPlanner) -> tuple[float, float]:
    """Return samples/s if changes took no time, and the share of machine-seconds that has no place then."""
    samples = idle = 0.0
    live = 0
    ends = [change.at for change in trace.changes[1:]] + [trace.end]
    for change, end in zip(trace.changes, ends, strict=True):
        live += len(change.added) - len(change.removed)
        seconds = end - change.at
        if live and (found := planner.size(live)).layout is not None:
            samples += seconds * found.layout.batch_size / found.step_seconds
            idle += seconds * (live - len(found.used))
    return samples / trace.end, idle / trace.machine_seconds


def describe(ledger: Ledger, trace: MarketTrace, best: float) -> str:
    report = report_ledger(ledger)
    rate = report.samples / trace.end
    return f"{report.goodput:.1%} ({rate:.1f} samples/s, {rate / best:.1%} of the best)"


def print_tables(trace: MarketTrace, planner: CachedPlanner) -> None:
    """Print the goodput of all policies, and what is lost in place by cause."""
    usual = planner.size(round(trace.mean_machines))
    assert usual.layout is not None, usual.problem
    stage = STATE_BYTES / usual.layout.depth
    costs = costs_of_stage(stage)
    print(
        f"{round(trace.mean_machines)} machines: {usual.layout}, micro-batches of "
        f"{usual.layout.microbatch_size}, {usual.step_seconds:.2f} s a step"
    )
    print(f"a stage has {stage / 1e9:.1f} GB; costs: {encode(costs)}")
    best, idle = best_rate(trace, planner)
    print(f"if changes took no time: {best:.1f} samples/s, {idle:.1%} of the machine-time idle\n", flush=True)
    print("| costs | policy | no notice | 120 s notice |\n|---|---|---|---|")
    in_place: list[Ledger] = []
    for name, used, hot, greedy in (
        ("measured, in place", costs, True, False),
        ("measured, in place", costs, True, True),
        ("measured, restart", costs, False, False),
        ("published restart", PUBLISHED_RESTART, False, True),
        ("published restart", PUBLISHED_RESTART, False, False),
    ):
        found = [
            simulate(planner, trace, used, notice_seconds=notice, hot=hot, greedy=greedy)
            for notice in NOTICES
        ]
        in_place = in_place or found
        policy = "greedy" if greedy else "by expected samples"
        print(
            f"| {name} | {policy} | {' | '.join(describe(one, trace, best) for one in found)} |", flush=True
        )
    print("\n| lost in place, % of paid machine-seconds | no notice | 120 s notice |\n|---|---|---|")
    for cause in LOST:
        shares = (one.amounts.get(cause, 0.0) / sum(one.amounts.values()) for one in in_place)
        print(f"| {cause} | {' | '.join(f'{100 * share:.2f}' for share in shares)} |")
    for notice, ledger in zip(NOTICES, in_place, strict=True):
        changes = [one for one in ledger.interruptions if one.kind != "start"]
        losses = [one for one in changes if one.kind == "loss"]
        stored = [one for one in losses if "ending" in one.seconds]
        print(
            f"notice of {notice:.0f} s: {len(changes)} changes, {len(losses)} of them losses, "
            f"{len(stored)} of them from a checkpoint; {ledger.steps_redone} steps run again, "
            f"{ledger.saves} saves"
        )
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpt2_market", description=__doc__)
    parser.add_argument("trace", type=Path, metavar="TRACE")
    parser.add_argument("--cache", type=Path, help="keep the estimated profile in this file")
    arguments = parser.parse_args()
    cache: Path | None = arguments.cache
    if cache is not None and cache.exists():
        profile = decode(cache.read_bytes(), Profile, str(cache))
    else:
        profile = estimated_profile()
        if cache is not None:
            cache.write_text(encode(profile))
    trace = read_trace(arguments.trace)
    for batch_size, microbatch_size in CONFIGURATIONS:
        print(f"## {batch_size} samples per step\n")
        request = LayoutRequest(batch_size=batch_size, microbatch_size=microbatch_size, profile=profile)
        print_tables(trace, CachedPlanner(request, devices_per_machine=1))


if __name__ == "__main__":
    main()
