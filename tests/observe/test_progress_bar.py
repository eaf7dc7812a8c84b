"""A long capture shows its progress; a model on the meta device is planned like one with values."""

from __future__ import annotations

import io
import logging
import re

import pytest
import torch
from rich.console import Console

from tests.toys import make_inputs, make_model
from varuna.capture import Source
from varuna.observe import progress_bar
from varuna.observe.progress_bar import capture_progress
from varuna.plan.search.search import search
from varuna.profile.estimate import Speed, assumed_link, estimate_profile
from varuna.types import Cluster, Machine


def capture(watch: progress_bar.CaptureProgress | None) -> None:
    inputs = make_inputs("GPT", 4, torch.Generator().manual_seed(0))
    Source(make_model("GPT"), watch=watch).capture(inputs, training=True)


def test_a_terminal_shows_a_progress_bar() -> None:
    """R12"""
    seen = io.StringIO()
    capture(capture_progress(shown=True, console=Console(file=seen, force_terminal=True)))
    assert "capturing the model" in seen.getvalue()


def test_without_a_terminal_progress_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R12: the number of modules done and in total; other ranks log nothing."""
    monkeypatch.setattr(progress_bar, "LOG_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "varuna")
    watch = capture_progress(shown=True, console=Console(file=io.StringIO()))
    capture(watch)
    found = [re.search(r"(\d+) of (\d+) modules", line) for line in caplog.messages]
    numbers = [(int(match[1]), int(match[2])) for match in found if match]
    assert len(numbers) > 5 and numbers == sorted(numbers)
    assert all(done <= total for done, total in numbers)
    assert capture_progress(shown=False) is None


def test_a_model_on_meta_is_planned_as_one_with_values() -> None:
    """R12: the same costs, the same plan, the same fingerprint."""
    speed = Speed(flops_per_second=1e9, bytes_per_second=1e9, memory_bytes=1 << 17)
    cluster = Cluster((Machine("node0", 4, 1 << 17),))
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = make_model("GPT", cutpoints=False)
        profile = estimate_profile(
            model,
            lambda size: make_inputs("GPT", size, torch.Generator().manual_seed(0)),
            [1, 2, 4],
            speed=speed,
            within=assumed_link(1e-5, 1e9),
        )
        found.append((profile, search(profile, cluster, batch_size=16).best))
    assert found[0] == found[1]
    assert found[0][1].plan.depth > 1
