"""Servers that read the curves of a job: Debian's Prometheus and TensorBoard's own, on loopback."""

import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.ports import free_port

DASHBOARD = Path(__file__).parents[2] / "varuna" / "data" / "grafana-dashboard.json"
ANSWER_SECONDS = 60.0
"""Time limit for data that a server has not read yet."""
POLL_SECONDS = 0.1

Found = TypeVar("Found")


@contextmanager
def running(command: Sequence[str], ready: str) -> Iterator[None]:
    """Run a server; enter the block as soon as it prints `ready`."""
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    try:
        printed = []
        for line in server.stdout:
            printed.append(line)
            if ready in line:
                break
        else:
            raise AssertionError("".join(printed))
        rest = threading.Thread(target=server.stdout.read)  # else a full pipe would stop the server
        rest.start()
        yield
    finally:
        server.terminate()
        server.wait()
    rest.join()
    server.stdout.close()


def get_json(url: str, **query: str) -> Any:
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
        return json.loads(answer.read())


def wait_for(ask: Callable[[], Found | None], what: str) -> Found:
    """Ask until the answer is not None."""
    limit = time.monotonic() + ANSWER_SECONDS
    while (found := ask()) is None:
        assert time.monotonic() < limit, what
        time.sleep(POLL_SECONDS)
    return found


class Prometheus:
    """A Prometheus that scrapes one endpoint."""

    def __init__(self, url: str) -> None:
        self._url = url

    @classmethod
    @contextmanager
    def scraping(cls, endpoint: str, folder: Path) -> Iterator["Prometheus"]:
        program = shutil.which("prometheus")
        if program is None:
            pytest.fail("Prometheus is not installed (run `make setup`, or install Debian's prometheus)")
        folder.mkdir()
        target = urllib.parse.urlsplit(endpoint).netloc
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 500ms}\n"
            "scrape_configs:\n"
            f"  - job_name: varuna\n    static_configs: [{{targets: ['{target}']}}]\n"
        )
        address = f"127.0.0.1:{free_port()}"
        options = {
            "config.file": folder / "prometheus.yml",
            "storage.tsdb.path": folder / "data",
            "web.listen-address": address,
        }
        command = [program, *(f"--{name}={value}" for name, value in options.items())]
        with running(command, "Server is ready to receive web requests"):
            yield cls(f"http://{address}")

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an expression; an error of Prometheus raises."""
        answer = get_json(f"{self._url}/api/v1/query", query=expression)
        assert answer["status"] == "success", answer
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def runs(self) -> list[str]:
        """Return the values of the dashboard's variable `run`."""
        answer = get_json(f"{self._url}/api/v1/label/run/values")
        found: list[str] = answer["data"]
        return found


def dashboard_queries() -> list[str]:
    """Return the queries of all panels of our dashboard, for all jobs."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"].replace("$run", ".*") for panel in panels for target in panel.get("targets", ())]


def check_dashboard(prometheus: Prometheus, *, without_data: Sequence[str] = ()) -> None:
    """Check that each query is valid, and has data unless it names one of these metrics."""
    queries = dashboard_queries()
    assert len(queries) > 20
    for query in queries:
        prometheus.query(query)
        if not any(name in query for name in without_data):
            wait_for(lambda query=query: prometheus.query(query) or None, f"no data: {query}")  # type: ignore[misc]


@contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """Serve a folder by TensorBoard; yield its address."""
    port = free_port()
    options = ["--logdir", str(folder), "--host", "127.0.0.1", "--port", str(port), "--reload_interval", "1"]
    command = [sys.executable, "-m", "tensorboard.main", *options, "--load_fast", "false"]
    with running(command, "(Press CTRL+C to quit)"):
        yield f"http://127.0.0.1:{port}"
