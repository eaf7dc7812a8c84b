"""What the server of the page reads: the state of a job from its files and its manager."""

import math
import os
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tests.page.folders import view_of
from varuna.morph.protocol.generations import MACHINES
from varuna.morph.protocol.messages import ManagerReply
from varuna.morph.run.job_folder import JobFolder, ManagerContact
from varuna.morph.run.log_pages import PAGE_BYTES
from varuna.observe.history_file import NAME as METRICS
from varuna.observe.history_file import MetricLine, read_history
from varuna.observe.job_view import NAME as VIEW
from varuna.observe.job_view import JobView
from varuna.page.job_reader import JobReader
from varuna.page.log_reader import LogReader, WorkerLog
from varuna.page.manager_link import ManagerLink
from varuna.secure.credential import make_credential


def test_a_job_is_over_until_a_manager_resumes_it(tmp_path: Path) -> None:
    """SEE-2: events that follow the end, such as a refused caller, do not change that."""
    reader = JobReader(tmp_path, ManagerLink(tmp_path, tmp_path / "home"))
    links = []
    with (tmp_path / "events.jsonl").open("ab", buffering=0) as file:
        for what in ("listening", "finished", "caller refused", "listening", "failed"):
            event = {"at": "2026-09-21T14:14:00.000+00:00", "what": what, "why": ""}
            file.write(msgspec.json.encode(event) + b"\n")
            links.append(reader.update().link)
    assert links == ["lost", "over", "over", "lost", "over"]


def test_a_killed_manager_is_gone_and_one_on_another_machine_is_not(tmp_path: Path) -> None:
    """SEE-2: the page says so, and since when."""
    sleeper = subprocess.Popen(["sleep", "600"])
    folder = JobFolder(tmp_path / "home" / "jobs" / "1")
    contact = ManagerContact(
        job="job",
        pid=sleeper.pid,
        address="127.0.0.1",
        port=1,
        credential=make_credential("job"),
        log_dir=str(tmp_path),
        host=socket.gethostname(),
    )
    folder.write_contact(contact)
    (tmp_path / METRICS).write_bytes(msgspec.json.encode(MetricLine(2, 150.0, 0.5, 0.1, 8)) + b"\n")
    view = view_of(machines=1, stages=1, steps=2)
    (tmp_path / VIEW).write_bytes(msgspec.json.encode(msgspec.structs.replace(view, at=100.0)))
    reader = JobReader(tmp_path, ManagerLink(tmp_path, tmp_path / "home"))
    try:
        assert reader.update().link == "lost"  # it runs, and does not answer
    finally:
        sleeper.kill()
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # its parent has not read its status
    found = reader.update()
    assert (found.link, found.seen_at) == ("gone", 150.0)
    sleeper.wait()
    assert reader.update().link == "gone"
    folder.write_contact(msgspec.structs.replace(contact, host="another machine"))
    assert reader.update().link == "lost"


class AnsweringLink:
    """A manager that gives these views, one after the other."""

    def is_gone(self) -> bool:
        return False

    def __init__(self, *views: bytes) -> None:
        self._views = list(views)

    def request(self, what: str, **fields: object) -> ManagerReply:
        assert what == "view"
        return ManagerReply(True, "", status=msgspec.Raw(self._views.pop(0)))


def test_views_that_cannot_be_read_are_a_problem_and_a_clock_that_is_set_back_is_none(tmp_path: Path) -> None:
    """SEE-2: neither stops the page."""
    views = b'{"at":20.0}', b'{"at":"late"}', b'{"at":19.0,"job":"\xff"}', b'{"at":10.0}'
    reader = JobReader(tmp_path, AnsweringLink(*views))  # type: ignore[arg-type]
    found = [reader.update() for _ in views]
    assert [(one.link, bytes(one.view)) for one in found] == [
        ("live", views[0]),
        ("lost", views[0]),
        ("live", views[2]),
        ("live", views[3]),
    ]
    assert "Expected `float`, got `str`" in found[1].problem
    broken = reader.failed(RuntimeError("no"))
    assert (broken.link, broken.problem) == ("lost", "this page cannot read the job: RuntimeError('no')")


def test_a_job_that_changes_is_read_more_often(tmp_path: Path) -> None:
    """SEE-2: one whose layout changes, or that has a new event."""
    phases = ("gathering", "running", "running", "running", "morphing", "over", "over")
    views = (b'{"phase":"%b"}' % phase.encode() for phase in phases)
    reader = JobReader(tmp_path, AnsweringLink(*views))  # type: ignore[arg-type]
    found = []
    with (tmp_path / "events.jsonl").open("ab", buffering=0) as file:
        for number in range(len(phases)):
            if what := {2: "lost", 5: "finished"}.get(number):
                event = {"at": "2026-09-21T14:14:00.000+00:00", "what": what, "why": ""}
                file.write(msgspec.json.encode(event) + b"\n")
            reader.update()
            found.append(reader.is_steady)
    assert found == [False, True, False, True, False, False, True]


