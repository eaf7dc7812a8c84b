"""Copies of the state on other ranks: who holds them, how often, damage on the way, and failures."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.toys import make_inputs, make_model
from varuna import Varuna
from varuna.checkpoint.format.tree import pack
from varuna.errors import PeerLost
from varuna.execute.rebuild.handover import Unit
from varuna.execute.rebuild.snapshot import Mirror, choose_holders, take_snapshot
from varuna.morph.run.progress_page import ProgressWriter
from varuna.train.hot import copies
from varuna.train.hot.copies import StateCopies, choose_interval
from varuna.train.hot.hot_state import HotState
from varuna.train.hot.moving import set_state
from varuna.types import parse_stage_map


@pytest.mark.parametrize("machines", ["ab", "abc", "aabb", "abab", "aab", "aaab", "aa", "abbcc"])
def test_each_rank_holds_the_copy_of_one_other_on_another_machine(machines: str) -> None:
    """HOT-3: if no machine has more than half of the ranks, its loss leaves a copy of each of them."""
    holders = choose_holders(list(machines))
    assert sorted(holders) == list(range(len(machines)))
    assert all(holder != rank for rank, holder in enumerate(holders))
    if 2 * max(map(machines.count, machines)) <= len(machines):
        assert all(machines[holder] != machines[rank] for rank, holder in enumerate(holders))


def test_copies_cost_at_most_one_percent() -> None:
    """HOT-3: the interval grows with the measured cost and shrinks with the step time."""
    for cost, step in [(0.001, 1.0), (0.05, 0.3), (2.0, 0.01), (0.0, 0.0)]:
        steps = choose_interval(cost, step)
        assert steps >= 1 and cost <= 0.01 * steps * max(step, 1e-9) * (1 + 1e-9)
        assert steps == 1 or cost > 0.01 * (steps - 1) * step * (1 - 1e-9)


@pytest.mark.parametrize("flips", [False, True])
def test_a_copy_that_arrives_damaged_does_not_count(flips: bool) -> None:
    """HOT-6: the bytes are hashed on both sides."""
    units = {
        "a": Unit({"trains": True}, {"value": torch.arange(7.0), "gradient": torch.ones(3).bool()}),
        "": Unit({"step": 5, "lr": [0.1]}, {}),
    }
    (one, far), (between, other) = socket.socketpair(), socket.socketpair()
    sender, receiver = Mirror(one, one), Mirror(other, other)
    snapshot = take_snapshot(5, units)
    sender.start(snapshot, None)
    receiver.start(take_snapshot(5, {}), None)
    size = 24 + snapshot.head.nbytes + snapshot.memory.nbytes + 16
    data = bytearray(far.recv(size, socket.MSG_WAITALL))
    data[-20] ^= 16 * flips
    between.sendall(data)
    far.sendall(between.recv(24 + take_snapshot(5, {}).head.nbytes + 16, socket.MSG_WAITALL))
    receiver.wait()
    sender.wait()
    if flips:
        assert receiver.arrived is None
    else:
        assert receiver.arrived is not None and receiver.arrived.step == 5
        found = receiver.arrived.units()
        assert found[""].tree == units[""].tree and found["a"].tree == units["a"].tree
        assert all(torch.equal(found["a"].tensors[key], value) for key, value in units["a"].tensors.items())
    for mirror in (sender, receiver):
        mirror.close()


# ---------------------------------------------------------------- visits of two ranks, each a thread


class Meeting:
    """Gathers one value of each of two ranks."""

    def __init__(self) -> None:
        self._values: list[Any] = [None, None]
        self._barrier = threading.Barrier(2, timeout=60)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


class Page(ProgressWriter):
    """Notes whose copy this rank has."""

    copy_of: int | None = None

    def holds_copy_of(self, rank: int | None) -> None:
        self.copy_of = rank


class CopyingRank:
    """A rank whose state is a tensor with the number of its step."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        session: Any = SimpleNamespace(
            rank=rank,
            ranks=[0, 1],
            gather=lambda value, kind: meeting.gather(rank, value),
            gather_numbers=lambda numbers: meeting.gather(rank, list(numbers)),
            closers=[],
        )
        self.rank, self.session, self.page = rank, session, Page()
        self.copies = StateCopies(session, ["one", "other"])

    def visit(self, step: int) -> None:
        model: Any = SimpleNamespace(
            _trainer=SimpleNamespace(iteration=step),
            _progress=self.page,
            _orders=SimpleNamespace(abandons=False),
        )
        self.copies.visit(model)
        assert self.copies._mirror is not None
        self.copies._mirror.wait()

    def copied_value(self, step: int) -> float:
        return float(self.copies.units_at(step)["w"].tensors["value"][-1])


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CopyingRank]]:
    def units(model: Any) -> dict[str, Unit]:
        return {"w": Unit(None, {"value": torch.full((100,), float(model._trainer.iteration))})}

    monkeypatch.setattr(copies, "state_units", units)
    monkeypatch.setattr(copies, "_why_no_copies", lambda model: "")
    monkeypatch.setattr(copies, "MOST_COST", 1e9)  # copy in each step
    meeting = Meeting()
    found = [CopyingRank(rank, meeting) for rank in range(2)]
    yield found
    for one in found:
        for close in one.session.closers:
            close()


