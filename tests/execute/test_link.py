"""Links between ranks: order, exact bits, no deadlock, and a peer's end is noticed at once."""

import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import TCPStore

from varuna import codec
from varuna.errors import PeerLost
from varuna.execute.comm import address, pump
from varuna.execute.comm.address import RankAddress
from varuna.execute.comm.frames import DTYPES
from varuna.execute.comm.link import Delay, PeerLink
from varuna.execute.comm.network import PeerNetwork, connect

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0  # far above what anything here takes: reached only by a failure
BIG = 64 << 20


def in_pairs(
    work: Callable[[int, Callable[[str], list[str]]], PeerNetwork],
) -> tuple[PeerNetwork, PeerNetwork]:
    """Run two ranks in two threads, with an exchange between them."""
    barrier = threading.Barrier(2)
    given = ["", ""]
    made: dict[int, PeerNetwork] = {}

    def run(rank: int) -> None:
        def exchange(own: str) -> list[str]:
            given[rank] = own
            barrier.wait(PATIENCE)
            return list(given)

        made[rank] = work(rank, exchange)

    other = threading.Thread(target=run, args=(1,))
    other.start()
    run(0)
    other.join()
    return made[0], made[1]


def linked_pair(*, unix: bool = True, delay: Delay | None = None) -> tuple[PeerNetwork, PeerNetwork]:
    return in_pairs(
        lambda rank, exchange: connect(
            rank, {1 - rank: f"rank {1 - rank}"}, exchange, unix=unix, delay=delay, timeout_seconds=PATIENCE
        )
    )


def await_message(network: PeerNetwork, link: PeerLink) -> list[Tensor]:
    while not link.ready:
        assert network.wait(PATIENCE), "nothing arrived"
    return link.take()


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.fixture(scope="module", params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[PeerNetwork, PeerNetwork]]:
    first, second = linked_pair(unix=request.param == "unix")
    yield first, second
    first.close()
    second.close()


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(sorted(DTYPES.values(), key=str)))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype).reshape(shape)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


@settings(max_examples=60, deadline=None)
@given(messages=st.lists(st.lists(tensors(), max_size=4), min_size=1, max_size=4))
def test_every_message_arrives_in_order_and_bit_for_bit(
    pair: tuple[PeerNetwork, PeerNetwork], messages: list[list[Tensor]]
) -> None:
    """V3, V14: any dtype, shape and layout; what arrives is what was sent."""
    sender, receiver = pair
    for message in messages:
        sender.links[1].send(message)
    for message in messages:
        arrived = await_message(receiver, receiver.links[0])
        assert [(t.dtype, t.shape, bits(t)) for t in arrived] == [
            (t.dtype, t.shape, bits(t)) for t in message
        ]


def test_lazily_conjugated_values_are_sent_resolved(pair: tuple[PeerNetwork, PeerNetwork]) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    pair[0].links[1].send([value.conj(), value.conj().imag])
    conjugated, negated = await_message(pair[1], pair[1].links[0])
    assert torch.equal(conjugated, value.conj().clone()) and torch.equal(negated, torch.tensor([-2.0, 4.0]))


def test_many_tensors_fit_one_message(pair: tuple[PeerNetwork, PeerNetwork]) -> None:
    pair[0].links[1].send([torch.full((2, 2), float(i)) for i in range(1500)])
    assert [t[1, 1].item() for t in await_message(pair[1], pair[1].links[0])] == list(range(1500))


def test_a_sparse_tensor_is_refused_before_anything_is_sent(pair: tuple[PeerNetwork, PeerNetwork]) -> None:
    before = pair[0].links[1].sent
    with pytest.raises(TypeError, match="make it dense"):
        pair[0].links[1].send([torch.eye(2).to_sparse()])
    assert pair[0].links[1].sent == before


def test_messages_are_counted() -> None:
    with linked_pair()[0] as first, pytest.raises(LookupError, match="no message"):
        first.links[1].send([torch.zeros(3), torch.zeros(2, dtype=torch.bool)])
        assert first.links[1].sent == 1
        first.links[1].take()


