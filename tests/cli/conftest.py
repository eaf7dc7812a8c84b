"""The command `varuna`, ready to call."""

import pytest

from tests.cli.commands import Cli


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(monkeypatch, capsys)
