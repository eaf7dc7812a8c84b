"""Links are measured once for all tests that only need some."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import varuna.profile.profiler
from tests.measure.ladders import BRIEF, MESSAGES, get_batch
from varuna.profile.link_probe import Findings, measure_with_neighbours
from varuna.profile.profiler import Profiler

MakeProfiler = Callable[..., Profiler]


@pytest.fixture(scope="session")
def findings() -> Findings:
    return measure_with_neighbours(1, torch.device("cpu"), MESSAGES)


@pytest.fixture
def make_profiler(tmp_path: Path, findings: Findings, monkeypatch: pytest.MonkeyPatch) -> MakeProfiler:
    monkeypatch.setattr(varuna.profile.profiler, "measure_with_neighbours", lambda *_: findings)

    def make(model: torch.nn.Module, get_batch: Any = get_batch, **options: Any) -> Profiler:
        given = {"device": "cpu", "out_folder": tmp_path, "effort": BRIEF, **options}
        return Profiler(model, get_batch, **given)

    return make
