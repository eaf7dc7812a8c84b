"""Progress of a profiler: one line for each result, silent on all ranks but one."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from varuna.profile import report as module
from varuna.profile.report import BarReport, ProfileReport, open_report


def test_a_line_for_each_result_with_its_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([10.0, 12.5])

    class Clock:
        monotonic = staticmethod(lambda: next(times))

    monkeypatch.setattr(module, "time", Clock)
    report = ProfileReport()
    with report.item("the optimizer, Adam"):
        assert capsys.readouterr().err == "", "nothing is said before there is a result"
    assert capsys.readouterr().err == "varuna: profiled the optimizer, Adam in 2.5 s\n"


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with open_report(enabled=False) as report, report.item("links"):
        report.say("micro-batch size 8 is left out")
    assert capsys.readouterr().err == ""


def test_a_measurement_that_fails_is_not_reported_as_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no"), ProfileReport().item("links"):
        raise ValueError("no")
    assert capsys.readouterr().err == ""


def test_without_a_terminal_there_are_lines() -> None:
    with open_report(enabled=True) as report:
        assert type(report) is ProfileReport


def test_on_a_terminal_every_measurement_has_a_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Progress("{task.description}", console=console) as bar:
        report = BarReport(bar)
        with report.item("links"):
            assert not bar.tasks[0].finished
        report.say("micro-batch size 8 is left out")
        assert [(task.description, task.finished) for task in bar.tasks] == [("links", True)]
    assert "is left out" in console.file.getvalue()  # type: ignore[attr-defined]
