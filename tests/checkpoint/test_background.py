"""Saving while training goes on: what is saved, who dies with whom, and what is said when it fails."""

import itertools
import logging
import multiprocessing as mp
import os
import random
import resource
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.s3 import BUCKET, S3Server
from varuna.checkpoint import background as background_module
from varuna.checkpoint.background import BackgroundSaver, SaveOrder
from varuna.checkpoint.format.manifest import Facts, Manifest, PartManifest, folder_of
from varuna.checkpoint.format.part import lay_out
from varuna.checkpoint.format.tensors import as_plain, memory_of, spec_of
from varuna.checkpoint.load import all_checkpoints, newest_complete, open_checkpoint, verify
from varuna.checkpoint.save import commit, write_part
from varuna.checkpoint.store.store import open_store
from varuna.errors import CheckpointError
from varuna.train.saving import checkpoints as checkpointing

LONG = 60.0  # for what must come, however slow the machine
ME, OTHER = "stage-0-replica-0", "stage-1-replica-0"


def facts_of(step: int, attempt: str = "try") -> Facts:
    return Facts(step=step, iteration=step, attempt=attempt, job="job")


def state_of(step: int, size: int = 1000) -> dict[str, Tensor]:
    return {
        "model/weight": torch.arange(size, dtype=torch.float32) + step,
        "model/bias": torch.full((3, 5), step, dtype=torch.float64),
        "optimizer/weight/step": torch.tensor(step),
    }


def begin(
    background: BackgroundSaver,
    store: Path | str,
    step: int,
    tensors: dict[str, Tensor] | None = None,
    *,
    writer: str = ME,
    writers: Sequence[str] = (ME,),
    attempt: str = "try",
    **options: Any,
) -> "Future[Manifest | PartManifest]":
    tensors = state_of(step) if tensors is None else tensors
    specs = [spec_of(key, tensor) for key, tensor in tensors.items()]
    order = SaveOrder(
        **{"url": str(store), "retry_seconds": LONG, **options},
        facts=facts_of(step, attempt),
        writer=writer,
        trees={f"trees/{writer}": {"step": step}},
        commits=writer == ME,
        writers=writers,
    )
    return background.start(order, specs, lay_out(specs, metadata={}), tensors)


def check_saved(store: Path, step: int, tensors: dict[str, Tensor] | None = None) -> None:
    checkpoint = open_checkpoint(open_store(str(store)), step)
    assert verify(checkpoint) == []
    tensors = state_of(step) if tensors is None else tensors
    assert checkpoint.manifest.tensors.keys() == tensors.keys()
    for key, data in checkpoint.read(tensors).items():
        plain = as_plain(key, tensors[key])
        assert data == memory_of(plain)


def writers_of(process: int) -> list[int]:
    """Living ones; a child belongs to the thread that started it."""
    children = [
        int(child)
        for file in Path(f"/proc/{process}/task").glob("*/children")
        for child in file.read_text().split()
    ]
    return [child for child in children if b"varuna.checkpoint.writer_process" in command_of(child)]


def command_of(process: int) -> bytes:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


def writer_of(process: int) -> int:
    (writer,) = writers_of(process)
    return writer


def wait_for_the_end_of(process: int) -> None:
    """Return the state of any process."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], LONG)[0], f"process {process} lives on"
    finally:
        os.close(descriptor)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def background() -> Iterator[BackgroundSaver]:
    background = BackgroundSaver()
    yield background
    background.close(wait_seconds=0)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@contextmanager
def words(level: int) -> Iterator["Words"]:
    handler = Words(level)
    logging.getLogger("varuna").addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger("varuna").removeHandler(handler)


class Words(logging.Handler):
    """A handler that keeps log messages and can be waited for."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.said: list[str] = []
        self.came = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        self.came.set()


# ---------------------------------------------------------------- what is saved


