"""Describes machines: as many of one kind, or what a file says of machines that differ. Imports no torch."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from varuna.codec import decode
from varuna.plan.plan_file import Network
from varuna.plan.search.auto_config import equal_machines
from varuna.types import Cluster, Count, Machine
from varuna.units import BANDWIDTH, MEMORY, TIME, read_quantity

LATENCY = "20us"
"""Of a network of which only the bandwidth is told."""
MOST_DEVICES = 1 << 20


class Machines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some that are alike."""

    name: str
    devices: Annotated[int, Meta(ge=1, le=MOST_DEVICES)]
    count: Annotated[int, Meta(ge=1, le=MOST_DEVICES)] = 1
    memory: str | None = None  # of each device, "80GiB"; None: as much as the profiled one has
    speed: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    cards: Count = 1


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    machines: Annotated[tuple[Machines, ...], Meta(min_length=1)]
    network: str = ""  # between machines, "25Gbit"; empty: as it was measured
    latency: str = ""


def read_cluster(path: Path, *, memory_bytes: int) -> tuple[Cluster, Network | None]:
    """The machines that a file tells of; and the network, where it tells of that too."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no cluster file {path}") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder (a cluster is described by one JSON file)") from None
    found = decode(text, ClusterFile, str(path))
    machines: list[Machine] = []
    for index, some in enumerate(found.machines):
        memory = memory_bytes
        if some.memory is not None:
            memory = int(read_quantity(some.memory, MEMORY, f"{path}: `machines[{index}].memory`"))
        names = [some.name] if some.count == 1 else [f"{some.name}-{place}" for place in range(some.count)]
        machines += [Machine(name, some.devices, memory, some.speed, some.cards) for name in names]
    cluster = Cluster(tuple(machines))
    _refuse_too_many(cluster.num_devices, str(path))
    if len({machine.name for machine in machines}) < len(machines):
        raise ValueError(f"{path} gives two machines one name (write `count` where several are alike)")
    return cluster, read_network(found.network, found.latency, keys=(f"{path}: network", f"{path}: latency"))


def read_machines(devices: int, per_machine: int, *, memory_bytes: int) -> Cluster:
    for key, number in (("--devices", devices), ("--per-machine", per_machine)):
        if number < 1:
            raise ValueError(f"{key} must be 1 or more, not {number}")
        _refuse_too_many(number, key)
    return equal_machines(devices, per_machine, memory_bytes=memory_bytes)


def read_network(
    network: str, latency: str, *, keys: tuple[str, str] = ("--network", "--latency")
) -> Network | None:
    if not network:
        if latency:
            raise ValueError(f"{keys[1]} says how quick a network is that {keys[0]} must describe (25Gbit)")
        return None
    return Network(
        read_quantity(network, BANDWIDTH, keys[0]), read_quantity(latency or LATENCY, TIME, keys[1])
    )


def _refuse_too_many(devices: int, key: str) -> None:
    if devices > MOST_DEVICES:
        raise ValueError(f"{key}: {devices} devices are more than can be planned for, {MOST_DEVICES}")
