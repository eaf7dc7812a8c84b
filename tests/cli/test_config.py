"""Options of `varuna run` from varuna.toml and the environment."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.commands import Cli
from varuna.cli import run as run_command
from varuna.cli.manage import settings_of
from varuna.cli.run import SHOWN_DEFAULTS, PreparedRun, RunOptions, job_spec, prepare, with_absolute_paths

FILE = """
[run]
machine-list = "machines"
batch_size = 32
nstages = 2
chunk_size = 4
save_every = 30
hot = false
hang_seconds = 5
command = ["script.py", "--lr", "0.1"]
"""
SAVED: dict[str, Any] = {
    "nstages": 2,
    "batch_size": 32,
    "chunk_size": 4,
    "gpus_per_node": 8,
    "save_every": "off",
    "command": ["script.py"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "varuna.toml").write_text(FILE)
    return tmp_path


def typed(cli: Cli, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> RunOptions:
    """Run the command up to the point where it has its options."""
    found: list[RunOptions] = []

    def stop(options: RunOptions, **_: object) -> None:
        found.append(options)
        raise ValueError("stop here")

    monkeypatch.setattr(run_command, "prepare", stop)
    assert cli("run", *arguments) == 2
    assert found, cli.err
    return found[0]


def test_flags_win_over_variables_and_variables_over_the_file(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each option comes from the first place that gives it; both spellings work in the file."""
    monkeypatch.setenv("VARUNA_RUN_NSTAGES", "3")
    monkeypatch.setenv("VARUNA_RUN_BATCH_SIZE", "48")
    options = typed(cli, monkeypatch, "--batch_size", "64")
    assert (options.batch_size, options.nstages, options.chunk_size) == (64, 3, 4)
    assert (options.save_every, options.hot, options.hang_seconds) == ("30", False, 5.0)
    assert options.machine_list == "machines" and options.command == ["script.py", "--lr", "0.1"]
    assert typed(cli, monkeypatch, "--hot", "other.py", "--x").command == ["other.py", "--x"]


def test_another_file_names_paths_relative_to_itself(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "jobs").mkdir()
    (folder / "varuna.toml").rename(folder / "jobs" / "night.toml")
    options = typed(cli, monkeypatch, "--config", "jobs/night.toml")
    assert options.machine_list == "jobs/machines" and options.batch_size == 32
    assert typed(cli, monkeypatch, "script.py").batch_size is None  # no varuna.toml here


def test_a_price_in_another_file_is_a_number_or_a_file_beside_it(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "jobs").mkdir()
    for value, found in [
        ('"prices.csv"', "jobs/prices.csv"),
        ("0.92", "0.92"),
        ('"0.92"', "0.92"),
        ('"10.0.*,0.9"', "10.0.*,0.9"),
    ]:
        (folder / "jobs" / "night.toml").write_text(f"[run]\nprice = {value}")
        assert typed(cli, monkeypatch, "--config", "jobs/night.toml", "script.py").price == found


@pytest.mark.parametrize(
    ("arguments", "nstages"),
    [
        ([], 2),  # as saved
        (["--nstages", "3"], 3),
        (["--config", "varuna.toml"], 5),
        (["--config", "varuna.toml", "--nstages", "3"], 3),
    ],
)
def test_resume_prefers_what_is_given_now_then_what_was_saved_to_the_default_file(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: list[str], nstages: int
) -> None:
    (folder / "machines").write_text("127.0.0.1\n")
    (folder / "script.py").write_text("")
    monkeypatch.setenv("VARUNA_HOME", str(folder / "home"))
    prepared = prepare(RunOptions(machine_list="machines", **SAVED), home=folder / "home")
    (folder / "varuna.toml").write_text('[run]\nnstages = 5\nlog_dir = "other"\ncommand = ["new.py"]\n')
    (folder / "new.py").write_text("")
    found: list[PreparedRun] = []

    def stop(ready: PreparedRun) -> None:
        found.append(ready)
        raise ValueError("stop here")

    monkeypatch.setattr(run_command, "open_page", stop)
    assert cli("run", "--resume", *arguments) == 2 and found, cli.err
    job = found[0].job
    assert found[0].choice.layout.depth == nstages
    assert Path(job.script).name == ("new.py" if "--config" in arguments else "script.py")
    assert Path(job.log_dir).parent.name == "other"  # it is not saved, so the file counts
    assert job.save_every_seconds == prepared.job.save_every_seconds == 0.0


def test_variables_override_the_saved_options_at_resume(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "varuna.toml").write_text("[run]\nnstages = 5\nchunk_size = 3\nhot = true\n")
    monkeypatch.setenv("VARUNA_RUN_NSTAGES", "3")
    options = typed(cli, monkeypatch, "--resume", "--no-hot")
    assert (options.nstages, options.chunk_size, options.hot) == (3, None, False)


