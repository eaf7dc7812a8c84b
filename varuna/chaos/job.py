"""A managed job that faults are injected into: its manager process, its output, and its steps."""

import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType
from typing import Self

from varuna.codec import decode
from varuna.morph.clock import SuspendAwareClock
from varuna.morph.protocol.messages import JobStatus, ManagerReply, ManagerRequest
from varuna.morph.run.client import send_request
from varuna.morph.run.job_folder import ManagerContact
from varuna.observe.losses import LossFollower, LossRecord
from varuna.secure.framing import FramingError

MANAGER = (sys.executable, "-m", "varuna.run_varuna")
PATIENCE_SECONDS = 120.0
"""The job is stuck after this time without the expected output; a flapping machine waits half a minute."""
POLL_SECONDS = 0.02
END_SECONDS = 30.0
"""The manager is killed if it does not end within this time."""
SAVING = "varuna: saving: "
KEPT = "varuna: machines kept: "  # a machine is off the list, but works on until others replace it
GENERATION = "varuna: generation: "
LAUNCHED = re.compile(GENERATION + r"(\d+): ")

clock = SuspendAwareClock(time.monotonic)
"""Does not count time in which this process was suspended."""


class JobStuck(AssertionError):
    """The job makes no progress."""


def within_patience(
    complaint: str, *, seconds: float = PATIENCE_SECONDS, pause_seconds: float = 0.0
) -> Iterator[None]:
    """Retry until `seconds` have passed, then raise JobStuck."""
    deadline = clock.now() + seconds
    while clock.now() < deadline:
        yield
        time.sleep(pause_seconds)
    raise JobStuck(f"{complaint} for {seconds:.0f} s")


