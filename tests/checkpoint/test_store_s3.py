"""A store in S3, against a real server on loopback: in blocks, in ranges, halted, killed, and back."""

import errno
import secrets
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import obstore
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.s3 import BUCKET, S3Server
from varuna.checkpoint.store.claim import RECORD, refuse_disowned
from varuna.checkpoint.store.s3 import S3Store
from varuna.checkpoint.store.spans import GAP_BYTES
from varuna.checkpoint.store.store import Entry, Owner, open_store, retrying
from varuna.errors import StoreTaken

BLOCK = 5 << 20  # the smallest that S3 takes


@pytest.fixture(scope="module")
def one_server() -> Iterator[S3Server]:
    with closing(S3Server()) as server:
        yield server


@pytest.fixture
def server(one_server: S3Server) -> Iterator[S3Server]:
    """Tests may halt and kill it; it is up again for the next one."""
    yield one_server
    one_server.revive()


@pytest.fixture(scope="module")
def store(one_server: S3Server) -> S3Store:
    """One for all tests, each in a folder of its own: an S3 client takes longer to make than to use."""
    return open_on(one_server, seconds=10)


@pytest.fixture(scope="module")
def hasty(one_server: S3Server) -> S3Store:
    """One that does not wait long for a server that stalls."""
    return open_on(one_server, seconds=1)


def open_on(server: S3Server, *, seconds: float, **options: str) -> S3Store:
    return S3Store(
        f"s3://{BUCKET}/place",
        {**server.options, **options},
        block_bytes=BLOCK,
        request_seconds=seconds,
        client_retries=0,
    )


@pytest.fixture
def folder() -> str:
    return secrets.token_hex(8)


