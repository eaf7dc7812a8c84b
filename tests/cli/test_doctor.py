"""`varuna doctor`: what it finds, and what it tells to do."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import varuna
from tests.cli.commands import Cli
from varuna.cli import doctor


def found(cli: Cli, *arguments: object) -> dict[str, dict[str, Any]]:
    cli("doctor", "--json", *arguments)
    return {finding["what"]: finding for finding in json.loads(cli.out)}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARUNA_HOME", str(tmp_path / "home"))


@pytest.fixture
def only_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the checks of this machine, which take seconds."""
    for name in ("check_torch", "check_devices"):
        monkeypatch.setattr(doctor, name, lambda: iter(()))


def make_ssh(folder: Path, script: str) -> str:
    client = folder / "ssh-client"
    client.write_text(f"#!{sys.executable}\n{script}\n")
    client.chmod(0o755)
    return str(client)


def test_a_machine_that_can_run_a_job_has_no_problem(cli: Cli, tmp_path: Path) -> None:
    assert cli("doctor", "--store", str(tmp_path / "store")) == 0
    lines = cli.out.splitlines()
    assert any(line.startswith("ok       torch: ") for line in lines)
    assert "ok       gloo: a process group forms on this machine" in lines
    assert any("CPU cores" in line or "GPU" in line for line in lines)
    assert f"ok       store: {tmp_path / 'store'} can be written and read" in lines
    assert not list((tmp_path / "store").iterdir())


def test_machines_are_asked_over_ssh(cli: Cli, tmp_path: Path, only_machines: None) -> None:
    listed = tmp_path / "machines"
    listed.write_text("127.0.0.1\n10.77.0.9\n")
    log = tmp_path / "called"
    note = f"import sys; open({str(log)!r}, 'w').write(' '.join(sys.argv))"
    good = make_ssh(tmp_path, f"{note}\nprint('{varuna.__version__} 2.13.0')")
    findings = found(cli, "--machine-list", listed, "--ssh", f"{good} -p 22", "--python", "/opt/python")
    assert findings["127.0.0.1"]["result"] == "ok"
    assert findings["10.77.0.9"]["result"] == "ok" and "torch 2.13.0" in findings["10.77.0.9"]["found"]
    assert (
        "-p 22" in log.read_text() and "BatchMode=yes" in log.read_text() and "/opt/python" in log.read_text()
    )
    old = make_ssh(tmp_path, "print('0.0.1 2.13.0')")
    findings = found(cli, "--machine-list", listed, "--ssh", old)
    assert "0.0.1" in findings["10.77.0.9"]["found"] and "same version" in findings["10.77.0.9"]["remedy"]
    broken = make_ssh(tmp_path, "import sys; sys.exit('Permission denied (publickey).')")
    assert cli("doctor", "--machine-list", listed, "--ssh", broken) == 1
    assert "Permission denied" in cli.out
    assert cli("doctor", "--machine-list", listed, "--ssh", "no-such-client") == 1
    assert "no ssh client 'no-such-client'" in cli.out


def test_what_cannot_be_written_is_a_problem(
    cli: Cli, tmp_path: Path, only_machines: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VARUNA_HOME", str(tmp_path / "file" / "home"))
    findings = found(cli, "--store", tmp_path / "file" / "store")
    assert findings["home"]["result"] == findings["store"]["result"] == "problem"
    assert "VARUNA_HOME" in findings["home"]["remedy"]


def test_low_limits_are_named_with_the_command_that_raises_them(
    cli: Cli, only_machines: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: (128, 5000))
    findings = found(cli)
    assert findings["open files"]["result"] == "problem"
    assert findings["open files"]["remedy"] == "ulimit -n 5000"


def test_a_wrong_machine_list_is_refused(cli: Cli, tmp_path: Path) -> None:
    assert cli("doctor", "--machine-list", tmp_path / "none") == 2
    assert "cannot read the machine list" in cli.err
