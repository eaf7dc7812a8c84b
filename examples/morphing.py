"""A job whose machines change while it trains, compared with one plain process, and drawn as a picture.

    python examples/morphing.py --out morphing.svg

The machines are loopback addresses on this computer. Two start; two more join; a worker is killed; one
machine leaves. The job continues each time with the same global batch: in place, without the killed worker
until its machine is ready again. The exit status is 1 if its losses differ from those of one plain process
by more than rounding.
"""

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gpt

BATCH_SIZE = 8
TOLERANCE = 1e-4  # another number of replicas adds floating-point numbers in another order
COLOURS = ("#4e79a7", "#e15759", "#59a14f", "#b07aa1", "#f28e2b")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 900, 330, 56, 76, 40


@dataclass
class Generation:
    """The steps that the job trained in one layout."""

    event: str
    layout: str
    losses: dict[int, float] = field(default_factory=dict)


class Job:
    """`varuna run` over loopback machines, in a folder of its own."""

    def __init__(self, folder: Path, steps: int, pause: float) -> None:
        self.folder = folder
        self.events = {0: "two machines"}  # by the number of generations before
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "VARUNA_HOME": str(folder / "home"),
        }
        self.list_machines(1, 2)
        script = Path(__file__).with_name("gpt.py").absolute()
        with (folder / "output").open("w") as output:
            self.process = subprocess.Popen(
                [
                    *[sys.executable, "-m", "varuna", "run", "--machine_list", "machines"],
                    *["--gpus_per_node", "1", "--nstages", "2", "--chunk_size", "2"],
                    *["--batch_size", str(BATCH_SIZE), "--log_dir", "logs", str(script)],
                    *["--steps", str(steps), "--store", str(folder / "store"), "--save_every", "20"],
                    *["--pause", str(pause)],
                ],
                cwd=folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def list_machines(self, *numbers: int) -> None:
        (self.folder / "machines").write_text("".join(f"127.0.0.{number}\n" for number in numbers))

    def kill_a_worker(self) -> None:
        command = [sys.executable, "-m", "varuna", "status", "--json"]
        status = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, check=True
        )
        machines = json.loads(status.stdout)["machines"]
        os.kill(next(worker["pid"] for machine in machines for worker in machine["workers"]), signal.SIGKILL)

    def generations(self) -> list[Generation]:
        """Read the manager's output, which holds what rank 0 prints."""
        found: list[Generation] = []
        for line in (self.folder / "output").read_text().splitlines():
            if start := re.match(r"varuna: generation: \d+: (\d+) stages? x ([\d+]+) replica", line):
                event = self.events.get(len(found), "it is back")
                found.append(Generation(event, f"{start[1]} stages × {start[2]}"))
            elif step := re.match(r"\[rank 0\] step (\d+) loss (\S+)", line):
                found[-1].losses[int(step[1])] = float(step[2])
        return found

    def last_lines(self) -> str:
        return "\n".join((self.folder / "output").read_text().splitlines()[-30:])

    def change(self, event: str, action: Callable[[], None], layout: str, *, steps: int) -> None:
        """Do something, and wait until the job has trained some steps in the layout that follows."""
        before = len(self.generations())
        self.events[before] = event
        action()

        def is_there() -> bool:
            found = self.generations()
            return len(found) > before and found[-1].layout == layout and len(found[-1].losses) >= steps

        self.wait_for(is_there)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 600.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the job ended early (give more --steps) or hangs:\n{self.last_lines()}")
            time.sleep(0.05)


def run_job(folder: Path, steps: int, pause: float) -> list[Generation]:
    job = Job(folder, steps, pause)
    some = steps // 8
    try:
        job.wait_for(lambda: any(len(generation.losses) >= some for generation in job.generations()))
        job.change("two join", lambda: job.list_machines(1, 2, 3, 4), "2 stages × 2", steps=some)
        job.change("worker killed", job.kill_a_worker, "2 stages × 2", steps=some)
        job.change("one leaves", lambda: job.list_machines(1, 2, 4), "2 stages × 1", steps=1)
        if job.process.wait(600):
            sys.exit(f"the job failed:\n{job.last_lines()}")
    finally:
        job.process.terminate()
        job.process.wait()
    return job.generations()


def draw(plain: list[float], generations: list[Generation]) -> str:
    """The loss of one process as a line, that of the job as dots, coloured by generation."""
    lowest, highest = min(plain), max(plain)
    across = (WIDTH - LEFT - 16) / max(1, len(plain) - 1)
    down = (HEIGHT - TOP - BOTTOM) / math.log(highest / lowest)

    def point(step: int, loss: float) -> str:
        return f"{LEFT + step * across:.1f},{TOP + math.log(highest / loss) * down:.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">Loss of a job whose machines change '
        "(dots) and of one plain process (line)</text>",
    ]
    for loss in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0):
        if lowest <= loss <= highest:
            x, y = point(0, loss).split(",")
            lines.append(f'<path d="M{x} {y}H{WIDTH - 16}" stroke="#ddd"/>')
            lines.append(f'<text x="{LEFT - 8}" y="{y}" dy="4" text-anchor="end" fill="#666">{loss}</text>')
    line = " ".join(point(step, loss) for step, loss in enumerate(plain))
    lines.append(f'<polyline points="{line}" fill="none" stroke="#222" stroke-width="1.2"/>')
    for number, generation in enumerate(generations):
        if not generation.losses:
            continue
        colour = COLOURS[number % len(COLOURS)]
        x, bottom = point(min(generation.losses), lowest).split(",")
        lines.append(f'<path d="M{x} {TOP - 36}V{bottom}" stroke="{colour}" stroke-dasharray="3 3"/>')
        for row, text in enumerate((generation.event, generation.layout)):
            lines.append(
                f'<text x="{float(x) + 5:.1f}" y="{TOP - 26 + 14 * row}" fill="{colour}">{text}</text>'
            )
        for step, loss in generation.losses.items():
            x, y = point(step, loss).split(",")
            lines.append(f'<circle cx="{x}" cy="{y}" r="2.2" fill="{colour}"/>')
    lines.append(
        f'<text x="{WIDTH - 16}" y="{HEIGHT - 12}" text-anchor="end" fill="#666">{len(plain)} steps</text>'
    )
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--pause", type=float, default=0.15, help="seconds to wait after each step")
    parser.add_argument("--out", type=Path, default=Path("morphing.svg"), help="picture to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        generations = run_job(Path(folder), args.steps, args.pause)
    run = gpt.train_plainly(gpt.make_model(), batch_size=BATCH_SIZE, steps=args.steps)
    plain = [loss for name, loss in run if name != "held-out"]
    args.out.write_text(draw(plain, generations))
    worst, missing = 0.0, set(range(args.steps))
    for generation in generations:
        print(f"{generation.event}: {generation.layout}, {len(generation.losses)} steps")
        for step, loss in generation.losses.items():
            worst = max(worst, abs(loss - plain[step]) / abs(plain[step]))
            missing.discard(step)
    equal = worst <= TOLERANCE and not missing
    print(f"largest relative difference from one process: {worst:.1e}; steps missing: {len(missing)}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
