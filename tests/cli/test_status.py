"""The status of a job in a real terminal: a pseudo-terminal, whose screen pyte keeps as xterm would."""

import asyncio
import fcntl
import functools
import io
import json
import os
import pty
import re
import select
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pyte
import pytest
from rich.console import Console

from tests.launch.jobs import environment
from tests.morph.jobs import STEPS, Job, contains_one
from tests.morph.test_hot_jobs import FETCHES
from varuna.cli import jobs
from varuna.cli.status import screen as screens
from varuna.cli.status import viewers
from varuna.cli.status import watch as watching
from varuna.cli.status.render import OUTPUT_LINES, amount, clock, live_status, plain_line, ranks_text
from varuna.cli.status.screen import LiveScreen, PlainScreen, open_screen
from varuna.cli.status.viewers import ViewerOptions, Viewers
from varuna.cli.status.watch import NUM_EVENTS
from varuna.morph.protocol.messages import JobStatus, MachineStatus, ManagerReply
from varuna.observe.job_view import EventView, JobView, LayoutView, MachineView

SCRIPT = FETCHES.replace(
    "while model.iteration",
    "import varuna\nvaruna.log({'half': 0.5}, num_steps=STEPS)\nwhile model.iteration",
    1,
)


SCREEN_SECONDS = 90.0
"""Time limit for a text to appear."""


class Terminal:
    """A terminal window: its screen, and the process in it."""

    def __init__(self, command: list[str], *, cwd: Path, columns: int = 100, lines: int = 30) -> None:
        self.screen = pyte.Screen(columns, lines)
        self.stream = pyte.ByteStream(self.screen)
        self.master, slave = pty.openpty()
        self.resize(columns, lines)
        env = {**environment(cwd), "TERM": "xterm-256color"}
        for fixed in ("COLUMNS", "LINES"):  # of the terminal that runs the tests; readline sets them
            env.pop(fixed, None)
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.process = subprocess.Popen(command, cwd=cwd, env=env, start_new_session=True, **streams)  # type: ignore[call-overload]
        os.close(slave)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.screen.resize(lines, columns)

    def wait_for(self, seen: Callable[[str], bool]) -> str:
        """Read until the screen shows it; return the screen."""
        limit = time.monotonic() + SCREEN_SECONDS
        while not seen(text := "\n".join(line.rstrip() for line in self.screen.display)):
            left = limit - time.monotonic()
            assert left > 0 and select.select([self.master], [], [], left)[0], text
            self.stream.feed(os.read(self.master, 65536))
        return text

    def wait_for_all(self, *texts: str) -> list[str]:
        """Read until each text was on a screen; return the screens on which texts appeared first."""
        missing, screens = list(texts), []
        while missing:
            screen = self.wait_for(functools.partial(contains_one, missing))
            missing = [one for one in missing if one not in screen]
            screens.append(screen)
        return screens

    def close(self) -> None:
        os.close(self.master)


def step_of(text: str) -> int:
    """The step that a live status shows; -1: none."""
    found = re.search(r"^step (\d+) of ", text, re.MULTILINE)
    return int(found[1]) if found else -1


