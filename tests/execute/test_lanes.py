"""Messages over lanes: NCCL matches calls by their order only, so every call of both ends is checked."""

import socket
from collections import deque
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.execute.test_link import await_message, linked_pair
from varuna.errors import PeerLost
from varuna.execute.comm.groups import RankDevice, choose_channel
from varuna.execute.comm.link import PeerLink


class Half:
    """One call of a broadcast; complete when the other end has made its call too."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.complete = False

    def is_completed(self) -> bool:
        return self.complete

    def wait(self) -> None:
        assert self.complete, "a message is taken whose sender has not made its call"


class Pairing:
    """A backend as strict as NCCL: the first call of one end matches the first of the other."""

    def __init__(self) -> None:
        self.halves: dict[bool, deque[Half]] = {True: deque(), False: deque()}
        self.calls = 0

    def call(self, sends: bool, tensor: Tensor) -> Half:
        assert tensor.dtype == torch.uint8 and tensor.is_contiguous() and tensor.numel()
        half = Half(tensor)
        self.halves[sends].append(half)
        while self.halves[True] and self.halves[False]:
            sent, received = self.halves[True].popleft(), self.halves[False].popleft()
            assert sent.tensor.shape == received.tensor.shape, "two calls that do not belong together"
            received.tensor.copy_(sent.tensor)
            sent.complete = received.complete = True
            self.calls += 1
        return half


class End:
    """One end of a lane."""

    name = "a backend that checks"

    def __init__(self, pairing: Pairing, *, sends: bool) -> None:
        self.pairing, self.sends = pairing, sends

    def broadcast(self, tensor: Tensor) -> Any:
        return self.pairing.call(self.sends, tensor)


def use_lanes(one: PeerLink, other: PeerLink) -> tuple[Pairing, Pairing]:
    there, back = Pairing(), Pairing()
    one.use_lanes(End(there, sends=True), End(back, sends=False))
    other.use_lanes(End(back, sends=True), End(there, sends=False))
    return there, back


shapes = st.lists(st.integers(0, 3), max_size=3)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64])
messages = st.lists(st.tuples(st.booleans(), st.lists(st.tuples(shapes, dtypes), max_size=3)), max_size=8)


@settings(max_examples=25, deadline=None)
@given(messages)
def test_every_call_of_one_end_matches_a_call_of_the_other(sent: list[Any]) -> None:
    """V21: in both directions, however they interleave; empty tensors and messages make no call."""
    ones, others = linked_pair()
    with ones, others:
        (one,), (other,) = ones.links.values(), others.links.values()
        lanes = use_lanes(one, other)
        expected: dict[bool, list[list[Tensor]]] = {True: [], False: []}
        for forward, forms in sent:
            tensors = [(torch.rand(shape) * 9).to(dtype) for shape, dtype in forms]
            (one if forward else other).send(tensors)
            expected[forward].append(tensors)
        for forward, network, link in ((True, others, other), (False, ones, one)):
            for tensors in expected[forward]:
                found = await_message(network, link)
                assert [t.dtype for t in found] == [t.dtype for t in tensors]
                assert all(map(torch.equal, found, tensors))
        for lane, forward in zip(lanes, (True, False), strict=True):
            assert lane.calls == sum(t.numel() > 0 for tensors in expected[forward] for t in tensors)
            assert not any(lane.halves.values())


def test_a_view_is_sent_over_a_lane_with_its_values() -> None:
    ones, others = linked_pair()
    with ones, others:
        (one,), (other,) = ones.links.values(), others.links.values()
        use_lanes(one, other)
        shown = [torch.arange(6).view(2, 3).t(), torch.tensor([1 + 2j]).conj(), torch.tensor(4.0)]
        one.send(shown)
        assert all(map(torch.equal, await_message(others, other), shown))


def test_a_peer_that_is_lost_leaves_no_call_behind() -> None:
    """V21: its call would never come, and the device would wait forever."""
    ones, others = linked_pair()
    with ones, others:
        (one,), (other,) = ones.links.values(), others.links.values()
        there, _ = use_lanes(one, other)
        one.send([torch.ones(3)])
        one.socket.shutdown(socket.SHUT_RDWR)
        while other.lost is None:
            other.receive()
        with pytest.raises(PeerLost, match="rank 0"):
            other.take()
        assert not there.halves[False]


def seat(machine: str, gpu: str | None, *in_reach: str) -> RankDevice:
    return RankDevice(machine, gpu, (*in_reach, gpu) if gpu else ())


@pytest.mark.parametrize(
    ("one", "other", "nccl", "chosen"),
    [
        (seat("a", "0"), seat("a", "0"), False, "shared"),  # two ranks on one GPU, which NCCL refuses
        (seat("a", "0", "1"), seat("a", "1", "0"), True, "shared"),
        (seat("a", "0", "1"), seat("a", "1"), True, "group"),  # one of them sees its own GPU alone
        (seat("a", "0"), seat("b", "1"), True, "group"),
        (seat("a", "0"), seat("b", "1"), False, "host"),  # other ranks of the job share a GPU
        (seat("a", None), seat("a", None), False, "host"),
        (seat("a", None), seat("b", "0"), False, "host"),
    ],
)
def test_the_channel_depends_on_the_devices_of_both_ranks(
    one: RankDevice, other: RankDevice, nccl: bool, chosen: str
) -> None:
    """V21: and both ends choose the same."""
    assert choose_channel(one, other, nccl=nccl) == choose_channel(other, one, nccl=nccl) == chosen
