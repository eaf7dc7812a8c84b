"""The curve in a real browser: its axis reaches every event, and a request that fails is repeated."""

import http.client
import math
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Page, Route, expect

from tests.page.browsing import Chromium, ServedPage, chromium, served
from tests.page.folders import BEGUN, write_folder
from varuna.observe.history_file import NAME as METRICS
from varuna.observe.history_file import MetricLine
from varuna.page.job_reader import PageUpdate

STEPS = 100  # the last one ends 10 s after BEGUN; the events are 40, 100 and 160 s after it

ENDS = """() => {
    const line = document.querySelector("#chart .loss .line").getBBox();
    const clip = document.querySelector("#clip-loss rect").getBBox();
    const marks = [...document.querySelectorAll("#chart circle.event")].map((one) => one.cx.baseVal.value);
    const at = (x) => (x - clip.x) / clip.width;
    return { line: at(line.x + line.width), marks: marks.map(at).sort((a, b) => a - b) };
}"""
"""The places of the last step and of the events: 0 is the left end of the axis, 1 the right one."""

LABELS = """() => {
    const right = (one) => one.getBoundingClientRect().right;
    const picture = right(document.querySelector("#chart svg"));
    return [...document.querySelectorAll("#chart .tick.middle")].map((one) => right(one) / picture);
}"""
"""The right ends of the labels of the time axis, as shares of the picture's."""


@pytest.fixture(scope="module")
def shared_browser() -> Iterator[Chromium]:
    with chromium() as found:
        yield found


@pytest.fixture
def browser(shared_browser: Chromium) -> Iterator[Chromium]:
    yield shared_browser
    shared_browser.check()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPage]:
    folder = write_folder(tmp_path_factory.mktemp("job"), machines=4, stages=2, steps=STEPS)
    with served(folder) as (found, _):
        yield found


def live_update(at: float) -> str:
    """Return the stream of a job that runs, and whose manager has sent nothing but this."""
    update = PageUpdate("live", "", at, at, "/logs", STEPS, 3, 0, msgspec.Raw(b"null"))
    return f"data: {msgspec.json.encode(update).decode()}\n\n"


def drawn(tab: Page) -> None:
    expect(tab.locator("#chart .loss .line")).to_be_visible()


def test_events_after_the_last_step_are_on_the_time_axis(browser: Chromium, page: ServedPage) -> None:
    """A machine is lost in a stall, and the job ends without another step."""
    tab = browser.open(page.url)
    drawn(tab)
    ends = tab.evaluate(ENDS)
    whole = 160.0 - 0.1  # from the end of the first step
    assert [round(place, 2) for place in ends["marks"]] == [
        round((at - 0.1) / whole, 2) for at in (40, 100, 160)
    ]
    assert round(ends["line"], 2) == round(9.9 / whole, 2)
    tab.locator("#chart").focus()
    tab.keyboard.press("End")
    expect(tab.locator(".tooltip")).to_contain_text("Step 100")
    expect(tab.locator(".tooltip")).to_contain_text("2 min 30 s after its end")
    expect(tab.locator(".tooltip")).to_contain_text("finished: every worker ended normally")


def test_the_time_axis_of_a_running_job_reaches_to_now(browser: Chromium, page: ServedPage) -> None:
    tab = browser.new_tab()
    now = BEGUN + 1000  # a full minute: the last label is at the end of the axis
    tab.route(
        "**/api/stream*",
        lambda route: route.fulfill(body=live_update(now), content_type="text/event-stream"),
    )
    follow_once(page)
    tab.goto(page.url)
    drawn(tab)
    assert round(tab.evaluate(ENDS)["line"], 3) == round(9.9 / 999.9, 3)
    assert tab.evaluate(LABELS)[-1] <= 1.0, "no label is cut off"


def follow_once(page: ServedPage) -> None:
    """Make the server read the job: it does so while a stream is open."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
    connection.request("GET", "/api/stream", headers={"Authorization": f"Bearer {page.token}"})
    response = connection.getresponse()
    while f'"last_step":{STEPS}'.encode() not in response.readline():
        pass
    connection.close()


def test_events_before_the_first_step_are_shown(browser: Chromium, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "job", machines=2, stages=1, steps=1)
    (folder / "metrics.jsonl").unlink()
    with served(folder) as (page, _):
        tab = browser.open(page.url)
        expect(tab.locator("#chart")).to_contain_text("No step has finished yet")
        expect(tab.locator("#chart circle.event")).to_have_count(3)


def hold_curve(browser: Chromium, page: ServedPage) -> tuple[Page, list[Route]]:
    """Open the page without an answer to its first requests for the curve."""
    held: list[Route] = []
    tab = browser.new_tab()
    tab.route("**/api/curve*", lambda route: held.append(route))
    tab.goto(page.url)
    expect(tab.locator("#phase")).to_have_text("finished")
    return tab, held


def test_the_chart_can_be_left_before_its_first_data(browser: Chromium, page: ServedPage) -> None:
    tab, held = hold_curve(browser, page)
    tab.locator("#chart svg").hover()
    tab.locator("#theme").hover()
    tab.locator("#chart").focus()
    tab.keyboard.press("ArrowLeft")
    tab.locator("#theme").focus()
    held[0].continue_()
    drawn(tab)


def test_a_curve_that_fails_is_requested_again(browser: Chromium, page: ServedPage) -> None:
    """The job is over: no update comes that would request it."""
    requests: list[str] = []

    def fail_twice(route: Route) -> None:
        requests.append(route.request.url)
        if len(requests) == 1:
            route.abort()
        elif len(requests) == 2:
            route.fulfill(status=500)
        else:
            route.continue_()

    tab = browser.new_tab()
    tab.route("**/api/curve*", fail_twice)
    tab.goto(page.url)
    drawn(tab)
    assert len(requests) >= 3


def test_another_axis_shows_all_steps(browser: Chromium, page: ServedPage) -> None:
    tab = browser.open(page.url)
    drawn(tab)
    tab.locator("#chart").focus()
    tab.keyboard.press("+")
    expect(tab.locator("#zoom-out")).to_be_enabled()
    tab.locator("label", has_text=re.compile("^Step$")).click()
    expect(tab.locator("#zoom-out")).to_be_disabled()


def test_a_loss_that_differs_by_rounding_alone_is_drawn(browser: Chromium, tmp_path: Path) -> None:
    """SEE-2: ticks between two neighbouring numbers would never end."""
    folder = write_folder(tmp_path / "job", machines=1, stages=1, steps=1)
    losses = (0.6931471805599453, math.nextafter(0.6931471805599453, 1.0))
    lines = (MetricLine(step, BEGUN + step, losses[step % 2], 1.0, 8) for step in range(1, 20))
    (folder / METRICS).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    with served(folder) as (page, _):
        tab = browser.open(page.url)
        expect(tab.locator("#chart .loss .line")).to_have_attribute("d", re.compile("^M.*L"))
        assert tab.locator("#chart .tick.end").count() < 20
