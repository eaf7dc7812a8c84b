"""Placement of stages and replicas on devices, and its effect on links and reductions."""

from hypothesis import given
from hypothesis import strategies as st

from tests.plan.profiles import GB, machines
from varuna.plan.cut.place import ARRANGEMENTS, ClusterMap, ReplicaKind, lanes
from varuna.types import Cluster, Machine


def test_a_replicas_stages_stand_on_one_machine_where_they_can() -> None:
    cluster_map = ClusterMap(machines(2, 8))
    placement = cluster_map.place(3, 4, "stages together")
    assert [list(replica) for replica in placement.replicas] == [
        [0, 1, 2], [3, 4, 5], [8, 9, 10], [11, 12, 13],
    ]  # fmt: skip
    assert placement.kinds == (ReplicaKind((1.0, 1.0, 1.0), (False, False)),)
    assert placement.ranks() == ((0, 3, 6, 9), (1, 4, 7, 10), (2, 5, 8, 11))
    # No machine has enough devices left for a fifth, so replicas are packed one after the other.
    packed = cluster_map.place(3, 5, "stages together")
    assert list(packed.replicas[2]) == [6, 7, 8]
    assert (
        packed.kinds
        == (ReplicaKind((1.0, 1.0, 1.0), (False, True)), ReplicaKind((1.0, 1.0, 1.0), (True, False)))[
            : len(packed.kinds)
        ]
    )


def test_the_replicas_of_a_stage_stand_together_on_request() -> None:
    placement = ClusterMap(machines(2, 4)).place(2, 4, "replicas together")
    assert [list(replica) for replica in placement.replicas] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert placement.between == (False, False)
    assert placement.kinds == (ReplicaKind((1.0, 1.0), (True,)),)
    assert placement.messages_per_card == (4,)  # all four messages leave by one card
    four_cards = ClusterMap(machines(2, 4, cards=4)).place(2, 4, "replicas together")
    assert four_cards.messages_per_card == (1,)


def test_stages_of_one_machine_reduce_over_its_cards() -> None:
    assert ClusterMap(machines(4, 4)).place(4, 4, "stages together").lanes == (0, 0, 0, 0)
    assert ClusterMap(machines(4, 4, cards=2)).place(4, 4, "stages together").lanes == (0, 1, 0, 1)
    assert ClusterMap(machines(4, 2)).place(4, 2, "stages together").lanes == (0, 0, 1, 1)


def test_the_slowest_and_smallest_devices_are_left_idle() -> None:
    cluster = Cluster(
        (Machine("slow", 2, 80 * GB, 0.5), Machine("small", 2, 10 * GB), Machine("good", 2, 80 * GB))
    )
    cluster_map = ClusterMap(cluster)
    placement = cluster_map.place(1, 2, "stages together")
    assert [list(replica) for replica in placement.replicas] == [[4], [5]]
    assert (cluster_map.name(4), cluster_map.name(1)) == ("good:0", "slow:1")
    everyone = cluster_map.place(1, 6, "stages together")
    assert everyone.memory_bytes == (10 * GB,) and everyone.speeds == (0.5,)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 9), st.integers(1, 9))
def test_no_device_runs_two_things_and_ranks_count_the_used_ones(
    count: int, devices: int, depth: int, width: int
) -> None:
    cluster_map = ClusterMap(machines(count, devices))
    if depth * width > cluster_map.num_devices:
        return
    for way in ARRANGEMENTS:
        placement = cluster_map.place(depth, width, way)
        used = [device for replica in placement.replicas for device in replica]
        assert len(set(used)) == len(used) == depth * width
        assert max(used) < cluster_map.num_devices
        ranks = [rank for stage in placement.ranks() for rank in stage]
        assert sorted(ranks) == list(range(depth * width))
        assert (placement.depth, placement.width) == (depth, width)


@given(st.integers(2, 5), st.integers(1, 5), st.integers(1, 8), st.integers(2, 20))
def test_the_first_replicas_describe_all_replicas_of_equal_machines(
    count: int, devices: int, depth: int, width: int
) -> None:
    """The same as looking at each; a machine with other cards makes that necessary."""
    if depth * width > count * devices:
        return
    alike = machines(count, devices)
    odd = Cluster((*alike.machines, Machine("odd", 1, 80 * GB, cards=7)))
    for way in ARRANGEMENTS:
        few = ClusterMap(alike).place(depth, width, way)
        every = ClusterMap(odd).place(depth, width, way)
        if [list(r) for r in few.replicas] == [list(r) for r in every.replicas]:
            assert few[1:] == every[1:]