def test_what_is_saved_in_the_background_is_what_a_plain_save_writes(
    background: BackgroundSaver, tmp_path: Path
) -> None:
    """V35: byte for byte, for tensors of any type, shape and form."""
    tensors = {
        "double": torch.randn(3, 5, dtype=torch.float64),
        "transposed": torch.randn(70, 30).t(),
        "strided": torch.randn(100)[::3],
        "expanded": torch.randn(1, 4).expand(6, 4),
        "number": torch.tensor(7.5),
        "empty": torch.empty(0, 4),
        "conjugate": torch.randn(9, dtype=torch.complex64).conj(),
        "half": torch.randn(33).bfloat16(),
        "small": torch.randn(7).to(torch.float8_e4m3fn),
        "count": torch.tensor([2**40, -1]),
        "unsigned": torch.tensor([2**15 + 1], dtype=torch.uint16),
        "flags": torch.tensor([True, False, True]),
        "needs a gradient": torch.randn(4, requires_grad=True),
    }
    manifest = begin(background, tmp_path / "background", 1, tensors).result(LONG)
    plain = {key: as_plain(key, tensor) for key, tensor in tensors.items()}
    specs = [spec_of(key, tensor) for key, tensor in plain.items()]
    store, layout = open_store(str(tmp_path / "plain")), lay_out(specs, metadata={})
    trees = {f"trees/{ME}": {"step": 1}}
    part = write_part(store, facts_of(1), ME, specs, layout, lambda key: memory_of(plain[key]), trees)
    assert manifest == commit(store, [part])
    written = sorted((tmp_path / "plain" / folder_of(1)).iterdir())
    assert len(written) == 3
    for file in written:
        assert file.read_bytes() == (tmp_path / "background" / folder_of(1) / file.name).read_bytes()


def test_tensors_may_change_as_soon_as_start_returns(background: BackgroundSaver, store: Path) -> None:
    """V35: what is saved is how they were."""
    tensors = state_of(1, size=1_000_000)
    future = begin(background, store, 1, tensors)
    for tensor in tensors.values():
        tensor.zero_()
    future.result(LONG)
    check_saved(store, 1, state_of(1, size=1_000_000))


def test_one_writer_process_and_one_memory_serve_save_after_save(
    background: BackgroundSaver, store: Path
) -> None:
    """V35: also where the state grows, or shrinks, or gets other tensors."""
    states = [
        state_of(1),
        state_of(2),
        state_of(3, size=5_000_000),
        state_of(4, size=10),
        {"model/other": torch.ones(2, 2)},
        {},
        state_of(7),
    ]
    writers = set()
    for step, state in enumerate(states, start=1):
        begin(background, store, step, state).result(LONG)
        writers.add(writer_of(os.getpid()))
    for step, state in enumerate(states, start=1):
        check_saved(store, step, state)
    assert len(writers) == 1


