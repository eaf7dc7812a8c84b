"""The job's store: the semantics of torch's TCPStore for members, and nothing for strangers."""

import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from torch.distributed import PrefixStore, Store, TCPStore

from varuna.execute.comm.job_store import JobStore, JoinTimeout, StoreLost, disconnect_job_stores
from varuna.secure import store_server
from varuna.secure.credential import JobCredential, make_credential
from varuna.secure.framing import pack_frame
from varuna.secure.store_client import KeyTimeout, StoreConnection, StoreGone
from varuna.secure.store_server import StoreRequest, store_in_thread

PATIENCE = 60.0  # far above what anything here takes: reached only by a failure
CREDENTIAL = make_credential("test")


class RunningStore:
    def __init__(self, port: int, log: list[str]) -> None:
        self.port = port
        self.log = log

    def client(self, credential: JobCredential = CREDENTIAL, **options: Any) -> JobStore:
        return JobStore("127.0.0.1", self.port, credential, **options)

    def wait_for_log(self, text: str, count: int = 1) -> None:
        deadline = time.monotonic() + PATIENCE
        while sum(text in line for line in self.log) < count:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.01)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningStore]:
    monkeypatch.setattr(store_server, "HANDSHAKE_SECONDS", 0.5)
    log: list[str] = []
    with store_in_thread(CREDENTIAL, log=log.append) as port:
        yield RunningStore(port, log)


# ---------------------------------------------------------------- members

KEYS = st.sampled_from(["a", "b", "c"])
NUMBERS = st.integers(-3, 3)
NUMERALS = st.integers(0, 3).map(str)
OPERATIONS = st.one_of(
    st.tuples(st.just("set"), KEYS, NUMERALS),
    st.tuples(st.just("add"), KEYS, NUMBERS),
    st.tuples(st.just("append"), KEYS, NUMERALS),
    st.tuples(st.just("compare_set"), KEYS, st.sampled_from(["", "0", "1"]), NUMERALS),
    st.tuples(st.just("check"), st.lists(KEYS, min_size=1, max_size=3)),
    st.tuples(st.just("delete_key"), KEYS),
    st.tuples(st.just("num_keys")),
    st.tuples(st.just("multi_set"), st.just(["a", "b"]), st.tuples(NUMERALS, NUMERALS).map(list)),
    st.tuples(st.just("list_keys")),
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.just("multi_get"), st.lists(KEYS, min_size=1, max_size=2)),
)


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Store, Store]]:
    reference = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with store_in_thread(CREDENTIAL) as port:
        yield reference, JobStore("127.0.0.1", port, CREDENTIAL)


@settings(max_examples=100, deadline=None)
@given(st.lists(OPERATIONS, max_size=12))
def test_it_answers_like_torchs_store(both: tuple[Store, Store], operations: list[tuple[Any, ...]]) -> None:
    """SEC-2: it replaces a TCPStore, which has the same methods and answers."""
    for name, *arguments in operations:
        wanted = [arguments[0]] if name == "get" else arguments[0] if name == "multi_get" else []
        if wanted and not both[0].check(wanted):
            continue  # it would wait
        found = [getattr(one, name)(*arguments) for one in both]
        if name == "list_keys":
            found = [sorted(keys) for keys in found]
        assert found[0] == found[1], (name, arguments)
    for key in both[0].list_keys():
        assert [one.delete_key(key) for one in both] == [True, True]


def test_an_addition_to_text_is_an_error_of_this_request_only(store: RunningStore) -> None:
    client = store.client()
    client.set("a", "text")
    with pytest.raises(ValueError, match="add"):
        client.add("a", 1)
    assert client.get("a") == b"text"


def test_values_are_bytes_of_any_kind_and_size(store: RunningStore) -> None:
    client, big = store.client(), os.urandom(5 * 2**20)
    client.set("a", big)
    client.set("empty", "")
    assert client.get("a") == big and client.get("empty") == b""


def test_get_waits_until_another_member_sets_the_key(store: RunningStore) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.client().get, "a")
        many = pool.submit(store.client().wait, ["a", "b"])
        client = store.client()
        client.set("a", b"\x00\xff")
        assert waiting.result(PATIENCE) == b"\x00\xff"
        client.add("b", 1)
        many.result(PATIENCE)


