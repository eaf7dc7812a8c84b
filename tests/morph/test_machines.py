"""The parsers of the machine list and the environment file accept comments and refuse invalid lines."""

from pathlib import Path

import pytest

from varuna.morph.machines import MachineList, parse_environment, read_machines, require_machines
from varuna.morph.run.watchers import MachineListWatcher


def test_the_machine_list_may_hold_comments_and_blank_lines() -> None:
    found = read_machines(
        b"\xef\xbb\xbf# ours\r\n127.0.0.1  # here\n\nnode-a\nme@gpu_1.lan\n::1\n", source="f"
    )
    assert found == MachineList(("127.0.0.1", "node-a", "me@gpu_1.lan", "::1"))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        *[
            (line, "not an IPv4 address")
            for line in (b"127.0.0", b"10.1.2.", b"127", b"1.2.3.256", b"0x7f.1")
        ],
        *[(line, "not an IPv6 address") for line in (b"fe80:", b"[::1", b"host:22", b"[1.2.3.4.5]")],
        *[(line, "not a machine address") for line in (b"-oProxyCommand=x", b"b; rm -rf /", b"\0", b"a b")],
        *[(line, "not a machine address") for line in (b"a..b", b"node-", b"x" * 300, "nöde".encode())],
        (b"node-\xff", "not UTF-8"),
    ],
)
def test_an_invalid_line_is_named_with_its_file_and_number(line: bytes, why: str) -> None:
    """REL-6: the whole list is then not used, so no machine seems to be removed."""
    found = read_machines(b"a\nb\n" + line + b"\nc\n", source="/here/machines")
    assert found.machines == () and why in found.problem
    assert found.problem.startswith("/here/machines, line 3: ")
    with pytest.raises(ValueError, match="/here/machines, line 3: "):
        require_machines(found, source="/here/machines")


def test_repeated_machines_count_once_and_a_huge_list_is_refused() -> None:
    found = read_machines(b"a\nb\na\n", source="f")
    assert found.machines == ("a", "b") and found.repeated == (
        "f, line 3: a appears more than once (first in line 1)",
    )
    assert "not a machine list" in read_machines(b"a\n" * 2**20, source="f").problem


def test_half_a_line_is_not_read_until_it_is_whole_or_stays(tmp_path: Path) -> None:
    """REL-6: a file that is being written; an editor that writes no end of line."""
    path = tmp_path / "machines"
    path.write_text("127.0.0.1\n127.0.0.2")
    watcher = MachineListWatcher(path)
    assert watcher.poll(0.0) == MachineList(("127.0.0.1", "127.0.0.2")), "the job starts with it"
    path.write_text("127.0.0.1\n127.0.0.")
    assert watcher.poll(1.0) is None
    path.write_text("127.0.0.1\n127.0.0.25")
    assert watcher.poll(2.5) is None
    path.write_text("127.0.0.1\n127.0.0.254\n")
    assert watcher.poll(2.75) == MachineList(("127.0.0.1", "127.0.0.254"))
    assert watcher.poll(3.0) is None
    path.write_text("127.0.0.1\n127.0.0.3")
    assert watcher.poll(4.0) is watcher.poll(4.5) is None
    assert watcher.poll(5.0) == MachineList(("127.0.0.1", "127.0.0.3"))
    path.unlink()
    gone = watcher.poll(6.0)
    assert gone is not None and f"{path} cannot be read" in gone.problem
    assert watcher.poll(7.0) is None


def test_an_env_file_is_read_like_a_shell_reads_it() -> None:
    """V31"""
    text = "# cluster\nA=1\nexport B='two words' # here\n\nC=\"x=y\"\nD= E=5\n"
    assert parse_environment(text.encode(), source="f") == {
        "A": "1",
        "B": "two words",
        "C": "x=y",
        "D": "",
        "E": "5",
    }


@pytest.mark.parametrize("line", ["A=two words", "A b", "1A=2", "A='open", "A=\udcff"])
def test_an_invalid_line_of_an_env_file_is_reported(line: str) -> None:
    """V31"""
    with pytest.raises(ValueError, match="f, line 2"):
        parse_environment(f"OK=1\n{line}\n".encode(errors="surrogateescape"), source="f")


@pytest.mark.parametrize("line", ["KEY='hunter2", "my-key=hunter2", "KEY=a hunter2", 'export "KEY=hunter2'])
def test_an_error_in_an_env_file_does_not_show_its_values(line: str) -> None:
    """SEC-3"""
    with pytest.raises(ValueError, match="f, line 1") as raised:
        parse_environment(f"{line}\n".encode(), source="f")
    assert "hunter2" not in str(raised.value)
