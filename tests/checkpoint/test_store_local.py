"""A local folder under fire: killed writers, a full disk, readers in between, a second job."""

import errno
import fcntl
import json
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from varuna.checkpoint.store import claim as claim_module
from varuna.checkpoint.store import local
from varuna.checkpoint.store.claim import RECORD, claim_after_earlier_run, refuse_disowned
from varuna.checkpoint.store.local import LocalStore
from varuna.checkpoint.store.store import Owner
from varuna.errors import StoreTaken

ROOT = Path(__file__).parent.parent.parent


def publish(store: LocalStore, version: int) -> None:
    """A checkpoint in small: the old one away, a part, and last the manifest that vouches for it."""
    content = bytes([version % 256]) * 300_000
    store.remove("checkpoint")
    store.write("checkpoint/part", lambda: [content[:10], content[10:]])
    store.replace("checkpoint/manifest.json", content[:1])
    store.replace("newest", content)


def assert_whole(store: LocalStore) -> None:
    """Check that a folder with a manifest is complete, and that a replaced file is old or new."""
    if "manifest.json" in {entry.name for entry in store.list("checkpoint")}:
        assert store.read("checkpoint/part") == store.read("checkpoint/manifest.json") * 300_000
    if "newest" in {entry.name for entry in store.list()}:
        newest = store.read("newest")
        assert newest == newest[:1] * 300_000