def numbered(size: int) -> bytes:
    """Bytes that are different wherever they are taken from."""
    return b"".join(number.to_bytes(4, "big") for number in range(size // 4))


def test_a_large_file_goes_out_in_blocks_and_comes_back_in_ranges(
    server: S3Server, store: S3Store, folder: str
) -> None:
    content = numbered(2 * BLOCK + 40_000)
    path = f"{folder}/part"
    server.requests()
    store.write(path, lambda: [content[:7], content[7 : BLOCK + 9], b"", content[BLOCK + 9 :]])
    sent = [line for line in server.requests() if "partNumber" in line]
    assert sorted(line.partition("partNumber=")[2][0] for line in sent) == ["1", "2", "3"]
    assert store.size(path) == len(content)
    assert store.read(path) == content
    near = [(0, 10), (10 + GAP_BYTES, 20 + GAP_BYTES), (5, 7)]
    spans = [*near, (BLOCK - 3, BLOCK + 5), (len(content) - 4, len(content)), (8, 8)]
    server.requests()
    views = store.read_spans(path, spans)
    assert [bytes(view) for view in views] == [content[first:stop] for first, stop in spans]
    assert [line.split()[0] for line in server.requests()] == ["HEAD", "GET", "GET", "GET"]
    assert bytes(store.read_spans(path, [(1, len(content))])[0]) == content[1:]


@settings(max_examples=10, deadline=None)
@given(chunks=st.lists(st.binary(max_size=2000), max_size=4), data=st.data())
def test_what_is_written_is_read_back(store: S3Store, chunks: list[bytes], data: Any) -> None:
    folder = secrets.token_hex(8)
    whole = b"".join(chunks)
    store.write(f"{folder}/part", lambda: chunks)
    store.replace(f"{folder}/manifest.json", whole)
    assert store.read(f"{folder}/part") == store.read(f"{folder}/manifest.json") == whole
    ends = st.integers(0, len(whole))
    spans = data.draw(st.lists(st.tuples(ends, ends).map(lambda span: (min(span), max(span))), max_size=3))
    views = store.read_spans(f"{folder}/part", spans)
    assert [bytes(view) for view in views] == [whole[first:stop] for first, stop in spans]
    store.remove(f"{folder}/part")
    assert store.list(folder) == [Entry(name="manifest.json", is_folder=False, size=len(whole))]


def test_a_file_of_any_length_is_written_with_the_memory_of_a_few_blocks(store: S3Store, folder: str) -> None:
    chunk = numbered(BLOCK)
    tracemalloc.start()
    store.write(f"{folder}/part", lambda: (chunk for _ in range(10)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 7 * BLOCK
    assert store.size(f"{folder}/part") == 10 * BLOCK


def test_a_write_that_fails_leaves_no_file_and_no_upload(
    server: S3Server, store: S3Store, folder: str
) -> None:
    def failing(size: int) -> Iterator[bytes]:
        yield bytes(size)
        raise KeyError("the source failed")

    for size in (10, BLOCK + 10):
        with pytest.raises(KeyError, match="the source failed"):
            store.write(f"{folder}/part", lambda size=size: failing(size))
    assert store.list(folder) == []
    assert folder.encode() not in server.request("GET", f"/{BUCKET}?uploads")


def test_a_folder_goes_with_its_manifest_first(
    store: S3Store, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "manifest.json", "z", "deep/part"):
        store.write(f"{folder}/one/{name}", lambda: [b"x"])
    store.write(f"{folder}/one_more/part", lambda: [b"x"])
    removed: list[list[str]] = []
    delete = obstore.delete
    monkeypatch.setattr(
        obstore, "delete", lambda bucket, paths: removed.append(paths) or delete(bucket, paths)
    )
    store.remove(f"{folder}/one")
    assert removed[0] == [f"{folder}/one/manifest.json"] and len(removed[1]) == 3
    assert [entry.name for entry in store.list(folder)] == ["one_more"]


def test_what_another_process_wrote_or_removed_is_seen_at_once(
    store: S3Store, hasty: S3Store, folder: str
) -> None:
    mine, theirs = store, hasty
    assert mine.list(folder) == []
    theirs.replace(f"{folder}/deep/manifest.json", b"12")
    assert [entry.name for entry in mine.list(f"{folder}/deep")] == ["manifest.json"]
    assert mine.size(f"{folder}/deep/manifest.json") == 2
    theirs.replace(f"{folder}/deep/manifest.json", b"123")
    assert mine.size(f"{folder}/deep/manifest.json") == 3
    theirs.remove(f"{folder}/deep")
    assert mine.list(folder) == mine.list(f"{folder}/deep") == []


def test_a_reader_sees_the_old_content_or_the_new(store: S3Store, folder: str) -> None:
    path = f"{folder}/newest"
    store.replace(path, b"0" * 100_000)
    stop = threading.Event()

    def keep_writing() -> None:
        version = 0
        while not stop.is_set():
            version += 1
            store.replace(path, bytes([48 + version % 10]) * 100_000)

    thread = threading.Thread(target=keep_writing)
    thread.start()
    try:
        seen = set()
        while len(seen) < 5:
            content = store.read(path)
            assert content == content[:1] * 100_000
            seen.add(content[:1])
    finally:
        stop.set()
        thread.join()


def test_a_missing_bucket_fails_without_a_retry(server: S3Server) -> None:
    store = S3Store("s3://nowhere/folder", server.options)
    patient = retrying(store, seconds=1e9, on_wait=pytest.fail)
    with pytest.raises(FileNotFoundError, match=r"bucket does not exist.*s3://nowhere/folder/part"):
        patient.write("part", lambda: [b"x"])


class Clock:
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def patient(store: S3Store, *, seconds: float, on_wait: Callable[[str], None]) -> Any:
    clock = Clock()
    return retrying(store, seconds=seconds, on_wait=on_wait, clock=clock, sleep=clock.sleep)


def interrupting(content: bytes, interrupt: Callable[[], None]) -> Callable[[], Iterator[bytes]]:
    """The chunks of a file, with an interruption after the first block, the first time."""
    interruptions = iter([interrupt])

    def chunks() -> Iterator[bytes]:
        yield content[: BLOCK + 1]
        next(interruptions, lambda: None)()
        yield content[BLOCK + 1 :]

    return chunks


def test_a_server_that_stalls_in_the_middle_of_an_operation_is_waited_for(
    server: S3Server, hasty: S3Store, folder: str
) -> None:
    content = numbered(BLOCK + 40_000)
    messages: list[str] = []

    def on_wait(message: str) -> None:
        messages.append(message)
        server.resume()

    store = patient(hasty, seconds=60, on_wait=on_wait)
    store.write(f"{folder}/part", interrupting(content, server.halt))
    assert store.read(f"{folder}/part") == content
    assert f"writing {store.url}/{folder}/part failed" in messages[0] and "does not answer" in messages[0]
    messages.clear()
    server.halt()
    assert bytes(store.read_spans(f"{folder}/part", [(4, 8)])[0]) == content[4:8]
    assert f"reading {store.url}/{folder}/part failed" in messages[0]


def test_a_server_that_is_killed_in_the_middle_of_a_write_and_started_again_gets_it_whole(
    server: S3Server, store: S3Store, folder: str
) -> None:
    content = numbered(BLOCK + 40_000)
    tireless = patient(store, seconds=60, on_wait=lambda message: server.revive())
    tireless.write(f"{folder}/part", interrupting(content, server.kill))
    assert store.read(f"{folder}/part") == content


def test_a_server_that_came_back_without_the_blocks_sent_so_far_gets_them_again(
    server: S3Server, store: S3Store, folder: str
) -> None:
    def restart() -> None:
        server.kill()
        server.start()

    content = numbered(BLOCK + 40_000)
    messages: list[str] = []
    patient(store, seconds=60, on_wait=messages.append).write(
        f"{folder}/part", interrupting(content, restart)
    )
    assert store.read(f"{folder}/part") == content
    assert messages


def test_a_server_that_does_not_come_back_is_given_up_with_how_often_and_how_long(
    server: S3Server, store: S3Store, folder: str
) -> None:
    messages: list[str] = []
    tireless = patient(store, seconds=60, on_wait=messages.append)
    with pytest.raises(OSError, match="cannot be reached") as caught:
        tireless.write(f"{folder}/part", interrupting(numbered(BLOCK + 40_000), server.kill))
    assert caught.value.errno == errno.EIO
    assert f"tried {len(messages) + 1} times over 60 s" in str(caught.value)
    assert f"{store.url}/{folder}/part" in str(caught.value)
    with pytest.raises(OSError, match="tried"):
        tireless.list()


def test_a_run_that_was_disowned_writes_no_more_and_the_next_of_its_job_takes_over(
    store: S3Store,
) -> None:
    """V42"""
    store.disown()
    earlier = store.claim(Owner(job="mine", token="1", host="here", pid=1))
    earlier.check()
    store.disown()
    with pytest.raises(StoreTaken, match="can no longer write there"):
        earlier.check()
    with pytest.raises(StoreTaken, match="can no longer write there"):
        refuse_disowned(store)
    later = store.claim(Owner(job="mine", token="2", host="there", pid=2))
    earlier.release()
    later.check()
    later.release()


def test_a_claim_is_a_record_that_another_job_respects_and_this_one_takes_over(store: S3Store) -> None:
    mine = store.claim(Owner(job="mine", token="1", host="here", pid=1))
    with pytest.raises(StoreTaken, match=r"job mine \(host here, pid 1\)"):
        store.claim(Owner(job="other", token="2", host="there", pid=2))
    again = store.claim(Owner(job="mine", token="3", host="there", pid=3))
    with pytest.raises(StoreTaken, match="another run of this job"):
        mine.check()
    again.check()
    mine.release()
    again.check()
    again.release()
    store.claim(Owner(job="other", token="2", host="there", pid=2)).release()


def test_of_two_jobs_that_claim_at_the_same_moment_one_is_refused(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both read that there is no claim; the conditional PUT of the second one fails."""
    store.remove(RECORD)
    read_version = store.read_version

    def read_then_other_claims(path: str) -> tuple[bytes, str | None]:
        monkeypatch.setattr(store, "read_version", read_version)
        try:
            return read_version(path)
        finally:
            store.claim(Owner(job="faster", token="1", host="here", pid=1))

    monkeypatch.setattr(store, "read_version", read_then_other_claims)
    with pytest.raises(StoreTaken, match="job faster"):
        store.claim(Owner(job="slower", token="2", host="there", pid=2))
    store.remove(RECORD)


def test_a_server_without_conditional_puts_still_keeps_a_claim(server: S3Server) -> None:
    store = open_on(server, seconds=10, conditional_put="disabled")
    mine = store.claim(Owner(job="mine", token="1", host="here", pid=1))
    with pytest.raises(StoreTaken, match="job mine"):
        store.claim(Owner(job="other", token="2", host="there", pid=2))
    mine.check()
    mine.release()


def test_a_chunk_may_be_reused_after_the_next_one_is_requested(store: S3Store, folder: str) -> None:
    def one_buffer() -> Iterator[bytearray]:
        buffer = bytearray(BLOCK // 2 + 1)
        for number in range(5):
            buffer[:] = bytes([number]) * len(buffer)
            yield buffer

    store.write(f"{folder}/part", one_buffer)
    size = BLOCK // 2 + 1
    assert store.read(f"{folder}/part") == b"".join(bytes([number]) * size for number in range(5))


def test_a_url_opens_the_bucket_that_the_environment_points_to(
    server: S3Server, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    store = open_store(f"s3://{BUCKET}/{folder}/")
    assert store.url == f"s3://{BUCKET}/{folder}"
    store.write("part", lambda: [b"abc"])
    assert store.list() == [Entry(name="part", is_folder=False, size=3)]
