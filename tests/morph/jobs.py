"""Real jobs on loopback machines with a real manager, whose output is read line by line.

The script trains slowly until the file `hurry` exists: a test has time to break something, and loses none
afterwards. A test may prepend code that sets how often the script saves (EVERY, 0: never), how much
longer an instruction takes (`delay`), and what it does after a step (`misbehave`).
"""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType
from typing import Any, Self

import pytest

from tests.launch.jobs import environment
from varuna.codec import decode
from varuna.morph.protocol.messages import ManagerRequest
from varuna.morph.run.client import send_request
from varuna.morph.run.job_folder import ManagerContact

STEPS = 300

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.cut = CutPoint()

    def forward(self, x, y):
        return ((self.last(self.cut(torch.tanh(self.first(x)))) - y) ** 2).mean()
"""

TRAIN = f"""
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from varuna import CutPoint, SampleOrder, Varuna

STEPS, EVERY = {STEPS}, globals().get("EVERY", 10)


{NET}

torch.manual_seed(1)
x = torch.randn(64, 4)
y = x.sum(1, keepdim=True)
stage_map = os.environ.get("VARUNA_STAGE_TO_RANK_MAP", "0;")
model = Varuna(Net(), stage_map, {{"x": x[:2], "y": y[:2]}}, 12, 2, device="cpu", seed=3,
    compute_delay=globals().get("delay"))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model.set_optimizer(optimizer)
model.resume("store")
resumed = os.environ.get("VARUNA_RESUME_STEP")
assert resumed is None or int(resumed) == model.iteration, (resumed, model.iteration)
order = SampleOrder(64, batch_size=12, seed=5)
while model.iteration < STEPS:
    step = model.iteration
    share = order.replica(step=step, replica=model.rank_within_stage, num_replicas=model.data_depth)
    loss, _ = model.step({{"x": x[share], "y": y[share]}})
    optimizer.step()
    model.zero_grad()
    if "misbehave" in globals():
        misbehave(step)
    print("step", step, "loss", loss)
    if EVERY and model.iteration % EVERY == 0 and "VARUNA_GENERATION" in os.environ:
        model.checkpoint("store", keep_last=2)
    if not Path("hurry").exists():
        time.sleep(0.05 if step < 40 else 0.2 if step < 150 else 1.0 if step < 200 else 3.0)
print("trained")
"""

PATIENT = (
    sys.executable,
    "-c",
    """
