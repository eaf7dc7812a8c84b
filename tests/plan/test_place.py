"""Who stands where, and what that means for links and reductions."""

from hypothesis import given
from hypothesis import strategies as st

from tests.plan.profiles import GB, machines
from varuna.plan.cut.place import WAYS, Ground, ReplicaKind
from varuna.types import Cluster, Machine


def test_a_replicas_stages_stand_on_one_machine_where_they_can() -> None:
    ground = Ground(machines(2, 8))
    placement = ground.place(3, 4, "stages together")
    assert [list(replica) for replica in placement.replicas] == [
        [0, 1, 2], [3, 4, 5], [8, 9, 10], [11, 12, 13],
    ]  # fmt: skip
    assert placement.kinds == (ReplicaKind((1.0, 1.0, 1.0), (False, False)),)
    assert placement.ranks() == ((0, 3, 6, 9), (1, 4, 7, 10), (2, 5, 8, 11))
    # A fifth does not find one machine with room, so they stand one after the other.
    packed = ground.place(3, 5, "stages together")
    assert list(packed.replicas[2]) == [6, 7, 8]
    assert (
        packed.kinds
        == (ReplicaKind((1.0, 1.0, 1.0), (False, True)), ReplicaKind((1.0, 1.0, 1.0), (True, False)))[
            : len(packed.kinds)
        ]
    )


def test_the_replicas_of_a_stage_stand_together_on_request() -> None:
    placement = Ground(machines(2, 4)).place(2, 4, "replicas together")
    assert [list(replica) for replica in placement.replicas] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert placement.between == (False, False)
    assert placement.kinds == (ReplicaKind((1.0, 1.0), (True,)),)
    assert placement.crowding == (4,)  # all four messages leave by one card
    four_cards = Ground(machines(2, 4, cards=4)).place(2, 4, "replicas together")
    assert four_cards.crowding == (1,)


def test_stages_of_one_machine_reduce_over_its_cards() -> None:
    assert Ground(machines(4, 4)).place(4, 4, "stages together").lanes == (0, 0, 0, 0)
    assert Ground(machines(4, 4, cards=2)).place(4, 4, "stages together").lanes == (0, 1, 0, 1)
    assert Ground(machines(4, 2)).place(4, 2, "stages together").lanes == (0, 0, 1, 1)


def test_the_slowest_and_smallest_devices_are_left_idle() -> None:
    cluster = Cluster(
        (Machine("slow", 2, 80 * GB, 0.5), Machine("small", 2, 10 * GB), Machine("good", 2, 80 * GB))
    )
    ground = Ground(cluster)
    placement = ground.place(1, 2, "stages together")
    assert [list(replica) for replica in placement.replicas] == [[4], [5]]
    assert (ground.name(4), ground.name(1)) == ("good:0", "slow:1")
    everyone = ground.place(1, 6, "stages together")
    assert everyone.memory_bytes == (10 * GB,) and everyone.speeds == (0.5,)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 9), st.integers(1, 9))
def test_no_device_runs_two_things_and_ranks_count_the_used_ones(
    count: int, devices: int, depth: int, width: int
) -> None:
    ground = Ground(machines(count, devices))
    if depth * width > ground.num_devices:
        return
    for way in WAYS:
        placement = ground.place(depth, width, way)
        used = [device for replica in placement.replicas for device in replica]
        assert len(set(used)) == len(used) == depth * width
        assert max(used) < ground.num_devices
        ranks = [rank for stage in placement.ranks() for rank in stage]
        assert sorted(ranks) == list(range(depth * width))
        assert (placement.depth, placement.width) == (depth, width)


@given(st.integers(2, 5), st.integers(1, 5), st.integers(1, 8), st.integers(2, 20))
def test_a_look_at_the_first_replicas_tells_all_of_equal_machines(
    count: int, devices: int, depth: int, width: int
) -> None:
    """The same as looking at each; a machine with other cards makes that necessary."""
    if depth * width > count * devices:
        return
    alike = machines(count, devices)
    odd = Cluster((*alike.machines, Machine("odd", 1, 80 * GB, cards=7)))
    for way in WAYS:
        few = Ground(alike).place(depth, width, way)
        every = Ground(odd).place(depth, width, way)
        if [list(r) for r in few.replicas] == [list(r) for r in every.replicas]:
            assert few[1:] == every[1:]