def visit_all(ranks: list[CopyingRank], step: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.visit(step), ranks))


class FlippingSocket:
    """A connection that flips one bit of the next tensors that arrive."""

    def __init__(self, link: socket.socket, num_bytes: int) -> None:
        self._link, self._num_bytes, self.flips = link, num_bytes, 1

    def recv_into(self, view: memoryview) -> int:
        count = self._link.recv_into(view)
        if self.flips and len(view) == self._num_bytes:
            view[0] ^= 1
            self.flips -= 1
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


def test_the_first_copy_can_be_used_in_the_first_step(ranks: list[CopyingRank]) -> None:
    """HOT-3: a loss soon after a morph must not need the store."""
    visit_all(ranks, 7)
    assert [one.page.copy_of for one in ranks] == [1, 0]
    assert all(one.copies.steps() == [7] for one in ranks)
    visit_all(ranks, 8)
    assert [one.page.copy_of for one in ranks] == [1, 0]
    assert all(7 in one.copies.steps() for one in ranks)


def test_state_that_comes_from_a_copy_does_not_keep_the_memory_of_the_whole_copy() -> None:
    """HOT-3: the ranks make new copies after they have gone back, of the same size."""
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    tensors: dict[str, torch.Tensor] = {}
    tree = {"state": pack(dict(optimizer.state[parameter]), "state", tensors), "on_host": list(tensors)}
    snapshot = take_snapshot(3, {"w": Unit(tree, tensors)})
    expected = {key: value.clone() for key, value in optimizer.state[parameter].items()}
    set_state(optimizer, parameter, snapshot.units()["w"])
    found = optimizer.state[parameter]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in found.values())


def test_copies_from_before_a_load_are_dropped(ranks: list[CopyingRank]) -> None:
    """HOT-3: after a loss, the ranks must not go back to the state that the script has replaced."""
    for step in (97, 98, 99):
        visit_all(ranks, step)
    for one in ranks:
        one.copies.drop(one.page)
        assert one.copies.steps() == [] and one.page.copy_of is None
    visit_all(ranks, 50)
    assert all(one.copies.steps() == [50] and one.copied_value(50) == 50.0 for one in ranks)
    assert [one.page.copy_of for one in ranks] == [1, 0]
    visit_all(ranks, 51)
    assert all(one.copies.steps() == [50, 51] for one in ranks)


def test_copies_that_are_on_their_way_during_a_load_never_count(ranks: list[CopyingRank]) -> None:
    """HOT-3: they have the state before it."""
    visit_all(ranks, 98)
    is_held = threading.Event()
    for one in ranks:
        mirror: Any = one.copies._mirror
        mirror._threads.append(threading.Thread(target=is_held.wait, args=(60,)))
        mirror._threads[-1].start()
        one.copies.drop(one.page)
        mirror.wait = lambda: None
    visit_all(ranks, 50)
    assert all(one.copies.steps() == [] for one in ranks)
    is_held.set()
    for one in ranks:
        mirror = one.copies._mirror
        del mirror.wait
        mirror.wait()
    visit_all(ranks, 51)
    assert all(one.copies.steps() == [51] for one in ranks)