def test_any_thread_ends_a_wait(pair: tuple[PeerNetwork, PeerNetwork]) -> None:
    waker = threading.Thread(target=pair[0].wake)
    waker.start()
    assert pair[0].wait(PATIENCE)
    waker.join()
    assert not pair[0].wait(0)


def test_a_message_that_the_pump_read_ends_the_next_wait() -> None:
    """A big message may be read in the background: the wait that follows must not miss it."""
    first, second = linked_pair()
    with first, second:
        for _ in range(20):
            first.links[1].send([torch.ones(1 << 18)])
            await_message(second, second.links[0])
            second.links[0].send([])
            await_message(first, first.links[1])
        assert second.links[0].bulky and second.links[0].received == 20


def test_delayed_messages_keep_their_order() -> None:
    """V20: the jitter that tests and benchmarks put on links never reorders them."""
    delays = [0.03, 0.0, 0.01, 0.0, 0.02]
    first, second = linked_pair(delay=lambda index: delays[index] if index < 5 else 0.0)
    with first, second:
        for tag in range(5):
            first.links[1].send([torch.tensor(tag)])
        assert [await_message(second, second.links[0])[0].item() for tag in range(5)] == list(range(5))


def test_a_delayed_message_does_not_hold_up_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """V20: the link is slow, not the stage."""
    monkeypatch.setattr(pump, "GOODBYE_SECONDS", 0.0)
    first, second = linked_pair(delay=lambda index: 3600.0)
    with first, second:
        first.links[1].send([torch.ones(1)])
        assert first.links[1].unsent and not second.wait(0)


def test_an_orderly_end_is_not_a_loss() -> None:
    first, second = linked_pair()
    first.links[1].send([torch.ones(1)])
    first.close()
    assert await_message(second, second.links[0])[0].item() == 1.0  # what came before it still counts
    while not second.links[0].ended:
        assert second.wait(PATIENCE)
    assert second.links[0].lost is None
    with pytest.raises(PeerLost, match="rank 0 has ended"):
        second.links[0].send([])
    second.close()


def test_messages_of_a_peer_that_died_still_arrive() -> None:
    first, second = linked_pair()
    with first, second:
        first.links[1].send([torch.ones(1)])
        first.links[1].socket.shutdown(socket.SHUT_RDWR)
        assert await_message(second, second.links[0])[0].item() == 1.0
        with pytest.raises(PeerLost, match="rank 0 is lost"):
            while second.wait(PATIENCE):
                pass


@pytest.mark.parametrize("last_words", [b"", b"GET / HTTP/1.1\r\nHost: varuna.example\r\n\r\n"])
def test_a_peer_that_vanishes_or_sends_garbage_is_lost(last_words: bytes) -> None:
    first, second = linked_pair()
    with first, second:
        first.links[1].socket.sendall(last_words)
        first.links[1].socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(PeerLost, match="rank 0 is lost: it"):
            while second.wait(PATIENCE):
                pass
        assert second.links[0].lost is not None


def test_closing_leaves_no_file_and_no_thread_behind() -> None:
    def belongings() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = belongings()
    first, second = linked_pair()
    for network in (first, second, first):  # twice does no harm
        network.close()
    first.wake()  # nor does a late callback
    assert belongings() == before


class SharedCard:
    """Both ends of the slots of a shared GPU, without a GPU: `filled` holds the numbers of filled slots."""

    shares_gpu, unreachable, num_slots = True, False, 1

    def __init__(self) -> None:
        self.slots: list[list[Tensor]] = []
        self.filled: set[int] = set()

    def put(self, tensors: list[Tensor]) -> int:
        self.slots.append(tensors)
        return len(self.slots) - 1

    def is_filled(self, number: int) -> bool:
        return number in self.filled

    def tensors(self, number: int, forms: object) -> list[Tensor]:
        return self.slots[number]

    def release_copied(self) -> None: ...
    def take_freed(self) -> list[int]:
        return []

    def close(self) -> None: ...


