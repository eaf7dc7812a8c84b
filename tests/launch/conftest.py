"""A real profile, shared by all jobs that are planned from it."""

from pathlib import Path

import pytest

from tests.launch import planned_net
from tests.profile.ladders import BRIEF, MESSAGES
from varuna.profile.profiler import Profiler


@pytest.fixture(scope="session")
def profile_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiles")
    profiler = Profiler(
        planned_net.Net(),
        planned_net.get_batch,
        device="cpu",
        out_folder=folder,
        effort=BRIEF,
        message_bytes=MESSAGES,
    )
    profiler.profile_all([1, 2])
    return folder