# ---------------------------------------------------------------- unequal clusters

unequal_clusters = st.lists(
    st.tuples(
        st.integers(1, 5), st.sampled_from([16 * GB, 80 * GB]), st.sampled_from([0.5, 1.0]), st.integers(1, 2)
    ),
    min_size=1,
    max_size=5,
).map(
    lambda rows: Cluster(tuple(Machine(f"m{index}", *row) for index, row in enumerate(rows)))  # type: ignore[arg-type]
)


@given(unequal_clusters, st.integers(1, 6), st.integers(1, 6))
def test_every_device_is_used_at_most_once_on_unequal_machines(
    cluster: Cluster, depth: int, width: int
) -> None:
    cluster_map = ClusterMap(cluster)
    if depth * width > cluster_map.num_devices:
        return
    for arrangement in ARRANGEMENTS:
        placement = cluster_map.place(depth, width, arrangement)
        used = [device for replica in placement.replicas for device in replica]
        assert len(used) == len(set(used)) == depth * width
        assert set(used) <= set(range(cluster_map.num_devices))
        machines_of = [
            [cluster_map.machine_of[device] for device in replica] for replica in placement.replicas
        ]
        for stage in range(depth):
            column = {replica[stage] for replica in machines_of}
            assert placement.between[stage] == (len(column) > 1)
            smallest = min(cluster.machines[machine].memory_bytes for machine in column)
            assert placement.memory_bytes[stage] == smallest
            assert placement.speeds[stage] >= min(cluster.machines[machine].speed for machine in column)
        if depth * width == cluster_map.num_devices:
            assert sorted(used) == list(range(cluster_map.num_devices))


@given(unequal_clusters, st.integers(1, 5), st.integers(1, 5))
def test_a_placement_described_from_its_devices_is_the_same(cluster: Cluster, depth: int, width: int) -> None:
    cluster_map = ClusterMap(cluster)
    if depth * width > cluster_map.num_devices:
        return
    for arrangement in cluster_map.arrangements(depth, width):
        placed = cluster_map.place(depth, width, arrangement)
        columns = [[replica[stage] for replica in placed.replicas] for stage in range(depth)]
        described = cluster_map.placement_of(columns)
        assert described[1:] == placed[1:]
        assert described.ranks() == placed.ranks()


@given(unequal_clusters, st.integers(1, 4))
def test_a_replica_stays_on_one_machine_where_all_machines_have_enough_devices(
    cluster: Cluster, depth: int
) -> None:
    cluster_map = ClusterMap(cluster)
    fitting = sum(machine.devices // depth for machine in cluster.machines)
    if not fitting or any(machine.devices < depth for machine in cluster.machines):
        return
    placement = cluster_map.place(depth, fitting, "stages together")
    for replica in placement.replicas:
        assert len({cluster_map.machine_of[device] for device in replica}) == 1
    assert all(not any(kind.crossing) for kind in placement.kinds)
    assert placement.messages_per_card == (1,) * (depth - 1)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(1, 3))
def test_stages_of_a_machine_take_its_cards_in_turn(homes: list[int], cards: int) -> None:
    owners = [Machine(f"m{index}", 9, GB, cards=cards) for index in range(3)]
    found = lanes(homes, owners)
    by_lane: dict[int, set[int]] = {}
    for home, lane in zip(homes, found, strict=True):
        by_lane.setdefault(lane, set()).add(home)
    assert all(len(members) == 1 for members in by_lane.values())  # a lane is a card of one machine
    for machine in set(homes):
        own = [lane for home, lane in zip(homes, found, strict=True) if home == machine]
        assert len(set(own)) == min(cards, len(own))
        assert own == [own[index % cards] for index in range(len(own))]


def test_only_the_slowest_kinds_of_replicas_are_kept() -> None:
    """Two fast machines and a slow one: a replica that is as slow everywhere stands for the others."""
    cluster = Cluster((Machine("a", 2, 80 * GB), Machine("b", 2, 80 * GB), Machine("slow", 2, 80 * GB, 0.5)))
    placement = ClusterMap(cluster).place(2, 3, "stages together")
    assert placement.kinds == (ReplicaKind((0.5, 0.5), (False,)),)
    assert placement.speeds == (0.5, 0.5)
