"""Places stages and replicas on the devices of a cluster.

There are two arrangements. "stages together": the stages of a replica are side by side, so activations
stay within a machine and gradients travel between machines. "replicas together": the replicas of a stage
are side by side, with the opposite effect. The second also puts machines of one speed into one stage,
which can then get segments to match.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import ceil
from typing import Any, Literal, NamedTuple

from varuna.types import Cluster, Machine

Arrangement = Literal["stages together", "replicas together"]
ARRANGEMENTS: tuple[Arrangement, ...] = ("stages together", "replicas together")

MOST_KINDS = 2
"""Replicas that cross machines equally often, but at other cuts, take almost equally long."""


class ReplicaKind(NamedTuple):
    """Replicas with equal times: the speed of each stage's device, and the cuts between machines."""

    speeds: tuple[float, ...]
    crossing: tuple[bool, ...]


class Placement(NamedTuple):
    """Devices of a layout, numbered in the order of the cluster, and what its costs depend on."""

    replicas: Sequence[Sequence[int]]  # the devices of each, by stage
    kinds: tuple[ReplicaKind, ...]
    messages_per_card: tuple[int, ...]  # by cut: messages that leave a machine at once over one card
    memory_bytes: tuple[int, ...]  # by stage: memory of its smallest device
    between: tuple[bool, ...]  # by stage: its replicas are on several machines
    lanes: tuple[int, ...]  # by stage: stages with one number reduce over one card

    @property
    def depth(self) -> int:
        return len(self.replicas[0])

    @property
    def width(self) -> int:
        return len(self.replicas)

    @property
    def speeds(self) -> tuple[float, ...]:
        """Speed of each stage's slowest device."""
        return tuple(map(min, zip(*(kind.speeds for kind in self.kinds), strict=True)))

    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks by stage and replica. Ranks number the used devices in the cluster's order."""
        used = sorted(device for replica in self.replicas for device in replica)
        rank = {device: index for index, device in enumerate(used)}
        return tuple(tuple(rank[device] for device in stage) for stage in zip(*self.replicas, strict=True))


class DeviceRow(Sequence[Sequence[int]]):
    """The replicas of a layout on a row of devices, computed on access.

    One replica comes after the other; with `striped`, one stage after the other.
    """

    def __init__(self, devices: Sequence[int], depth: int, width: int, *, striped: bool) -> None:
        self._devices, self._depth, self._width, self._striped = devices, depth, width, striped

    def __len__(self) -> int:
        return self._width

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._width:
            raise IndexError(index)
        if self._striped:
            return self._devices[index : self._depth * self._width : self._width]
        return self._devices[index * self._depth : (index + 1) * self._depth]


