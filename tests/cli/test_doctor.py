"""`varuna doctor`: what it finds, and what it tells to do."""

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

import varuna
from tests.cli.commands import Cli
from varuna.chaos.hosts.box import tool
from varuna.chaos.hosts.lab import Lab
from varuna.cli.doctor import command, network, this_machine
from varuna.cli.doctor.finding import Finding


def found(cli: Cli, *arguments: object) -> dict[str, dict[str, Any]]:
    cli("doctor", "--json", *arguments)
    return {finding["what"]: finding for finding in json.loads(cli.out)}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARUNA_HOME", str(tmp_path / "home"))


@pytest.fixture
def only_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the checks of this machine that take seconds."""
    slow = (this_machine.check_torch, this_machine.check_devices, this_machine.check_nccl)
    monkeypatch.setattr(command, "HERE", tuple(check for check in command.HERE if check not in slow))


def make_ssh(folder: Path, script: str) -> str:
    client = folder / "ssh-client"
    client.write_text(f"#!{sys.executable}\n{script}\n")
    client.chmod(0o755)
    return str(client)


def make_machine(folder: Path, version: str) -> str:
    """Return an ssh client that runs the command here, with these versions of varuna and torch."""
    there = folder / f"varuna-{version}"
    there.mkdir(exist_ok=True)
    (there / "varuna.py").write_text(f"__version__ = {version!r}")
    (there / "torch.py").write_text("__version__ = '2.13.0'")
    note = f"open({str(folder / 'called')!r}, 'a').write(' '.join(sys.argv) + chr(10))"
    run = "os.execvp('sh', ['sh', '-c', 'echo motd; ' + sys.argv[-1]])"
    return make_ssh(folder, f"import os, sys\n{note}\nos.chdir({str(there)!r})\n{run}")


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    path = tmp_path / "machines"
    path.write_text("127.0.0.1\n10.77.0.9\n10.77.0.10\n")
    return path


def test_a_machine_that_can_run_a_job_has_no_problem(cli: Cli, tmp_path: Path) -> None:
    assert cli("doctor", "--store", str(tmp_path / "store")) == 0
    lines = cli.out.splitlines()
    assert any(line.startswith("ok       torch: ") for line in lines)
    assert "ok       gloo: a process group forms on this machine" in lines
    assert any("CPU cores" in line or "GPU" in line for line in lines)
    assert "ok       manager's port: a port of 127.0.0.1 can be opened" in lines
    assert f"ok       store: {tmp_path / 'store'} can be written and read" in lines
    assert not list((tmp_path / "store").iterdir())


def test_machines_are_asked_over_ssh(cli: Cli, tmp_path: Path, listed: Path, only_machines: None) -> None:
    good = make_machine(tmp_path, varuna.__version__)
    findings = found(cli, "--machine-list", listed, "--ssh", f"{good} -p 22")
    assert findings["127.0.0.1"]["result"] == "ok"
    for machine, after in (("10.77.0.9", "10.77.0.10"), ("10.77.0.10", "10.77.0.9")):
        one = findings[machine]
        assert one["result"] == "ok" and f"varuna {varuna.__version__}, torch 2.13.0" in one["found"]
        assert "it reaches this machine at " in one["found"] and one["found"].endswith(f" and {after}")
    calls = (tmp_path / "called").read_text().splitlines()
    assert len(calls) == 2 and all("-p 22" in call and "BatchMode=yes" in call for call in calls)
    old = make_machine(tmp_path, "0.0.1")
    findings = found(cli, "--machine-list", listed, "--ssh", old)
    assert findings["10.77.0.9"]["found"] == f"varuna 0.0.1, but {varuna.__version__} here"
    assert "same version" in findings["10.77.0.9"]["remedy"]


def test_a_machine_that_does_not_answer_is_named_with_the_reason(
    cli: Cli, tmp_path: Path, listed: Path, only_machines: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = make_ssh(tmp_path, "import sys; sys.exit('Permission denied (publickey).')")
    assert cli("doctor", "--machine-list", listed, "--ssh", broken) == 1
    assert "Permission denied" in cli.out
    assert cli("doctor", "--machine-list", listed, "--ssh", "no-such-client") == 1
    assert "no ssh client 'no-such-client'" in cli.out
    other = make_machine(tmp_path, varuna.__version__)
    findings = found(cli, "--machine-list", listed, "--ssh", other, "--python", "/no/python")
    assert "the python to run was not found" in findings["10.77.0.9"]["found"]
    monkeypatch.setattr(network, "SSH_SECONDS", 0.1)
    hanging = make_ssh(tmp_path, "import threading; threading.Event().wait()")
    findings = found(cli, "--machine-list", listed, "--ssh", hanging)
    assert findings["10.77.0.9"]["found"] == "no answer in 0 s"
    assert findings["10.77.0.9"]["remedy"] == "try: ssh 10.77.0.9 true"


def test_a_manager_that_machines_cannot_reach_is_a_problem(
    cli: Cli, tmp_path: Path, listed: Path, only_machines: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = make_machine(tmp_path, varuna.__version__)
    findings = found(cli, "--machine-list", listed, "--ssh", good, "--manager-ip", "192.0.2.1")
    assert "cannot listen on 192.0.2.1" in findings["10.77.0.9"]["found"]

    def only_bound(address: str, port: int) -> socket.socket:
        """A port that refuses all, as behind a firewall."""
        made = socket.socket()
        made.bind((address, port))
        return made

    monkeypatch.setattr(network, "listen", only_bound)
    findings = found(cli, "--machine-list", listed, "--ssh", good)
    refused = findings["10.77.0.9 to this machine"]
    assert refused["result"] == "problem" and refused["found"].endswith("Connection refused")
    assert "allow TCP" in refused["remedy"]
    assert findings["10.77.0.9"]["found"].endswith("it reaches 10.77.0.10")


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(2) as lab:
        yield lab


def test_machines_that_cannot_reach_each_other_are_named(
    cli: Cli, lab: Lab, tmp_path: Path, only_machines: None
) -> None:
    listed = tmp_path / "machines"
    listed.write_text("n1\nn2\n")
    options = ("--machine-list", listed, "--ssh", " ".join(lab.ssh), "--manager-ip", lab.address)
    findings = found(cli, *options)
    assert [findings[name]["result"] for name in ("n1", "n2")] == ["ok", "ok"], findings
    assert findings["n1"]["found"].endswith(f"it reaches this machine at {lab.address} and n2")
    lab.hosts[0].run([tool("ip"), "route", "add", "unreachable", lab.hosts[1].address])
    findings = found(cli, *options)
    assert findings["n1 to n2"]["result"] == "problem"
    assert lab.hosts[1].address in findings["n1 to n2"]["found"]


def test_a_group_that_does_not_form_or_hangs_is_a_problem(
    cli: Cli, only_machines: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "GLOO_PROGRAM", "raise RuntimeError('no interface')")
    (finding,) = this_machine.check_gloo()
    assert finding.result == "problem" and finding.found.endswith("RuntimeError: no interface")
    monkeypatch.setattr(this_machine, "GLOO_PROGRAM", "import threading; threading.Event().wait()")
    monkeypatch.setattr(this_machine, "GROUP_SECONDS", 0.1)
    monkeypatch.setattr(command, "HERE", (this_machine.check_gloo,))
    assert cli("doctor") == 1
    assert "problem  gloo: no process group forms: it hangs" in cli.out and "GLOO_SOCKET_IFNAME" in cli.out


def nccl_findings(monkeypatch: pytest.MonkeyPatch, gpus: int, failure: str | None) -> list[Finding]:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    ran: list[str] = []

    def fail(arguments: list[str]) -> str | None:
        ran.append(" ".join(arguments[2:]))
        return failure

    monkeypatch.setattr(this_machine, "failure_of", fail)
    findings = list(this_machine.check_nccl())
    assert ran == ([f"nccl {gpus}", "share"] if gpus else [])
    return findings


def test_nccl_groups_and_shared_gpu_memory_are_tried_where_there_are_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert nccl_findings(monkeypatch, 0, None) == [Finding("NCCL", "ok", "not applicable: no GPU")]
    good = nccl_findings(monkeypatch, 2, None)
    assert [(one.result, one.found) for one in good] == [
        ("ok", "2.29.7; a group of 2 ranks forms on this machine"),
        ("ok", "two processes share GPU memory"),
    ]
    bad = nccl_findings(monkeypatch, 1, "it hangs (120 s)")
    assert [one.result for one in bad] == ["problem", "warning"]
    assert bad[0].found == "2.29.7; no group of 1 rank forms: it hangs (120 s)"
    assert "NCCL_SOCKET_IFNAME" in bad[0].remedy and "--ipc=host" in bad[1].remedy


@pytest.mark.parametrize("arguments", [["nccl", "1"], ["share"]])
def test_a_driver_that_fails_ends_the_programs_on_gpus_with_a_reason(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    failure = this_machine.failure_of(["-m", this_machine.GPU_PROGRAM, *arguments])
    assert failure is not None and "Error" in failure and "hangs" not in failure


def test_a_taken_port_of_the_page_is_only_a_note(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "HERE", (this_machine.check_ports,))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(this_machine, "DEFAULT_PORT", port)
        assert found(cli)["page"]["found"] == f"port {port} is taken: `varuna run --page` takes another one"
        assert cli("doctor") == 0
    assert found(cli)["page"]["found"] == f"port {port} is free"


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
    monkeypatch.setattr(this_machine.resource, "getrlimit", lambda kind: (128, 5000))
    findings = found(cli)
    assert findings["open files"]["result"] == "problem"
    assert findings["open files"]["remedy"] == "ulimit -n 5000"


def test_a_wrong_machine_list_is_refused(cli: Cli, tmp_path: Path) -> None:
    assert cli("doctor", "--machine-list", tmp_path / "none") == 2
    assert "cannot read the machine list" in cli.err
