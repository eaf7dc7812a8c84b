"""One pool of workers for all training tests, and no cache left on the machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("VARUNA_CACHE", str(folder))  # before the pool starts: workers inherit it
        yield folder


@pytest.fixture(scope="session")
def pool(own_cache: Path) -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()