class ClusterMap:
    """Devices of a cluster, and the placements of layouts on them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.machine_of = [
            index for index, machine in enumerate(cluster.machines) for _ in range(machine.devices)
        ]
        self._firsts = firsts = [0, *accumulate(machine.devices for machine in cluster.machines)]
        # The slowest and smallest machines come last, so they stay idle.
        order = sorted(
            zip(cluster.machines, pairwise(firsts), strict=True),
            key=lambda pair: (-pair[0].speed, -pair[0].memory_bytes),
        )
        self._machines = [range(*span) for _, span in order]
        self._in_order = [device for machine in self._machines for device in machine]
        self.unequal = len({(machine.memory_bytes, machine.speed) for machine in cluster.machines}) > 1
        self._uneven = len({(machine.devices, machine.cards) for machine in cluster.machines}) > 1
        self._aligned: dict[int, list[Sequence[int]]] = {}
        self._placed: dict[tuple[int, int, Arrangement], Placement] = {}

    @property
    def num_devices(self) -> int:
        return len(self.machine_of)

    @property
    def fastest(self) -> float:
        return max(machine.speed for machine in self.cluster.machines)

    @property
    def largest_bytes(self) -> int:
        return max(machine.memory_bytes for machine in self.cluster.machines)

    def arrangements(self, depth: int, width: int) -> tuple[Arrangement, ...]:
        """Return the arrangements that can differ for this depth and width."""
        alike = depth == 1 or width == 1 or len(self.cluster.machines) == 1
        return ARRANGEMENTS[:1] if alike and not (self.unequal and depth > 1) else ARRANGEMENTS

    def place(self, depth: int, width: int, arrangement: Arrangement) -> Placement:
        key = (depth, width, arrangement)
        if key not in self._placed:
            striped = arrangement == "replicas together"
            replicas: Sequence[Sequence[int]] = [] if striped else self._align(depth)[:width]
            if len(replicas) < width:
                replicas = DeviceRow(self._in_order, depth, width, striped=striped)
            self._placed[key] = self._describe(replicas)
        return self._placed[key]

    def speeds(self, depth: int, width: int, arrangement: Arrangement) -> tuple[float, ...]:
        if not self.unequal:
            return (self.cluster.machines[0].speed,) * depth
        return self.place(depth, width, arrangement).speeds

    def placement_of(self, devices: Sequence[Sequence[int]]) -> Placement:
        """Return the placement on given devices, by stage and replica."""
        return self._describe([list(replica) for replica in zip(*devices, strict=True)])

    def name(self, device: int) -> str:
        index = self.machine_of[device]
        return f"{self.cluster.machines[index].name}:{device - self._firsts[index]}"

    def _align(self, depth: int) -> list[Sequence[int]]:
        """Return replicas that are on as few machines as possible."""
        if depth not in self._aligned:
            found: list[Sequence[int]] = []
            gathered: list[int] = []  # of a replica that needs several machines
            for machine in self._machines:
                if len(machine) >= depth:
                    found += [machine[k : k + depth] for k in range(0, len(machine) - depth + 1, depth)]
                    continue
                gathered += machine
                if len(gathered) >= depth:
                    found.append(gathered[:depth])
                    gathered = []
            self._aligned[depth] = found
        return self._aligned[depth]

    def _describe(self, replicas: Sequence[Sequence[int]]) -> Placement:
        machines, machine_of = self.cluster.machines, self.machine_of
        depth = len(replicas[0])
        # On equal machines, replicas repeat after at most as many as one machine has devices.
        number = len(replicas)
        if not self.unequal and not self._uneven:
            number = min(number, 2 * machines[0].devices)
        homes = [[machine_of[device] for device in replicas[r]] for r in range(number)]
        speeds = [machine.speed for machine in machines]
        kinds = dict.fromkeys(
            ReplicaKind(
                tuple([speeds[home] for home in replica]),
                tuple([left != right for left, right in pairwise(replica)]),
            )
            for replica in homes
        )
        messages_per_card = []
        for cut in range(depth - 1):
            leaving = Counter(home[cut] for home in homes if home[cut] != home[cut + 1])
            messages_per_card.append(
                max((ceil(count / machines[home].cards) for home, count in leaving.items()), default=1)
            )
        columns = [{home[stage] for home in homes} for stage in range(depth)]
        return Placement(
            replicas,
            _slowest(tuple(kinds)),
            tuple(messages_per_card),
            tuple(min(machines[home].memory_bytes for home in column) for column in columns),
            tuple(len(column) > 1 for column in columns),
            lanes(homes[0], machines),
        )


def _slowest(kinds: tuple[ReplicaKind, ...]) -> tuple[ReplicaKind, ...]:
    """Drop each kind that is at least as fast everywhere as another one."""

    def faster(kind: ReplicaKind, than: ReplicaKind) -> bool:
        return (
            kind != than
            and all(map(float.__ge__, kind.speeds, than.speeds))
            and all(map(bool.__le__, kind.crossing, than.crossing))
        )

    left = [kind for kind in kinds if not any(faster(kind, other) for other in kinds)]
    return tuple(sorted(left, key=lambda kind: (-sum(kind.crossing), sum(kind.speeds)))[:MOST_KINDS])


def lanes(homes: Sequence[int], machines: Sequence[Machine]) -> tuple[int, ...]:
    """Return the lane of each stage, from its machine: stages on one machine take its cards in turn."""
    seen: Counter[int] = Counter()
    numbers: dict[tuple[int, int], int] = {}
    found = []
    for home in homes:
        card = (home, seen[home] % machines[home].cards)
        seen[home] += 1
        found.append(numbers.setdefault(card, len(numbers)))
    return tuple(found)
