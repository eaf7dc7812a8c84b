"""The last step of a job, from its workers' trace files: found over morphs, in bounded memory."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.page.folders import BEGUN, TracedWorker, view_of, write_report
from varuna.morph.protocol.messages import LogPage, ManagerReply
from varuna.observe.job_view import LayoutView
from varuna.observe.trace_file import list_traces
from varuna.page.last_step import LastStepReader
from varuna.page.timeline_reader import MAX_DRAWN, ShownStep, TimelineReader
from varuna.page.trace_tail import MAX_STEPS, TraceTail


def no_manager(what: str, **fields: object) -> ManagerReply:
    raise ValueError("no manager runs this job")


def layout(generation: int = 1) -> LayoutView:
    """Two stages with one replica each."""
    found = view_of(machines=2, stages=2, steps=1).layout
    assert found is not None
    return msgspec.structs.replace(found, generation=generation)


def shown_by(reader: TimelineReader, *, generation: int = 1, since: float = 0.0) -> ShownStep:
    reader.update(layout(generation), {0: "node-0", 1: "node-1"}, since=since)
    return msgspec.json.decode(bytes(reader.read()), type=ShownStep)


def local_tail(path: Path, sizes: list[int] | None = None) -> TraceTail:
    def read(start: int) -> tuple[bytes, int]:
        data = path.read_bytes()
        if sizes is not None:
            sizes.append(len(data[start:]))
        return data[start:], len(data)

    return TraceTail(read, is_remote=False)


def test_the_last_step_is_the_newest_that_all_stages_have_finished(tmp_path: Path) -> None:
    """SEE-2: rank 1 has not written step 8 yet. The page counts finished steps, so step 7 is the eighth."""
    first, second = (TracedWorker(tmp_path, generation=1, rank=rank) for rank in (0, 1))
    reader = TimelineReader(tmp_path, no_manager)
    first.finish(*range(9))
    second.finish(*range(8))
    found = shown_by(reader)
    assert (found.kind, found.step, found.generation) == ("last", 8, 1)
    kinds = {one.what for one in found.measured.intervals}
    assert kinds == {"F", "B", "wait", "reduce", "optimizer"}, "not what overlaps the compute"
    assert [round(stage.compute_seconds, 6) for stage in found.stages] == [0.04, 0.04]
    assert found.stages[0].seconds == pytest.approx(found.measured.seconds)
    version = reader.version
    shown_by(reader)
    assert reader.version == version, "nothing is new"
    second.finish(8)
    assert shown_by(reader).step == 9 and reader.version > version


def test_a_worker_keeps_its_file_over_a_morph(tmp_path: Path) -> None:
    """The ranks are exchanged in generation 2: each file is named by the rank of its start."""
    workers = [TracedWorker(tmp_path, generation=1, rank=rank) for rank in (0, 1)]
    reader = TimelineReader(tmp_path, no_manager)
    for worker in workers:
        worker.finish(0, 1)
    assert shown_by(reader).generation == 1
    assert (shown_by(reader, generation=2).generation, shown_by(reader, generation=2).step) == (1, 2)
    for worker in workers:
        worker.generation, worker.rank, worker.stage = 2, 1 - worker.rank, 1 - worker.rank
        worker.finish(2)
    fresh = TimelineReader(tmp_path, no_manager)
    found = shown_by(fresh, generation=2)
    assert (found.generation, found.step) == (2, 3)
    assert {(one.stage, one.rank) for one in found.measured.intervals} == {(0, 0), (1, 1)}


def test_a_rank_whose_file_is_elsewhere_is_read_from_its_machine(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    TracedWorker(here, generation=1, rank=0).finish(*range(5))
    other = TracedWorker(there, generation=1, rank=1)
    other.finish(*range(5))
    places: list[Any] = []

    def ask(what: str, **fields: Any) -> ManagerReply:
        if fields["stream"] == "timeline":
            raise ValueError("there is no such log")
        assert (what, fields["machine"]) == ("logs", "node-1")
        if fields["stream"] == "traces":
            data = msgspec.json.encode(list_traces(there))
            return ManagerReply(True, "", log=LogPage(len(data), len(data), data=data))
        places.append(fields["start"])
        data = other.path.read_bytes()
        piece = data[fields["start"] :][:100]  # pages are shorter than the file
        return ManagerReply(True, "", log=LogPage(fields["start"] + len(piece), len(data), data=piece))

    reader = LastStepReader(here, ask)
    traces = reader.update(layout(), {0: "node-0", 1: "node-1"})
    assert [(trace.rank, trace.step) for trace in traces] == [(0, 4), (1, 4)]
    assert places == list(range(0, other.path.stat().st_size, 100))


def test_without_traces_the_typical_step_is_shown_and_says_why(tmp_path: Path) -> None:
    write_report(tmp_path, stages=2, microbatches=2, predicted=True)
    found = shown_by(TimelineReader(tmp_path, no_manager))
    assert (found.kind, found.step) == ("typical", 10)
    assert (
        found.note
        == "the last step is not known here: the steps of node-1 cannot be read: no manager runs this job"
    )
    assert found.predicted is not None and found.forecast is not None


def test_nothing_is_shown_before_the_layout_is_known(tmp_path: Path) -> None:
    """The typical step would be replaced by the last one a second later."""
    write_report(tmp_path, stages=2, microbatches=2, predicted=False)
    reader = TimelineReader(tmp_path, no_manager)
    reader.update(None, {}, since=0.0)
    assert (bytes(reader.read()), reader.version) == (b"null", 0)


def test_a_prediction_of_another_layout_is_not_compared(tmp_path: Path) -> None:
    for rank in (0, 1):
        TracedWorker(tmp_path, generation=1, rank=rank).finish(0)
    write_report(tmp_path, stages=2, microbatches=2, predicted=True)
    found = shown_by(TimelineReader(tmp_path, no_manager))
    assert found.predicted is not None and found.forecast is not None
    os.utime(tmp_path / "timeline.json", (BEGUN, BEGUN))  # written before the layout began
    assert shown_by(TimelineReader(tmp_path, no_manager), since=BEGUN + 1).predicted is None
    write_report(tmp_path, stages=2, microbatches=3, predicted=True)
    found = shown_by(TimelineReader(tmp_path, no_manager))
    assert found.predicted is None and found.forecast is None


def test_a_step_with_too_many_operations_has_only_its_table(tmp_path: Path) -> None:
    for rank in (0, 1):
        TracedWorker(tmp_path, generation=1, rank=rank).finish(0, microbatches=MAX_DRAWN // 4)
    found = shown_by(TimelineReader(tmp_path, no_manager))
    assert found.measured.intervals == () and "too many to draw" in found.note
    assert found.stages[1].compute_seconds > 0


def test_only_new_bytes_of_a_trace_are_read_and_few_steps_kept(tmp_path: Path) -> None:
    worker = TracedWorker(tmp_path, generation=1, rank=0)
    worker.finish(*range(2 * MAX_STEPS))
    size = worker.path.stat().st_size
    sizes: list[int] = []
    tail = local_tail(worker.path, sizes)
    assert tail.update() == size
    assert tail.steps(1, 0) == set(range(MAX_STEPS, 2 * MAX_STEPS)) and tail.steps(1, 1) == set()
    worker.finish(2 * MAX_STEPS)
    assert tail.update() == worker.path.stat().st_size - size == sizes[-1] > 0
    assert tail.trace(2 * MAX_STEPS).step == 2 * MAX_STEPS
    assert tail.update() == 0
    tail.forget()
    assert tail.steps(1, 0) == set() and tail.newest is not None and tail.newest.step == 2 * MAX_STEPS


def test_a_trace_is_followed_when_its_worker_starts_a_new_file(tmp_path: Path) -> None:
    worker = TracedWorker(tmp_path, generation=1, rank=0, file_bytes=4000)
    tail = local_tail(worker.path)
    for step in range(60):
        worker.finish(step)
        tail.update()
        assert tail.newest is not None and tail.newest.step == step
    assert worker.path.with_suffix(".trace.old").exists()


def test_a_new_file_that_is_already_longer_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "generation_1" / "rank_0.trace"
    TracedWorker(tmp_path, generation=1, rank=0).finish(0, microbatches=3)
    tail = local_tail(path)
    tail.update()
    TracedWorker(tmp_path, generation=1, rank=0).finish(*range(1, 9))  # this truncates the file
    tail.update()
    assert tail.newest is not None and tail.newest.step == 8


def test_a_damaged_or_incomplete_trace_does_no_harm(tmp_path: Path) -> None:
    worker = TracedWorker(tmp_path, generation=1, rank=0)
    worker.finish(0, 1)
    whole = worker.path.read_bytes()
    worker.path.write_bytes(whole[:-3])  # the worker was killed while it wrote step 1
    tail = local_tail(worker.path)
    tail.update()
    assert tail.newest is not None and tail.newest.step == 0
    worker.path.write_bytes(b"\x05\x00\x00\x00" + b"\xff" * 5 + b"\x00" * 40)
    tail = local_tail(worker.path)
    for _ in range(3):
        tail.update()
    assert tail.newest is None
