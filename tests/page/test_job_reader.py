"""What the server of the page reads: the state of a job from its files and its manager."""

from pathlib import Path

import msgspec

from varuna.page.job_reader import JobReader
from varuna.page.log_reader import LogReader, WorkerLog
from varuna.page.manager_link import ManagerLink


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


def test_a_log_on_a_machine_that_is_gone_is_named(tmp_path: Path) -> None:
    """SEE-2: the job is over, and this folder lacks the logs of its other machines."""
    reader = LogReader(tmp_path, ManagerLink(tmp_path, tmp_path / "home").request)
    found = reader.page(WorkerLog(generation=2, rank=3, stream="err"), start=None, stop=None)
    assert found.problem.startswith("this log folder has no rank_3.err: this user has no running job")
