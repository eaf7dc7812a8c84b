"""Automatic cuts against hand-placed ones: the time to find them, and what the best plan makes of them.

    python -m benchmarks.partition [--layers 256]

Prints a table; needs no device: models are on `meta`, their costs are estimated from their shapes.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from varuna.capture import Source, cut_after
from varuna.capture.alike import find_kinds
from varuna.estimating import estimate_profile
from varuna.plan.blocks import partition
from varuna.plan.costs import assumed_link
from varuna.plan.estimate import Speed
from varuna.plan.search import search
from varuna.types import Cluster, Machine, OperationGraph, Profile

GB = 1 << 30
A_GPU = Speed(
    flops_per_second=60e12, bytes_per_second=1.2e12, seconds_per_operation=4e-6, memory_bytes=24 * GB
)
WITHIN = assumed_link(1e-5, 20e9)
BETWEEN = assumed_link(3e-5, 3e9)
TOKENS = 1024


def gpt2(layers: int) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(n_layer=layers, n_head=16, n_embd=1024)
    return transformers.GPT2LMHeadModel(config)


def llama(layers: int) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=1024, num_attention_heads=16, intermediate_size=2816
    )
    return transformers.LlamaForCausalLM(config)


MODELS: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "gpt2": (gpt2, "transformer.h.{}"),
    "llama": (llama, "model.layers.{}"),
}


def get_batch(size: int) -> dict[str, Tensor]:
    ids = torch.zeros(size, TOKENS, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def on_meta(name: str, layers: int) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name][0](layers).train()


def time_partition(name: str, layers: int) -> dict[str, Any]:
    """CPU seconds, on one core: of the capture, of the cut, of telling equal segments from others."""
    found: dict[str, Any] = {}

    def timed(graph: OperationGraph) -> tuple[int, ...]:
        started = time.process_time()
        blocks = partition(graph)
        found.update(operations=len(graph.operations), algorithm=time.process_time() - started)
        return blocks

    print(f"capturing {name} with {layers} layers ...", flush=True)
    source = Source(on_meta(name, layers), partition=timed)
    started = time.process_time()
    captured = source.capture(get_batch(2), training=True)
    found["capture"] = time.process_time() - started
    print(f"{found['operations']} operations in {captured.num_segments} segments ...", flush=True)
    started = time.process_time()
    kinds = find_kinds(source, captured)
    found.update(segments=len(kinds), kinds=max(kinds) + 1, telling=time.process_time() - started)
    return found


def profile_of(name: str, layers: int, *, every: int | None) -> Profile:
    """With a CutPoint after every so many layers; None: without any."""
    model = on_meta(name, layers)
    if every is not None:
        cut_after(model, *(MODELS[name][1].format(i) for i in range(every - 1, layers - 1, every)))
    return estimate_profile(
        model, get_batch, [1, 2, 4, 8], speed=A_GPU, within=WITHIN, between=BETWEEN, precision="bf16"
    )


def compare(name: str, layers: int, devices: list[int]) -> list[tuple[str, int, float, str, float, float]]:
    """For each number of devices: the best step of automatic cuts, of hand-placed ones, and their ratio."""
    print(f"planning {name} with {layers} layers ...", flush=True)
    automatic = profile_of(name, layers, every=None)
    by_hand = {every: profile_of(name, layers, every=every) for every in (1, 2, 3, 4)}
    rows = []
    for number in devices:
        cluster = Cluster(tuple(Machine(f"n{i}", 4, A_GPU.memory_bytes) for i in range(number // 4)))
        ours = search(automatic, cluster, batch_size=128).best
        theirs = {
            every: search(profile, cluster, batch_size=128).best.forecast.seconds
            for every, profile in by_hand.items()
        }
        best = min(theirs, key=theirs.__getitem__)
        seconds = ours.forecast.seconds
        rows.append(
            (f"{name}-{layers}", number, seconds, f"every {best}", theirs[best], seconds / theirs[best])
        )
        print(f"{rows[-1]} depth {ours.plan.depth}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=256)
    arguments = parser.parse_args()
    lines = [
        "| model | devices | automatic, s | best by hand | by hand, s | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for name, layers in (("gpt2", 24), ("llama", 22)):
        for row in compare(name, layers, [8, 12, 16, 24]):
            model, number, ours, where, theirs, ratio = row
            lines.append(f"| {model} | {number} | {ours:.4f} | {where} | {theirs:.4f} | {ratio:.3f} |")
    print("\n".join(lines))
    for name in MODELS:
        found = time_partition(name, arguments.layers)
        print(", ".join(f"{key} {value:.4g}" for key, value in found.items()))


if __name__ == "__main__":
    main()
