"""Clusters to plan for: equal machines, or a file that lists different ones. Imports no torch."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from varuna.codec import decode
from varuna.errors import PlanError
from varuna.plan.cost.costs import with_network
from varuna.plan.plan_file import AssumedNetwork
from varuna.types import Cluster, Count, Machine, Profile
from varuna.units import BANDWIDTH, MEMORY, TIME, read_quantity

MOST_DEVICES = 1 << 20


class EqualMachines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of a cluster file: some machines of one kind."""

    name: str
    devices: Annotated[int, Meta(ge=1, le=MOST_DEVICES)]
    count: Annotated[int, Meta(ge=1, le=MOST_DEVICES)] = 1
    memory: str | None = None  # of each device, "80GiB"; None: as the profiled device
    speed: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    cards: Count = 1


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    machines: Annotated[tuple[EqualMachines, ...], Meta(min_length=1)]
    network: str = ""  # between machines, "25Gbit"; empty: as measured
    latency: str = ""


def read_cluster(path: Path, *, memory_bytes: int) -> tuple[Cluster, AssumedNetwork | None]:
    """Read the machines from a file, and the network if the file describes one."""
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
        raise ValueError(f"{path} gives two machines one name (use `count` for several equal machines)")
    return cluster, read_network(found.network, found.latency, keys=(f"{path}: network", f"{path}: latency"))


def read_machines(devices: int, per_machine: int, *, memory_bytes: int) -> Cluster:
    """Return the cluster that --devices and --per-machine describe."""
    for key, number in (("--devices", devices), ("--per-machine", per_machine)):
        if number < 1:
            raise ValueError(f"{key} must be 1 or more, not {number}")
        _refuse_too_many(number, key)
    return equal_machines(devices, per_machine, memory_bytes=memory_bytes)


def equal_machines(num_gpus: int, gpus_per_vm: int, *, memory_bytes: int) -> Cluster:
    """Return as many machines as the GPUs need; the last one may have fewer GPUs."""
    given = {"num_gpus": num_gpus, "gpus_per_vm": gpus_per_vm, "gpu_memory_capacity": memory_bytes}
    for name, number in given.items():
        if number < 1:
            raise ValueError(f"{name} must be 1 or more, not {number}")
    whole, rest = divmod(num_gpus, gpus_per_vm)
    sizes = [gpus_per_vm] * whole + ([rest] if rest else [])
    return Cluster(tuple(Machine(f"vm{index}", size, memory_bytes) for index, size in enumerate(sizes)))


def read_network(
    network: str, latency: str, *, keys: tuple[str, str] = ("--network", "--latency")
) -> AssumedNetwork | None:
    """Read a bandwidth and a latency (default: 20us); None if neither is given."""
    if not network:
        if latency:
            raise ValueError(f"{keys[1]} needs {keys[0]} as well: the bandwidth, such as 25Gbit")
        return None
    return AssumedNetwork(
        read_quantity(network, BANDWIDTH, keys[0]), read_quantity(latency or "20us", TIME, keys[1])
    )


def with_links(
    profile: Profile,
    cluster: Cluster,
    network: AssumedNetwork | None,
    *,
    example: str = "--network 25Gbit --latency 20us",
) -> Profile:
    """Return the profile with the assumed network; raise PlanError if a link of the cluster is unknown."""
    if network is not None or len(cluster.machines) == 1:  # a link that was not measured is not used
        notes = tuple(note for note in profile.notes if not note.startswith("between:"))
        profile = msgspec.structs.replace(profile, notes=notes)
    if network is not None:
        profile = with_network(profile, network.latency_seconds, network.bytes_per_second)
    if profile.between is None and len(cluster.machines) > 1:
        raise PlanError(
            f"the profile has no link between machines, and there are {len(cluster.machines)} machines "
            f"(describe the network: {example}; or profile with workers on two machines)"
        )
    if profile.within is None and any(machine.devices > 1 for machine in cluster.machines):
        raise PlanError(
            "the profile has no link within a machine, and there are machines with several devices "
            "(profile again: one process on one machine measures it)"
        )
    return profile


def _refuse_too_many(devices: int, key: str) -> None:
    if devices > MOST_DEVICES:
        raise ValueError(f"{key}: {devices} devices are too many, the planner takes at most {MOST_DEVICES}")
