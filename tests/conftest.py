"""What holds for every test: one thread per process, GPU tests only on a GPU, no quiet skips in CI."""

import os

# Before anything imports torch; workers that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's store asks the name of every client; where no name server answers that costs 5 s now and then.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import atexit
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

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


@pytest.fixture(autouse=True)
def fixed_randomness() -> None:
    """Every test draws the same numbers in every run and in any order."""
    import torch

    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """One pool of workers for all tests that train."""
    workers = Pool()
    yield workers
    workers.close()


# Tests that start whole jobs with deadlines of seconds run one at a time; the longest groups start first.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell started the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

WHOLE_MACHINE = (
    "tests/morph/test_morphing.py",
    "tests/morph/test_managed_jobs.py",
    "tests/morph/test_hot_jobs.py",
    "tests/page/test_live_page.py",
    "tests/morph/test_metrics.py",
    "tests/cli/test_trace.py",
    "tests/cli/test_status.py",
    "tests/morph/test_full_disks.py",
    "tests/morph/test_soak.py",
    "tests/chaos/test_chaos.py",
    "tests/morph/test_strangers.py",
    "tests/morph/test_hosts.py",
    "tests/morph/test_ssh.py",
    "tests/morph/test_ray.py",
    "tests/morph/test_slurm.py",
    "tests/checkpoint/test_kills.py",
)
EACH_ALONE = ("tests/examples/", "tests/benchmarks/", "tests/docs/test_docs.py", "tests/launch/")
"""Tests that share nothing with others of their file, and may run beside them."""
LONGEST_FIRST = (*WHOLE_MACHINE, *EACH_ALONE, "tests/pyrannc/", "tests/train/", "tests/checkpoint/")


def group_of(nodeid: str) -> str:
    """Return the group of a test. Tests of one group run one after another in one process of pytest-xdist."""
    if nodeid.startswith(WHOLE_MACHINE):
        return "whole machine"
    return nodeid if nodeid.startswith(EACH_ALONE) else nodeid.partition("::")[0]


def turn_of(nodeid: str) -> int:
    return next(
        (turn for turn, start in enumerate(LONGEST_FIRST) if nodeid.startswith(start)), len(LONGEST_FIRST)
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep groups together. With pytest 9.2, the option `--dist loadgroup` of pytest-xdist 3.8 does not."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # keep the order of the items
    return GroupScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: turn_of(item.nodeid))
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
