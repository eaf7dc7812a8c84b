"""Jobs of any size in a real browser: the page stays responsive, and the memory of its server bounded."""

import json
import os
import re
from pathlib import Path

from playwright.sync_api import expect

from tests.page.browsing import chromium, served
from tests.page.folders import LONG_NAME, write_folder

GIGABYTE = 2**30


def peak_memory(pid: int) -> int:
    """Bytes of the process at its largest."""
    (found,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found) * 1024


def write_large_log(path: Path) -> None:
    """A log of a gigabyte, most of it zeros, which take no disk."""
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(GIGABYTE)
        file.seek(0, os.SEEK_END)
        for number in range(20_000):
            file.write(b"line %d\n" % number)
        file.write(b"the last line\n")


def test_a_thousand_machines_a_million_steps_and_a_log_of_a_gigabyte(tmp_path: Path) -> None:
    """SEE-2"""
    folder = write_folder(tmp_path / "job", machines=1000, stages=8, steps=1_000_000)
    write_large_log(folder / "generation_1" / "rank_0.out")
    with chromium() as browser, served(folder) as (page, pid):
        tab = browser.open(page.url, viewport={"width": 390, "height": 844})
        expect(tab.locator("#phase")).to_have_text("finished")
        assert tab.locator("#layout button").count() == 1000
        assert tab.locator("#machines tbody tr").count() == 100
        expect(tab.locator("#machines-text")).to_contain_text("900 more than shown")
        expect(tab.locator("#machines tbody tr").first).to_contain_text("slow")  # those come first
        tab.locator("#machine-filter").fill("node-99")
        expect(tab.locator("#machines tbody tr")).to_have_count(11)
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), "fits a phone's width"

        tab.set_viewport_size(
            {"width": 320, "height": 640}
        )  # the narrowest phone: nothing is cut or squeezed
        # After it is drawn again:
        tab.wait_for_function("() => /1,000,000/.test(document.querySelector('#facts').textContent)")
        tab.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")
        whole = (
            "[...document.querySelectorAll('#facts .value')].every(one => one.scrollWidth <= one.clientWidth)"
        )
        assert tab.evaluate(whole)
        expect(tab.locator("#scalars")).to_contain_text(LONG_NAME)
        widths = (
            "[...document.querySelectorAll('.pairs:not(.causes) dd')]"
            ".map(one => one.getBoundingClientRect().width)"
        )
        assert min(tab.evaluate(widths)) > 100
        while json.loads(page.data("/api/curve?points=400"))["window"]["last_step"] < 1_000_000:
            tab.evaluate("new Promise(requestAnimationFrame)")  # the page is alive while the server reads
        window = json.loads(page.data("/api/curve?points=400"))["window"]
        assert len(window["steps"]) == 400 and max(window["bands"]["loss"]["high"]) == 100.0
        part = json.loads(page.data("/api/curve?first=333000&last=333700&points=400"))["window"]
        assert max(part["bands"]["loss"]["mean"]) > 10.0  # zoomed in, the spike is one point

        log = tab.locator("#log")
        expect(log).to_contain_text("the last line")
        for _ in range(12):
            before = tab.locator("#log-text").inner_text()
            tab.locator("#log-earlier").click()
            expect(tab.locator("#log-text")).not_to_have_text(before)
        expect(log).not_to_contain_text("the last line")  # only a few pages stay
        assert tab.evaluate("document.querySelector('#log').textContent.length") < 5 * 2**18
        tab.locator("#log-latest").click()
        expect(log).to_contain_text("the last line")
        assert peak_memory(pid) < 300 * 2**20


def test_a_job_without_steps_says_so(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("")
    with chromium() as browser, served(tmp_path) as (page, _):
        tab = browser.open(page.url)
        expect(tab.locator("#notice")).to_contain_text("The manager does not answer")
        expect(tab.locator("#chart")).to_contain_text("No step has finished yet")
        tab.goto(f"{page.base}/#wrong-token-{'x' * 20}")
        tab.reload()
        expect(tab.locator("#notice")).to_contain_text("This tab has no valid token")
