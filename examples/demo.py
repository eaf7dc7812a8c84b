"""The demo of `make demo`: a small GPT over four workers on this machine, then in one plain process.

The workers are started by varuna's own launcher: 2 pipeline stages in 2 replicas, on the CPU. The script that
they run is examples/gpt.py, with dropout, gradient clipping and a learning rate schedule. The exit
status is 1 if the losses of the two runs differ by more than rounding.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import gpt
import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

BATCH_SIZE = 16
CHUNK_SIZE = 4
STAGES, REPLICAS = 2, 2
LAYOUT = f"{STAGES} stages x {REPLICAS} replicas"
TOLERANCE = 1e-5


class Progress:
    """One line that renews itself; where there is no terminal, a line now and then."""

    def __init__(self, console: Console, layout: str, steps: int) -> None:
        self.console, self.layout, self.steps = console, layout, steps
        self.started = time.perf_counter()
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> "Progress":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def show(self, step: int, loss: float) -> None:
        if step == 0:
            self.started, speed = time.perf_counter(), "..."  # what comes before is start-up, not training
        else:
            speed = f"{step * BATCH_SIZE / (time.perf_counter() - self.started):.0f}"
        line = f"step {step + 1:>3}/{self.steps}   loss {loss:.4f}   {speed:>4} samples/s   {self.layout}"
        if self.live:
            self.live.update(Text(line), refresh=True)
        elif (step + 1) % 10 == 0 or step + 1 == self.steps:
            self.console.print(line, highlight=False, soft_wrap=True)


def train_over_workers(steps: int, log_dir: str) -> Iterator[tuple[int, float]]:
    """Starts the launcher, and reads what rank 0 prints."""
    command = [
        *[sys.executable, "-m", "varuna.launcher", "--log_dir", log_dir],
        *["--ngpus_per_server", str(STAGES * REPLICAS), "--nstages", str(STAGES)],
        *["--batch_size", str(BATCH_SIZE), "--chunk_size", str(CHUNK_SIZE)],
        *[str(Path(__file__).with_name("gpt.py")), "--steps", str(steps)],
    ]
    # The CPU is what this shows; one thread for each worker.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if found := re.search(r"step (\d+) loss (\S+)", line):
                yield int(found[1]), float(found[2])
    if job.returncode:
        sys.exit(job.returncode)  # the launcher has said why


def train_plainly(steps: int) -> Iterator[tuple[int, float]]:
    losses = gpt.train_plainly(gpt.make_model(), batch_size=BATCH_SIZE, steps=steps)
    for step, (_, loss) in zip(range(steps), losses, strict=False):  # without the held-out loss at the end
        yield step, loss


def run(title: str, progress: Progress, steps: Iterator[tuple[int, float]]) -> list[float]:
    progress.console.print(f"\n{title}", style="bold", highlight=False)
    losses = []
    with progress:
        for step, loss in steps:
            losses.append(loss)
            progress.show(step, loss)
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    console = Console()
    workers = STAGES * REPLICAS
    with tempfile.TemporaryDirectory() as log_dir:
        sizes = f"batch {BATCH_SIZE}, micro-batches of {CHUNK_SIZE}"
        title = f"A small GPT over {workers} processes on this CPU; {sizes}"
        parallel = run(title, Progress(console, LAYOUT, steps), train_over_workers(steps, log_dir))
    title = "The same model in one plain process, without varuna"
    plain = run(title, Progress(console, "1 process", steps), train_plainly(steps))
    differences = [abs(a - b) / abs(b) for a, b in zip(parallel, plain, strict=True)]
    worst = max(differences)
    equal = worst <= TOLERANCE
    console.print(
        f"\nThe losses of all {steps} steps over {workers} workers "
        f"{'equal' if equal else 'DIFFER FROM'} the single process's; "
        f"largest difference: {worst:.1e} relative (up to {TOLERANCE:.0e} is rounding).",
        style="bold green" if equal else "bold red",
        highlight=False,
        soft_wrap=True,
    )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