def test_a_wait_ends_with_the_missing_rank(store: RunningStore) -> None:
    """REL-2: torch's default of 30 minutes does not apply, and the error names who is missing."""
    first, second = (store.client(rank=rank, world=3) for rank in range(2))
    assert first.timeout <= timedelta(minutes=5)
    first.set_timeout(timedelta(minutes=30))  # init_process_group sets it
    assert first.timeout <= timedelta(minutes=5)
    first.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(JoinTimeout, match=r"rank 2 has not called init_process_group .* b in the job"):
        first.get("b")
    with pytest.raises(JoinTimeout):
        second.wait(["b"], timedelta(seconds=0.05))
    assert second.add("b", 1) == 1  # the connection is still good


def test_a_prefix_and_its_clone_reach_the_store(store: RunningStore) -> None:
    prefixed: Any = PrefixStore("p", store.client())
    prefixed.clone().set("a", "1")
    assert store.client().get("p/a") == b"1"
    assert prefixed.num_keys() == 1 and prefixed.delete_key("a")
    with pytest.raises(JoinTimeout):
        prefixed.wait(["a"], timedelta(seconds=0.01))


def test_everybody_who_waits_fails_at_once_when_the_store_ends() -> None:
    """REL-2: the connection closes, so nobody waits for a dead store."""
    with ThreadPoolExecutor() as pool:
        with store_in_thread(CREDENTIAL) as port:
            clients = [JobStore("127.0.0.1", port, CREDENTIAL) for _ in range(4)]
            waiting = [pool.submit(client.get, "a") for client in clients]
            wait_until(lambda: all(one.running() for one in waiting))
        for one in waiting:
            with pytest.raises(StoreLost, match=rf"store at 127.0.0.1:{port} "):
                one.result(PATIENCE)
        with pytest.raises(StoreLost, match=f"127.0.0.1:{port}"):  # it does not reconnect
            clients[0].set("a", "1")
        with pytest.raises(StoreGone, match="cannot be reached"):
            StoreConnection("127.0.0.1", port, CREDENTIAL, connect_seconds=0.1)


def test_a_connection_that_another_thread_closes_keeps_its_number_until_the_request_has_ended(
    store: RunningStore,
) -> None:
    """HOT-3: a new socket with the same number would give its bytes to the request, or let it wait."""
    connection = StoreConnection("127.0.0.1", store.port, CREDENTIAL)
    with connection._lock:  # as in a request
        connection.close()
        assert connection._socket.fileno() >= 0 and connection._socket.recv(1) == b""
    with pytest.raises(StoreGone, match="was closed by this process"):
        connection.request(StoreRequest("num_keys"))
    assert connection._socket.fileno() == -1
    other = StoreConnection("127.0.0.1", store.port, CREDENTIAL)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(other.request, StoreRequest("get", ("a",), seconds=PATIENCE))
        wait_until(other._lock.locked)
        other.close()
        with pytest.raises(StoreGone):
            waiting.result(PATIENCE)
    assert other._socket.fileno() == -1


def test_a_group_that_still_uses_a_disconnected_store_learns_that_it_is_lost(store: RunningStore) -> None:
    """HOT-3: torch does not keep the store alive; a call of one that is gone would be an error of torch's."""
    groups = PrefixStore("group", store.client())
    disconnect_job_stores()
    with pytest.raises(StoreLost):
        groups.get("key")


def test_a_member_that_leaves_while_it_waits_is_forgotten(store: RunningStore) -> None:
    connection = StoreConnection("127.0.0.1", store.port, CREDENTIAL)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(connection.request, StoreRequest("get", ("a",), seconds=PATIENCE))
        wait_until(waiting.running)
        connection.close()
        with pytest.raises(StoreGone):
            waiting.result(PATIENCE)
    client = store.client()
    client.set("a", "1")
    assert client.get("a") == b"1"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---------------------------------------------------------------- strangers


def still_serves(store: RunningStore) -> None:
    client = store.client()
    assert client.compare_set("alive", "", "1") == b"1"
    client.close()


def speak(port: int, data: bytes) -> bytes:
    """Send bytes as a stranger, and return what comes back until the store closes the connection."""
    found = b""
    address = ("127.0.0.1", port)
    with socket.create_connection(address, timeout=PATIENCE) as stranger, suppress(ConnectionError):
        stranger.sendall(data)
        while more := stranger.recv(4096):
            found += more
    return found


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        bytes(range(256)) * 100,
        b"\xff\xff\xff\xff" + b"x" * 1000,  # a length of 4 GiB
        pack_frame(b"\x93\xa3set\x91\xa5error\x91\xc4\x01x"),  # a request without TLS
        b"\x16\x03\x01\xff\xff" + b"x" * 70000,  # a TLS record that is no handshake
    ],
)
def test_a_stranger_without_tls_is_refused(store: RunningStore, data: bytes) -> None:
    """SEC-2"""
    assert b"alive" not in speak(store.port, data)
    store.wait_for_log("refused")
    still_serves(store)
    assert store.client().num_keys() == 1


