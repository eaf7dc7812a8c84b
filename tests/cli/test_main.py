"""The command `varuna` itself: version, help, errors, and both spellings of every flag."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.text import Text

import varuna
from tests.cli.commands import Cli, parse_options
from tests.without_torch import run_without_torch
from varuna.cli.launch import LaunchOptions, launch_script
from varuna.cli.launch import app as launch_app
from varuna.cli.main import app, main
from varuna.cli.options import add_command, new_app, say, warn
from varuna.cli.run import RunOptions


@pytest.mark.parametrize("command", [["-m", "varuna"], [str(Path(sys.executable).with_name("varuna"))]])
def test_it_is_a_command_and_a_module(command: list[str]) -> None:
    interpreter = [sys.executable] if command[0] == "-m" else []
    run = subprocess.run([*interpreter, *command, "--version"], capture_output=True, text=True)
    assert (run.stdout, run.returncode) == (f"varuna {varuna.__version__}\ntorch {version('torch')}\n", 0)


def test_help_shows_all_of_its_text() -> None:
    """Typer prints help as Rich markup, which leaves out [words] in brackets."""
    commands = [typer.main.get_command(app), typer.main.get_command(launch_app)]
    texts = []
    while commands:
        command: Any = commands.pop()
        commands += getattr(command, "commands", {}).values()
        texts += [command.help or "", *(getattr(one, "help", None) or "" for one in command.params)]
    assert len(texts) > 100
    assert [text for text in texts if Text.from_markup(text).plain != text] == []


def test_version_and_help_import_no_torch() -> None:
    run_without_torch([["--version"], ["--help"], ["run", "--help"], ["checkpoint", "--help"]])


def test_an_error_is_one_line_unless_debugging(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("checkpoint", "ls", tmp_path / "nowhere") == 1
    assert cli.err == (
        f"varuna: there is no folder {tmp_path}/nowhere (check the path, and that the disk is mounted)\n"
    )
    monkeypatch.setenv("VARUNA_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["varuna", "checkpoint", "ls", str(tmp_path / "nowhere")])
    with pytest.raises(FileNotFoundError):
        main()


def test_text_from_elsewhere_does_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """SEC-2: a title, a colour and a cursor movement from another machine are shown, not obeyed."""
    hostile = "lost: \x1b]0;title\x07\x1b[2J \x9b31m\r ok\n\tnext line"
    say(hostile)
    assert capsys.readouterr().out == (
        "varuna: lost: \\x1b]0;title\\x07\\x1b[2J \\x9b31m\\x0d ok\n\tnext line\n"
    )
    warn(hostile)
    assert not set(capsys.readouterr().err) & {"\x1b", "\x9b", "\x07", "\r"}


def test_a_terminal_without_unicode_gets_escapes(tmp_path: Path) -> None:
    """SEE-1: text that the terminal cannot show ends neither a command nor a job."""
    path = tmp_path / "a→b"
    run = subprocess.run(
        [sys.executable, "-m", "varuna", "run", "--show-config", "--log-dir", str(path), "x.py"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert f"{tmp_path}/a\\u2192b" in run.stdout


# ---------------------------------------------------------------- flags


def all_commands() -> dict[str, Any]:
    """Return every command of `varuna`, and the launcher, as typer builds them."""
    launcher = new_app()
    add_command(launcher, launch_script, ends_with_script=True)
    found: dict[str, Any] = {"launcher": typer.main.get_command(launcher)}
    groups = {"varuna": typer.main.get_command(app)}
    while groups:
        name, group = groups.popitem()
        for command_name, command in group.commands.items():
            place = groups if hasattr(command, "commands") else found
            place[f"{name} {command_name}"] = command
    return found


FLAGS = [
    (name, parameter.name, flag, parameter.is_flag)
    for name, command in all_commands().items()
    for parameter in command.params
    if parameter.param_type_name == "option"
    for flag in (*parameter.opts, *parameter.secondary_opts)
    if "-" in flag[2:]
]


def test_the_search_for_flags_finds_them() -> None:
    found = {(name, flag) for name, _, flag, _ in FLAGS}
    assert {
        ("launcher", "--ngpus-per-server"),
        ("varuna run", "--machine-list"),
        ("varuna run", "--no-worker-args"),
        ("varuna plan", "--no-recompute"),
        ("varuna checkpoint export", "--max-shard-size"),
        ("varuna logs", "--code-dir"),
    } <= found


@pytest.mark.parametrize(("command", "parameter", "flag", "is_switch"), FLAGS)
def test_every_flag_takes_dashes_and_underscores(
    command: str, parameter: str, flag: str, is_switch: bool
) -> None:
    found = all_commands()[command]
    context = found.context_class(found, info_name=command, **found.context_settings)
    for spelling in (flag, "--" + flag[2:].replace("-", "_")):
        options, rest, _ = found.make_parser(context).parse_args([spelling, *([] if is_switch else ["1"])])
        assert parameter in options and not rest


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (
            ["--nstages", "2", "train.py", "--nstages", "9", "--batch_size"],
            ["train.py", "--nstages", "9", "--batch_size"],
        ),
        (["--nstages=2", "--worker_args", "train.py", "--resume"], ["train.py", "--resume"]),
        (["--nstages", "2", "--", "train.py", "--", "-x_y"], ["train.py", "--", "-x_y"]),
    ],
)
@pytest.mark.parametrize("kind", [RunOptions, LaunchOptions])
def test_arguments_of_the_script_pass_untouched(
    kind: type[RunOptions] | type[LaunchOptions], argv: list[str], command: list[str]
) -> None:
    options = parse_options(kind, argv)
    assert (options.nstages, options.command) == (2, command)