def test_a_message_counts_as_arrived_when_a_shared_card_has_filled_it() -> None:
    """In order: a later filled message waits for its turn. Nothing wakes the waiter, and it still sees it."""
    first, second = linked_pair()
    card: Any = SharedCard()
    out, into = first.links[1], second.links[0]
    out._slots_in = out._slots_out = into._slots_in = into._slots_out = card
    for tag in range(3):
        out.send([torch.tensor(tag)])
    card.filled = {1}
    while into.num_unfilled < 3:
        second.poll()
    assert into.ready == 0 and not second.wait(0.01)
    with pytest.raises(LookupError, match="no message"):
        into.take()
    threading.Timer(0.05, lambda: card.filled.add(0)).start()
    assert second.wait(PATIENCE) and (into.ready, into.num_unfilled) == (2, 1)
    assert [into.take()[0].item() for tag in range(2)] == [0, 1]
    card.filled.add(2)
    assert await_message(second, into)[0].item() == 2
    first.close()
    second.close()


@pytest.mark.parametrize("polls", range(8))
def test_a_message_that_is_filled_between_two_polls_is_not_missed(polls: int) -> None:
    """Whichever poll of one `wait` finds it filled, the wait must end."""
    first, second = linked_pair()
    card: Any = SharedCard()
    out, into = first.links[1], second.links[0]
    out._slots_in = out._slots_out = into._slots_in = into._slots_out = card
    out.send([torch.tensor(1)])
    while not into.num_unfilled:
        second.poll()
    assert not second.wait(0)
    left = iter(range(polls))
    card.is_filled = lambda number: next(left, None) is None
    waiter = threading.Thread(target=second.wait, args=(10 * PATIENCE,), daemon=True)
    waiter.start()
    waiter.join(PATIENCE)
    assert not waiter.is_alive() and into.ready == 1
    first.close()
    second.close()


def test_a_forked_child_does_not_keep_the_connections_open() -> None:
    """A data loader's worker must not hide its parent's death from the other ranks."""
    first, second = linked_pair()
    with first, second:
        files = [link.socket.fileno() for link in (first.links[1], second.links[0])]
        child = os.fork()
        if child == 0:
            os._exit(sum(os.path.exists(f"/proc/self/fd/{file}") for file in files))
        assert os.waitpid(child, 0)[1] == 0


def opening(source: int, target: int) -> bytes:
    return address.OPENING.pack(address.MAGIC, source, target, bytes(32))


def test_strangers_are_refused_and_the_peer_still_connects(caplog: pytest.LogCaptureFixture) -> None:
    """V46, SEC-2, on the data links: a caller without the key is refused and logged."""
    strangers: list[socket.socket] = []

    def work(rank: int, exchange: Callable[[str], list[str]]) -> PeerNetwork:
        def exchange_after_strangers(own: str) -> list[str]:
            if rank == 1:  # the one that is dialled: strangers come first, while rank 0 still waits
                contact = codec.decode(own, RankAddress)
                guess = opening(0, 1) + bytes(32)
                words = guess, opening(7, 1), opening(0, 5), b"x" * len(guess), b"short", b"", b"x" * 100_000
                for word in words:
                    stranger = socket.create_connection((contact.host, contact.port))
                    stranger.sendall(word)
                    strangers.append(stranger)
            return exchange(own)

        return connect(rank, {1 - rank: f"rank {1 - rank}"}, exchange_after_strangers, unix=False)

    first, second = in_pairs(work)
    with first, second:
        first.links[1].send([torch.ones(1)])
        assert await_message(second, second.links[0])[0].item() == 1.0
    for stranger in strangers:
        stranger.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionResetError):
            found = b"".join(iter(lambda: stranger.recv(1 << 16), b""))  # noqa: B023 - called here
            assert len(found) <= address.OPENING.size, "no proof for a stranger"
        stranger.close()
    refusals = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert 1 <= len(refusals) <= 2, "strangers must not fill the log"
    assert "rank 1 refused" in refusals[0] and "127.0.0.1 port" in refusals[0]