def strangers_context(*, has_certificate: bool) -> ssl.SSLContext:
    """A TLS client that accepts any server, and has no certificate or one of its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if has_certificate:
        context = make_credential("test").client_context()  # the job's name, but another key
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@pytest.mark.parametrize("has_certificate", [False, True])
def test_a_stranger_with_tls_but_without_the_jobs_key_is_refused(
    store: RunningStore, has_certificate: bool
) -> None:
    """SEC-2: the store reads no request before the caller has proved that it has the key."""
    answer = b""
    context = strangers_context(has_certificate=has_certificate)
    with (
        suppress(OSError),
        socket.create_connection(("127.0.0.1", store.port), timeout=PATIENCE) as raw,
        context.wrap_socket(raw) as stranger,
    ):
        stranger.sendall(pack_frame(b"\x93\xa3set\x91\xa5error\x91\xc4\x01x"))
        answer = stranger.recv(4096)
    assert answer == b""
    store.wait_for_log("refused")
    assert store.client().num_keys() == 0
    with pytest.raises(StoreGone, match="credential"):
        StoreConnection("127.0.0.1", store.port, make_credential("test"))


def test_a_torch_client_is_refused(store: RunningStore) -> None:
    """SEC-2: a TCPStore client, which is how a stranger joined a generation before."""
    with pytest.raises(RuntimeError):
        TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=1))
    store.wait_for_log("refused")
    still_serves(store)


def test_a_silent_or_slow_stranger_is_disconnected(store: RunningStore) -> None:
    """SEC-4"""
    assert speak(store.port, b"") == b""
    assert speak(store.port, b"\x16\x03") == b""  # the beginning of a handshake, then nothing
    address = ("127.0.0.1", store.port)
    with socket.create_connection(address, timeout=PATIENCE) as slow, pytest.raises(OSError):
        for byte in b"\x16\x03\x01\x02\x00" + bytes(500):
            slow.sendall(bytes([byte]))
            time.sleep(0.02)
    store.wait_for_log("refused", 3)


def test_500_idle_strangers_do_not_keep_members_out(store: RunningStore) -> None:
    """SEC-4"""
    with ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(socket.create_connection(("127.0.0.1", store.port), timeout=PATIENCE))
        still_serves(store)
        with ThreadPoolExecutor() as pool:
            assert sorted(pool.map(lambda _: store.client().add("n", 1), range(8))) == list(range(1, 9))
    store.wait_for_log("(refusal 128)")
    assert len(store.log) < 30  # ten, then powers of two


def test_more_strangers_than_the_limit_drop_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-4: a member completes its handshake in milliseconds, so it is never the oldest for long."""
    monkeypatch.setattr(store_server, "MAX_STRANGERS", 4)
    with store_in_thread(CREDENTIAL) as port, ExitStack() as stack:
        first, *_ = (
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
            for _ in range(20)
        )
        client = JobStore("127.0.0.1", port, CREDENTIAL)
        assert client.add("n", 1) == 1
        assert first.recv(1) == b""


def test_a_member_that_breaks_the_protocol_is_disconnected(store: RunningStore) -> None:
    """A member has the key, but may have another version; the store serves the others."""
    for data in (struct.pack("!I", 2**32 - 1), pack_frame(b"no message"), pack_frame(b"\x91\xa4what")):
        with (
            socket.create_connection(("127.0.0.1", store.port), timeout=PATIENCE) as raw,
            CREDENTIAL.client_context().wrap_socket(raw) as member,
        ):
            member.sendall(data)
            with suppress(OSError):
                assert member.recv(1) == b""
    store.wait_for_log("refused", 3)
    still_serves(store)


def test_the_credential_is_in_no_message_of_an_error(store: RunningStore) -> None:
    """SEC-3"""
    with pytest.raises(KeyTimeout) as found:
        StoreConnection("127.0.0.1", store.port, CREDENTIAL).request(StoreRequest("get", ("a",), seconds=0))
    assert CREDENTIAL.key.splitlines()[1] not in repr(found.value) + repr(CREDENTIAL)


def test_threads_of_one_member_take_turns(store: RunningStore) -> None:
    client = store.client()
    barrier = threading.Barrier(4)

    def count(_: int) -> None:
        barrier.wait(PATIENCE)
        for _ in range(50):
            client.add("n", 1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(4)))
    assert client.get("n") == b"200"