def test_a_snapshot_in_a_folder_leaves_nothing_there(tmp_path: Path, store: Path) -> None:
    """V35: it has no name there at any time, and so no kill leaves it behind."""
    folder = tmp_path / "not yet" / "temp"
    background = BackgroundSaver(folder)
    future = begin(background, store, 1)
    assert list(folder.iterdir()) == []
    future.result(LONG)
    background.close()
    assert list(folder.iterdir()) == []
    check_saved(store, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("tempdir", [None, "temp"], ids=["in memory", "in a folder"])
def test_what_lies_on_a_gpu_is_saved_as_it_was(tmp_path: Path, store: Path, tempdir: str | None) -> None:
    """V35: and may change as soon as start returns."""
    with closing(BackgroundSaver(tempdir and tmp_path / tempdir)) as background:
        for step, size in ((1, 1_000_000), (2, 1_000_000), (3, 5_000_000)):
            tensors = {key: tensor.cuda() for key, tensor in state_of(step, size).items()}
            future = begin(background, store, step, tensors)
            for tensor in tensors.values():
                tensor.zero_()
            future.result(LONG)
            check_saved(store, step, state_of(step, size))


def test_a_save_cannot_start_while_one_is_running(background: BackgroundSaver, store: Path) -> None:
    begin(background, store, 1, writers=[ME, OTHER])
    with pytest.raises(AssertionError, match="still running"):
        begin(background, store, 2)


# ---------------------------------------------------------------- several writers


def test_the_manifest_comes_after_the_last_part(background: BackgroundSaver, store: Path) -> None:
    """V37: before that there is no checkpoint."""
    future = begin(background, store, 1, writers=[ME, OTHER])
    until(lambda: f"waiting for the parts of {OTHER}" in background.activity)
    assert newest_complete(open_store(str(store))) is None
    with closing(BackgroundSaver()) as other:
        part = begin(other, store, 1, {"model/theirs": torch.ones(3)}, writer=OTHER).result(LONG)
    manifest = future.result(LONG)
    assert isinstance(part, PartManifest) and isinstance(manifest, Manifest)
    assert manifest.trees == {f"trees/{ME}": {"step": 1}, f"trees/{OTHER}": {"step": 1}}
    check_saved(store, 1, {**state_of(1), "model/theirs": torch.ones(3)})


def test_a_job_that_has_failed_does_not_wait_for_the_parts_of_the_dead(
    background: BackgroundSaver, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B7: no hang at the end, and nothing half saved."""
    monkeypatch.setattr(checkpointing, "FAILED_JOB_SECONDS", 0.1)
    future = begin(background, store, 1, writers=[ME, OTHER])
    checkpointing.SaveResources(background=background, failed=True).close()
    with pytest.raises(CheckpointError, match="the job has failed"):
        future.result(timeout=0)
    assert newest_complete(open_store(str(store))) is None


def test_the_error_names_a_writer_that_wrote_no_part(background: BackgroundSaver, store: Path) -> None:
    """V37: and nothing stays of a checkpoint that will not be."""
    future = begin(background, store, 1, writers=[ME, OTHER], patience_seconds=0.1)
    with pytest.raises(
        CheckpointError, match=f"checkpoint 1 was not saved: the parts of {OTHER} are missing"
    ):
        future.result(LONG)
    assert list(store.iterdir()) == []
    begin(background, store, 2).result(LONG)
    check_saved(store, 2)


def test_old_checkpoints_go_when_the_new_one_is_there(background: BackgroundSaver, store: Path) -> None:
    for step in range(1, 5):
        begin(background, store, step, keep_last=2).result(LONG)
    assert [found.step for found in all_checkpoints(open_store(str(store)))] == [3, 4]


# ---------------------------------------------------------------- a store that fails


def block_the_path(path: Path) -> None:
    """A socket: whoever opens it meets an error that may pass."""
    path.parent.mkdir(parents=True)
    os.mknod(path, stat.S_IFSOCK | 0o600)


def test_a_store_that_fails_for_a_while_is_tried_again(background: BackgroundSaver, store: Path) -> None:
    """The other writer's document is listed, but cannot be opened at first."""
    block_the_path(store / folder_of(1) / f"{OTHER}-try.json")
    with words(logging.WARNING) as log:
        future = begin(background, store, 1, writers=[ME, OTHER])
        assert log.came.wait(LONG)
        with closing(BackgroundSaver()) as other:
            begin(other, store, 1, {}, writer=OTHER).result(LONG)
        future.result(LONG)
    assert "No such device or address" in log.said[0] and "attempt 2 starts in" in log.said[0]
    check_saved(store, 1)


def test_a_store_that_goes_on_failing_is_reported_once_and_training_goes_on(
    background: BackgroundSaver, store: Path
) -> None:
    block_the_path(store / folder_of(1) / f"{OTHER}-try.json")
    with words(logging.ERROR) as log:
        future = begin(background, store, 1, writers=[ME, OTHER], retry_seconds=0.1)
        error = future.exception(LONG)
    assert isinstance(error, CheckpointError) and log.said == [str(error)]
    assert "No such device or address (tried 2 times" in str(error)
    begin(background, store, 2).result(LONG)
    check_saved(store, 2)


def test_a_save_waits_for_a_remote_store_that_is_down(
    background: BackgroundSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V35: against a real server of S3 that is killed, and started again when the writer has noticed."""
    with closing(S3Server()) as server, words(logging.WARNING) as log:
        url = f"s3://{BUCKET}/store"
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.kill()
        future = begin(background, url, 1)
        assert log.came.wait(LONG)
        server.start()
        future.result(LONG)
        checkpoint = open_checkpoint(open_store(url), None)
        assert verify(checkpoint) == [] and checkpoint.manifest.tensors.keys() == state_of(1).keys()
    assert "attempt 2 starts in" in log.said[0]


def test_a_full_disk_is_reported_in_the_stores_own_words(background: BackgroundSaver, store: Path) -> None:
    """V37: written files are removed, so that the next save has space."""
    begin(background, store, 1).result(LONG)
    limit = (100_000, resource.RLIM_INFINITY)
    resource.prlimit(writer_of(os.getpid()), resource.RLIMIT_FSIZE, limit)
    future = begin(background, store, 2, state_of(2, size=1_000_000))
    with pytest.raises(CheckpointError, match=r"File too large after 100000 bytes .* \(free some"):
        future.result(LONG)
    assert [found.step for found in all_checkpoints(open_store(str(store)))] == [1]
    begin(background, store, 3).result(LONG)
    check_saved(store, 3)


def test_too_little_space_for_the_snapshot_is_reported(tmp_path: Path, store: Path) -> None:
    with closing(BackgroundSaver(tmp_path / "temp")) as background:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            future = begin(background, store, 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with pytest.raises(CheckpointError, match=r"not enough space for a snapshot of .* bytes in .*temp"):
            future.result(LONG)
        begin(background, store, 2).result(LONG)
    check_saved(store, 2)


def test_a_tensor_that_cannot_be_saved_is_named(background: BackgroundSaver, store: Path) -> None:
    future = begin(background, store, 1, {"model/table": torch.eye(3).to_sparse()})
    with pytest.raises(CheckpointError, match=r"model/table is a torch\.sparse_coo tensor"):
        future.result(LONG)


# ---------------------------------------------------------------- giving up


def test_a_save_that_is_given_up_leaves_nothing_and_the_writer_process_stays(
    background: BackgroundSaver, store: Path
) -> None:
    future = begin(background, store, 1, writers=[ME, OTHER])
    until(lambda: "waiting" in background.activity)
    writer = writer_of(os.getpid())
    background.cancel("another rank has failed")
    with pytest.raises(CheckpointError, match="checkpoint 1 was not saved: another rank has failed"):
        future.result(0)
    assert list(store.iterdir()) == []
    assert background.activity == "" and background.stalled_seconds == 0 and background.wait(0)
    begin(background, store, 2).result(LONG)
    check_saved(store, 2)
    assert writer_of(os.getpid()) == writer


def test_a_save_that_is_given_up_too_late_is_there(background: BackgroundSaver, store: Path) -> None:
    future = begin(background, store, 1)
    future.result(LONG)
    background.cancel("too late")
    assert isinstance(future.result(0), Manifest)
    begin(background, store, 2).result(LONG)


def test_a_writer_process_that_hangs_is_killed_when_its_save_is_given_up(store: Path) -> None:
    with closing(BackgroundSaver(timeout_seconds=0.05)) as background:
        begin(background, store, 1).result(LONG)
        hanging = writer_of(os.getpid())
        os.kill(hanging, signal.SIGSTOP)
        future = begin(background, store, 2)
        until(lambda: background.stalled_seconds > 0.01)
        assert "the background save of checkpoint 2 (starting)" in background.activity
        background.cancel("the store hangs")
        with pytest.raises(CheckpointError, match="checkpoint 2 was not saved: the store hangs"):
            future.result(0)
        wait_for_the_end_of(hanging)
        begin(background, store, 3).result(LONG)
    assert [found.step for found in all_checkpoints(open_store(str(store)))] == [1, 3]


def test_a_writer_process_that_cannot_even_be_killed_is_left_behind(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a process that waits in the kernel for a dead server; the next one has its own memory."""
    monkeypatch.setattr(background_module, "KILL_SECONDS", 0.05)
    monkeypatch.setattr(background_module.WriterProcess, "kill", lambda writer: None)
    with closing(BackgroundSaver(timeout_seconds=0.05)) as background:
        begin(background, store, 1).result(LONG)
        hanging = writer_of(os.getpid())
        os.kill(hanging, signal.SIGSTOP)
        future = begin(background, store, 2)
        background.cancel("the store hangs")
        with pytest.raises(CheckpointError, match=r"the store hangs \(its process hangs in the kernel"):
            future.result(0)
        begin(background, store, 3, state_of(3, size=5_000_000)).result(LONG)
        check_saved(store, 3, state_of(3, size=5_000_000))
    os.kill(hanging, signal.SIGKILL)
    wait_for_the_end_of(hanging)


def test_closing_logs_and_waits_for_a_running_save(store: Path) -> None:
    background = BackgroundSaver()
    with words(logging.WARNING) as log:
        future = begin(background, store, 1, state_of(1, size=1_000_000))
        background.close()
    assert log.said and log.said[0].startswith("waiting for the background save of checkpoint 1")
    assert future.done() and writers_of(os.getpid()) == []
    check_saved(store, 1, state_of(1, size=1_000_000))


# ---------------------------------------------------------------- the process


def test_the_writer_process_imports_no_torch() -> None:
    check = "import sys, varuna.checkpoint.writer_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_the_writer_process_takes_what_is_left_over_and_inherits_nothing(
    background: BackgroundSaver, store: Path, tmp_path: Path
) -> None:
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        begin(background, store, 1).result(LONG)
        writer = writer_of(os.getpid())
        held = [os.readlink(link) for link in Path(f"/proc/{writer}/fd").iterdir() if int(link.name) > 2]
    assert [name.split(" ")[0] for name in held] == ["/memfd:varuna-checkpoint"]
    assert os.getpriority(os.PRIO_PROCESS, writer) == 19


def test_a_killed_writer_process_fails_its_save_and_the_next_save_has_another(
    background: BackgroundSaver, store: Path
) -> None:
    """V37, V42: as the kernel kills where memory runs out."""
    begin(background, store, 1).result(LONG)
    first = writer_of(os.getpid())
    future = begin(background, store, 2, writers=[ME, OTHER])
    os.kill(first, signal.SIGKILL)
    with pytest.raises(
        CheckpointError, match="checkpoint 2 was not saved: its process was killed by SIGKILL"
    ):
        future.result(LONG)
    begin(background, store, 3).result(LONG)
    second = writer_of(os.getpid())
    os.kill(second, signal.SIGKILL)  # while it has nothing to do
    until(lambda: writers_of(os.getpid()) == [])
    future = begin(background, store, 4)
    if future.exception(LONG) is not None:  # it was started before the end was noticed
        begin(background, store, 4).result(LONG)
    assert [found.step for found in all_checkpoints(open_store(str(store)))] == [1, 3, 4]
    assert len({first, second, writer_of(os.getpid())}) == 3


def test_a_forked_child_that_ends_leaves_its_parents_save_alone(
    background: BackgroundSaver, store: Path
) -> None:
    """At its end it runs the exit handlers that it inherited."""
    future = begin(background, store, 1, writers=[ME, OTHER])
    child = mp.get_context("fork").Process(target=background.close)
    child.start()
    child.join(LONG)
    assert child.exitcode == 0
    with closing(BackgroundSaver()) as other:
        begin(other, store, 1, {}, writer=OTHER).result(LONG)
    future.result(LONG)
    check_saved(store, 1)


def hold_a_save(store: Path, ready: Connection, forks: bool) -> None:
    os.setpgrp()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # ignoring them would be inherited
    background = BackgroundSaver()
    future = begin(background, store, 1, writers=[ME, OTHER])
    until(lambda: "waiting" in background.activity)
    child = os.fork() if forks else -1
    if child == 0:
        signal.pause()
    ready.send((writer_of(os.getpid()), child))
    future.result()
    background.close()
    ready.send("saved")
    signal.pause()


@contextmanager
def trainer(task: Callable[..., None], *args: Any) -> Iterator[tuple[Any, Connection]]:
    """Forked from here, where torch is loaded; killed at the end."""
    ours, theirs = mp.Pipe()
    process = mp.get_context("fork").Process(target=task, args=(args[0], theirs, *args[1:]))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


@pytest.mark.parametrize("forks", [False, True], ids=["alone", "with a forked child that lives on"])
def test_the_writer_process_goes_with_a_trainer_that_is_killed(store: Path, forks: bool) -> None:
    """V42: a child that the trainer forked holds the line to the writer open; that must not keep it."""
    with trainer(hold_a_save, store, forks) as (process, ready):
        writer, child = ready.recv()
        try:
            process.kill()
            wait_for_the_end_of(writer)
        finally:
            if forks:
                os.kill(child, signal.SIGKILL)
    assert newest_complete(open_store(str(store))) is None


def test_a_signal_to_the_whole_process_group_is_the_trainers_to_answer(store: Path) -> None:
    """V40: Ctrl-C, a preemption notice to all processes; the running save continues."""
    with trainer(hold_a_save, store, False) as (process, ready):
        ready.recv()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.killpg(process.pid, number)
        with closing(BackgroundSaver()) as other:
            begin(other, store, 1, {}, writer=OTHER).result(LONG)
        assert ready.poll(LONG) and ready.recv() == "saved"
    check_saved(store, 1)


# ---------------------------------------------------------------- kills from a seed


def train(store: Path, saved: Connection) -> None:
    """Goes on from the newest checkpoint, and saves step after step until it is killed."""
    background = BackgroundSaver()
    for step in itertools.count((newest_complete(open_store(str(store))) or 0) + 1):
        state = state_of(step, size=200_000)
        begin(background, store, step, state, attempt=str(os.getpid()), keep_last=2).result(LONG)
        saved.send(step)


def test_a_trainer_killed_at_any_moment_leaves_a_newest_checkpoint_that_is_whole(store: Path) -> None:
    """V37: 40 kills from a seed; what was reported as saved is there, the next trainer goes on from it."""
    chance = random.Random(20)
    kept = 0
    for trial in range(40):
        with trainer(train, store) as (process, saved):
            if trial % 4:  # the others are killed while they start, or in their first save
                assert saved.poll(LONG)
            process.join(chance.uniform(0, 0.2))
            process.kill()
            process.join()
            reported = kept
            with suppress(EOFError):
                while saved.poll():
                    reported = saved.recv()
        kept = newest_complete(open_store(str(store))) or 0
        assert reported <= kept <= reported + 1
        if kept:
            check_saved(store, kept, state_of(kept, size=200_000))
    assert kept >= 30


# ---------------------------------------------------------------- a store that fills up


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.parametrize("files", ["the tensors", "the part's document", "the manifest"])
def test_a_store_that_fills_up_during_a_save_keeps_no_leftovers_and_the_next_save_works(
    files: str, background: BackgroundSaver, small_disk: Path
) -> None:
    """REL-3, V37: nothing is taken for complete, and freed space is enough for the next save."""
    store = small_disk / "store"
    begin(background, store, 1).result(LONG)
    filling = small_disk / "filling"
    pages = {"the tensors": 1, "the part's document": 2, "the manifest": 3}[files]  # 4 KiB each
    fill_but(filling, pages * 4096)
    future = begin(background, store, 2, state_of(2, size=1000 if pages > 1 else 100_000))
    with pytest.raises(CheckpointError, match=r"No space left on device"):
        future.result(LONG)
    assert newest_complete(open_store(str(store))) == 1
    left = sum(path.stat().st_size for path in store.glob("varuna_ckpt_2/*"))
    assert left == 0 or files == "the manifest"  # after a failed commit the manifest may exist
    filling.unlink()
    begin(background, store, 3).result(LONG)
    check_saved(store, 3)
    check_saved(store, 1)
    assert not (store / "varuna_ckpt_2").exists()


def fill_but(path: Path, left: int) -> None:
    """Fill the file system of a path except for `left` bytes."""
    with path.open("wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(4096))
        os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size - left)