class Watched:
    """The os module, with a look at each call before it is made."""

    def __init__(self, look: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._look = look

    def __getattr__(self, name: str) -> Any:
        value = getattr(os, name)
        if not callable(value) or isinstance(value, type):
            return value

        def call(*arguments: Any, **keywords: Any) -> Any:
            self._look(name, arguments)
            return value(*arguments, **keywords)

        return call


def in_a_child(work: Callable[[], None]) -> int:
    """Run the work in a forked process; return 0, or minus the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_killed_before_any_system_call_nothing_half_written_looks_whole(tmp_path: Path) -> None:
    """V37: every moment between two calls of the operating system, one after the other."""
    store = LocalStore(str(tmp_path))
    publish(store, 0)
    for moment in count(1):

        def work(moment: int = moment) -> None:
            calls = count(1)

            def look(name: str, arguments: tuple[Any, ...]) -> None:
                if next(calls) == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

            local.os = Watched(look)  # type: ignore[assignment]
            publish(store, moment)

        ended = in_a_child(work)
        assert_whole(store)
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
    assert moment > 40
    assert store.read("newest")[0] == moment


def test_killed_at_random_moments_nothing_half_written_looks_whole(tmp_path: Path) -> None:
    """V37: the kill comes from outside, at whatever the writer is doing then."""
    moments = random.Random(20240607)
    store = LocalStore(str(tmp_path))
    for _ in range(12):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            for version in count():
                publish(store, version)
                os.write(write_end, b".")
        os.close(write_end)
        for _ in range(moments.randrange(1, 12)):
            os.read(read_end, 1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read_end)
        assert_whole(store)


def test_bytes_are_synced_before_their_name_appears_and_folders_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def look(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "fsync":
            calls.append(f"fsync {os.path.relpath(os.readlink(f'/proc/self/fd/{arguments[0]}'), tmp_path)}")
        if name in ("mkdir", "replace", "unlink"):
            calls.append(f"{name} {os.path.relpath(arguments[-1], tmp_path)}")

    monkeypatch.setattr(local, "os", Watched(look))
    monkeypatch.setattr(local.secrets, "token_hex", lambda size: "draft")
    store = LocalStore(str(tmp_path / "store"))
    store.write("a/b/part", lambda: [b"x"])
    assert calls == [
        *("mkdir store", "fsync ."),
        *("mkdir store/a", "fsync store"),
        *("mkdir store/a/b", "fsync store/a"),
        *("unlink store/a/b/part", "fsync store/a/b/part"),
        *("fsync store/a/b", "fsync store/a", "fsync store"),
    ]
    calls.clear()
    store.replace("a/manifest.json", b"{}")
    assert calls == [
        *("fsync store/a/.varuna-draft", "replace store/a/manifest.json"),
        *("fsync store/a", "fsync store"),
    ]
    calls.clear()
    store.remove("a")
    assert calls[:2] == ["unlink store/a/manifest.json", "fsync store/a"]


def test_a_reader_sees_the_old_content_or_the_new_whatever_the_moment(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.replace("newest", b"0" * 200_000)
    pid = os.fork()
    if pid == 0:
        for version in count():
            store.replace("newest", bytes([48 + version % 10]) * (100_000 + version % 7))
    try:
        seen = set()
        while len(seen) < 10:
            content = bytes(store.read_spans("newest", [(0, 100_000)])[0])
            assert content == content[:1] * 100_000
            content = store.read("newest")
            assert content == content[:1] * len(content) and len(content) >= 100_000
            seen.add(content[:1])
            assert [entry.name for entry in store.list()] == ["newest"]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_spans_are_views_of_one_mapping_that_outlives_the_file(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.write("part", lambda: [bytes(range(256)) * 100])
    first, second = store.read_spans("part", [(0, 256), (5000, 5256)])
    assert isinstance(first.obj, mmap.mmap) and first.obj is second.obj
    store.write("part", lambda: [b"new"])
    store.remove("part")
    assert bytes(first) == bytes(range(256)) and bytes(second) == bytes(range(136, 256)) + bytes(range(136))


FULL_DISK = """
import json, os, sys
from varuna.checkpoint.store.store import open_store
store = open_store(sys.argv[1])
store.replace("manifest.json", b"old")
errors = []
for attempt in (
    lambda: store.write("folder/part", lambda: (bytes(1 << 18) for _ in range(40))),
    lambda: store.replace("manifest.json", bytes(10 << 20)),
):
    try:
        attempt()
    except OSError as error:
        errors.append([error.errno, str(error)])
print(json.dumps([errors, sorted(os.listdir(sys.argv[1])), os.listdir(sys.argv[1] + "/folder")]))
assert store.read("manifest.json") == b"old"
"""


def test_a_sector_that_cannot_be_read_is_an_error_and_not_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REL-1: a page of a mapping that is gone would kill the process with SIGBUS."""
    place = tmp_path / "file"
    place.write_bytes(bytes(3 * mmap.PAGESIZE))
    real = mmap.mmap

    def cut_after_mapping(*arguments: Any, **options: Any) -> mmap.mmap:
        mapping = real(*arguments, **options)
        os.truncate(place, mmap.PAGESIZE)
        return mapping

    monkeypatch.setattr(mmap, "mmap", cut_after_mapping)
    with pytest.raises(OSError, match="Input/output error") as caught:
        LocalStore(str(tmp_path)).read_spans("file", [(0, 10), (mmap.PAGESIZE, 2 * mmap.PAGESIZE)])
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(place))


