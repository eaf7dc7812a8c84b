"""What real jobs are compared with."""

import pytest

from tests.morph.jobs import losses_without_trouble


@pytest.fixture(scope="session")
def peace(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process that nobody disturbs."""
    return losses_without_trouble(tmp_path_factory.mktemp("peace"))
