"""The page of a real job in a real browser, while machines join, leave and are killed."""

import json
import os
import re
import signal
import time
from pathlib import Path

import msgspec
from playwright.sync_api import Page, expect

from tests.morph.jobs import STEPS, Job
from tests.morph.test_hot_jobs import FETCHES
from tests.page.browsing import ServedPage, chromium, served
from varuna.observe.job_view import JobView
from varuna.observe.step_timelines import NAME, StepTimelines
from varuna.page.log_reader import LogReader, WorkerLog
from varuna.page.manager_link import ManagerLink
from varuna.page.timeline_reader import ReportReader, ShownStep, TimelineReader

HOSTILE = r"""
def misbehave(step):
    print("<img src=x onerror='window.broken = 1'><script>window.broken = 2</script>")
    print("\x1b[2J\x1b]0;title\x07 \u202etxt.exe \x00\x9b1m bell\x07")
"""

GONE = r"The manager is gone since \d+ \w+ \d\d:\d\d:\d\d: its process has ended, and the job has not"


def step_of(tab: Page) -> int:
    text = tab.locator("#facts .value").first.inner_text()
    return int(text.replace(",", "")) if text != "–" else 0


def cells(tab: Page) -> set[tuple[str, str]]:
    """The layout as the page draws it: (rank, machine)."""
    found = tab.locator("#layout button").all_inner_texts()
    return {tuple(text.split("\n")) for text in found}  # type: ignore[misc]


def wait_for_cells(tab: Page, *machines: int) -> None:
    names = [f"127.0.0.{number}" for number in machines]
    tab.wait_for_function(
        """(names) => {
            const found = [...document.querySelectorAll("#layout button span")].map((one) => one.textContent);
            return JSON.stringify(found.sort()) === JSON.stringify(names.sort());
        }""",
        arg=names,
    )


def wait_for_steps(tab: Page, count: int) -> None:
    tab.wait_for_function(
        """(least) => {
            const text = document.querySelector("#facts .value").textContent;
            return Number(text.replace(/,/g, "")) >= least;
        }""",
        arg=step_of(tab) + count,
    )


def wait_for_timeline(tab: Page, count: int) -> None:
    """Wait until the timeline shows a step that is at least `count` after the present one."""
    tab.wait_for_function(
        """(least) => {
            const text = document.querySelector("#timeline-text").textContent;
            const found = text.match(/^step ([\\d,]+), first replica/);
            const isDrawn = document.querySelector("#timeline canvas") !== null;
            return found && Number(found[1].replace(/,/g, "")) >= least && isDrawn;
        }""",
        arg=step_of(tab) + count,
    )


def test_a_morphing_job_in_a_browser(tmp_path: Path) -> None:
    """SEE-2: one curve over joins, a kill, a leave and a new manager; hostile output stays text."""
    options = ("--page-port", "0", "--save-every", "off")
    with (
        Job(tmp_path, machines=2, stages=2, script=HOSTILE + FETCHES, options=options) as job,
        chromium() as browser,
    ):
        line = job.wait_for("page: open the address in ")
        assert "token" not in line  # others may read the output
        page = ServedPage(Path(line.rpartition(" in ")[2]))
        log_dir = page.file.parent
        assert page.token not in "".join(job.processes().values())
        tab = browser.open(page.url)
        requests: list[str] = []
        tab.on("request", lambda request: requests.append(request.url))

        wait_for_cells(tab, 1, 2)
        wait_for_steps(tab, 12)
        wait_for_timeline(tab, 2)  # follows the job, unlike the report of step 10
        wait_for_timeline(tab, 2)
        assert tab.url == f"{page.base}/" and page.token not in tab.content()
        job.write_list(1, 2, 3, 4)  # two machines join
        wait_for_cells(tab, 1, 2, 3, 4)
        wait_for_steps(tab, 3)
        wait_for_timeline(tab, 2)  # workers keep their files over a morph
        check_narrow_window(tab)
        os.kill(job.worker(4), signal.SIGKILL)  # a worker dies: its place is filled again
        expect(tab.locator("#events")).to_contain_text("generation")
        wait_for_steps(tab, 3)
        job.write_list(1, 2)  # two machines leave
        wait_for_cells(tab, 1, 2)
        wait_for_steps(tab, 3)

        check_log(tab)
        check_curve(tab)
        check_other_machines(job, log_dir)
        assert all(url.startswith(f"{page.base}/") for url in requests), "the page works offline"
        check_new_manager(tab, job, log_dir)


def check_log(tab: Page) -> None:
    """Output of a worker is text: neither tags nor control characters do anything."""
    tab.locator("#layout button").first.click()
    log = tab.locator("#log")
    expect(log).to_contain_text("<img src=x onerror='window.broken = 1'><script>window.broken = 2</script>")
    expect(log).to_contain_text(r"\x1b[2J\x1b]0;title\x07 \u202etxt.exe \x00\x9b1m bell\x07")
    assert tab.locator("#log img, #log script").count() == 0
    assert tab.evaluate("window.broken === undefined")
    assert tab.evaluate("document.activeElement.id") == "log"