def test_a_terminal_shows_the_job_live_and_the_job_outlives_it(tmp_path: Path) -> None:
    """SEE-1: step, loss, speed, layout, machines, next save and last event, below the workers' output."""
    with Job(tmp_path, machines=2, script=SCRIPT, manager=("sleep", "0")) as job:  # only its folder is used
        job.process.wait()
        command = [sys.executable, "-m", "varuna", "run", "--machine-list", "machines"]
        command += ["--gpus-per-node", "1", "--batch-size", "12", "--chunk-size", "2", "--nstages", "1"]
        taken = socket.create_server(("127.0.0.1", 0))
        command += ["--metrics-port", str(taken.getsockname()[1]), "script.py"]
        terminal = Terminal(command, cwd=tmp_path)
        job.process = terminal.process  # type: ignore[assignment]
        *_, shown = terminal.wait_for_all(
            *("half 0.5", "next save in", f" of {STEPS} ", "loss ", " left", " samples/s"),
            "layout 1 stage x 2 replicas, batch 12 in micro-batches of 2",
            *("127.0.0.1  at work  0 ", "127.0.0.2  at work  1 ", "last event ", "generation: 1: "),
            *("metrics endpoint: port ", " cannot be used: Address already in use"),
        )
        output, status = shown.split("\n── ", 1)
        assert "[rank 0] step " in output and "[rank 0] step " not in status
        taken.close()
        job.write_list(1, 2, 3)
        terminal.wait_for(lambda text: "1 morph" in text and "127.0.0.3  at work" in text)
        terminal.resize(60, 12)
        terminal.wait_for(lambda text: "3 machines" in text and text.count("── script-") == 1)
        terminal.close()  # the window is closed; the manager was started so that it survives this
        watch = subprocess.Popen(
            [sys.executable, "-m", "varuna", "status", "--watch", "--json"],
            cwd=tmp_path,
            env=environment(tmp_path),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert watch.stdout is not None
        view = json.loads(watch.stdout.readline())
        assert view["layout"]["widths"] == [3] and view["scalars"] == {"half": 0.5} and view["morphs"] == 1
        live = Terminal([sys.executable, "-m", "varuna", "status", "--watch"], cwd=tmp_path)
        live.wait_for_all("layout 1 stage x 3 replicas", "127.0.0.3  at work  2 ", "half 0.5", "1 morph")
        first = live.wait_for(lambda text: "step " in text and text.count("── script-") == 1)
        live.wait_for(lambda text: step_of(text) > step_of(first) and text.count("── script-") == 1)
        (tmp_path / "hurry").touch()
        assert terminal.process.wait() == 0
        live.wait_for(lambda text: " is over: finished: " in text)
        assert live.process.wait() == 0
        live.close()
        *_, last = watch.stdout.read().splitlines()
        assert watch.wait() == 0 and " is over: finished: " in last
    assert job.processes_left() == []
    done = job.varuna("status", "--watch")
    assert done.returncode == 0 and " is over: finished: " in done.stdout


def test_without_a_terminal_the_status_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SEE-1: one line when its time has come and something has changed; none with --no-status."""
    clock_ = [0.0]
    monkeypatch.setattr(screens.time, "monotonic", lambda: clock_[0])
    screen = open_screen("live")  # stdout is no terminal here
    assert isinstance(screen, PlainScreen)
    view = example(step=3)
    for now, needs_view in ((1.0, False), (16.0, True), (17.0, False), (40.0, True)):
        clock_[0] = now
        assert screen.needs_view == needs_view
        screen.update(view)
    screen.worker_output(0, "one\ntwo\n", is_stderr=False)
    screen.close()
    off = open_screen("off")
    clock_[0] = 1000.0
    off.update(example(step=4))
    assert not off.needs_view
    off.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"varuna: status: {plain_line(view)}", "[rank 0] one", "[rank 0] two"]
    assert plain_line(view) == (
        "step 3 of 10, loss 0.25, 32 samples/s, 8.2 M tokens/s, MFU 41.0%, 0.25 s/step, "
        "2 stages x 1 replica, 2 machines: 1 at work, 1 lost, 1:01:05 left, saved step 2, next save in 0:30, "
        "1 morph, 2 losses"
    )


def test_a_view_is_made_only_if_somebody_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEE-3: without a terminal, Prometheus gets a new view, but not one for each of many requests."""
    clock_ = [100.0]
    monkeypatch.setattr(viewers.time, "monotonic", lambda: clock_[0])
    made: list[JobView] = []

    def view(state: object, *, now: float) -> JobView:
        made.append(example(step=len(made)))
        return made[-1]

    observer = SimpleNamespace(view=view, subscribers=[])
    job = SimpleNamespace(script="s", arguments=(), log_dir=str(tmp_path))
    contact, clock = SimpleNamespace(job="j"), SimpleNamespace(now=lambda: 0.0)
    manager = SimpleNamespace(observer=observer, job=job, contact=contact, clock=clock, state=None)

    async def look() -> None:
        shown = Viewers(manager, open_screen("off"), ViewerOptions(status="off"))  # type: ignore[arg-type]
        task = asyncio.create_task(shown.run())
        await asyncio.sleep(0)
        assert not made
        for step, at in enumerate((100.0, 200.0)):
            clock_[0] = at
            for _ in range(2):
                found = await asyncio.to_thread(shown._view_for_thread)
                assert found is not None and found.step == step
        task.cancel()
        shown.close()

    asyncio.run(look())
    assert len(made) == 2


def example(step: int, **changes: object) -> JobView:
    fields: dict[str, object] = {
        **{"job": "job", "at": 0.0, "begun_at": 0.0, "phase": "running", "phase_seconds": 5.0, "reason": ""},
        **{"step": step, "num_steps": 10, "loss": 0.25, "step_seconds": 0.25, "samples_per_second": 32.0},
        **{
            "tokens_per_second": 8.2e6,
            "mfu": 0.41,
            "eta_seconds": 3665.0,
            "store": "s3://x",
            "saved_step": 2,
        },
        **{"next_save_seconds": 30.9, "morphs": 1, "losses": 2},
        "layout": LayoutView(
            generation=2,
            stage_map=((0,), (1,)),
            depth=2,
            widths=(1, 1),
            batch_size=8,
            microbatch_size=2,
            text="2 stages x 1 replica",
        ),
        "machines": (MachineView(name="a", state="at work", ranks=(0,)), MachineView(name="b", state="lost")),
    }
    return JobView(**{**fields, **changes})  # type: ignore[arg-type]


def test_machines_cannot_control_the_terminal_and_many_of_them_fit() -> None:
    """SEE-1: names and reasons of machines are text; those that need attention come first."""
    machines = tuple(MachineView(name=f"10.0.0.{n}", state="at work", ranks=(n,)) for n in range(49))
    machines += (MachineView(name="[fd00:a:b::1]", state="lost"),)
    bad = MachineView(name="evil\x1b[2Jname", state="lost", slow=True)
    event = EventView(0.0, "failed", "worker said \x1b]0;title\x07\nand more")
    console = Console(width=90, height=30, record=True, file=io.StringIO(), force_terminal=True)
    view = example(1, machines=(*machines, bad), last_event=event, loss=None, num_steps=None)
    console.print(live_status(view))
    text = console.export_text()
    assert "evil\\x1b[2Jname" in text and "\\x1b]0;title\\x07 and more" in text
    assert "[fd00:a:b::1]" in text, "an address, not a style"
    assert "and 43 more" in text and "43 at work" in text and "loss not finite" in text
    assert len(text.splitlines()) < 20


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (90, "machine state ranks step s compute s wait s memory"),
        (60, "machine state ranks step s compute s memory"),
        (30, "machine state step s"),
        (20, "machine state"),
    ],
)
def test_a_narrow_terminal_shows_fewer_columns_and_whole_names(width: int, shown: str) -> None:
    """SEE-1"""
    machines = (MachineView(name="10.0.0.12", state="at work", ranks=(0, 1), memory_bytes=2**30),)
    console = Console(width=width, height=30, record=True, file=io.StringIO(), force_terminal=True)
    console.print(live_status(example(1, machines=machines), width=width))
    lines = console.export_text().splitlines()
    (header,) = (line for line in lines if line.startswith("machine"))
    assert header.split() == shown.split()
    assert any(line.startswith("10.0.0.12  at work") for line in lines)
    console.print(live_status(example(1, machines=()), width=width))  # a job that begins