def test_a_load_and_another_number_of_the_step_drop_the_copies(tmp_path: Path) -> None:
    """HOT-3: `batches` would go back to a step before the load."""
    model = Varuna(make_model("Plain"), "0;", make_inputs("Plain", 2, torch.Generator()), 4, 2, device="cpu")
    model.set_optimizer(torch.optim.SGD(model.parameters()))
    snapshot = take_snapshot(7, {})

    def has_copies() -> bool:
        return bool(model._state_copies.steps())

    def copy() -> None:
        model._state_copies._counted = copies.CopyPair(snapshot, snapshot)
        assert has_copies()

    copy()
    model.iteration = model.iteration
    model.checkpoint(tmp_path, 0)
    assert has_copies(), "the state is the same"
    model.load_checkpoint(tmp_path, 0)
    assert not has_copies()
    copy()
    model.resume(tmp_path)
    assert not has_copies()
    copy()
    model.iteration = 3
    assert not has_copies()
    model.close()


def test_after_a_damaged_copy_all_ranks_copy_again(
    ranks: list[CopyingRank], caplog: pytest.LogCaptureFixture
) -> None:
    """HOT-6: the last whole copy stays until then, and the log says it once."""
    visit_all(ranks, 0)
    mirror = ranks[1].copies._mirror
    assert mirror is not None
    damage: Any = FlippingSocket(mirror._held, 448)  # 100 numbers, rounded up to 64 bytes
    mirror._held = damage
    visit_all(ranks, 1)
    assert not damage.flips
    assert ranks[0].copies.steps() == [0, 1] and ranks[1].copies.steps() == [0]
    visit_all(ranks, 2)
    for one in ranks:
        assert one.copies.steps() == [0, 2] and one.copied_value(0) == 0.0
    visit_all(ranks, 3)
    for one in ranks:
        assert one.copies.steps() == [2, 3] and one.copied_value(2) == 2.0
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and lines[0].startswith(
        "the copy of rank 0's state before step 1 arrived with other"
    )


