"""What holds for every test: one thread per process, GPU tests only on a GPU, no quiet skips in CI."""

import os

# Before anything imports torch; workers that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's store asks the name of every client; where no name server answers that costs 5 s now and then.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import atexit
import shutil
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest

from tests.pool import Pool

# CI says whether a change is sound, so it tries the same examples each time; runs by hand look for new ones.
# No example has a deadline: how long it takes is this machine's affair.
hypothesis.settings.register_profile("here", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("VARUNA_CI") == "1" else "here")

# What wrapping remembers is remembered for this run alone.
os.environ["VARUNA_CACHE"] = tempfile.mkdtemp(prefix="varuna-test-cache-")
atexit.register(shutil.rmtree, os.environ["VARUNA_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """One pool of workers for all tests that train."""
    workers = Pool()
    yield workers
    workers.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and not cuda_is_here():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def cuda_is_here() -> bool:
    import torch

    return torch.cuda.is_available()


def could_have_run(report: pytest.TestReport | pytest.CollectReport) -> bool:
    """All that was skipped, but for GPU tests on a machine without a GPU."""
    return "gpu" not in getattr(report, "keywords", {}) or cuda_is_here()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None or os.environ.get("VARUNA_CI") != "1":
        return
    if names := [report.nodeid for report in terminal.stats.get("skipped", []) if could_have_run(report)]:
        terminal.write_line(f"\nfailed: skipped, though this machine could run them: {', '.join(names)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
