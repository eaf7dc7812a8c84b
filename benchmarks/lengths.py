"""Step time of a capture that serves all lengths, against one with fixed sizes, at the same length.

    python -m benchmarks.lengths [--steps 50]

Both run in one process, in turn, so that a disturbance meets both.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

from varuna import Varuna

LENGTH, OTHER_LENGTH, VOCABULARY = 64, 48, 512


def batch(length: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (8, length))
    return {"input_ids": ids, "labels": ids.clone()}


def wrapped(first_length: int) -> tuple[Any, torch.optim.Optimizer]:
    """Return a wrapped model that has trained at two lengths, the second of which is LENGTH."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=VOCABULARY, n_positions=128, n_embd=64, n_layer=6, n_head=4)
    sample = {name: value[:2] for name, value in batch(first_length).items()}
    model = Varuna(hf.GPT2LMHeadModel(config), "0", sample, batch_size=8, chunk_size=2, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.set_optimizer(optimizer)
    for length in (first_length, LENGTH):
        step(model, optimizer, batch(length))
    return model, optimizer


def step(model: Any, optimizer: torch.optim.Optimizer, inputs: dict[str, Tensor]) -> float:
    start = time.perf_counter()
    model.step(inputs)
    optimizer.step()
    model.zero_grad()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    sides = {"fixed": wrapped(LENGTH), "all lengths": wrapped(OTHER_LENGTH)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    inputs = batch(LENGTH)
    for turn in range(steps):
        for name in sorted(sides, reverse=turn % 2 == 1):
            times[name].append(step(*sides[name], inputs))
    for name, taken in times.items():
        print(f"{name}: {1000 * median(taken):.1f} ms, quickest {1000 * min(taken):.1f} ms")
    ratios = [own / other for own, other in zip(times["all lengths"], times["fixed"], strict=True)]
    print(f"ratio of each pair of steps, median: {median(ratios):.3f}")


if __name__ == "__main__":
    main()