class ManagedJob:
    """A manager process whose output is read line by line."""

    def __init__(
        self, folder: Path, *, command: Sequence[str], environment: Mapping[str, str], home: Path
    ) -> None:
        """`command`: the arguments of `varuna run`, with the script."""
        self.folder = folder
        self.home = home  # its folder for saved options and the journal
        self.environment = dict(environment)
        self.command = tuple(command)
        self.lines: list[str] = []
        self.start()

    def start(self, *more: str) -> None:
        """Start the manager, with `more` options."""
        self.process = subprocess.Popen(
            [*MANAGER, *more, *self.command],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C in the terminal must reach only this process
        )
        self._queue: Queue[str | None] = Queue()
        threading.Thread(target=self._read, args=(self.process, self._queue), daemon=True).start()

    def _read(self, process: "subprocess.Popen[str]", queue: "Queue[str | None]") -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                queue.put(line.rstrip("\n"))
        queue.put(None)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def status(self) -> JobStatus:
        return decode(self.request("status").status, JobStatus, "the manager's answer")

    def request(self, what: str, **fields: object) -> ManagerReply:
        """Send a request to the manager; `fields` are those of `ManagerRequest`."""
        contact = self.contact()
        request = ManagerRequest(contact.job, what, **fields)  # type: ignore[arg-type]
        return send_request(contact.address, contact.port, contact.credential, request)

    def contact(self) -> ManagerContact:
        (place,) = self.home.glob("jobs/*/manager.json")
        return decode(place.read_bytes(), ManagerContact)

    def close(self) -> None:
        """End the manager."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ChaosJob(ManagedJob):
    """A job whose output and steps must come in time. It follows the loss files of its workers."""

    def __init__(
        self,
        folder: Path,
        *,
        command: Sequence[str],
        environment: Mapping[str, str],
        home: Path,
        losses: Path,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.patience_seconds = patience_seconds
        self.generation = 0
        self.morphing = True  # no generation runs, or it is ending
        self.step = -1  # newest step of the current generation
        self.steps: dict[tuple[int, int], float] = {}  # (generation, step): when it was seen first
        self.records: list[LossRecord] = []
        self.steps_redone = 0
        self._newest = -1  # step of the newest generation
        self._counts: Counter[int] = Counter()  # steps by generation
        self._earlier = 0  # generations of jobs that have ended: the next one begins with 1 again
        self._follower = LossFollower(losses)
        super().__init__(folder, command=command, environment=environment, home=home)

    # ------------------------------------------------------------ output and steps

    def wait_for(self, wanted: str | Callable[[str], bool]) -> str:
        """Read until a line of the manager contains the text."""
        text = "what this fault waits for" if callable(wanted) else repr(wanted)
        for line in self._lines_in_time(f"the manager has not printed {text}"):
            if wanted(line) if callable(wanted) else wanted in line:
                return line
        raise JobStuck(f"the manager ended without {text}")

    def wait_for_steps(self, count: int) -> None:
        """Wait for `count` more steps of the current generation."""
        self.read_all()
        for _ in range(count):
            before = self._num_steps()
            for _ in within_patience("no step", seconds=self.patience_seconds, pause_seconds=POLL_SECONDS):
                self.read_all()
                if self._num_steps() > before:
                    break

    def wait_for_generation(self, after: int) -> None:
        """Wait for a generation with a higher number."""
        complaint = f"no generation after {after}"
        for _ in within_patience(complaint, seconds=self.patience_seconds, pause_seconds=POLL_SECONDS):
            self.read_all()
            if self.generation > after:
                return

    def _num_steps(self) -> int:
        # A machine that was cut off may go on with a generation that is over.
        return self._counts[self.generation]

    def _lines_in_time(self, complaint: str) -> Iterator[str]:
        for _ in within_patience(complaint, seconds=self.patience_seconds):
            self.read_steps()
            with suppress(Empty):
                while (line := self._queue.get(timeout=0.1)) is not None:
                    self._note(line)
                    yield line
                return

    def read_all(self) -> None:
        """Read output and steps so far. Raise JobStuck if the manager has ended."""
        if self.read_output():
            raise JobStuck("the manager ended")

    def read_output(self) -> bool:
        """Read output and steps so far; return True if the manager has ended."""
        self.read_steps()
        with suppress(Empty):
            while (line := self._queue.get_nowait()) is not None:
                self._note(line)
            self._queue.put(None)
            return True
        return False

    def read_steps(self) -> None:
        now = clock.now()
        for record in sorted(self._follower.read(), key=lambda one: (one.generation, one.step)):
            self.records.append(record)
            generation = self._earlier + record.generation
            if generation not in self._counts:  # steps of the last generation may run again
                self.steps_redone += max(0, self._newest + 1 - record.step)
                self._newest = record.step
            if (key := (generation, record.step)) not in self.steps:
                self.steps[key] = now
                self._counts[generation] += 1
                if generation == max(self._counts):
                    self._newest = record.step
            if generation == self.generation:
                self.step = record.step

    def _note(self, line: str) -> None:
        self.lines.append(line)
        if line.startswith((SAVING, "varuna: generation ended: ")):
            self.morphing = True
        elif found := LAUNCHED.match(line):
            self.generation, self.morphing = self._earlier + int(found[1]), False

    def start_again(self) -> None:
        """Start the job that has ended. Its generations count from 1; here they get higher numbers."""
        self.read_steps()
        self._earlier = max(self.generation, *self._counts, 0)
        self.start("--resume")

    def wait_for_ended(self) -> int:
        for _ in self._lines_in_time("the manager has not ended"):
            pass
        self.read_steps()
        return self.process.wait()

    def answering(self) -> JobStatus | None:
        """Return the status; None if the manager does not answer."""
        with suppress(OSError, FramingError, ValueError):
            return self.status()
        return None

    def wait_for_morph(self, *signs: str) -> str:
        """Wait for the start of a change of machines; `signs` are starts of lines that count, too."""
        return self.wait_for(lambda line: line.startswith((*signs, KEPT, GENERATION)))

    def kill_manager(self) -> None:
        self.process.kill()
        self.wait_for_ended()