def test_a_full_disk_is_reported_with_path_and_space_and_leaves_no_file(tmp_path: Path) -> None:
    script = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    tiny_disk = f"mount -t tmpfs -o size=2m none {tmp_path}"
    can_mount = subprocess.run(["sh", "-c", f"unshare -rm {tiny_disk}"], capture_output=True).returncode == 0
    if can_mount:
        command = ["unshare", "-rm", "sh", "-c", f'{tiny_disk} && exec "$@"', "sh", *script]
    else:  # the next best: a limit on the size of files
        command = ["sh", "-c", 'ulimit -f 2048 && exec "$@"', "sh", *script]
    run = subprocess.run(command, env={"PYTHONPATH": str(ROOT), **os.environ}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    errors, names, in_folder = json.loads(run.stdout)
    assert [code for code, _ in errors] == [errno.ENOSPC if can_mount else errno.EFBIG] * 2
    assert f"'{tmp_path}/folder/part'" in errors[0][1]
    for _, message in errors:
        assert "bytes of this file, with " in message and "bytes free on its file system" in message
    assert (names, in_folder) == (["folder", "manifest.json"], [])


# Claims.

MINE = Owner(job="mine", token="1", host="here", pid=os.getpid())

CLAIM_AND_WAIT = """
import os, subprocess, sys
from varuna.checkpoint.store.store import Owner, open_store
claim = open_store(sys.argv[1]).claim(Owner(job="theirs", token="2", host="there", pid=os.getpid()))
if sys.argv[2] == "fork" and os.fork() == 0:
    print(os.getpid(), flush=True)
elif sys.argv[2] == "program":
    print(subprocess.Popen(["cat"], close_fds=False).pid, flush=True)
elif sys.argv[2] == "alone":
    print("claimed", flush=True)
sys.stdin.read()
"""


def start_a_job(folder: Path, company: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CLAIM_AND_WAIT, str(folder), company],
        env={"PYTHONPATH": str(ROOT), **os.environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_second_job_is_refused_while_the_first_lives_and_admitted_when_it_is_killed(tmp_path: Path) -> None:
    with start_a_job(tmp_path, "alone") as theirs:
        assert theirs.stdout is not None and theirs.stdout.readline() == "claimed\n"
        with pytest.raises(StoreTaken) as caught:
            LocalStore(str(tmp_path)).claim(MINE)
        theirs.kill()
    assert f"{tmp_path} is claimed by job theirs (host there, pid {theirs.pid})" in str(caught.value)
    assert "use another store" in str(caught.value)
    mine = LocalStore(str(tmp_path)).claim(MINE)
    mine.check()
    mine.release()


@pytest.mark.parametrize("company", ["fork", "program"])
def test_a_child_that_outlives_a_killed_job_does_not_keep_its_claim(company: str, tmp_path: Path) -> None:
    theirs = start_a_job(tmp_path, company)
    assert theirs.stdout is not None and theirs.stdin is not None
    child = int(theirs.stdout.readline())
    with pytest.raises(StoreTaken):
        LocalStore(str(tmp_path)).claim(MINE)
    theirs.kill()
    theirs.wait()
    os.kill(child, 0)  # it lives
    LocalStore(str(tmp_path)).claim(MINE).release()
    theirs.stdin.close()
    theirs.stdout.close()


def test_a_forked_child_leaves_the_claim_to_its_parent(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    mine = store.claim(MINE)

    def work() -> None:
        with pytest.raises(StoreTaken, match="this process does not hold it"):
            mine.check()
        mine.release()

    assert in_a_child(work) == 0
    mine.check()
    with pytest.raises(StoreTaken, match="job mine"):
        store.claim(Owner(job="other", token="3", host="here", pid=1))
    mine.release()


def test_a_released_claim_is_free_and_forgotten(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    mine = store.claim(MINE)
    mine.release()
    mine.release()
    with pytest.raises(StoreTaken, match="released"):
        mine.check()
    other = store.claim(Owner(job="other", token="3", host="here", pid=1))
    other.check()
    other.release()
    assert store.list() == []


def test_an_earlier_run_of_the_same_job_that_still_lives_is_named_as_such(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    mine = store.claim(MINE)
    with pytest.raises(StoreTaken, match="another run of this job"):
        store.claim(Owner(job="mine", token="2", host="here", pid=1))
    mine.release()


def test_a_run_waits_for_an_earlier_one_of_its_job_that_is_about_to_end(tmp_path: Path) -> None:
    """V42: that of a machine which was cut off, and has not noticed yet."""
    store = LocalStore(str(tmp_path))
    earlier = store.claim(MINE)
    with ThreadPoolExecutor(1) as threads:
        later = threads.submit(
            claim_after_earlier_run, store, Owner(job="mine", token="2", host="there", pid=1)
        )
        with pytest.raises(StoreTaken, match="job mine"):
            claim_after_earlier_run(store, Owner(job="other", token="3", host="here", pid=1))
        earlier.release()
        later.result().check()
    later.result().release()


def test_a_claim_is_retried_while_another_is_being_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V42: locked, though its record is empty: its holder is about to write its name, or has released it."""
    holder = os.open(tmp_path / RECORD, os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    monkeypatch.setattr(claim_module, "EMPTY_SECONDS", 0.0)
    with pytest.raises(StoreTaken, match="has not written its name yet"):
        LocalStore(str(tmp_path)).claim(MINE)
    monkeypatch.setattr(claim_module, "EMPTY_SECONDS", 60.0)
    monkeypatch.setattr(claim_module.time, "sleep", lambda seconds: os.close(holder))
    LocalStore(str(tmp_path)).claim(MINE).release()


def test_a_run_that_was_disowned_writes_no_more_and_the_next_of_its_job_takes_over(tmp_path: Path) -> None:
    """V42: a machine that was cut off may go on alone, and must not save beside the job."""
    store = LocalStore(str(tmp_path))
    store.disown()
    earlier = store.claim(MINE)
    earlier.check()
    store.disown()
    with pytest.raises(StoreTaken, match="can no longer write there"):
        earlier.check()
    with pytest.raises(StoreTaken, match="can no longer write there"):
        refuse_disowned(store)  # the check of the writer process
    with pytest.raises(StoreTaken, match="another run of this job"):
        store.claim(Owner(job="mine", token="2", host="there", pid=1))
    earlier.release()
    store.claim(Owner(job="mine", token="2", host="there", pid=1)).release()


def test_a_managed_job_takes_its_folder_from_a_frozen_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V42, REL-2: it keeps its lock, and must find that it lost the claim. A live worker here keeps it."""
    store = LocalStore(str(tmp_path))
    monkeypatch.setattr(claim_module, "EARLIER_RUN_SECONDS", 0.0)
    frozen = store.claim(Owner("mine", "1", "there", 7, since=1.0, launch="launch"))
    later = Owner("mine", "2", socket.gethostname(), os.getpid(), since=time.time(), launch="launch")
    with pytest.raises(StoreTaken, match="another run of this job"):
        claim_after_earlier_run(store, later, wait=False)  # the first save waits for it
    second = claim_after_earlier_run(store, later)
    with pytest.raises(StoreTaken):
        frozen.check()
    with pytest.raises(StoreTaken):
        claim_after_earlier_run(store, Owner("mine", "3", "there", 8, since=1.0, launch="launch"))
    store.disown("launch")  # the manager restarts the job
    third = claim_after_earlier_run(store, Owner("mine", "4", "there", 9, launch="launch"), wait=False)
    third.check()
    with pytest.raises(StoreTaken):
        second.check()
    third.release()


def test_a_claim_survives_a_cleared_folder_but_not_another_owner(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    mine = store.claim(MINE)
    (tmp_path / RECORD).unlink()
    mine.check()
    with pytest.raises(StoreTaken, match="job mine"):
        store.claim(Owner(job="other", token="3", host="here", pid=1))
    theirs = (tmp_path / RECORD).read_text().replace('"1"', '"3"')
    (tmp_path / RECORD).write_text(theirs)
    with pytest.raises(StoreTaken, match="has taken over"):
        mine.check()
    (tmp_path / RECORD).unlink()
    other = store.claim(Owner(job="other", token="3", host="here", pid=1))
    with pytest.raises(StoreTaken, match="job other"):
        mine.check()
    mine.release()
    other.check()
    other.release()


def test_where_the_file_system_has_no_locks_the_record_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no locks here")

    monkeypatch.setattr(claim_module.fcntl, "flock", flock)
    store = LocalStore(str(tmp_path))
    mine = store.claim(MINE)
    with pytest.raises(StoreTaken, match=r"job mine .*remove .*owner or wait until"):
        store.claim(Owner(job="other", token="3", host="here", pid=1))
    again = store.claim(Owner(job="mine", token="2", host="here", pid=1))
    with pytest.raises(StoreTaken, match="taken over"):
        mine.check()
    mine.release()
    again.check()
    again.release()
    store.claim(Owner(job="other", token="3", host="here", pid=1)).release()
