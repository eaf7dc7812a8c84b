"""The page by keyboard and in both colours, and its timeline: in a real browser."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.page.browsing import Chromium, ServedPage, chromium, served
from tests.page.folders import TracedWorker, write_folder, write_report

CONTROLS = """() => [...document.querySelectorAll('a[href], button, input, select, [tabindex="0"]')]
    .filter((one) => !one.disabled && !(one.type === "radio" && !one.checked) && one.checkVisibility())
    .map((one, at) => (one.dataset.control = one.id || one.ariaLabel || `${one.tagName} ${at}`))"""
"""Name every control that a keyboard should reach. A group of radio buttons is one stop."""
PICTURE = "() => document.querySelector('#timeline canvas').toDataURL()"


class Served:
    """A page with a timeline and a prediction, its workers and its browser."""

    def __init__(self, browser: Chromium, page: ServedPage, workers: list[TracedWorker]) -> None:
        self.browser, self.page, self.workers = browser, page, workers

    def open(self, **options: object) -> Page:
        tab = self.browser.open(self.page.url, **options)
        expect(tab.locator("#timeline canvas")).to_have_count(2)
        return tab


@pytest.fixture
def job(shared_job: Served) -> Iterator[Served]:
    yield shared_job
    shared_job.browser.check()


@pytest.fixture(scope="module")
def shared_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_folder(tmp_path_factory.mktemp("job"), machines=2, stages=2, steps=100)
    write_report(folder, stages=2, microbatches=2, predicted=True)
    workers = [TracedWorker(folder, generation=1, rank=rank) for rank in (0, 1)]
    for worker in workers:
        worker.finish(*range(12))
    (folder / "generation_1" / "rank_0.out").write_text("trained\n")
    with chromium() as browser, served(folder) as (page, _):
        yield Served(browser, page, workers)


def background(tab: Page) -> str:
    return str(tab.evaluate("getComputedStyle(document.body).backgroundColor"))


def is_dark(tab: Page) -> bool:
    red, green, blue = map(int, re.findall(r"\d+", background(tab))[:3])
    return red + green + blue < 3 * 128


def wait_for_other_picture(tab: Page, before: str) -> str:
    tab.wait_for_function(f"(before) => ({PICTURE})() !== before", arg=before)
    return str(tab.evaluate(PICTURE))


def test_a_link_of_another_site_opens_the_page(job: Served) -> None:
    """SEE-2: such as the terminal of a web IDE."""
    tab = job.browser.new_tab()
    link = f"<a href='{job.page.url}'>the page</a>"
    tab.route("http://ide.example/", lambda route: route.fulfill(content_type="text/html", body=link))
    tab.goto("http://ide.example/")
    tab.locator("a").click()
    expect(tab.locator("#job")).to_have_text("train-1f2e3d4c")
    assert tab.url == f"{job.page.base}/"


def test_the_colours_follow_the_system_and_the_button(job: Served) -> None:
    """SEE-2: both the style sheet and the picture on the canvas, which reads its colours once."""
    tab = job.open(color_scheme="light")
    picture = tab.evaluate(PICTURE)
    assert not is_dark(tab)
    tab.emulate_media(color_scheme="dark")
    picture = wait_for_other_picture(tab, picture)
    assert is_dark(tab)
    button = tab.get_by_role("button", name="Colours")
    expect(button).to_have_text("Auto")
    button.click()
    expect(button).to_have_text("Light")
    picture = wait_for_other_picture(tab, picture)
    assert not is_dark(tab), "although the system is dark"
    button.click()
    expect(button).to_have_text("Dark")
    wait_for_other_picture(tab, picture)
    tab.emulate_media(color_scheme="light")
    assert is_dark(tab), "although the system is light"
    tab.reload()
    expect(button).to_have_text("Dark")
    assert is_dark(tab), "the choice is kept"


def test_the_tab_key_reaches_every_control(job: Served) -> None:
    """SEE-2"""
    tab = job.open()
    expect(tab.locator("#log")).to_contain_text("trained")
    tab.locator("#chart").focus()
    tab.keyboard.press("+")
    expect(tab.locator("#zoom-out")).to_be_enabled()
    wanted = tab.evaluate(CONTROLS)
    assert {
        "theme",
        "log-scale",
        "zoom-out",
        "chart",
        "machine-filter",
        "events",
        "log-generation",
        "log",
    } <= set(wanted)
    assert sum("step. Left and right" in name for name in wanted) == 2, "both timelines"
    tab.locator("a.skip").focus()
    reached = []
    for _ in range(2 * len(wanted)):
        reached.append(tab.evaluate("document.activeElement.dataset.control"))
        assert reached[-1] is None or tab.evaluate("document.activeElement.matches(':focus-visible')")
        tab.keyboard.press("Tab")
    assert [name for name in wanted if name not in reached] == []
    order = [name for name in dict.fromkeys(reached) if name in wanted]
    assert order == wanted, "in the order of the page"


def test_the_prediction_stands_beside_the_measured_step(job: Served) -> None:
    tab = job.open()
    titles = tab.locator("#timeline h3").all_inner_texts()
    assert [title.split()[0] for title in titles] == ["Measured", "Predicted"]
    expect(tab.locator("#timeline caption")).to_have_text("Measured / predicted")
    expect(tab.locator("#timeline tbody tr")).to_have_count(2)
    expect(tab.locator("#timeline tbody td").first).to_have_text("40 ms / 40 ms")
    widths = tab.evaluate("[...document.querySelectorAll('#timeline canvas')].map((one) => one.clientWidth)")
    assert min(widths) > 300


def test_operations_are_read_by_keyboard(job: Served) -> None:
    tab = job.open()
    canvas, tip = tab.locator("#timeline canvas").first, tab.locator("#timeline .tip")
    canvas.focus()
    before = tab.evaluate(PICTURE)
    tab.keyboard.press("ArrowRight")
    expect(tip).to_have_text("Stage 0, rank 0: forward, micro-batch 0, 10 ms from 0 µs")
    expect(tip).to_have_attribute("aria-live", "polite")
    before = wait_for_other_picture(tab, before)  # the operation is marked
    tab.keyboard.press("ArrowRight")
    expect(tip).to_contain_text("forward, micro-batch 1")
    tab.keyboard.press("ArrowDown")
    expect(tip).to_have_text("Stage 1, rank 1: forward, micro-batch 0, 10 ms from 10 ms")
    tab.keyboard.press("End")
    expect(tip).to_contain_text("Stage 1, rank 1: optimizer")
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowUp")
    expect(tip).to_contain_text("Stage 0, rank 0: forward")
    tab.keyboard.press("Escape")
    expect(tip).to_have_text("\u00a0")
    canvas.hover(position={"x": 65, "y": 10})
    expect(tip).to_contain_text("Stage 0, rank 0: forward, micro-batch 0")
    expect(tip).to_have_attribute("aria-live", "off")


def test_a_step_stays_while_someone_reads_it(job: Served) -> None:
    tab = job.open()
    text = tab.locator("#timeline-text")
    expect(text).to_have_text("step 12, first replica")
    tab.locator("#timeline canvas").first.focus()
    tab.keyboard.press("ArrowRight")
    for worker in job.workers:
        worker.finish(12)
    expect(text).to_have_text("step 12, first replica, paused while you read it")
    expect(tab.locator("#timeline .tip")).to_contain_text("Stage 0, rank 0: forward")
    tab.locator("#theme").focus()
    expect(text).to_have_text("step 13, first replica")


def test_a_folder_without_traces_shows_the_typical_step(job: Served, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "job", machines=2, stages=2, steps=100)
    write_report(folder, stages=2, microbatches=2, predicted=False)
    with served(folder) as (page, _):
        tab = job.browser.open(page.url)
        text = tab.locator("#timeline-text")
        expect(text).to_contain_text("a typical step near step 10 of its layout, first replica")
        expect(text).to_contain_text("the last step is not known here")
        expect(tab.locator("#timeline canvas")).to_have_count(1)


def test_a_finger_reads_values(job: Served) -> None:
    """SEE-2: on a phone, the value under a tap stays until the next one."""
    tab = job.open(has_touch=True, is_mobile=True, viewport={"width": 390, "height": 844})
    expect(tab.locator("#chart .loss .line")).to_be_attached()
    tab.locator("#chart svg").tap(position={"x": 200, "y": 100})
    expect(tab.locator(".tooltip")).to_contain_text(re.compile(r"Step \d+"))
    tab.locator("#timeline canvas").first.tap(position={"x": 70, "y": 10})
    expect(tab.locator("#timeline .tip")).to_contain_text("Stage 0, rank 0: forward, micro-batch 0")
    expect(tab.locator(".tooltip")).to_be_hidden()


def test_a_hidden_tab_keeps_no_connection(job: Served) -> None:
    """SEE-2: a browser has six connections to a server, so six tabs would stop each other."""
    first = job.open()
    with first.expect_event("requestfailed", lambda request: request.url.endswith("/api/stream")):
        hide(first, True)
    tabs = [first]
    for _ in range(7):
        tab = first.context.new_page()
        tab.goto(job.page.url)
        expect(tab.locator("#timeline canvas")).to_have_count(2)
        hide(tab, True)
        tabs.append(tab)
    with first.expect_request("**/api/stream"):
        hide(first, False)
    expect(first.locator("#link")).to_have_text("job is over")
    expect(first.locator("#notice")).to_be_hidden()


def hide(tab: Page, hidden: bool) -> None:
    """Tell the page that its tab is hidden or seen: without a window, Chromium does not."""
    tab.evaluate(
        """(hidden) => {
            Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )
