"""What a job is started with is read as people write it, and refused where it makes no sense."""

import pytest

from varuna.morph.machines import parse_environment, parse_machines, require_this_machine


def test_the_machine_list_may_hold_comments_and_blank_lines() -> None:
    assert parse_machines("# ours\n127.0.0.1  # here\n\n10.0.0.2\n") == ("127.0.0.1", "10.0.0.2")


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "::1"])
def test_this_machine_is_accepted(name: str) -> None:
    require_this_machine((name,))


@pytest.mark.parametrize(
    ("machines", "complaint"),
    [
        ((), "names no machine"),
        (("10.0.0.2",), r"10\.0\.0\.2 is not this one"),
        (("127.0.0.1", "127.0.0.1"), "2 machines .* several machines come with morphing"),
        (("node-a", "node-b"), "node-a, node-b.*several machines come with morphing"),
    ],
)
def test_other_machines_are_refused_by_name(machines: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        require_this_machine(machines)


def test_an_env_file_holds_several_variables_as_a_shell_would_read_them() -> None:
    """V31"""
    text = "# cluster\nA=1\nexport B='two words' # here\n\nC=\"x=y\"\nD= E=5\n"
    assert parse_environment(text, source="f") == {"A": "1", "B": "two words", "C": "x=y", "D": "", "E": "5"}


@pytest.mark.parametrize("line", ["A=two words", "A b", "1A=2", "A='open"])
def test_a_line_that_is_no_assignment_is_named(line: str) -> None:
    """V31"""
    with pytest.raises(ValueError, match="f, line 2"):
        parse_environment(f"OK=1\n{line}\n", source="f")