@pytest.mark.parametrize("error", [RuntimeError("no memory"), ConnectionResetError("reset")])
def test_copies_that_fail_are_switched_off_on_all_ranks(
    ranks: list[CopyingRank],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    """HOT-3: the manager then restarts the job from its store, and goes back to no older and older copies.

    A failure may come from the loss of a rank. So the ranks train one more step, which such a loss ends.
    """
    visit_all(ranks, 0)

    def fail(memory: Any, on_arrival: Any) -> None:
        raise error

    monkeypatch.setattr(ranks[1].copies._mirror, "_receive", fail)
    visit_all(ranks, 1)
    visit_all(ranks, 2)
    assert [one.page.copy_of for one in ranks] == [1, 0] and not any(one.copies.is_off for one in ranks)
    assert all(0 in one.copies.steps() for one in ranks)
    visit_all(ranks, 3)
    assert [one.page.copy_of for one in ranks] == [None, None] and all(one.copies.is_off for one in ranks)
    assert not any(one.copies.steps() for one in ranks)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any(line.endswith(str(error)) for line in lines)
    why = "after a loss, this job restarts from a checkpoint: ranks [1] cannot exchange copies of the state"
    assert why in lines and len(lines) == 2
    errors = [record for record in caplog.records if record.exc_info]
    assert len(errors) == isinstance(error, RuntimeError)  # with its traceback


def test_a_loss_while_copies_connect_ends_the_wait(
    ranks: list[CopyingRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """HOT-3: a silent machine must not block a survivor for the timeout of a connection."""

    def connect(*_: Any, has_order: Callable[[], bool], **__: Any) -> Any:
        assert not has_order()
        model._orders.abandons = True
        assert has_order()
        raise PeerLost("ordered")

    monkeypatch.setattr(copies, "connect_sockets", connect)
    model: Any = SimpleNamespace(
        _trainer=SimpleNamespace(iteration=0),
        _progress=Page(),
        _orders=SimpleNamespace(abandons=False),
    )
    one = ranks[0]
    one.session.gather = lambda value, kind: [value, value]
    with pytest.raises(PeerLost, match="ordered"):
        one.copies.visit(model)


class InstantMirror:
    """An exchange that takes half a second of processor time, and no time on the clock."""

    is_busy, problem, thread_seconds = False, "", 0.5
    arrived: Any = None

    def __init__(self) -> None:
        self.num_started = 0

    def start(self, own: Any, memory: Any, *, on_arrival: Any) -> None:
        self.arrived, self.num_started = own, self.num_started + 1


def test_the_interval_makes_up_for_the_first_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """HOT-3: the copies after the first one cost at most 1 %, although the first step is slow."""
    now = 0.0
    monkeypatch.setattr(copies, "state_units", lambda model: {})
    monkeypatch.setattr(copies, "time", SimpleNamespace(perf_counter=lambda: now))
    session: Any = SimpleNamespace(rank=0, ranks=[0], gather_numbers=lambda numbers: [numbers])
    model: Any = SimpleNamespace(_trainer=SimpleNamespace(iteration=0), _progress=Page())
    held, mirror = StateCopies(session, ["here"]), InstantMirror()
    held._mirror = mirror  # type: ignore[assignment]
    for step in range(5000):
        model._trainer.iteration = step
        held.visit(model)
        now += 10.0 if step == 0 else 0.1
    assert mirror.num_started >= 5 and 0.5 * (mirror.num_started - 1) <= 0.01 * now


def test_what_the_first_copy_costs_more_puts_no_later_copy_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """HOT-3: nor do the connection, a wait for another rank, and the looks themselves."""
    now = 0.0

    def take(seconds: float) -> None:
        nonlocal now
        now += seconds

    def connect(model: Any) -> bool:
        take(30.0)
        held._mirror = mirror  # type: ignore[assignment]
        return True

    def gather(numbers: list[float]) -> list[list[float]]:
        take(0.02)  # this rank waits for the other one, which comes last
        return [numbers, [*numbers[:3], 0.01]]

    def copy(step: int, *_: Any) -> SimpleNamespace:
        take(0.0966 if copied else 5.0)
        copied.append(step)
        return SimpleNamespace(step=step, memory=None)

    copied = list[int]()
    mirror: Any = InstantMirror()
    mirror.thread_seconds = 0.0
    session: Any = SimpleNamespace(rank=0, ranks=[0, 1], gather_numbers=gather)
    model: Any = SimpleNamespace(_trainer=SimpleNamespace(iteration=0), _progress=Page())
    held = StateCopies(session, ["one", "other"])
    monkeypatch.setattr(held, "_connect", connect)
    monkeypatch.setattr(copies, "state_units", lambda model: {})
    monkeypatch.setattr(copies, "take_snapshot", copy)
    monkeypatch.setattr(copies, "time", SimpleNamespace(perf_counter=lambda: now))
    for step in range(400):
        model._trainer.iteration = step
        held.visit(model)
        take(2.0 if step == 0 else 0.1)
    # 0.0966 s for the copy and 0.02 s for two messages are 1 % of 116.6 steps.
    assert copied == [0, 16, 133, 250, 367] and held.interval == 117


@pytest.mark.parametrize(
    ("mapping", "options", "warns"),
    [
        ("0;1;", {}, True),
        ("0,1;", {"shard_optimizer": True}, True),
        ("0,1;", {}, False),  # replicas: no copies are needed
        ("0;", {}, False),  # no other rank
        ("0;1;", {"in_batches": True}, False),
        ("0;1;", {"reported": "several models"}, False),  # that is logged already
    ],
)
def test_a_loop_that_cannot_go_back_to_copies_is_warned_of(
    caplog: pytest.LogCaptureFixture, mapping: str, options: dict[str, Any], warns: bool
) -> None:
    """HOT-3: the script learns it before the first loss, with the loop to use."""
    stage_map = parse_stage_map(mapping)
    ranks = [rank for row in stage_map for rank in row]
    session = SimpleNamespace(rank=0, ranks=ranks, stage_map=stage_map, num_ranks=len(ranks))
    hot = HotState(True, 1, in_batches=options.get("in_batches", False), reported=options.get("reported", ""))
    wrapping = SimpleNamespace(shard_optimizer=options.get("shard_optimizer", False))
    model: Any = SimpleNamespace(_session=session, _hot=hot, _options=wrapping)
    copies.explain_missing_copies(model)
    assert [("model.batches(fetch, order)" in one) for one in caplog.messages] == [True] * warns


def test_copies_need_the_memory_of_all_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """HOT-3: also where the launcher does not set LOCAL_WORLD_SIZE."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    monkeypatch.setattr(copies, "why_not_hot", lambda model: "")
    monkeypatch.setattr(copies, "available_bytes", lambda device: 100)
    training = SimpleNamespace(num_bytes=10, registered={})
    model: Any = SimpleNamespace(_optimizer=None, _checkpoints=SimpleNamespace(training=training))
    assert copies._why_no_copies(model).startswith("copies of the state need 160")
