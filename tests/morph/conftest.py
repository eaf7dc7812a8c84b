"""Reference losses for the tests of real jobs."""

import pytest

from tests.morph.jobs import reference_losses


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of one undisturbed process."""
    return reference_losses(tmp_path_factory.mktemp("reference"))
