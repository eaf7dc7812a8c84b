"""Measures a small GPT on this machine's CPU, then asks what 1 to 16 devices would make of it.

    python examples/plan.py                     # both, from Python
    varuna profile examples/plan.py:make        # the first from the command line, into the folder profiles
    varuna plan profiles --devices 1,2,4,8,16 --per-machine 16 --batch-size 64

No device but the one that is measured on is needed, and none at all for the second part.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
from gpt import GPT, make_sequences
from torch import Tensor, nn

from varuna import AutoConfig, Profiler
from varuna.measure.stopwatch import Effort

SIZES = (1, 2, 4, 8)
DEVICES = (1, 2, 3, 4, 6, 8, 12, 16)


def get_batch(size: int) -> dict[str, Tensor]:
    return {"tokens": make_sequences(size, seed=0)}


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def make() -> tuple[nn.Module, Callable[[int], dict[str, Tensor]], Any]:
    """Return model and batches, as `varuna profile` needs them."""
    options = read_options()
    return GPT(layers=options.layers, width=options.width), get_batch, make_optimizer


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=64, help="of the whole job, each step")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    torch.set_num_threads(1)  # as a worker has it
    with tempfile.TemporaryDirectory() as folder:
        model, batches, optimizer = make()
        profiler = Profiler(
            model,
            batches,
            device="cpu",
            out_folder=folder,
            message_bytes=[4096, 65536, 1 << 20],  # none of this model's messages is larger
            effort=Effort(seconds=0.02, fewest=3, most=20),  # a rough look; leave it out for a good one
        )
        profiler.set_optimizer(optimizer)
        profiler.profile_all(SIZES)
        print("devices  stages  replicas  micro-batch      a step  samples/s  efficiency")
        alone = 0.0
        for devices in DEVICES:
            config = AutoConfig(devices, max(DEVICES), options.batch_size, folder, verbose=False)
            depth, microbatch_size, seconds = config.get_min()
            replicas = config.ranking.best.plan.width
            rate = options.batch_size / seconds
            alone = alone or rate
            print(
                f"{devices:7}  {depth:6}  {replicas:8}  {microbatch_size:11}  {seconds * 1e3:7.2f} ms  "
                f"{rate:9.0f}  {rate / alone / devices:10.0%}"
            )


if __name__ == "__main__":
    main()
