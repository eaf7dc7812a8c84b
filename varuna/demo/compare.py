"""Runs the demo: a small GPT over four workers on this machine, then in one plain process, and compares.

The workers are started by Varuna's own launcher: 2 pipeline stages in 2 replicas, on the CPU.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

BATCH_SIZE = 16
CHUNK_SIZE = 4
STAGES, REPLICAS = 2, 2
TOLERANCE = 1e-5
"""Relative difference of two losses that is rounding."""
SCRIPT = str(Path(__file__).with_name("gpt.py"))


class DemoProgress:
    """One line that renews itself; without a terminal, a line now and then."""

    def __init__(self, console: Console, layout: str, steps: int) -> None:
        self.console, self.layout, self.steps = console, layout, steps
        self.started = time.perf_counter()
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def show(self, step: int, loss: float) -> None:
        if step == 0:
            self.started, speed = time.perf_counter(), "..."  # the time before is start-up, not training
        else:
            speed = f"{step * BATCH_SIZE / (time.perf_counter() - self.started):.0f}"
        line = f"step {step + 1:>3}/{self.steps}   loss {loss:.4f}   {speed:>4} samples/s   {self.layout}"
        if self.live:
            self.live.update(Text(line), refresh=True)
        elif (step + 1) % 10 == 0 or step + 1 == self.steps:
            self.console.print(line, highlight=False, soft_wrap=True)


def read_losses(command: list[str]) -> Iterator[tuple[int, float]]:
    """Run a command and yield the steps and losses that it prints. Exit with its status if it fails."""
    # The demo is about the CPU; each worker has one thread.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"step (\d+) loss (\S+)", line):
                yield int(found[1]), float(found[2])
    if process.returncode:
        sys.exit(process.returncode)  # it has said why


def over_workers(steps: int, log_dir: str) -> list[str]:
    return [
        *[sys.executable, "-m", "varuna.launcher", "--log_dir", log_dir],
        *["--ngpus_per_server", str(STAGES * REPLICAS), "--nstages", str(STAGES)],
        *["--batch_size", str(BATCH_SIZE), "--chunk_size", str(CHUNK_SIZE)],
        *[SCRIPT, "--steps", str(steps)],
    ]


def in_one_process(steps: int) -> list[str]:
    return [sys.executable, SCRIPT, "--plain", str(BATCH_SIZE), "--steps", str(steps)]


def show_run(title: str, command: list[str], progress: DemoProgress) -> list[float]:
    """Run a command and show its progress. Return its losses."""
    progress.console.print(f"\n{title}", style="bold", highlight=False)
    losses = []
    with progress:
        for step, loss in read_losses(command):
            losses.append(loss)
            progress.show(step, loss)
    return losses


def run_demo(steps: int) -> int:
    """Run the demo. Return 1 if the losses of the two runs differ by more than rounding, else 0."""
    console = Console()
    workers = STAGES * REPLICAS
    with tempfile.TemporaryDirectory() as log_dir:
        sizes = f"batch {BATCH_SIZE}, micro-batches of {CHUNK_SIZE}"
        progress = DemoProgress(console, f"{STAGES} stages x {REPLICAS} replicas", steps)
        title = f"A small GPT over {workers} processes on this CPU; {sizes}"
        parallel = show_run(title, over_workers(steps, log_dir), progress)
    title = "The same model in one plain process, without varuna"
    plain = show_run(title, in_one_process(steps), DemoProgress(console, "1 process", steps))
    worst = max(abs(a - b) / abs(b) for a, b in zip(parallel, plain, strict=True))
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
