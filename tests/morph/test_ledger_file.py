"""The ledger of a resumed job: it continues, or the manager says from when it counts (PRO-4)."""

from pathlib import Path

import msgspec
import pytest

from varuna.morph.ledger_file import DAMAGED, NAME, LedgerKeeper, read_ledger
from varuna.morph.state import JobState
from varuna.observe.ledger import Ledger
from varuna.types import JobSpec

NOON = 1_800_000_000.0  # 2027-01-15 08:00:00 UTC


def keeper(folder: Path, *, continues: bool = True) -> LedgerKeeper:
    job = JobSpec(script="a.py", code_dir="/", log_dir=str(folder), devices_per_machine=1)
    return LedgerKeeper(job, continues=continues, wall=lambda: NOON, monotonic=lambda: 5.0)


def whole_ledger() -> Ledger:
    return Ledger(begun_at=NOON - 3600, at=NOON - 60, machines={"a": 100.0}, amounts={"useful": 100.0})


def test_a_resumed_manager_continues_the_ledger(tmp_path: Path) -> None:
    """B6, PRO-4"""
    (tmp_path / NAME).write_bytes(msgspec.json.encode(whole_ledger()))
    resumed = keeper(tmp_path)
    resumed.observe(JobState(), clock=0.0)
    assert resumed.loss == "" and read_ledger(tmp_path).begun_at == NOON - 3600
    assert resumed.report().useful_seconds == 100.0 and not (tmp_path / DAMAGED).exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"begun_at": 1799996400.0, "amou', "is not a valid Ledger: Input data was truncated"),
        (b'{"begun_at": "soon"}', "is not a valid Ledger: Expected `float`, got `str`"),
        (b"{}", "is not a valid Ledger: it has no beginning"),
        (b"", "is not a valid Ledger"),
    ],
)
def test_a_damaged_ledger_is_kept_and_the_new_one_says_from_when_it_counts(
    tmp_path: Path, content: bytes, why: str
) -> None:
    """B6, PRO-4: counting from zero without a word is a wrong bill."""
    (tmp_path / NAME).write_bytes(content)
    resumed = keeper(tmp_path)
    assert resumed.loss.startswith(f"{tmp_path / NAME} {why}"), resumed.loss
    assert resumed.loss.endswith(
        f"(kept as {DAMAGED}); the ledger counts from 2027-01-15 08:00:00+00:00, without the time before"
    )
    resumed.observe(JobState(), clock=0.0)
    assert (tmp_path / DAMAGED).read_bytes() == content
    assert read_ledger(tmp_path).begun_at == NOON
    (tmp_path / NAME).write_bytes(b"again")
    assert f"(kept as {DAMAGED}.1)" in keeper(tmp_path).loss
    assert (tmp_path / DAMAGED).read_bytes() == content, "the first one stays"


def test_a_missing_ledger_is_said_and_a_new_job_needs_none(tmp_path: Path) -> None:
    """B6, PRO-4"""
    assert keeper(tmp_path, continues=False).loss == ""
    missing = keeper(tmp_path).loss
    assert missing.startswith("there is no ledger: ") and "; the ledger counts from 2027-01-15" in missing