def test_show_config_names_where_every_option_comes_from(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VARUNA_RUN_NSTAGES", "3")
    assert cli("run", "--show-config", "--batch-size", "64") == 0
    rows = {line.split()[0]: line.split("  ") for line in cli.out.splitlines()}
    found = {name: [cell.strip() for cell in row if cell][1:] for name, row in rows.items()}
    assert found["batch_size"] == ["64", "command line"]
    assert found["nstages"] == ["3", "environment"]
    assert found["chunk_size"] == ["4", "file"]
    assert found["command"] == ["script.py --lr 0.1", "file"]
    assert found["log_dir"] == ["varuna_logs", "default"] and found["plan"] == ["-", "default"]
    assert found["track"] == ["-", "default"] and found["gpus_per_node"] == ["4", "default"]
    assert "show_config" not in found


def test_show_config_shows_the_defaults_that_a_job_gets(folder: Path) -> None:
    (folder / "script.py").write_text("")
    given, missing = (
        job_spec(with_absolute_paths(msgspec.structs.replace(RunOptions(**SAVED), **values)))
        for values in (SHOWN_DEFAULTS, dict.fromkeys(SHOWN_DEFAULTS))
    )
    assert settings_of(given) == settings_of(missing)
    assert msgspec.structs.replace(given, hang_seconds=None) == missing


def test_show_config_of_a_resume_has_the_saved_options(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each from where `--resume` would take it; nothing is started or saved."""
    assert cli("run", "--resume", "--show-config", "--code-dir", "x") == 2
    assert "--resume found no earlier job" in cli.err
    (folder / "machines").write_text("127.0.0.1\n")
    (folder / "script.py").write_text("")
    monkeypatch.setenv("VARUNA_HOME", str(folder / "home"))
    prepare(RunOptions(machine_list="machines", **SAVED), home=folder / "home")
    before = [file.read_bytes() for file in (folder / "home").rglob("*.json")]
    (folder / "varuna.toml").write_text("[run]\nnstages = 5\nchunk_size = 3\nhot = true\n")
    monkeypatch.setenv("VARUNA_RUN_SAVE_EVERY", "60")
    assert cli("run", "--resume", "--show-config", "--batch-size", "64") == 0, cli.err
    rows = {line.split()[0]: line.split("  ") for line in cli.out.splitlines()}
    found = {name: [cell.strip() for cell in row if cell][1:] for name, row in rows.items()}
    assert found["batch_size"] == ["64", "command line"] and found["save_every"] == ["60", "environment"]
    assert found["nstages"] == ["2", "saved job"] and found["chunk_size"] == ["4", "saved job"]
    assert found["command"] == ["script.py", "saved job"] and found["gpus_per_node"] == ["8", "saved job"]
    assert found["hot"] == ["True", "default"]  # that of varuna.toml does not count
    assert [file.read_bytes() for file in (folder / "home").rglob("*.json")] == before != []


def test_a_misspelt_variable_gets_a_warning(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of others, and the options of `varuna run`, do not."""
    for name in ("VARUNA_CACH", "VARUNA_MY_DATASET", "VARUNA_MORPH_PORT", "VARUNA_RUN_TRACK", "VARUNA_HOME"):
        monkeypatch.setenv(name, "x")
    assert cli("--version") == 0
    expected = "varuna: the environment variable VARUNA_CACH is not known (did you mean VARUNA_CACHE?)\n"
    assert cli.err == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nbatchsize = 3", "varuna.toml: 'batchsize' is not known (did you mean 'batch_size'?)"),
        ("[run]\nxyzzy = 3", "'xyzzy' is not known (`varuna run --help` lists all options)"),
        ('[run]\nbatch_size = "many"', "'batch_size' must be a whole number, not 'many'"),
        ("[run]\nbatch_size = true", "'batch_size' must be a whole number, not True"),
        ('[run]\nhot = "yes"', "'hot' must be true or false, not 'yes'"),
        ("[run]\nmachine_list = [1]", "'machine_list' must be text"),
        ('[run]\ncommand = "train.py"', "'command' must be a list of texts"),
        ("[run]\nresume = true", "'resume' belongs to one call (pass it on the command line)"),
        ("[run]\nbatch_size = 1\nbatch-size = 2", "given twice"),
        ("batch_size = 3", "below a line [run]"),
        ("[plan]\nx = 1", "'plan' is not known"),
        ("[run\n", "is no valid TOML file"),
        ("\xff", "is no valid TOML file"),
    ],
)
def test_a_wrong_file_is_refused_by_file_and_key(folder: Path, cli: Cli, text: str, message: str) -> None:
    (folder / "varuna.toml").write_bytes(text.encode("latin-1"))
    assert cli("run", "script.py") == 2
    assert "varuna.toml" in cli.err and message in cli.err


def test_a_file_that_is_missing_and_an_unknown_variable_are_refused(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("run", "--config", "none.toml", "script.py") == 2
    assert "cannot read the configuration 'none.toml'" in cli.err
    monkeypatch.setenv("VARUNA_RUN_NSTAGE", "3")
    assert cli("run", "script.py") == 2
    assert "VARUNA_RUN_NSTAGE is not known (did you mean 'VARUNA_RUN_NSTAGES'?)" in cli.err
    monkeypatch.delenv("VARUNA_RUN_NSTAGE")
    monkeypatch.setenv("VARUNA_RUN_COMMAND", "other.py")  # it would be ignored
    assert cli("run", "script.py") == 2
    assert "the environment variable VARUNA_RUN_COMMAND is not known" in cli.err
    monkeypatch.delenv("VARUNA_RUN_COMMAND")
    monkeypatch.setenv("VARUNA_RUN_BATCH_SIZE", "x")  # the parser would name --batch-size
    assert cli("run", "script.py") == 2
    assert "variable VARUNA_RUN_BATCH_SIZE must be a whole number, not 'x'" in cli.err