def test_the_browser_gets_all_fields_of_a_view_or_none(tmp_path: Path) -> None:
    """SEE-2: the file may be damaged, or of an earlier version that had fewer fields."""
    least = {"job": "a", "at": 1.0, "begun_at": 0.0, "phase": "over", "phase_seconds": 0.0, "reason": ""}
    reader = JobReader(tmp_path, ManagerLink(tmp_path, tmp_path / "home"))
    for damaged in (b"{}", b'{"at":1.0}', b'{"machines":3,' + msgspec.json.encode(least)[1:], b"[]", b""):
        (tmp_path / VIEW).write_bytes(damaged)
        assert bytes(reader.update().view) == b"null"
    (tmp_path / VIEW).write_bytes(msgspec.json.encode(least).replace(b",", b",\n\n"))
    assert bytes(reader.update().view) == msgspec.json.encode(JobView(**least))


def test_a_line_with_bytes_that_are_no_text_is_left_out(tmp_path: Path) -> None:
    """SEE-2: as a disk may change it."""
    good = msgspec.json.encode(MetricLine(2, 1.0, 0.5, 0.1, 8))
    (tmp_path / METRICS).write_bytes(b'{"step":1,"at":0.0,"name":"\xff"}\n' + good + b"\n")
    reader = JobReader(tmp_path, ManagerLink(tmp_path, tmp_path / "home"))
    assert reader.update().last_step == 2
    assert [point.step for point in read_history(tmp_path).steps()] == [2]


def test_the_newest_events_of_a_part_are_marked(tmp_path: Path) -> None:
    """SEE-2: however many there are."""
    reader = JobReader(tmp_path, ManagerLink(tmp_path, tmp_path / "home"))
    with (tmp_path / METRICS).open("wb") as file:
        for step in range(1, 1001):
            file.write(msgspec.json.encode(MetricLine(step, float(step), 0.5, 1.0, 8)) + b"\n")
    with (tmp_path / "events.jsonl").open("wb") as file:
        for second in range(0, 1000, 2):
            at = datetime.fromtimestamp(second, UTC).isoformat()
            file.write(msgspec.json.encode({"at": at, "what": f"event {second}", "why": ""}) + b"\n")
    reader.update()
    whole = reader.curve(-math.inf, math.inf, axis="step", points=100)
    assert [mark.step for mark in whole.marks] == list(range(600, 1000, 2))
    assert (whole.first_event, whole.last_event) == (0.0, 998.0)
    part = reader.curve(10, 20, axis="time", points=100)
    assert [mark.what for mark in part.marks] == [f"event {second}" for second in range(10, 21, 2)]


def test_a_log_on_a_machine_that_is_gone_is_named(tmp_path: Path) -> None:
    """SEE-2: the job is over, and this folder lacks the logs of its other machines."""
    reader = LogReader(tmp_path, ManagerLink(tmp_path, tmp_path / "home").request)
    found = reader.page(WorkerLog(generation=2, rank=3, stream="err"), start=None, stop=None)
    assert found.problem.startswith("this log folder has no rank_3.err: this user has no running job")
    (tmp_path / "generation_2").mkdir()
    (tmp_path / "generation_2" / MACHINES).write_text('{"node-1": [0, 1], "node-2": [2, 3]}')
    found = reader.page(WorkerLog(generation=2, rank=3, stream="err"), start=None, stop=None)
    assert found.problem.startswith("this log folder has no rank_3.err (it is on node-2): this user has no")


def test_a_character_at_the_end_of_a_page_is_whole(tmp_path: Path) -> None:
    """SEE-2: a worker may have written a part of it, or it may not fit into the page."""
    reader = LogReader(tmp_path, ManagerLink(tmp_path, tmp_path / "home").request)
    log, file = WorkerLog(0, 0, "out"), tmp_path / "rank_0.out"
    for data in ("50% █ done █\n".encode(), b"a" * (PAGE_BYTES - 1) + "é\n".encode(), b"\xff\xe2x\n"):
        for written in range(max(0, len(data) - 8), len(data)):
            file.write_bytes(data[:written])
            first = reader.page(log, start=0, stop=None)
            file.write_bytes(data)
            pages = [first]
            while pages[-1].stop < len(data):
                pages.append(reader.page(log, start=pages[-1].stop, stop=None))
            assert "".join(page.text for page in pages) == data.decode(errors="replace")


def test_the_ranks_of_a_generation_are_those_of_all_machines(tmp_path: Path) -> None:
    """SEE-2: of each generation, also if this folder has the logs of one machine only."""
    for number, machines in ((1, '{"a": [0, 1], "b": [2, 3]}'), (2, '{"b": [0], "a": [1]}'), (3, "")):
        folder = tmp_path / f"generation_{number}"
        folder.mkdir()
        (folder / MACHINES).write_text(machines)
        (folder / "rank_1.out").touch()
    reader = LogReader(tmp_path, ManagerLink(tmp_path, tmp_path / "home").request)
    assert [reader.index(number).ranks for number in (1, 2, 3)] == [[0, 1, 2, 3], [0, 1], [1]]
    assert reader.index(None).generations == [1, 2, 3]
