"""Atomic writes, and files that only this user can read."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from varuna.files import DroppingFile, LineFile, make_private_folder, open_private, write_atomic


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
    umask = os.umask(0)
    try:
        write_atomic(tmp_path / "a" / "b" / "secret", "x", private=True)
        with os.fdopen(open_private(tmp_path / "log"), "w") as log:
            log.write("x")
        (tmp_path / "old").touch(mode=0o644)
        os.close(open_private(tmp_path / "old"))
    finally:
        os.umask(umask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"a": 0o700, "b": 0o700, "secret": 0o600, "log": 0o600, "old": 0o600}


def test_the_permissions_of_devices_and_of_folders_of_the_user_stay(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    before = os.stat("/dev/full").st_mode, tmp_path.stat().st_mode
    os.close(open_private(tmp_path / "full"))
    make_private_folder(tmp_path)
    assert (os.stat("/dev/full").st_mode, tmp_path.stat().st_mode) == before


def test_a_dropping_file_drops_what_does_not_fit() -> None:
    """REL-3: a script that prints to a full disk does not end."""
    with DroppingFile("/dev/full", "w") as file:
        assert file.write(b"lost") == 4
        print("lost", file=io.TextIOWrapper(file, write_through=True))  # type: ignore[type-var]


def test_a_line_file_repairs_a_cut_line(tmp_path: Path) -> None:
    """REL-3: the next line stands alone."""
    (tmp_path / "lines").write_bytes(b"one\ntw")
    lines = LineFile(tmp_path / "lines")
    lines.append(b"three")
    lines.close()
    lines.append(b"four")
    assert (tmp_path / "lines").read_bytes() == b"one\ntw\nthree\nfour\n"
    with pytest.raises(OSError, match="No space left"):
        LineFile(Path("/dev/full")).append(b"five")


def test_files_are_utf_8_in_every_locale(tmp_path: Path) -> None:
    """With another locale, a message of a worker would end the manager."""
    script = """
import sys
from pathlib import Path
from varuna.cli.config import read_config
from varuna.cli.run import RunOptions
from varuna.files import write_atomic

folder = Path(sys.argv[1])
(folder / "varuna.toml").write_bytes("[run]\\nlog_dir = 'caf\\xe9'".encode())
write_atomic(folder / "file", read_config(folder / "varuna.toml", RunOptions)["log_dir"])
"""
    variables = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}  # ASCII
    run = subprocess.run(
        [sys.executable, "-c", script, tmp_path], env={**os.environ, **variables}, stderr=subprocess.PIPE
    )
    assert run.returncode == 0, run.stderr.decode()
    assert (tmp_path / "file").read_bytes().decode() == f"{tmp_path}/café"