def check_narrow_window(tab: Page) -> None:
    """On a phone, nothing is cut off while the job goes on, and the layout and the log can be used."""
    before = tab.viewport_size
    assert before is not None
    tab.set_viewport_size({"width": 390, "height": 844})
    wait_for_steps(tab, 2)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    outside = """[...document.querySelectorAll("header *, #facts *, section, .tools *, svg, canvas, .hint")]
        .filter((one) => one.checkVisibility() && one.getBoundingClientRect().right > innerWidth + 0.5)
        .map((one) => one.outerHTML.slice(0, 80))"""
    assert tab.evaluate(outside) == []
    assert len(cells(tab)) == 4
    tab.locator("#layout button").last.click()
    expect(tab.locator("#log")).to_contain_text("step")
    expect(tab.locator("#log")).to_be_in_viewport()
    tab.set_viewport_size(before)


def check_other_machines(job: Job, log_dir: Path) -> None:
    """Logs and steps that are not in this folder come from the machine that has them."""
    ask, elsewhere = ManagerLink(log_dir, job.folder / "home").request, job.folder / "elsewhere"
    generation = job.status()["generation"]
    text = LogReader(elsewhere, ask).page(WorkerLog(generation, 1, "out"), start=None, stop=None)
    assert text.text and text.stop == text.end, text
    report = ReportReader(elsewhere, ask)
    report.update(0)
    assert report.found == msgspec.json.decode((log_dir / NAME).read_bytes(), type=StepTimelines)
    view = msgspec.json.decode(bytes(ask("view").status), type=JobView)
    assert view.layout is not None
    machines = {rank: machine.name for machine in view.machines for rank in machine.ranks}
    timelines = TimelineReader(elsewhere, ask)
    deadline = time.monotonic() + 60
    while True:  # until one step is in the traces of all machines
        timelines.update(view.layout, machines, since=0.0)
        shown = msgspec.json.decode(bytes(timelines.read()), type=ShownStep | None)
        if shown is not None and shown.kind == "last":
            break
        assert time.monotonic() < deadline, shown
        time.sleep(0.1)
    assert shown.generation == generation
    assert {one.rank for one in shown.measured.intervals} == {ranks[0] for ranks in view.layout.stage_map}


def check_curve(tab: Page) -> None:
    """By keyboard alone: move the cursor, zoom, show all. The marks name the layouts."""
    chart = tab.locator("#chart")
    chart.focus()
    tab.keyboard.press("End")
    expect(tab.locator(".tooltip")).to_contain_text(re.compile(r"Step \d+.*loss"))
    expect(tab.locator("#curve-text")).to_contain_text("samples/s")
    tab.keyboard.press("+")
    expect(tab.locator("#zoom-out")).to_be_enabled()
    tab.keyboard.press("0")
    expect(tab.locator("#zoom-out")).to_be_disabled()
    assert tab.locator("#chart circle.change").count() >= 3
    tab.locator("label", has_text=re.compile("^Step$")).click()
    expect(chart.locator(".loss .line")).to_have_attribute("d", re.compile("^M.*L"))


def check_new_manager(tab: Page, job: Job, log_dir: Path) -> None:
    """The manager is killed, and another one resumes the job: the curve goes on."""
    seen = step_of(tab)
    job.process.kill()
    job.process.wait()
    expect(tab.locator("#notice")).to_contain_text(re.compile(GONE + r".* Its page has ended with it"))
    assert step_of(tab) >= seen and cells(tab)  # the last view stays
    with served(log_dir, job.folder) as (later, _):
        tab.goto(later.url)
        expect(tab.locator("#notice")).to_contain_text(re.compile(GONE))
        expect(tab.locator("#link")).to_have_text("manager is gone")
        expect(tab.locator("#notice")).to_contain_text("varuna run --resume")
        assert cells(tab)
        job.options = ()
        job.restart("--resume")
        expect(tab.locator("#link")).to_have_text("live")
        expect(tab.locator("#notice")).to_be_hidden()
        wait_for_steps(tab, 3)
        slow = json.loads(later.data("/api/curve"))["window"]["last_step"]
        assert slow > seen and job.finish() == 0, job.text
        expect(tab.locator("#link")).to_have_text("job is over")
        expect(tab.locator("#phase")).to_have_text("finished")
        window = json.loads(later.data("/api/curve?points=2000"))["window"]
        # Each step once, over all layouts and managers. At the end the job hurries: its agents thin out steps
        # of a few milliseconds.
        assert window["steps"][:slow] == list(range(1, slow + 1))
        assert window["steps"] == sorted(set(window["steps"])) and window["last_step"] == STEPS
        assert window["times"] == sorted(window["times"])
        assert None not in window["bands"]["loss"]["mean"]


def test_the_tab_of_a_job_that_ends_says_so(tmp_path: Path) -> None:
    """SEE-2: the server sends the end to its tabs, removes its address, and ends by itself."""
    options = ("--page-port", "0", "--save-every", "off")
    with Job(tmp_path, machines=2, stages=2, script=FETCHES, options=options) as job, chromium() as browser:
        page = ServedPage(Path(job.wait_for("page: open the address in ").rpartition(" in ")[2]))
        tab = browser.open(page.url)
        wait_for_steps(tab, 3)
        assert job.finish() == 0, job.text
        expect(tab.locator("#phase")).to_have_text("finished")
        expect(tab.locator("#notice")).to_contain_text("The job is over, and its page has ended.")
        assert not page.file.exists(), "a server that is killed leaves it"