@pytest.mark.parametrize("height", [14, 18, 24, 40])
def test_the_status_fits_a_low_terminal_and_leaves_lines_for_the_output(height: int) -> None:
    """SEE-1: also with many machines and problems; the last event is not cut off."""
    machines = tuple(MachineView(name=f"10.0.0.{n}", state="at work", ranks=(n,)) for n in range(12))
    problems = {"journal": "disk full", "tensorboard": "disk full"}
    view = example(1, machines=machines, problems=problems, last_event=EventView(0.0, "morphed", "2"))
    console = Console(width=90, height=height, record=True, file=io.StringIO(), force_terminal=True)
    console.print(live_status(view, height=height))
    lines = console.export_text().splitlines()
    assert len(lines) <= height - OUTPUT_LINES and "morphed: 2" in lines[-1]
    assert any("tensorboard: disk full" in line for line in lines)


@pytest.mark.parametrize(("height", "shown"), [(14, 1), (40, 8)])
def test_a_watched_status_shows_the_last_events(height: int, shown: int) -> None:
    """SEE-1: as many as fit."""
    events = tuple(EventView(float(n), f"event {n}", "because") for n in range(20))
    view = example(1, events=events, last_event=events[-1])
    console = Console(width=90, height=height, record=True, file=io.StringIO(), force_terminal=True)
    console.print(live_status(view, height=height, num_events=NUM_EVENTS))
    lines = console.export_text().splitlines()
    found = [line for line in lines if "event " in line and "because" in line]
    assert len(found) == shown and len(lines) <= height - OUTPUT_LINES
    assert found[-1].startswith("last event ") and all(
        f"event {19 - n}: " in found[-1 - n] for n in range(shown)
    )


