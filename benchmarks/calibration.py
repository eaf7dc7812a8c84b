"""Accuracy of times that are estimated from a device's speed in other models.

    python -m benchmarks.calibration [--device cuda] [--microbatch-sizes 2,8] [--out FILE]

Each model's segments are measured as `RaNNCModule` measures them. The speed is then found in all models but
one, and the times of that one's segments are estimated with it, from their shapes alone.
"""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyrannc.configuration import Configuration
from pyrannc.model_costs import FAR, LINKS, assumed_speed
from pyrannc.profile import MeasureRequest, MeasureSamples, ModelMeasurement
from varuna.capture import Source
from varuna.capture.model.call_convention import StructuredCall
from varuna.execute.comm.session import single_rank_session
from varuna.plan.cost.calibrate import speed_of
from varuna.plan.cost.estimate import Speed
from varuna.plan.cut.blocks import partition
from varuna.profile.description import describe
from varuna.types import Segment, SizeCost

VOCABULARY = 8192


class Subject(NamedTuple):
    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Tensor]]


def tokens(length: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda size: {"input_ids": torch.randint(0, VOCABULARY, (size, length))}


def images(side: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda size: {"pixel_values": torch.randn(size, 3, side, side)}


def models(scale: int) -> dict[str, Subject]:
    """Models with widths in proportion to `scale`."""
    import transformers as hf

    width, heads = 64 * scale, scale
    return {
        "gpt2": Subject(
            lambda: hf.GPT2LMHeadModel(
                hf.GPT2Config(vocab_size=VOCABULARY, n_layer=4, n_head=heads, n_embd=width, use_cache=False)
            ),
            tokens(128),
        ),
        "llama": Subject(
            lambda: hf.LlamaForCausalLM(
                hf.LlamaConfig(
                    vocab_size=VOCABULARY,
                    num_hidden_layers=4,
                    hidden_size=width,
                    num_attention_heads=heads,
                    intermediate_size=3 * width,
                    use_cache=False,
                )
            ),
            tokens(128),
        ),
        "bert": Subject(
            lambda: hf.BertModel(
                hf.BertConfig(
                    vocab_size=VOCABULARY,
                    num_hidden_layers=4,
                    hidden_size=width,
                    num_attention_heads=heads,
                    intermediate_size=4 * width,
                )
            ),
            tokens(128),
        ),
        "vit": Subject(
            lambda: hf.ViTModel(
                hf.ViTConfig(
                    num_hidden_layers=4,
                    hidden_size=width,
                    num_attention_heads=heads,
                    intermediate_size=4 * width,
                    image_size=128,
                )
            ),
            images(128),
        ),
        "resnet": Subject(
            lambda: hf.ResNetModel(
                hf.ResNetConfig(
                    embedding_size=16 * scale,
                    hidden_sizes=[32 * scale, 64 * scale, 128 * scale],
                    depths=[2, 2, 2],
                )
            ),
            images(96),
        ),
        "mlp": Subject(
            lambda: nn.Sequential(
                *(layer for _ in range(6) for layer in (nn.Linear(8 * width, 8 * width), nn.GELU()))
            ),
            lambda size: {"input": torch.randn(size, 8 * width)},
        ),
    }


Row = tuple[Segment, SizeCost]


class Found(NamedTuple):
    rows: list[Row]  # of each kind, at each size
    whole: list[Row]  # of every segment of the model
    memory_bytes: int
    device: str


def measure(subject: Subject, device: torch.device, sizes: tuple[int, ...], seconds: float) -> Found:
    torch.manual_seed(0)
    model = subject.make().train()
    source = Source(model, device_type=device.type, partition=partition)
    inputs = subject.inputs(max(sizes))
    calling, leaves = StructuredCall.of(model, (), inputs, grad_enabled=True)
    captured = source.capture(
        {name: leaf[:2] for name, leaf in leaves.items()}, training=True, convention=calling
    )
    described = describe(source, captured, sample_bytes=1, device=device, devices_per_machine=1)
    request = MeasureRequest(
        microbatch_sizes=sizes,
        seconds=seconds,
        iterations=Configuration().profiling_iter,
        speed=assumed_speed(device.type, 1),
        within=LINKS[device.type],
        between=FAR,
    )
    samples = MeasureSamples(leaves, dict.fromkeys(leaves, 0))
    session = single_rank_session()
    measurement = ModelMeasurement(session, source, captured, described, samples, device, request)
    profile = measurement.run(None, "127.0.0.1")
    assert profile is not None and not profile.notes, profile and profile.notes
    segments = captured.graph.segments
    rows = [
        (segments[profile.segments.index(kind)], cost)
        for kind, costs in enumerate(profile.kinds)
        for cost in costs.sizes
    ]
    whole = [
        (segment, cost)
        for segment, kind in zip(segments, profile.segments, strict=True)
        for cost in profile.kinds[kind].sizes
    ]
    return Found(rows, whole, profile.device_memory_bytes, profile.device)


def errors(speed: Speed, found: Found, size: int) -> tuple[float, float, float]:
    """Errors: median of the slower half of segments, whole model, memory of the whole model."""
    at_size = [(segment, cost) for segment, cost in found.whole if cost.microbatch_size == size]

    def estimated(segment: Segment) -> float:
        return speed.seconds(segment, size) + speed.backward_seconds(segment, size)

    def measured(cost: SizeCost) -> float:
        return cost.forward.seconds + cost.backward.seconds

    larger = sorted(at_size, key=lambda row: -measured(row[1]))[: (len(at_size) + 1) // 2]
    off = [abs(estimated(segment) / measured(cost) - 1) for segment, cost in larger]
    total = sum(estimated(segment) for segment, _ in at_size) / sum(measured(cost) for _, cost in at_size)
    held = sum(speed.activations * segment.kept_bytes.size(size) for segment, _ in at_size)
    return median(off), total - 1, held / sum(cost.activation_bytes for _, cost in at_size) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--microbatch-sizes", default="2,8")
    parser.add_argument("--scale", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    device = torch.device(arguments.device)
    sizes = tuple(map(int, arguments.microbatch_sizes.split(",")))
    found = {}
    for name, subject in models(arguments.scale).items():
        print(f"measuring {name} ...", flush=True)
        found[name] = measure(subject, device, sizes, arguments.seconds)
    assumed = assumed_speed(device.type, 1)
    lines = [
        "| model | micro-batch | its forwards and backwards | assumed speed | calibrated on the others | "
        "a segment (median) | activations |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, own in found.items():
        others = [row for other, theirs in found.items() if other != name for row in theirs.rows]
        speed = speed_of(others, memory_bytes=own.memory_bytes, device=own.device)
        for size in sizes:
            _, before, _ = errors(assumed, own, size)
            typical, total, held = errors(speed, own, size)
            taken = sum(
                cost.forward.seconds + cost.backward.seconds
                for _, cost in own.whole
                if cost.microbatch_size == size
            )
            lines.append(
                f"| {name} | {size} | {taken * 1e3:.1f} ms | {before:+.0%} | {total:+.0%} | "
                f"{typical:.0%} | {held:+.0%} |"
            )
    every = [row for theirs in found.values() for row in theirs.rows]
    speed = speed_of(every, memory_bytes=1, device=next(iter(found.values())).device)
    lines.append(f"\nAll of them: {speed}")
    text = "\n".join(lines)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