class Relay(threading.Thread):
    """Passes bytes on between a caller and its target, and records what the caller sends."""

    def __init__(self, target: tuple[str, int]) -> None:
        super().__init__(daemon=True)
        self.target = target
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.recorded = b""
        self.start()

    def run(self) -> None:
        caller, _ = self.listener.accept()
        called = socket.create_connection(self.target)
        back = threading.Thread(target=self.pass_on, args=(called, caller, False), daemon=True)
        back.start()
        self.pass_on(caller, called, True)

    def pass_on(self, source: socket.socket, target: socket.socket, records: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if records:
                    self.recorded += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def through_a_relay(relays: list[Relay], before: Callable[[RankAddress], None]) -> tuple[PeerNetwork, ...]:
    """Connect two ranks; rank 0 calls rank 1 through a relay."""

    def work(rank: int, exchange: Callable[[str], list[str]]) -> PeerNetwork:
        def exchange_relayed(own: str) -> list[str]:
            if rank == 0:
                return exchange(own)
            contact = codec.decode(own, RankAddress)
            before(contact)
            relays.append(Relay((contact.host, contact.port)))
            port = relays[-1].listener.getsockname()[1]
            return exchange(codec.encode(msgspec.structs.replace(contact, port=port)))

        return connect(rank, {1 - rank: f"rank {1 - rank}"}, exchange_relayed, unix=False, key=b"the job's")

    return in_pairs(work)


def test_a_recorded_handshake_is_worthless(caplog: pytest.LogCaptureFixture) -> None:
    """SEC-2: each side draws a new number for every connection."""
    relays: list[Relay] = []
    for network in through_a_relay(relays, lambda contact: None):
        network.close()
    recorded = relays[0].recorded[: address.OPENING.size + address.PROOF_BYTES]
    assert recorded.startswith(address.MAGIC) and len(recorded) == address.OPENING.size + 32
    replays: list[socket.socket] = []

    def replay(contact: RankAddress) -> None:
        replays.append(socket.create_connection((contact.host, contact.port)))
        replays[0].sendall(recorded)

    first, second = through_a_relay(relays, replay)
    with first, second:
        first.links[1].send([torch.ones(1)])
        assert await_message(second, second.links[0])[0].item() == 1.0
    assert "it does not know the key of this job" in caplog.text
    replays[0].close()


def test_ranks_with_different_keys_do_not_connect() -> None:
    """SEC-2: the exchange alone does not make a member."""
    errors: list[str] = []

    def work(rank: int, exchange: Callable[[str], list[str]]) -> PeerNetwork:
        try:
            return connect(
                rank, {1 - rank: "the other"}, exchange, key=b"%d" % rank, unix=False, timeout_seconds=1.0
            )
        except PeerLost as error:
            errors.append(str(error))
            return None  # type: ignore[return-value]

    in_pairs(work)
    assert any("rank 0 was not welcomed by rank 1" in error for error in errors)
    assert any("rank 1 waited in vain for ranks [0]" in error for error in errors)


def test_a_unix_socket_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-2"""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with own, other:
        assert address._is_own_user(own)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert not address._is_own_user(own)
    first, second = linked_pair()
    with first, second:
        assert first.links[1].transport == second.links[0].transport == "TCP"


def test_a_peer_that_never_connects_is_named() -> None:
    """B7"""

    def exchange(own: str) -> list[str]:
        contact = codec.decode(own, RankAddress)
        absent = RankAddress(rank=0, machine="", host="127.0.0.1", port=1, path="", nonce="")
        return [codec.encode(absent), codec.encode(contact)]

    with pytest.raises(PeerLost, match=r"rank 1 waited in vain for ranks \[0\]"):
        connect(1, {0: "rank 0"}, exchange, timeout_seconds=0.05)


def test_a_loopback_address_of_another_machine_is_explained() -> None:
    """B7: if nothing sets the address of the first machine."""
    own, peer = (RankAddress(rank, f"machine {rank}", "127.0.0.1", 1, "", "") for rank in range(2))
    with pytest.raises(PeerLost, match=r"rank 0 cannot reach rank 1.*set MASTER_ADDR on all ranks"):
        address._dial(own, peer, time.monotonic() + PATIENCE)


@pytest.mark.parametrize("unix", [False, True])
def test_an_order_of_the_manager_ends_a_call_to_a_silent_machine(unix: bool) -> None:
    """HOT-3: a survivor must not wait for the timeout of a connection."""
    silent = socket.socket(socket.AF_UNIX if unix else socket.AF_INET, socket.SOCK_STREAM)
    with silent, contextlib.ExitStack() as others:
        silent.bind(f"\0varuna-test-{os.getpid()}" if unix else ("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(4):  # its queue is full: it answers no other caller
            other = others.enter_context(socket.socket(silent.family, socket.SOCK_STREAM))
            other.setblocking(False)
            other.connect_ex(silent.getsockname())
        own = RankAddress(0, "here", "127.0.0.1", 1, "", "")
        path, port = ("", silent.getsockname()[1]) if not unix else (silent.getsockname()[1:].decode(), 1)
        peer = RankAddress(1, "here" if unix else "there", "127.0.0.1", port, path, "")
        orders = iter([False, False, True])
        with pytest.raises(PeerLost, match="the manager has ordered this rank to go on"):
            address._dial(own, peer, time.monotonic() + PATIENCE, lambda: next(orders))
        assert not list(orders)


# ---------------------------------------------------------------- with a real second process


def store_exchange(store: TCPStore, rank: int, own: str) -> list[str]:
    store.set(f"address/{rank}", own)
    return [store.get(f"address/{other}").decode() for other in range(2)]


def live_as_rank_1(port: int, orders: Connection) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False)
    network = connect(1, {0: "rank 0"}, lambda own: store_exchange(store, 1, own))
    while (order := orders.recv()) != "end":
        if order == "swap":
            network.links[0].send([torch.full((BIG,), 1, dtype=torch.uint8)])
            (arrived,) = await_message(network, network.links[0])
            orders.send(bool((arrived == 0).all()))


@contextlib.contextmanager
def two_processes() -> Iterator[tuple[PeerNetwork, BaseProcess, Connection]]:
    context = multiprocessing.get_context("spawn")
    orders, theirs = context.Pipe()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    peer = context.Process(target=live_as_rank_1, args=(store.port, theirs), daemon=True)
    peer.start()
    with connect(0, {1: "rank 1 (stage 1)"}, lambda own: store_exchange(store, 0, own)) as network:
        yield network, peer, orders
    peer.kill()
    peer.join()


def test_two_processes_swap_big_messages_and_a_killed_one_is_seen_at_once() -> None:
    """V33: no deadlock when both send more than the kernel holds; a kill ends the wait."""
    with two_processes() as (network, peer, orders):
        for _ in range(2):
            orders.send("swap")
            network.links[1].send([torch.zeros(BIG, dtype=torch.uint8)])
            assert sum(torch.ones(64, 64).mm(torch.ones(64, 64)).sum().item() for _ in range(200)) > 0
            (arrived,) = await_message(network, network.links[1])
            assert (arrived == 1).all() and orders.recv()
        peer.kill()
        with pytest.raises(PeerLost, match=r"rank 1 \(stage 1\) is lost"):
            while network.wait(PATIENCE):
                pass


def test_a_script_that_ends_without_closing_still_says_goodbye() -> None:
    """V34: the end of a job is not a loss."""
    script = """
from torch.distributed import TCPStore
from tests.execute.test_link import connect, store_exchange
store = TCPStore("127.0.0.1", PORT, is_master=False)
network = connect(1, {0: "rank 0"}, lambda own: store_exchange(store, 1, own))
network.links[0].send([])
"""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script = script.replace("PORT", str(store.port))
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) as peer:
        with connect(0, {1: "rank 1"}, lambda own: store_exchange(store, 0, own)) as network:
            while not network.links[1].ended:
                assert network.wait(PATIENCE)
            assert network.links[1].ready == 1
        assert peer.wait(PATIENCE) == 0
