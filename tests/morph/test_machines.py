"""The parsers of the machine list and the environment file accept comments and refuse invalid lines."""

import pytest

from varuna.morph.machines import parse_environment, read_machines


def test_the_machine_list_may_hold_comments_and_blank_lines() -> None:
    assert read_machines("# ours\n127.0.0.1  # here\n\nnode-a\n::1\n") == (("127.0.0.1", "node-a", "::1"), ())


def test_invalid_and_repeated_machines_are_reported_and_ignored() -> None:
    machines, problems = read_machines("a\n-oProxyCommand=x\na\nb; rm -rf /\n\x00\n")
    assert machines == ("a",)
    assert len(problems) == 4


def test_an_env_file_is_read_like_a_shell_reads_it() -> None:
    """V31"""
    text = "# cluster\nA=1\nexport B='two words' # here\n\nC=\"x=y\"\nD= E=5\n"
    assert parse_environment(text, source="f") == {"A": "1", "B": "two words", "C": "x=y", "D": "", "E": "5"}


@pytest.mark.parametrize("line", ["A=two words", "A b", "1A=2", "A='open"])
def test_an_invalid_line_of_an_env_file_is_reported(line: str) -> None:
    """V31"""
    with pytest.raises(ValueError, match="f, line 2"):
        parse_environment(f"OK=1\n{line}\n", source="f")


@pytest.mark.parametrize("line", ["KEY='hunter2", "my-key=hunter2", "KEY=a hunter2", 'export "KEY=hunter2'])
def test_an_error_in_an_env_file_does_not_show_its_values(line: str) -> None:
    """SEC-3"""
    with pytest.raises(ValueError, match="f, line 1") as raised:
        parse_environment(f"{line}\n", source="f")
    assert "hunter2" not in str(raised.value)
