"""Agents started over ssh, on hosts with their own sshd."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.morph.hosts.manager import StubManager
from varuna.chaos.hosts.lab import ROOT, Lab
from varuna.morph.protocol.orders import AgentOrders
from varuna.morph.starters.ssh import SshAgent, SshStarter, explain_ssh_end
from varuna.secure.credential import make_credential

STUB = str(ROOT / "tests/morph/hosts/stub_agent.py")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(2) as lab:
        yield lab


@pytest.fixture
def manager(lab: Lab) -> Iterator[StubManager]:
    with StubManager(lab.address) as manager:
        yield manager


def make_starter(lab: Lab, logs: Path, *, folder: str = "", python: str = sys.executable) -> SshStarter:
    return SshStarter(log_folder=logs, ssh=lab.ssh, agent=(STUB,), folder=folder, python=python)


def wait_for_the_end(agent: SshAgent) -> str:
    agent._client.wait()
    end = agent.ended()
    assert end is not None
    return end


def test_an_agent_starts_on_each_host_with_its_orders_in_its_folder(
    lab: Lab, manager: StubManager, tmp_path: Path
) -> None:
    folder = tmp_path / "it's a $folder; with `everything`"
    folder.mkdir()
    starter = make_starter(lab, tmp_path / "logs", folder=str(folder))
    agents = [starter.start(manager.orders(host.name)) for host in lab.hosts]
    hellos = [manager.accept().hello for _ in agents]
    assert {(hello["machine"], hello["hostname"]) for hello in hellos} == {("n1", "n1"), ("n2", "n2")}
    assert {hello["cwd"] for hello in hellos} == {str(folder)}
    assert [agent.ended() for agent in agents] == [None, None]


def test_the_secret_is_in_no_argument_no_environment_and_no_log(
    lab: Lab, manager: StubManager, tmp_path: Path
) -> None:
    """V46: the process list does not show it."""
    make_starter(lab, tmp_path).start(manager.orders("n1"))
    manager.accept().tell("say something")
    seen = b""
    for process in Path("/proc").glob("[0-9]*"):
        for listing in ["cmdline", "environ"]:
            try:
                seen += (process / listing).read_bytes()
            except OSError:
                continue  # gone meanwhile
    assert STUB.encode() in seen, "the agent itself is among what was read"
    assert manager.secret.encode() not in seen + (tmp_path / "n1.log").read_bytes()


def test_killing_an_agent_ends_it_on_its_host(lab: Lab, manager: StubManager, tmp_path: Path) -> None:
    agent = make_starter(lab, tmp_path).start(manager.orders("n1"))
    dialled_in = manager.accept()
    agent.kill()
    dialled_in.wait_until_gone()
    assert "killed by signal 9" in wait_for_the_end(agent)
    agent.kill()  # again is no error


def test_an_agent_survives_its_ssh_client_and_its_manager(
    lab: Lab, manager: StubManager, tmp_path: Path
) -> None:
    """V45: kill -9 of the manager closes its pipes; its agents continue and wait for a new manager."""
    starting = (
        "import sys, pathlib, msgspec; from varuna.morph.starters.ssh import SshStarter; "
        "from varuna.morph.protocol.orders import AgentOrders; "
        f"logs = pathlib.Path({str(tmp_path)!r}); "
        f"starter = SshStarter(log_folder=logs, ssh={lab.ssh!r}, agent=({STUB!r},)); "
        "agent = starter.start(msgspec.json.decode(sys.stdin.readline(), type=AgentOrders)); "
        "print('started', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", starting],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as first_manager:
        assert first_manager.stdin is not None and first_manager.stdout is not None
        first_manager.stdin.write(manager.orders("n1").line())
        first_manager.stdin.flush()
        dialled_in = manager.accept()
        client = client_of(first_manager.pid)
        first_manager.kill()
    dialled_in.tell("say still here")
    assert dialled_in.hear() == {"said": "still here"}
    os.kill(client, signal.SIGKILL)
    for word in ["nobody", "listens", "x" * 200_000]:
        dialled_in.tell(f"say {word}")
        assert dialled_in.hear() == {"said": word}
    dialled_in.tell("exit 0")
    dialled_in.wait_until_gone()


def client_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


def test_an_agent_that_exits_reports_its_last_output(lab: Lab, manager: StubManager, tmp_path: Path) -> None:
    agent = make_starter(lab, tmp_path).start(manager.orders("n2"))
    dialled_in = manager.accept()
    dialled_in.tell("say my last words")
    dialled_in.tell("exit 7")
    assert wait_for_the_end(agent) == "n2: the agent ended, exit status 7: my last words"


def test_a_dead_host_is_detected_and_its_agent_can_be_restarted(
    lab: Lab, manager: StubManager, tmp_path: Path
) -> None:
    starter = make_starter(lab, tmp_path)
    host = lab.hosts[1]
    agent = starter.start(manager.orders(host.name))
    manager.accept()
    host.kill()
    assert wait_for_the_end(agent).startswith("n2: the agent ended, exit status 255")
    assert "has no ssh server" in wait_for_the_end(starter.start(manager.orders(host.name)))
    host.boot()
    again = starter.start(manager.orders(host.name))
    manager.accept()
    assert again.ended() is None


# ---------------------------------------------------------------- what can be wrong


def test_an_unknown_host_key_is_refused(lab: Lab, manager: StubManager, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f"UserKnownHostsFile /dev/null\nInclude {lab.ssh_config}\n")
    starter = SshStarter(log_folder=tmp_path, ssh=("ssh", "-F", str(config)), agent=(STUB,))
    end = wait_for_the_end(starter.start(manager.orders("n1")))
    assert end.startswith("n1: its host key is unknown (connect once by hand, ssh n1, and")


def test_a_changed_host_key_is_refused(lab: Lab, manager: StubManager, tmp_path: Path) -> None:
    known, config = tmp_path / "known", tmp_path / "config"
    known.write_text(lab.known_hosts.read_text().replace("n1", "x1").replace("n2", "n1"))
    config.write_text(f"UserKnownHostsFile {known}\nInclude {lab.ssh_config}\n")
    starter = SshStarter(log_folder=tmp_path, ssh=("ssh", "-F", str(config)), agent=(STUB,))
    end = wait_for_the_end(starter.start(manager.orders("n1")))
    assert end.startswith("n1: its host key has changed")


def test_a_denied_login_is_reported(lab: Lab, manager: StubManager, tmp_path: Path) -> None:
    lab.make_key(tmp_path / "other")
    config = tmp_path / "config"
    config.write_text(lab.ssh_config.read_text().replace(str(lab.folder / "id"), str(tmp_path / "other")))
    starter = SshStarter(log_folder=tmp_path, ssh=("ssh", "-F", str(config)), agent=(STUB,))
    end = wait_for_the_end(starter.start(manager.orders("n1")))
    assert end.startswith("n1: it denied the login (try ssh -o BatchMode=yes n1 true")


def test_a_missing_python_is_reported(lab: Lab, manager: StubManager, tmp_path: Path) -> None:
    starter = make_starter(lab, tmp_path, python="/no/such python")
    end = wait_for_the_end(starter.start(manager.orders("n1")))
    assert end.startswith("n1: the python to run was not found") and "/no/such python" in end


def test_a_python_without_varuna_is_reported(lab: Lab, manager: StubManager, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -I "$@"\n')
    bare.chmod(0o755)
    starter = make_starter(lab, tmp_path, python=str(bare), folder=str(tmp_path))
    end = wait_for_the_end(starter.start(manager.orders("n1")))
    assert "has no varuna and no torch (install it there, or set --python)" in end


def test_another_version_of_varuna_is_reported(lab: Lab, manager: StubManager, tmp_path: Path) -> None:
    (tmp_path / "varuna").mkdir()
    (tmp_path / "varuna" / "__init__.py").write_text('__version__ = "0.0.9"\n')
    end = wait_for_the_end(make_starter(lab, tmp_path, folder=str(tmp_path)).start(manager.orders("n1")))
    assert "has 0.0.9 from" in end and "is required, as on the manager's machine" in end


def test_a_missing_folder_is_reported(lab: Lab, manager: StubManager, tmp_path: Path) -> None:
    starter = make_starter(lab, tmp_path, folder=str(tmp_path / "no such"))
    end = wait_for_the_end(starter.start(manager.orders("n1")))
    assert "no such cannot be entered: No such file or directory" in end


def test_a_missing_ssh_client_is_reported(tmp_path: Path) -> None:
    starter = SshStarter(log_folder=tmp_path, ssh=("no-such-ssh",))
    with pytest.raises(ValueError, match="the ssh client 'no-such-ssh' was not found"):
        starter.start(AgentOrders(job="j", machine="n1", manager="", credential=make_credential("j")))


@pytest.mark.parametrize(
    "machine",
    ["", "-oProxyCommand=touch x", "n1 n2", "n1;id", "$(id)", "n1\n", "../n1", "`id`", "n1|id", "é"],
)
def test_an_invalid_machine_name_never_reaches_ssh(machine: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a machine name or address"):
        orders = AgentOrders(job="j", machine=machine, manager="", credential=make_credential("j"))
        SshStarter(log_folder=tmp_path).start(orders)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        ("ssh: Could not resolve hostname n9: Name or service not known", "its name cannot be resolved"),
        ("ssh: connect to host n9 port 22: Connection timed out", "it does not answer"),
        ("ssh: connect to host n9 port 22: No route to host", "it does not answer"),
    ],
)
def test_other_errors_of_ssh_are_explained(error: str, meaning: str) -> None:
    assert explain_ssh_end("n9", 255, f"{error}\n") == f"n9: {meaning} (ssh: {error})"


def test_an_old_python_can_parse_the_remote_program() -> None:
    """It must be able to report its version."""
    import ast

    source = (ROOT / "varuna/morph/starters/remote.py").read_text()
    ast.parse(source, feature_version=(3, 7))
