"""Clusters: equal machines, files of different machines, and the network between them."""

import json
from pathlib import Path

import msgspec
import pytest

from tests.plan.profiles import GB, machines, profile, reductions, segment
from varuna.errors import PlanError
from varuna.plan.cluster_file import (
    MOST_DEVICES,
    equal_machines,
    read_cluster,
    read_machines,
    read_network,
    with_links,
)
from varuna.plan.plan_file import AssumedNetwork
from varuna.types import Cluster, Machine


def write(folder: Path, **content: object) -> Path:
    path = folder / "cluster.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(("gpus", "per_machine"), [(1, 1), (8, 4), (9, 4), (3, 8), (4096, 8)])
def test_equal_machines_have_all_gpus_and_only_the_last_has_fewer(gpus: int, per_machine: int) -> None:
    cluster = equal_machines(gpus, per_machine, memory_bytes=GB)
    assert cluster.num_devices == gpus
    assert all(machine.devices == per_machine for machine in cluster.machines[:-1])
    assert 1 <= cluster.machines[-1].devices <= per_machine
    assert [machine.name for machine in cluster.machines] == [f"vm{i}" for i in range(len(cluster.machines))]
    assert read_machines(gpus, per_machine, memory_bytes=GB) == cluster


def test_a_file_lists_machines_in_order_with_defaults_from_the_profile(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        machines=[
            {"name": "new", "count": 2, "devices": 4, "memory": "16GiB", "cards": 2},
            {"name": "old", "devices": 1, "speed": 0.6},
        ],
    )
    cluster, network = read_cluster(path, memory_bytes=3 * GB)
    assert network is None
    assert cluster == Cluster(
        (
            Machine("new-0", 4, 16 * GB, 1.0, 2),
            Machine("new-1", 4, 16 * GB, 1.0, 2),
            Machine("old", 1, 3 * GB, 0.6, 1),
        )
    )


def test_a_file_may_describe_the_network(tmp_path: Path) -> None:
    one = [{"name": "a", "devices": 1}]
    _, network = read_cluster(write(tmp_path, machines=one, network="8Gbit"), memory_bytes=GB)
    assert network == AssumedNetwork(1e9, pytest.approx(20e-6))
    _, network = read_cluster(
        write(tmp_path, machines=one, network="100 MB/s", latency="2ms"), memory_bytes=GB
    )
    assert network == AssumedNetwork(1e8, pytest.approx(2e-3))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"machines": []}, "length >= 1"),
        ({"machines": [{"devices": 1}]}, "missing required field `name`"),
        ({"machines": [{"name": "a", "devices": 0}]}, ">= 1"),
        ({"machines": [{"name": "a", "devices": 1, "gpus": 2}]}, "unknown field `gpus`"),
        ({"machines": [{"name": "a", "devices": 1, "speed": 0}]}, "> 0"),
        ({"machines": [{"name": "a", "devices": 1}] * 2}, "two machines one name"),
        ({"machines": [{"name": "a", "devices": MOST_DEVICES, "count": 2}]}, "too many"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_its_key(
    tmp_path: Path, content: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_cluster(write(tmp_path, **content), memory_bytes=GB)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no cluster file"):
        read_cluster(tmp_path / "nowhere.json", memory_bytes=GB)
    with pytest.raises(ValueError, match="is a folder"):
        read_cluster(tmp_path, memory_bytes=GB)


def test_a_latency_without_a_bandwidth_is_refused_with_both_keys() -> None:
    assert read_network("", "") is None
    with pytest.raises(ValueError, match=r"^--latency needs --network as well"):
        read_network("", "5us")
    with pytest.raises(ValueError, match=r"^delay needs wire as well"):
        read_network("", "5us", keys=("wire", "delay"))


def test_links_of_a_profile_are_replaced_needed_or_not_needed() -> None:
    """V25: a note about a missing link stays only while the link is needed."""
    note = "between: all processes ran on one machine"
    model = profile(
        [segment(1e-3)],
        [0] * 2,
        between=None,
        reduce_costs=reductions(1e9, between=False),
        notes=(note, "another"),
    )
    network = AssumedNetwork(1e9, 1e-5)
    assert with_links(model, machines(1, 4), None).notes == ("another",)
    with pytest.raises(PlanError, match=r"no link between machines.*there are 2 machines.*--network 25Gbit"):
        with_links(model, machines(2, 1), None)
    assumed = with_links(model, machines(2, 1), network)
    assert assumed.between is not None and assumed.notes[0] == "another" and note not in assumed.notes
    message = assumed.between.messages[-1]
    assert message.one_way.seconds == pytest.approx(1e-5 + message.num_bytes / 1e9)
    nothing = msgspec.structs.replace(model, within=None)
    with pytest.raises(PlanError, match="no link within a machine"):
        with_links(nothing, machines(2, 2), network)
    assert with_links(nothing, machines(2, 1), network).within is None
