"""Atomic writes."""

from pathlib import Path

import pytest

from varuna.files import write_atomic


@pytest.mark.parametrize("fsync", [True, False])
def test_a_file_is_replaced_and_no_temporary_file_stays(tmp_path: Path, fsync: bool) -> None:
    file = tmp_path / "new" / "file.json"
    write_atomic(file, "old", fsync=fsync)
    write_atomic(file, "new", fsync=fsync)
    assert [*file.parent.iterdir()] == [file]
    assert file.read_text() == "new"


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    write_atomic(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(file, "new \ud800")
    assert [*tmp_path.iterdir()] == [file]
    assert file.read_text() == "old"


def test_a_secret_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    write_atomic(tmp_path / "secret", "x", mode=0o600)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
