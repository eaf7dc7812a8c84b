"""A Profiler for tests: links are measured once, and shared by all tests that only need some."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import varuna.profile.profiler
from tests.profile.ladders import BRIEF, MESSAGES, get_batch
from varuna.profile.link_probe import ProcessCosts, measure_with_processes
from varuna.profile.profiler import Profiler

MakeProfiler = Callable[..., Profiler]


@pytest.fixture(scope="session")
def process_costs() -> ProcessCosts:
    return measure_with_processes(1, torch.device("cpu"), MESSAGES)


@pytest.fixture
def make_profiler(
    tmp_path: Path, process_costs: ProcessCosts, monkeypatch: pytest.MonkeyPatch
) -> MakeProfiler:
    monkeypatch.setattr(varuna.profile.profiler, "measure_with_processes", lambda *_: process_costs)

    def make(model: torch.nn.Module, get_batch: Any = get_batch, **options: Any) -> Profiler:
        given = {"device": "cpu", "out_folder": tmp_path, "effort": BRIEF, **options}
        return Profiler(model, get_batch, **given)

    return make
