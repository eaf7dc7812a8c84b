"""The numbers of the page in a real browser: all of them are shown, each once."""

from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import expect

from tests.page.browsing import chromium, served
from tests.page.folders import view_of, write_folder
from varuna.observe.job_view import NAME as VIEW

CUT = """() => [...document.querySelectorAll("#facts .value, #facts .note")]
    .filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.textContent)"""
SCALARS = {"store": 3.0, "next save": 2.0, "next  save": 1.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "job", machines=2, stages=2, steps=100)


def write_view(folder: Path, *, seconds: float) -> None:
    """Write a view with long numbers, so many seconds after the first one."""
    view = view_of(machines=2, stages=2, steps=100)
    found = msgspec.structs.replace(
        view, at=view.at + seconds, step=seconds, tokens_per_second=1_234_567.0, mfu=0.412, scalars=SCALARS
    )
    (folder / VIEW).write_bytes(msgspec.json.encode(found))


def test_numbers_are_not_cut_and_stay_single(folder: Path) -> None:
    """SEE-1, SEE-2: tokens/s and MFU at any width; values of the script with any names, over updates.

    Nobody hears the heartbeats of a job without a manager, so its last ones are not shown as present.
    """
    write_view(folder, seconds=0)
    with chromium() as browser, served(folder) as (page, _):
        tab = browser.open(page.url)
        expect(tab.locator("#facts")).to_contain_text("1,234,567 tokens/s, MFU 41.2 %")
        for width in (1480, 1280, 1240, 1000, 910, 600, 390, 320):
            tab.set_viewport_size({"width": width, "height": 800})
            assert tab.evaluate(CUT) == [], width
        for seconds in (1, 2):
            write_view(folder, seconds=seconds)
            expect(tab.locator("#facts .value").first).to_have_text(str(seconds))
        assert tab.locator("#scalars dt").all_inner_texts() == ["store", "next save", "next save"]
        assert tab.locator("#scalars dd").all_inner_texts() == ["3", "2", "1"]
        assert tab.locator("#checkpoints dt").count() == 4
        assert tab.locator("#machines tbody td:last-child").all_inner_texts() == ["–", "–"]
