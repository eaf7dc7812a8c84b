"""Agents in actors of a real Ray cluster on separate hosts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.morph.hosts.manager import StubManager
from tests.morph.hosts.ray_cluster import RayClient, RayCluster
from tests.morph.jobs import Job, check
from varuna.chaos.hosts.lab import ROOT
from varuna.morph.protocol.orders import AgentOrders
from varuna.morph.starters.ray import RayStarter
from varuna.secure.credential import make_credential

STUB = str(ROOT / "tests/morph/hosts/stub_agent.py")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: RayCluster) -> RayClient:
    return cluster.client(STUB)


@pytest.fixture
def manager(cluster: RayCluster) -> Iterator[StubManager]:
    with StubManager(cluster.lab.address) as manager:
        yield manager


def test_an_agent_runs_on_the_listed_node_and_dies_when_killed(
    cluster: RayCluster, client: RayClient, manager: StubManager
) -> None:
    for host in cluster.lab.hosts:
        assert client.ask("start", host.address, manager.orders(host.address)) is None
    dialled_in = {agent.hello["machine"]: agent for agent in [manager.accept(), manager.accept()]}
    for host in cluster.lab.hosts:
        assert dialled_in[host.address].hello["hostname"] == host.name
        assert client.ask("ended", host.address) is None
        client.ask("kill", host.address)
        dialled_in[host.address].wait_until_gone()
        ended = client.wait_for_the_end(host.address)  # whichever Ray notices first
        assert "Ray lost the agent" in ended or "exit status -9" in ended


def test_a_job_trains_on_ray(cluster: RayCluster, tmp_path: Path, reference: dict[int, float]) -> None:
    """V29, V47: the same job as on other machines, managed from a node."""
    told = {"VARUNA_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    addresses = [host.address for host in cluster.lab.hosts]
    (tmp_path / "varuna").symlink_to(ROOT / "varuna")  # nodes find the library in the code's folder
    with Job(
        tmp_path, machines=2, stages=2, addresses=addresses, manager=cluster.manager(tmp_path, told)
    ) as job:
        job.wait_for("generation: 1: 2 stages x 1 replica")
        job.wait_for_steps(3)
        assert {
            host.name for host in cluster.lab.hosts if "varuna.morph.run.agent" in str(host.processes())
        } == {
            "n1",
            "n2",
        }
        check(job, reference)


def test_an_agent_that_exits_reports_its_last_output_and_frees_its_resources(
    client: RayClient, manager: StubManager
) -> None:
    for name in ["m1", "m2", "m3"]:  # of one CPU each, and there are two
        client.ask("start", name, manager.orders(name))
    agents = [manager.accept(), manager.accept()]
    (waiting,) = {"m1", "m2", "m3"} - {agent.hello["machine"] for agent in agents}
    assert client.ask("ended", waiting) is None, "one that waits for its place has not ended"
    agents[0].tell("say my last words")
    agents[0].tell("exit 7")
    ended = agents[0].hello["machine"]
    assert client.wait_for_the_end(ended) == f"{ended}: the agent ended, exit status 7: my last words"
    agents.append(manager.accept())
    assert agents[2].hello["machine"] == waiting
    for agent in agents[1:]:
        agent.tell("exit 0")
        client.wait_for_the_end(agent.hello["machine"])


def test_an_agent_survives_the_manager_and_dies_with_its_node(
    cluster: RayCluster, client: RayClient, manager: StubManager
) -> None:
    """V45, V42: agents survive a killed manager; a dead node is reported."""
    first = cluster.client(STUB)
    host, other = cluster.lab.hosts
    first.ask("start", host.address, manager.orders(host.address))
    dialled_in = manager.accept()
    first.process.kill()
    first.process.wait()
    client.ask("start", other.address, manager.orders(other.address))
    lost = manager.accept()
    other.kill()
    lost.wait_until_gone()
    assert "Ray lost the agent" in client.wait_for_the_end(other.address)
    dialled_in.tell("say still here")
    assert dialled_in.hear() == {"said": "still here"}


def test_a_missing_ray_is_reported() -> None:
    with pytest.raises(ValueError, match=r"Ray is not installed \(pip install 'varuna-torch\[ray\]'\)"):
        RayStarter().start(AgentOrders(job="j", machine="m", manager="", credential=make_credential("j")))