def test_without_a_terminal_a_watched_status_prints_each_event_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SEE-1: at first the last ones, then each new one."""
    events = [EventView(float(n), f"event {n}", "because") for n in range(20)]

    def views(code_dir: str) -> Iterator[tuple[JobView, str]]:
        for count in (18, 18, 19, 20):
            yield example(1, events=tuple(events[max(0, count - 15) : count])), ""

    monkeypatch.setattr(watching, "views", views)
    watching.watch_job(".", as_json=False)
    lines = capsys.readouterr().out.splitlines()
    found = [line.split()[2].rstrip(":") for line in lines if line.endswith("because")]
    assert found == [str(n) for n in range(10, 20)] and len(lines) == len(found) + 1


NASTY = "a\x00b\x9b2Jc\x1b]0;title\x07d\x1b[2Je\x08f\tg\x1b[31mred\x1b[0mh\x1b(0i\x7f\x1b"
VISIBLE = "a\\x00b\\x9b2Jc\\x1b]0;title\\x07d\\x1b[2Je\\x08f\tg\x1b[31mred\x1b[0mh\\x1b(0i\\x7f\\x1b"


def test_workers_cannot_control_a_plain_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters are visible; colours stay, and end with the line."""
    screen = PlainScreen()
    screen.worker_output(3, f"{NASTY}\nplain\n", is_stderr=False)
    screen.worker_output(3, "\x1b[32mgreen", is_stderr=True)
    screen.close()
    found = capsys.readouterr()
    assert found.out.splitlines() == [f"[rank 3] {VISIBLE}\x1b[0m", "[rank 3] plain"]
    assert found.err == "[rank 3] \x1b[32mgreen\x1b[0m\n"


@pytest.mark.parametrize("is_stderr", [False, True])
def test_a_pipe_that_nobody_reads_delays_nothing(is_stderr: bool) -> None:
    """SEE-1: the manager calls the screen between two messages of its machines."""
    script = (
        "from varuna.cli.status.screen import open_screen\n"
        "screen = open_screen('live')\n"
        f"for number in range(30_000): screen.worker_output(0, str(number), is_stderr={is_stderr})\n"
        "screen.close()\n"
    )
    kept = subprocess.PIPE, subprocess.DEVNULL
    stdout, stderr = reversed(kept) if is_stderr else kept
    with subprocess.Popen([sys.executable, "-c", script], stdout=stdout, stderr=stderr) as process:
        assert process.wait(60) == 0, "it waits for the pipe"
        unread = process.stderr if is_stderr else process.stdout
        assert unread is not None
        lines = unread.read().decode().splitlines()
    assert lines[:2] == ["[rank 0] 0", "[rank 0] 1"] and len(lines) < 30_000


def test_workers_cannot_control_a_live_terminal() -> None:
    leader, follower = pty.openpty()
    live = LiveScreen(follower)
    live.worker_output(0, f"{NASTY}\nlast line\n", is_stderr=False)
    data = b""
    while b"last line" not in data:
        data += os.read(leader, 65536)
    seen = data.decode()
    live.close()
    os.close(follower)
    os.close(leader)
    assert "a\\x00b\\x9b2Jc\\x1b]0;title\\x07d\\x1b[2Je\\x08f" in seen and "i\\x7f\\x1b" in seen
    assert "\x1b[31mred" in seen
    assert not [
        one for one in ("\x00", "\x07", "\x08", "\x9b", "\x7f", "\x1b[2J", "\x1b]", "\x1b(") if one in seen
    ]


def test_status_shows_text_of_machines_and_workers_as_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SEE-1"""
    machine = MachineStatus("[fd00:a:b::1]", "lost", None, None, ())
    found = JobStatus(
        **{"job": "a", "pid": 1, "phase": "running", "phase_seconds": 1.0, "reason": "", "generation": None},
        **{"layout": None, "resume_step": None, "iteration": 0, "step_seconds": 0.0, "store": ""},
        **{"checkpoint_note": "\x1b[2J", "saved_step": None, "save_seconds": 0.0, "save_every_seconds": 0.0},
        **{"losses": 0, "slow_machines": ("b\x07",), "log_dir": "logs", "machines": (machine,)},
        problems={"save": "\x1b]0;title"},
    )
    answer = ManagerReply(ok=True, text="", status=msgspec.json.encode(found))
    monkeypatch.setattr(jobs, "request_manager", lambda *_: answer)
    jobs.status()
    out = capsys.readouterr().out
    assert "[fd00:a:b::1]" in out and "save: \\x1b]0;title" in out
    assert "broken checkpoint: \\x1b[2J" in out and "slow: b\\x07" in out and "\x1b" not in out


def test_numbers_are_short() -> None:
    assert ranks_text(()) == "-" and ranks_text((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"
    assert list(map(amount, (0.5, 42.25, 950.4, 9500.0, 12345.0, 4.56e6, 2e9))) == [
        *("0.5", "42.2", "950", "9,500", "12.3 k", "4.56 M", "2 G")
    ]
    assert list(map(clock, (7, 751, 11530, 184320))) == ["0:07", "12:31", "3:12:10", "2 d 03:12"]