import functools
import varuna.cli.manage as manage
from varuna.cli.run import main
manage.ManagerSettings = functools.partial(manage.ManagerSettings, lost_seconds=15.0)
main()
""",
)
"""A manager that does not take a machine for lost whose heartbeats are late, because other tests run."""

POLL_SECONDS = 0.1
END_SECONDS = 30.0
"""Time limit for the end of processes that a test has stopped, and let go on."""
STATUS_SECONDS = 120.0
"""Time limit for something that the status of a job must show."""

STEP = re.compile(r"\[rank 0\] step (\d+) loss (\S+)")


def contains_one(texts: Sequence[str], line: str) -> bool:
    return any(text in line for text in texts)


class Job:
    """A manager under test, its machines 127.0.0.1, 127.0.0.2, ... with one worker each."""

    def __init__(
        self,
        folder: Path,
        *,
        machines: int,
        stages: int = 1,
        script: str = TRAIN,
        addresses: Sequence[str] = (),
        options: Sequence[str] = (),
        manager: Sequence[str] = (sys.executable, "-m", "varuna.run_varuna"),
    ) -> None:
        self.folder = folder
        self.manager = manager
        self.addresses = tuple(addresses) or tuple(f"127.0.0.{number}" for number in range(1, 10))
        self.options = options
        (folder / "script.py").write_text(script)
        self.write_list(*range(1, machines + 1))
        self.stages = stages
        self.lines: list[str] = []
        self.losses: dict[int, float] = {}
        self.last_step = -1
        self.start()

    def start(self, *more: str) -> None:
        self.process = subprocess.Popen(
            [
                *[*self.manager, "--machine_list", "machines"],
                *["--gpus_per_node", "1", "--batch_size", "12", "--chunk_size", "2"],
                *["--nstages", str(self.stages), *self.options, *more, "script.py"],
            ],
            cwd=self.folder,
            env=environment(self.folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._queue: Queue[str | None] = Queue()
        threading.Thread(target=self._read, args=(self.process, self._queue), daemon=True).start()

    def restart(self, *more: str) -> None:
        """Start the manager again after its end, once all its output is read."""
        self._read_the_rest()
        self.start(*more)

    def _read(self, process: "subprocess.Popen[str]", queue: "Queue[str | None]") -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                queue.put(line.rstrip("\n"))
        queue.put(None)

    # ------------------------------------------------------------ what it says

    def wait_for(self, wanted: str | Callable[[str], bool]) -> str:
        """Read until a line contains the text; fail with the whole output if none does."""
        while (line := self._queue.get()) is not None:
            self._note(line)
            if wanted(line) if callable(wanted) else wanted in line:
                return line
        raise AssertionError(f"the job ended without {wanted!r}:\n" + "\n".join(self.lines))

    def wait_for_all(self, *wanted: str) -> list[str]:
        """Read until each text was in a line, in any order. Return these lines."""
        found: dict[str, str] = {}
        while missing := [text for text in wanted if text not in found]:
            line = self.wait_for(functools.partial(contains_one, missing))
            found |= {text: line for text in missing if text in line}
        return [found[text] for text in wanted]

    def wait_for_steps(self, count: int) -> None:
        """Wait for `count` more steps."""
        for _ in range(count):
            self.wait_for(lambda line: STEP.match(line) is not None)

    def wait_for_change(self, wanted: str) -> None:
        """Wait for a generation that continues where the last one ended: no step is repeated."""
        line = self.wait_for(wanted)
        assert f", from step {self.last_step + 1} (" in line, self.text

    def finish(self) -> int:
        (self.folder / "hurry").touch()
        self._read_the_rest()
        return self.process.wait()

    def _read_the_rest(self) -> None:
        while (line := self._queue.get()) is not None:
            self._note(line)

    def read_lost_output(self) -> None:
        """Find steps in the logs of rank 0 that an agent, because it was killed, did not show."""
        for path in self.folder.glob("varuna_logs/*/generation_*/rank_0.out"):
            for line in path.read_text().splitlines():
                if (found := STEP.match(f"[rank 0] {line}")) and int(found[1]) not in self.losses:
                    self.losses[int(found[1])] = float(found[2])

    def _note(self, line: str) -> None:
        self.lines.append(line)
        if found := STEP.match(line):
            self.last_step = int(found[1])
            self.losses[self.last_step] = float(found[2])

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def generations(self) -> list[str]:
        return [line.split(": ", 1)[1] for line in self.lines if line.startswith("varuna: generation: ")]

    # ------------------------------------------------------------ what is done to it

    def write_list(self, *numbers: int) -> None:
        (self.folder / "machines").write_text("".join(f"{self.addresses[n - 1]}\n" for n in numbers))

    def agent(self, number: int) -> int:
        """Return the process id of a machine's agent."""
        return int(self.machine(number)["agent_pid"])

    def worker(self, number: int) -> int:
        return int(self.machine(number)["workers"][0]["pid"])

    def machine(self, number: int) -> Any:
        name = self.addresses[number - 1]
        (found,) = (one for one in self.status()["machines"] if one["machine"] == name)
        return found

    def wait_for_reports(self, steps: int) -> None:
        """Wait until the manager knows that all workers have trained some more steps."""
        wanted = self.status()["iteration"] + steps
        self._wait_for_workers(lambda worker: bool(worker["iteration"] >= wanted))

    def wait_for_copies(self) -> None:
        """Wait until the manager knows that every worker's state has a copy on another one."""
        self._wait_for_workers(lambda worker: worker["copy_of"] is not None)

    def _wait_for_workers(self, wanted: Callable[[Any], bool]) -> None:
        """Ask for the status until it is true of all workers; fail with the whole output if it never is."""
        limit = time.monotonic() + STATUS_SECONDS
        while True:
            workers = [worker for one in self.status()["machines"] for worker in one["workers"]]
            if workers and all(wanted(worker) for worker in workers):
                return
            if time.monotonic() > limit:
                self._read_what_is_there()
                raise AssertionError(f"{workers} after {STATUS_SECONDS} s:\n{self.text}")
            time.sleep(POLL_SECONDS)

    def _read_what_is_there(self) -> None:
        with suppress(Empty):
            while (line := self._queue.get_nowait()) is not None:
                self._note(line)

    def status(self) -> Any:
        contact = self.contact()
        answer = send_request(
            contact.address,
            contact.port,
            contact.credential,
            ManagerRequest(contact.job, "status"),
        )
        return json.loads(bytes(answer.status))

    def contact(self) -> ManagerContact:
        (place,) = (self.folder / "home").glob("jobs/*/manager.json")
        return decode(place.read_bytes(), ManagerContact)

    def varuna(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "varuna", *arguments],
            cwd=self.folder,
            env=environment(self.folder),
            capture_output=True,
            text=True,
        )

    def processes(self) -> dict[int, str]:
        """Return all processes that belong to this folder, with their command lines."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if f"{self.folder}/".encode() in (entry / "environ").read_bytes():
                        line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                        found[int(entry.name)] = line
                except OSError:
                    pass
        return found

    def processes_left(self) -> list[str]:
        """Return the command lines of processes that do not end in time."""
        limit = time.monotonic() + END_SECONDS
        while (found := self.processes()) and time.monotonic() < limit:
            time.sleep(POLL_SECONDS)
        return list(found.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def reference_losses(folder: Path) -> dict[int, float]:
    """Return the losses of one undisturbed process."""
    (folder / "script.py").write_text(TRAIN)
    (folder / "hurry").touch()
    kept = {name: value for name, value in environment(folder).items() if name not in os.environ}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, **kept},
        capture_output=True,
        text=True,
        check=True,
    )
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", done.stdout)}


def check(job: Job, reference: dict[int, float]) -> None:
    """V47, V34: the job has finished with the reference losses and left no process behind."""
    assert job.finish() == 0, job.text
    assert "finished: every worker ended normally" in job.text
    job.read_lost_output()
    assert sorted(job.losses) == list(range(STEPS))
    assert job.losses == pytest.approx(reference, rel=1e-4, abs=1e-6)
    assert job.processes_left() == []
