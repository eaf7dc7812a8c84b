"""Memory of a worker over many steps with frequent saves: it must level off.

`python -m benchmarks.growth --steps 20000 --out FILE` runs a tiny model on two ranks, as stages and as
replicas, with a background save every 10 steps. At some steps each rank notes its resident memory and the
number of live Python objects.
"""

import argparse
import gc
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import nn

from benchmarks.report import machine
from tests.pool import Pool
from varuna import CutPoint, Varuna

BATCH, SAVE_EVERY = 4, 10
SHAPES = {"2 stages": "0;1;", "2 replicas": "0,1;"}


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut, self.last = nn.Linear(4, 8), CutPoint(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = ((self.last(self.cut(torch.tanh(self.first(x)))) - y) ** 2).mean()
        return loss


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(stage_map: str, marks: list[int], store: str) -> list[dict[str, Any]]:
    """Train on this rank; at each mark note memory, live objects and open files."""
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, 4), torch.randn(BATCH, 1)
    model = Varuna(Tiny(), stage_map, {"x": x[:2], "y": y[:2]}, BATCH, 2, device="cpu", seed=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    model.set_optimizer(optimizer)
    size = BATCH // model.data_depth
    share = slice(size * model.rank_within_stage, size * (model.rank_within_stage + 1))
    found = []
    for step in range(1, marks[-1] + 1):
        model.step({"x": x[share], "y": y[share]})
        optimizer.step()
        model.zero_grad()
        if step % SAVE_EVERY == 0:
            save = model.checkpoint(store, tempdir="memory", keep_last=2)
        if step in marks:
            save.result()  # the objects of a save that runs are no leak
            gc.collect()
            found.append(
                {
                    "step": step,
                    "resident_bytes": resident_bytes(),
                    "objects": len(gc.get_objects()),
                    "files": len(os.listdir("/proc/self/fd")),
                }
            )
    model.close()
    return found


def run(marks: list[int]) -> dict[str, list[list[dict[str, Any]]]]:
    """Return the notes of each rank, for each shape."""
    pool = Pool()
    try:
        with tempfile.TemporaryDirectory() as folder:
            return {
                name: pool.run(measure, 2, shape, marks, f"{folder}/{index}", timeout=3600)
                for index, (name, shape) in enumerate(SHAPES.items())
            }
    finally:
        pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--out", type=Path, help="a JSON file that gets the result")
    options = parser.parse_args()
    marks = sorted({max(SAVE_EVERY, options.steps * part // 40) for part in (1, 2, 4, 10, 20, 30, 40)})
    began = time.monotonic()
    found = run(marks)
    for name, ranks in found.items():
        for rank, notes in enumerate(ranks):
            for note in notes:
                memory = note["resident_bytes"] / 1e6
                counts = f"{note['objects']} objects, {note['files']} files"
                print(f"{name}, rank {rank}, step {note['step']:6}: {memory:8.2f} MB, {counts}")
    print(f"{time.monotonic() - began:.0f} s")
    if options.out:
        result = {"machine": machine(), "save_every_steps": SAVE_EVERY, "shapes": found}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
