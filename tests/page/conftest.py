"""The command `varuna`, ready to call."""

from tests.cli.conftest import cli

__all__ = ["cli"]
