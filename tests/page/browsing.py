"""The page as its users meet it: a real server process, plain HTTP requests, and Debian's Chromium."""

import http.client
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.launch.jobs import environment

FLAGS = [
    "--no-sandbox",  # tests run as root, too
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Chromium:
    """A browser with a profile of its own. It keeps the errors of its pages' scripts."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self.errors: list[str] = []

    def open(self, url: str, **options: object) -> Page:
        """Open an address in a tab; the options are those of a playwright context."""
        tab = self.new_tab(**options)
        tab.goto(url)
        return tab

    def new_tab(self, **options: object) -> Page:
        tab = self._browser.new_context(**options).new_page()  # type: ignore[arg-type]
        tab.set_default_timeout(60_000)
        tab.on("pageerror", lambda error: self.errors.append(str(error)))
        return tab

    def check(self) -> None:
        """Close all tabs. Fail if the script of one has failed."""
        for context in self._browser.contexts:
            context.close()
        errors, self.errors = self.errors, []
        assert not errors, "the page's script failed"


@contextmanager
def chromium() -> Iterator[Chromium]:
    """Start a browser. An error of a page's script fails the test."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.fail("Chromium is not installed (run `make setup`, or install Debian's package chromium)")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=FLAGS)
        found = Chromium(browser)
        yield found
        found.check()
        browser.close()


class ServedPage:
    """The address of a page, as its file has it, and requests to it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.url = file.read_text().strip()
        self.base, _, self.token = self.url.partition("/?token=")
        self.port = int(self.base.rpartition(":")[2])

    def get(
        self,
        path: str,
        headers: Mapping[str, str] | None = None,
        *,
        method: str = "GET",
        body: bytes | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, headers=dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def data(self, path: str) -> bytes:
        status, _, body = self.get(path, {"Authorization": f"Bearer {self.token}"})
        assert status == 200, (status, body)
        return body


@contextmanager
def served(log_dir: Path, home: Path | None = None) -> Iterator[tuple[ServedPage, int]]:
    """Serve a log folder by `varuna page`; yield the page and the process id of its server."""
    process = subprocess.Popen(
        [sys.executable, "-m", "varuna", "page", str(log_dir), "--port", "0"],
        env=environment(home or log_dir),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert f"page: open the address in {log_dir}/" in line, line
        yield ServedPage(Path(line.strip().rpartition(" in ")[2])), process.pid
    finally:
        process.terminate()
        assert process.wait() == 0
        process.stdout.close()
