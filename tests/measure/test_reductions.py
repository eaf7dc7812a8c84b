"""Reductions on a virtual network: latency and bandwidth come back, and ranks agree on the number of runs."""

import pytest
import torch
from torch import Tensor

from tests.measure.virtual import THREE_RUNS, VirtualClock, VirtualStopwatch
from varuna.measure import reductions as module
from varuna.measure.reductions import SMALL_BYTES, TENSORS_PER_OWNER, group_sizes, measure_reductions
from varuna.measure.stopwatch import Effort
from varuna.types import ReduceCost

LATENCY, BANDWIDTH = 2e-4, 1e9
SIZES = (1 << 12, 1 << 20, 1 << 24)


class VirtualNetwork:
    """An all-reduce of n bytes takes LATENCY + n / BANDWIDTH; sharing takes a third of it."""

    def __init__(self, group_size: int = 2) -> None:
        self.clock = VirtualClock()
        self.group_size = group_size
        self.reduced: list[int] = []
        self.shared: list[list[list[int]]] = []

    def all_reduce(self, tensor: Tensor) -> None:
        self.reduced.append(tensor.nbytes)
        self.clock.advance(LATENCY + tensor.nbytes / BANDWIDTH)
        tensor.mul_(self.group_size)  # all ranks propose the same

    def share(self, owned: object) -> None:
        tensors = [list(part) for part in owned]  # type: ignore[attr-defined]
        self.shared.append([[tensor.nbytes for tensor in part] for part in tensors])
        num_bytes = sum(tensor.nbytes for part in tensors for tensor in part)
        self.clock.advance((LATENCY + num_bytes / BANDWIDTH) / 3)


def measure(
    network: VirtualNetwork,
    monkeypatch: pytest.MonkeyPatch,
    *,
    shares: bool = True,
    between: bool = False,
    effort: Effort = THREE_RUNS,
) -> list[ReduceCost]:
    monkeypatch.setattr(module, "time", network.clock)
    return measure_reductions(
        network.all_reduce,
        network.share if shares else None,
        group_size=network.group_size,
        between_machines=between,
        device=torch.device("cpu"),
        stopwatch=VirtualStopwatch(network.clock),
        sizes=SIZES,
        effort=effort,
    )


def test_latency_and_bandwidth_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = measure(VirtualNetwork(), monkeypatch)
    assert [cost.num_bytes for cost in costs] == [SMALL_BYTES, *SIZES]
    for cost in costs:
        assert cost.duration.seconds == pytest.approx(LATENCY + cost.num_bytes / BANDWIDTH)
        assert cost.duration.spread == pytest.approx(0, abs=1e-9)
        assert cost.sharing is not None
        assert cost.sharing.seconds == pytest.approx(cost.duration.seconds / 3)
    small, *_, large = costs
    bandwidth = (large.num_bytes - small.num_bytes) / (large.duration.seconds - small.duration.seconds)
    assert bandwidth == pytest.approx(BANDWIDTH)
    assert small.duration.seconds - small.num_bytes / bandwidth == pytest.approx(LATENCY)


def test_the_group_and_its_place_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for between in (False, True):
        costs = measure(VirtualNetwork(4), monkeypatch, between=between)
        assert {(cost.group_size, cost.between_machines) for cost in costs} == {(4, between)}


def test_without_a_share_function_only_all_reduces_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    network = VirtualNetwork()
    costs = measure(network, monkeypatch, shares=False)
    assert network.shared == [] and all(cost.sharing is None for cost in costs)


def test_every_owner_shares_an_equal_part_in_several_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    network = VirtualNetwork(4)
    measure(network, monkeypatch)
    parts = next(parts for parts in network.shared if sum(map(sum, parts)) == SIZES[1])
    assert len(parts) == 4 and {sum(part) for part in parts} == {SIZES[1] // 4}
    assert all(len(part) == TENSORS_PER_OWNER for part in parts)


def test_every_run_starts_with_a_reduction_that_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    network = VirtualNetwork()
    measure(network, monkeypatch, shares=False)
    runs = THREE_RUNS.warmups + THREE_RUNS.fewest
    for size in (SMALL_BYTES, *SIZES):
        assert network.reduced.count(size) == runs
    proposals = len(SIZES) + 1
    assert network.reduced.count(4) == proposals * (runs + 1)  # one start for each run, one proposal


def test_the_number_of_runs_is_the_mean_of_all_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    network = VirtualNetwork(2)
    usual = network.all_reduce

    def with_a_slower_rank(tensor: Tensor) -> None:
        usual(tensor)
        if tensor.nbytes == 4 and tensor.item():  # a proposal: the other rank proposes 1 run
            tensor.fill_(tensor.item() / 2 + 1)

    network.all_reduce = with_a_slower_rank  # type: ignore[method-assign]
    effort = Effort(seconds=0.0, fewest=9, most=9, warmups=1)
    measure(network, monkeypatch, shares=False, effort=effort)
    assert network.reduced.count(SIZES[-1]) == 1 + (9 + 1) // 2


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, []), (2, [2]), (3, [2, 3]), (4, [2, 4]), (8, [2, 4, 8]), (9, [2, 4, 8, 9])]
)
def test_groups_double_up_to_the_whole(most: int, sizes: list[int]) -> None:
    assert group_sizes(most) == sizes
