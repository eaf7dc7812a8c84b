"""The test hosts behave like machines: they can be killed, cut off, reconnected and slowed down."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from varuna.chaos.hosts.lab import ROOT, Lab, command, ip, tool

LISTEN = (
    "import socket; server = socket.create_server(('', 7000)); print('ready', flush=True)\n"
    "while True: connection, _ = server.accept(); print(len(connection.makefile('rb').read()), flush=True)"
)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(2) as lab:
        yield lab


def ssh(lab: Lab, host: str, line: str, *, seconds: int = 20) -> str:
    return command([*lab.ssh, "-o", "BatchMode=yes", "-o", f"ConnectTimeout={seconds}", host, line])


def test_each_host_has_its_own_name_address_and_processes(lab: Lab) -> None:
    assert (
        ssh(lab, "n2", "hostname; getent hosts n1; cat /proc/1/comm")
        == f"n2\n{lab.hosts[0].address:15} n1\nsshd\n"
    )
    assert lab.hosts[0].run(["hostname"]) == "n1\n"


def test_hosts_reach_each_other(lab: Lab) -> None:
    with subprocess.Popen(
        lab.hosts[0].command([sys.executable, "-c", LISTEN]), stdout=subprocess.PIPE, text=True
    ) as listener:
        assert listener.stdout is not None and listener.stdout.readline() == "ready\n"
        send = "import socket; socket.create_connection(('n1', 7000)).sendall(bytes(1000))"
        ssh(lab, "n2", f'{sys.executable} -c "{send}"')
        assert listener.stdout.readline() == "1000\n"
        assert [line for line in lab.hosts[0].processes().values() if "create_server" in line]
        lab.hosts[0].kill()
    lab.hosts[0].boot()


def test_all_processes_die_with_their_host_and_it_boots_again(lab: Lab) -> None:
    host = lab.hosts[0]
    ssh(lab, "n1", "setsid sleep 1000 >/dev/null 2>&1 </dev/null &")
    assert any("sleep 1000" in line for line in host.processes().values())
    host.kill()
    assert host.processes() == {}
    with pytest.raises(RuntimeError, match="refused"):
        ssh(lab, "n1", "true")
    host.boot()
    ssh(lab, "n1", "true")
    assert host.processes() == {}


def test_a_host_that_is_cut_off_is_silent_until_it_is_reconnected(lab: Lab) -> None:
    host = lab.hosts[1]
    host.cut()
    with pytest.raises(RuntimeError, match=r"timed out|No route"):
        ssh(lab, "n2", "true", seconds=1)
    host.reconnect()
    ssh(lab, "n2", "true")


def test_a_slow_host_is_slow_both_ways(lab: Lab) -> None:
    host = lab.hosts[1]
    host.slow("50mbit")
    into = command([tool("tc"), "qdisc", "show", "dev", host._link])
    out_of = command([tool("tc"), "-n", host._namespace, "qdisc", "show", "dev", "eth0"])
    assert "tbf" in into and "rate 50Mbit" in into
    assert "tbf" in out_of and "rate 50Mbit" in out_of


def test_a_lab_removes_everything_and_also_the_leftovers_of_a_killed_lab() -> None:
    make = "from varuna.chaos.hosts.lab import Lab; lab = Lab(1); print(lab.name, flush=True); "
    die = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run(
        [sys.executable, "-c", make + die], env=environment, capture_output=True, text=True
    )
    orphan = killed.stdout.strip()
    assert orphan in ip("link", "show")
    with Lab(1) as lab:
        assert f"{orphan}-n1" not in ip("netns", "list") or lab.name == orphan
    assert lab.name not in ip("link", "show") and lab.name not in ip("netns", "list")
    assert not lab.folder.exists()
    (settings := Path("/etc/netns", f"{lab.name}-n1")).mkdir(parents=True)  # its namespace is gone already
    try:
        with Lab(1) as again:
            assert again.name == lab.name, "it takes the first free name"
    finally:
        shutil.rmtree(settings, ignore_errors=True)
