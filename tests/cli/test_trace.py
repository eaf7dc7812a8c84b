"""`varuna trace` writes the recorded steps of all ranks as a trace that Perfetto opens."""

import json
import os
import shutil
import socket
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from tests.morph.jobs import Job
from tests.morph.test_hot_jobs import FETCHES
from tests.pool import Pool
from varuna import CutPoint, Varuna
from varuna.addresses import machine_identity
from varuna.cli.main import app
from varuna.cli.status import trace as trace_command
from varuna.morph.protocol.messages import LogPage, ManagerReply
from varuna.observe import trace_file
from varuna.observe.job_view import NAME as VIEW
from varuna.observe.job_view import JobView, LayoutView
from varuna.observe.record import Entry, Recorder
from varuna.observe.step_timelines import StepTimelines
from varuna.observe.trace_file import (
    StepTrace,
    StepTracer,
    decode_traces,
    read_traces,
    step_timeline,
    whole_timeline,
)
from varuna.types import Interval, StageTime, StepReport, Timeline


class Net(torch.nn.Sequential):
    def forward(self, x: Any) -> Any:
        return super().forward(x).square().mean()


def train_traced(folder: str, steps: int) -> set[str]:
    """Train at two stages, save by a call and by a request; return the names that torch.profiler shows."""
    os.environ["VARUNA_LOG_DIR"], before = folder, os.environ.get("VARUNA_LOG_DIR")
    try:
        net = Net(torch.nn.Linear(8, 8), CutPoint(), torch.nn.Linear(8, 1))
        model = Varuna(net, "0;1;", {"x": torch.ones(2, 8)}, 8, 2, device="cpu", seed=1, recompute=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.set_optimizer(optimizer)
        for _ in range(steps):
            model.step({"x": torch.ones(8, 8)})
            optimizer.step()
            model.zero_grad()
        model.checkpoint(f"{folder}/store")
        model.checkpoint(f"{folder}/store", on_demand=True)
        for _ in range(2):  # the first one carries the request to all ranks
            model.step({"x": torch.ones(8, 8)})
            optimizer.step()
            model.zero_grad()
        model._trainer.engine.delay = lambda op, number: 0.02  # so that the second stage has to wait
        with torch.profiler.profile() as profiled:
            model.step({"x": torch.ones(8, 8)})
            optimizer.step()
            model.checkpoint(f"{folder}/profiled")
        model.close()
        model._tracer.close()
    finally:
        os.environ.pop("VARUNA_LOG_DIR") if before is None else os.environ.update(VARUNA_LOG_DIR=before)
    Path(folder, f"rank_{dist.get_rank()}.out").touch()
    return {event.key for event in profiled.key_averages()}


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def check_format(file: Path) -> list[dict[str, Any]]:
    """Check the rules of Chrome's trace event format; return the drawn intervals."""
    document = json.loads(file.read_text())
    assert document["displayTimeUnit"] == "ms"
    named: dict[str, set[Any]] = {"process_name": set(), "process_sort_index": set(), "thread_name": set()}
    drawn = []
    for event in document["traceEvents"]:
        assert isinstance(event["pid"], int) and event["name"]
        if event["ph"] == "M":
            place = event["pid"] if event["name"].startswith("process") else (event["pid"], event["tid"])
            assert place not in named[event["name"]], "a name is given once"
            named[event["name"]].add(place)
            value = event["args"]["sort_index" if event["name"].endswith("index") else "name"]
            assert isinstance(value, int if event["name"].endswith("index") else str)
        else:
            assert event["ph"] == "X" and isinstance(event["tid"], int) and event["cat"]
            assert event["ts"] >= 0 and event["dur"] >= 0
            drawn.append(event)

    def track(event: dict[str, Any]) -> tuple[int, int]:
        return event["pid"], event["tid"]

    drawn.sort(key=lambda event: (*track(event), event["ts"], -event["dur"]))
    assert {track(event) for event in drawn} == named["thread_name"]
    assert {event["pid"] for event in drawn} == named["process_name"] == named["process_sort_index"]
    for _, events in groupby(drawn, track):  # intervals of a track are disjoint or nest
        open_until: list[float] = []
        for event in events:
            while open_until and open_until[-1] <= event["ts"] + 0.01:
                open_until.pop()
            stop = event["ts"] + event["dur"]
            assert not open_until or stop <= open_until[-1] + 0.01, event
            open_until.append(stop)
    return drawn


def test_a_trace_has_all_ranks_and_kinds(pool: Pool, tmp_path: Path) -> None:
    """SEE-4: forward, backward, recompute, send, wait, reduce, optimizer and save of both stages."""
    names = pool.run(train_traced, 2, str(tmp_path), 12)
    assert {"varuna forward 0", "varuna backward 3"} <= names[0] and "varuna recompute 1" in names[0]
    for shown in names:
        assert {"varuna send", "varuna reduce", "varuna save", "Optimizer.step#SGD.step"} <= shown
    assert "varuna wait" in names[1]
    found = run(tmp_path, "--steps", "4:14")
    assert found.exit_code == 0, found.output
    assert "10 steps of 2 ranks" in found.output and "stage 1: idle" in found.output
    assert "lacks" not in found.output
    drawn = check_format(tmp_path / "trace.json")
    kinds = {rank: {e["cat"] for e in drawn if e["args"]["rank"] == rank} for rank in (0, 1)}
    for rank in (0, 1):
        assert {"F", "B", "send", "reduce", "optimizer", "save"} <= kinds[rank]
        assert sum(e["cat"] == "F" and e["args"]["rank"] == rank for e in drawn) == 10 * 4
        assert sum(e["cat"] == "save" and e["args"]["rank"] == rank for e in drawn) == 2
        assert "morph" not in kinds[rank]
    assert "R" in kinds[0] and any("wait" in found for found in kinds.values())
    for steps, message in (("90:95", "0 to 14"), ("9:4", "FIRST below STOP"), ("x", "not 'x'")):
        refused = run(tmp_path, "--steps", steps)
        assert refused.exit_code != 0 and message in str(refused.exception or refused.output)


def train_zero_bubble(folder: str, steps: int) -> None:
    os.environ["VARUNA_LOG_DIR"], before = folder, os.environ.get("VARUNA_LOG_DIR")
    try:
        net = Net(torch.nn.Linear(8, 8), CutPoint(), torch.nn.Linear(8, 1))
        sample = {"x": torch.ones(2, 8)}
        model = Varuna(net, "0;1;", sample, 8, 2, device="cpu", seed=1, schedule="zero-bubble")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.set_optimizer(optimizer)
        for _ in range(steps):
            model.step({"x": torch.ones(8, 8)})
            optimizer.step()
            model.zero_grad()
        model.close()
        model._tracer.close()
    finally:
        os.environ.pop("VARUNA_LOG_DIR") if before is None else os.environ.update(VARUNA_LOG_DIR=before)
    Path(folder, f"rank_{dist.get_rank()}.out").touch()


def test_a_trace_of_a_zero_bubble_schedule_separates_the_weight_gradients(pool: Pool, tmp_path: Path) -> None:
    """SEE-4: each micro-batch has one backward, whole or as inputs and then weights."""
    pool.run(train_zero_bubble, 2, str(tmp_path), 3)
    assert run(tmp_path, "--steps", "1:2").exit_code == 0
    drawn = check_format(tmp_path / "trace.json")
    for rank in (0, 1):
        places: dict[str, list[int]] = {kind: [] for kind in "FBIW"}
        ends: dict[tuple[str, int], float] = {}
        for event in drawn:
            kind, number = event["cat"], event["args"]["microbatch"]
            if event["args"]["rank"] == rank and kind in places:
                places[kind].append(number)
                ends[kind, number] = event["ts"] + event["dur"]
        assert sorted(places["F"]) == sorted(places["B"] + places["I"]) == [0, 1, 2, 3], rank
        assert sorted(places["W"]) == sorted(places["I"]), rank
        assert all(ends["F", number] < ends["I", number] < ends["W", number] for number in places["W"])
        assert places["W"] or rank == 0, "the last stage has a backward to put off"


def lose_remote_files(job: Job, log_dir: Path) -> Path:
    """Return a log folder and a home as the manager's machine has them if no folder is shared."""
    elsewhere = job.folder / "elsewhere"
    for file in (*log_dir.glob("*.json*"), *log_dir.glob("generation_*/machines.json")):
        copy = elsewhere / file.relative_to(log_dir)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    shutil.copytree(job.folder / "home", job.folder / "other_home")
    (contact,) = (job.folder / "other_home").glob("jobs/*/manager.json")
    contact.write_text(json.dumps(json.loads(contact.read_text()) | {"log_dir": str(elsewhere)}))
    return elsewhere


def test_files_of_other_machines_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEE-4: by the manager while the job runs; afterwards, the command says what is missing and where."""
    options = ("--save-every", "off")
    with Job(tmp_path, machines=2, stages=2, script=FETCHES, options=options) as job:
        job.wait_for_steps(12)
        job.write_list(1, 2, 3, 4)
        job.wait_for("2 stages x 2 replicas")
        job.wait_for("morphed: ")
        job.wait_for_steps(4)
        log_dir, last = Path(job.status()["log_dir"]), job.last_step
        folder = lose_remote_files(job, log_dir)
        monkeypatch.setenv("VARUNA_HOME", str(tmp_path / "other_home"))
        found = run(folder, "--steps", f"8:{last}")
        assert found.exit_code == 0, (found.output, found.exception)
        assert f"{last - 8} steps of 4 ranks" in found.output and "lacks" not in found.output
        drawn = check_format(folder / "trace.json")
        for rank in range(4):
            kinds = {event["cat"] for event in drawn if event["args"]["rank"] == rank}
            assert {"F", "B", "reduce", "morph"} <= kinds and (rank > 1 or "save" in kinds), rank
        assert not list(folder.glob("**/*.trace*"))
    missing = run(folder)
    text = str(missing.exception)
    assert missing.exit_code != 0 and f"on 127.0.0.4, {log_dir}/generation_*/rank_*.trace*" in text
    for file in log_dir.glob("generation_*/rank_0.trace"):
        shutil.copy(file, folder / file.parent.name)
    found = run(folder)
    assert found.exit_code == 0 and "10 steps of 1 ranks" in found.output, found.output
    for rank in (1, 2, 3):
        place = f"on 127.0.0.{rank + 1}, {log_dir}/generation_*"
        assert any(f"lacks rank {rank} in" in line and place in line for line in found.output.splitlines())


def step_trace(step: int, rank: int, machine: str, start: float, written: float) -> StepTrace:
    entries = [("F", 0, start, start + 1), ("reduce", -1, start + 1, start + 2)]
    return StepTrace(step, rank, 0, 2, written, machine, 1, entries)


class OtherMachine:
    """A manager of a job whose log folder is not shared: the first rank has `timeline.json` elsewhere."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def request(self, what: str, **fields: Any) -> ManagerReply:
        if (what, fields.get("stream"), fields.get("rank")) != ("logs", "timeline", 3):
            raise ValueError("no such file")
        start = fields["start"]
        page = LogPage(start, len(self._data), data=self._data[start : start + 100])
        return ManagerReply(ok=True, text="", log=page)


def test_the_predicted_idle_share_is_fetched_from_the_first_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEE-4"""
    tracer = StepTracer(tmp_path / "generation_1" / "rank_3.trace")
    tracer.leave(0, 3, 0, 1, lambda: [("F", 0, 0.0, 1.0), ("reduce", -1, 1.0, 2.0)], generation=1)
    tracer.close()
    layout = LayoutView(
        generation=1, stage_map=((3,),), depth=1, widths=(1,), batch_size=8, microbatch_size=8, text=""
    )
    view = JobView(
        job="a", at=1.0, begun_at=0.0, phase="running", phase_seconds=1.0, reason="", layout=layout
    )
    (tmp_path / VIEW).write_bytes(msgspec.json.encode(view))
    predicted = Timeline((Interval(3, 0, "F", 0, 0.0, 3.0), Interval(3, 0, "reduce", -1, 3.0, 4.0)))
    report = StepReport(10, 1, 2.0, (StageTime(1.0, 0.0, 1.0, 0.0),))
    elsewhere = msgspec.json.encode(StepTimelines(report, predicted, predicted))
    monkeypatch.setattr(trace_command, "ManagerLink", lambda *arguments: OtherMachine(elsewhere))
    found = run(tmp_path)
    assert "stage 0: idle 50.0% of a step, predicted 25.0%" in found.output, found.output


def test_steps_on_changing_machines_are_on_one_clock() -> None:
    """SEE-4: the first machine leaves, then all of them; clocks differ by hours."""
    steps = [
        [step_trace(0, 0, "a", 100.0, 50.0), step_trace(0, 1, "b", 9000.0, 50.0)],
        [step_trace(1, 0, "b", 9003.0, 53.0), step_trace(1, 1, "c", 7.0, 53.0)],
        [step_trace(2, 0, "d", 5e6, 57.0), step_trace(2, 1, "e", 2.0, 57.0)],
    ]
    found = whole_timeline(steps).intervals
    forwards = [(i.rank, i.start_seconds) for i in found if i.what == "F"]
    assert forwards == [(rank, start) for rank in (0, 1) for start in (0.0, 3.0, 7.0)]


def test_cloned_machines_with_one_host_name_have_clocks_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEE-4: also if their files are read together with one of an earlier version, with the host name."""
    assert machine_identity() == machine_identity() != socket.gethostname()
    for rank, start in enumerate((100.0, 9000.0)):
        monkeypatch.setattr(trace_file, "machine_identity", lambda rank=rank: f"clone boot-{rank}")
        tracer = StepTracer(tmp_path / f"rank_{rank}.trace")
        entries = step_trace(0, rank, "", start, 0.0).entries
        tracer.leave(0, rank, 0, 3, lambda entries=entries: [*entries])  # type: ignore[misc]
        tracer.close()
    earlier = StepTrace(0, 2, 0, 3, 50.0, "clone", 0, step_trace(0, 2, "", 5e6, 0.0).entries)
    found = step_timeline([*read_traces(tmp_path), earlier]).intervals
    assert [(i.rank, i.start_seconds) for i in found if i.what == "F"] == [(0, 0.0), (1, 0.0), (2, 0.0)]


def test_time_between_steps_is_a_save_or_a_morph_only_if_there_was_one(tmp_path: Path) -> None:
    """SEE-4"""
    tracer = StepTracer(tmp_path / "rank_0.trace")
    for step, noted in enumerate(((), ("save",), ("morph",), ("save", "morph"))):
        tracer.leave(step, 0, 0, 1, lambda: [("F", 0, 1.0, 2.0)])
        now = time.perf_counter()
        for place, what in enumerate(noted):
            tracer.note(what, now - 0.4 / (place + 1))
        tracer.note_between(now - 0.4 if step else now - 0.5)
        tracer.note_between(time.perf_counter())  # short
        if step == 1:
            tracer.note_between(now - 0.9)
        tracer.enter(time.perf_counter(), uninterrupted=False)
    tracer.close()
    found = [[entry[0] for entry in trace.entries[1:]] for trace in read_traces(tmp_path)]
    assert found == [["between"], ["save", "between"], ["morph"], ["save", "morph"]]
    before = read_traces(tmp_path)[1].entries
    assert before[2][3] == before[1][2], "it ends where the save starts"


def test_short_steps_are_written_together(tmp_path: Path) -> None:
    """SEE-4: after a quarter of a second or sixteen steps, before a pause, and at the end."""
    tracer = StepTracer(tmp_path / "rank_0.trace")

    def written(start: float, *steps: int) -> list[int]:
        for step in steps:
            tracer.leave(step, 0, 0, 1, lambda: [("F", 0, 1.0, 2.0)])
            tracer.enter(start + 0.001 * step, uninterrupted=True)
        return [trace.step for trace in read_traces(tmp_path)]

    assert written(1.0, 0) == [0], "the first one at once"
    assert written(1.0, *range(1, 16)) == [0]
    assert written(1.0, 16) == [*range(17)]
    assert written(1.0, 17) == [*range(17)]
    assert written(1.25, 18) == [*range(19)]
    assert written(1.25, 19) == [*range(19)]
    tracer.flush()
    assert written(1.25, 20) == [*range(20)]
    tracer.close()
    assert written(1.25) == [*range(21)]


def test_the_intervals_of_a_step_are_read_when_it_is_written(tmp_path: Path) -> None:
    """SEE-4: the next step does not wait for it, and its intervals stay as they were."""
    tracer, recorder = StepTracer(tmp_path / "rank_0.trace"), Recorder()
    read: list[int] = []

    def train(step: int) -> None:
        recorder.clear()
        recorder.add("F", step, 1.0, 2.0)
        snapshot = recorder.snapshot()
        recorder.add("F", 99, 2.0, 3.0)  # after the step

        def recorded() -> list[Entry]:
            read.append(step)
            return snapshot()

        tracer.leave(step, 0, 0, 1, recorded)
        tracer.enter(2.5 + step / 1000, uninterrupted=step != 2)

    for step in range(4):
        train(step)
    assert read == [0], "the first one is written at once"
    tracer.note("save", time.perf_counter())
    assert read == [0, 1, 2, 3]
    tracer.close()
    found = [trace.entries for trace in read_traces(tmp_path)]
    assert [[entry[:2] for entry in entries] for entries in found] == [
        [("F", 0), ("optimizer", -1)],
        [("F", 1), ("optimizer", -1)],
        [("F", 2)],
        [("F", 3), ("optimizer", -1)],
    ]
    assert found[1][1][2:] == (2.0, 2.501)


def test_a_trace_whose_folder_was_deleted_continues_and_closes_only_its_own_file(tmp_path: Path) -> None:
    """SEE-4: a closed descriptor may have become another file."""
    path = tmp_path / "generation_1" / "rank_0.trace"
    tracer = StepTracer(path, file_bytes=100, write_seconds=0.0)
    for step in range(6):
        tracer.leave(step, 0, 0, 1, lambda: [("F", 0, 1.0, 2.0)])
        tracer.enter(float(step), uninterrupted=True)
        if step == 2:
            shutil.rmtree(path.parent)
    assert max(trace.step for trace in read_traces(tmp_path)) == 5
    shutil.rmtree(path.parent)
    path.parent.touch()  # nothing can be written there
    tracer.leave(6, 0, 0, 1, lambda: [("F", 0, 1.0, 2.0)])
    tracer.enter(6.0, uninterrupted=True)
    assert not tracer.is_on
    with (tmp_path / "other").open("w+") as other:
        tracer.close()
        other.write("kept")


def test_folders_without_steps_are_refused(tmp_path: Path) -> None:
    """SEE-4: a folder that is no job's, and a job without steps."""
    refused = run(tmp_path)
    assert refused.exit_code != 0 and "not the log folder" in str(refused.exception or refused.output)
    (tmp_path / "generation_1").mkdir()
    refused = run(tmp_path)
    assert refused.exit_code != 0 and "no recorded steps" in str(refused.exception or refused.output)


def test_a_job_of_this_machine_without_steps_has_no_files_elsewhere(tmp_path: Path) -> None:
    """SEE-4: its workers failed before their first step."""
    (tmp_path / "generation_1").mkdir()
    (tmp_path / "generation_1" / "machines.json").write_text('{"127.0.0.1": [0, 1]}')
    refused = run(tmp_path)
    assert "no worker has finished a step" in str(refused.exception or refused.output)


def test_trace_files_are_bounded_and_survive_a_kill(tmp_path: Path) -> None:
    """SEE-4: two files of bounded size; an incomplete last step is left out."""
    path = tmp_path / "rank_0.trace"
    tracer = StepTracer(path, file_bytes=10_000)
    for step in range(300):
        tracer.leave(step, 0, 0, 1, lambda: [("F", 0, 1.0, 2.0), ("reduce", -1, 2.0, 3.0)])
        tracer.enter(time.perf_counter(), uninterrupted=True)
    tracer.close()
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert len(sizes) == 2 and sum(sizes) <= 20_000
    steps = [trace.step for trace in read_traces(tmp_path)]
    assert sorted(steps) == list(range(min(steps), 300)) and len(steps) > 50
    data = path.read_bytes()
    assert decode_traces(data[:-3]) == decode_traces(data)[:-1]


def test_a_full_disk_ends_the_trace_only(tmp_path: Path) -> None:
    tracer = StepTracer(tmp_path / "file" / "rank_0.trace")
    (tmp_path / "file").touch()
    tracer.leave(0, 0, 0, 1, lambda: [("F", 0, 1.0, 2.0)])
    tracer.enter(1.0, uninterrupted=False)
    assert not tracer.is_on
    with pytest.raises(OSError, match="Not a directory"):
        (tmp_path / "file" / "x").read_bytes()
