"""Background saves: training copies its state into shared memory, a second process writes it.

    training thread   copies the tensors into the shared memory, then continues
    writer process    writes them to the store (writer_process.py)
    listening thread  starts the writer process, receives its messages, completes the future

The step that starts a save waits only for the copy in memory.
"""

import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress

import msgspec
import torch
from torch import Tensor

from varuna.checkpoint.format.manifest import Manifest, PartManifest
from varuna.checkpoint.format.part import FileTensor, PartLayout
from varuna.checkpoint.format.tensors import check_dense
from varuna.checkpoint.writer_process import (
    CancelSave,
    CheckpointCommitted,
    PartWritten,
    SaveFailed,
    SaveOrder,
    SaveProgress,
    SaveTask,
    SaveWarning,
    StartSave,
    ToTrainer,
    ToWriter,
)
from varuna.errors import CheckpointError

log = logging.getLogger("varuna")

GROWTH_BYTES = 4 << 20
"""The memory grows in steps of this size, plus one in reserve, so that a slightly longer task still fits."""
KILL_SECONDS = 2.0
"""A killed process that lives longer is stuck in the kernel and is left there."""
LOG_SECONDS = 30.0
"""Time between two log messages while a script waits for its last save."""
HELD_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
"""Signals that may reach the whole process group; only the trainer handles them."""

IN_MEMORY = "memory"

Saved = Manifest | PartManifest


class BackgroundSaver:
    """Runs one save at a time, with one writer process and one shared memory.

    The memory is in RAM, or in an unnamed file in `tempdir`; the kernel frees it with the processes.
    A writer process that does not cancel a save within `timeout_seconds` is killed.
    """

    def __init__(self, tempdir: str | os.PathLike[str] | None = None, *, timeout_seconds: float = 10) -> None:
        self._tempdir = tempdir
        self._timeout_seconds = timeout_seconds
        self._memory: SnapshotMemory | None = None
        self._writer: WriterProcess | None = None
        self._save: BackgroundSave | None = None
        self._owner = os.getpid()

    def start(
        self, order: SaveOrder, specs: Sequence[FileTensor], layout: PartLayout, tensors: Mapping[str, Tensor]
    ) -> "Future[Saved]":
        """Start a save. The tensors may change after this returns; errors go to the future."""
        assert not self.busy, "the save before is still running"
        self._save = save = BackgroundSave(order.facts.step)
        try:
            self._memory = self._memory or SnapshotMemory(self._tempdir)
            if self._writer is None or self._writer.ended.is_set():
                self._writer = WriterProcess(self._memory.fd)  # it starts while the tensors are copied
            message = self._memory.fill(SaveTask(order, specs, layout), tensors)
            self._writer.run(message, save)
        except BaseException as error:
            save.fail(str(error) or type(error).__name__, error)
            if not isinstance(error, Exception):  # Ctrl-C
                raise
        return save.future

    @property
    def busy(self) -> bool:
        return self._save is not None and not self._save.future.done()

    @property
    def activity(self) -> str:
        """The running save and its state, for messages; "" if none is running."""
        return str(self._save) if self._save is not None and self.busy else ""

    @property
    def stalled_seconds(self) -> float:
        """Time since the last message of the running save."""
        return time.monotonic() - self._save.heard_at if self._save is not None and self.busy else 0.0

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the running save; return False if it is still running after `seconds`."""
        return self._save is None or bool(wait_for([self._save.future], seconds).done)

    def cancel(self, reason: str) -> None:
        """Cancel the running save. The writer removes what it has written, unless it hangs."""
        if self._save is None or self._writer is None or not self.busy:
            return
        self._save.cancel_reason = reason
        self._writer.send(CancelSave())
        if self.wait(self._timeout_seconds):
            return
        self._writer.kill()
        if not self._writer.ended.wait(KILL_SECONDS):
            self._forget()  # a later save gets a new process and new memory
            self._save.cancel_reason += " (its process hangs in the kernel and cannot be killed)"
            self._save.fail(reason)

    def close(self, wait_seconds: float = 600) -> None:
        """Wait for the running save, at most `wait_seconds` without a message, and end the writer."""
        if os.getpid() != self._owner:
            return  # a forked child: the save belongs to its parent
        while self.busy and self.stalled_seconds < wait_seconds:
            log.warning("waiting for %s", self.activity)
            self.wait(min(LOG_SECONDS, wait_seconds))
        self.cancel(f"its process sent nothing for {wait_seconds:g} s")
        if self._writer is not None:
            self._writer.shut_down()
        self._forget()

    def _forget(self) -> None:
        if self._memory is not None:
            self._memory.release()
        self._writer = self._memory = None


class BackgroundSave:
    """One save, as the trainer sees it."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.heard_at = time.monotonic()
        self.future: Future[Saved] = Future()
        self.future.set_running_or_notify_cancel()  # use BackgroundSaver.cancel, not Future.cancel
        self.cancel_reason = ""
        self._activity = "starting"
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"the background save of checkpoint {self.step} ({self._activity})"

    def handle(self, message: ToTrainer) -> None:
        self.heard_at = time.monotonic()
        match message:
            case SaveProgress():
                self._activity = message.activity
            case SaveWarning():
                log.warning(message.text)
            case PartWritten():
                self.succeed(message.part)
            case CheckpointCommitted():
                self.succeed(message.manifest)
            case SaveFailed():
                self.fail(message.reason)

    def succeed(self, saved: Saved) -> None:
        with self._lock:
            if not self.future.done():
                self.future.set_result(saved)

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """Fail the future. Two threads may call this; the first call counts."""
        with self._lock:
            if not self.future.done():
                error = CheckpointError(
                    f"checkpoint {self.step} was not saved: {self.cancel_reason or reason}"
                )
                error.__cause__ = cause
                log.error(str(error))
                self.future.set_exception(error)


class WriterProcess:
    """The writer process and the thread that listens to it."""

    def __init__(self, memory: int) -> None:
        self.ended = threading.Event()
        self._socket, writer_end = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None
        self._save: BackgroundSave | None = None
        self._exit_reason = ""
        self._lock = threading.Lock()  # for the save and the exit reason: one of the two finds the other
        threading.Thread(
            target=self._run, args=(writer_end, memory), name="varuna-writer", daemon=True
        ).start()

    def run(self, message: StartSave, save: BackgroundSave) -> None:
        with self._lock:
            self._save, exit_reason = save, self._exit_reason
        if exit_reason:
            save.fail(exit_reason)
        self.send(message)

    def send(self, message: ToWriter) -> None:
        with suppress(OSError):  # the listening thread finds out that the process ended, and why
            self._socket.sendall(msgspec.json.encode(message) + b"\n")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def shut_down(self) -> None:
        """End the process. Unlike close, shutdown works while a forked child holds the socket."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.ended.wait(KILL_SECONDS)

    def _run(self, writer_end: socket.socket, memory: int) -> None:
        """Start the process and listen until it ends: the kernel ends it with the thread that started it."""
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)  # the process inherits the mask
        try:
            exit_reason = self._listen(self._launch(writer_end, memory))
        except OSError as error:
            exit_reason = f"its process could not be started: {error}"
        with self._lock:
            self._exit_reason, save = exit_reason, self._save
        if save is not None:
            save.fail(exit_reason)
        self.ended.set()

    def _launch(self, writer_end: socket.socket, memory: int) -> "subprocess.Popen[bytes]":
        search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        module = "varuna.checkpoint.writer_process"
        with writer_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(os.getpid()), str(memory)],
                stdin=writer_end.fileno(),
                stdout=subprocess.DEVNULL,
                pass_fds=[memory],
                env={**os.environ, "PYTHONPATH": search_path},
            )
        return self._process

    def _listen(self, process: "subprocess.Popen[bytes]") -> str:
        """Handle messages until the process ends; return why it ended."""
        with self._socket, suppress(ConnectionError):
            for text in self._socket.makefile("rb"):
                if text.endswith(b"\n") and self._save is not None:
                    self._save.handle(msgspec.json.decode(text, type=ToTrainer))
        code = process.wait()
        if code >= 0:
            return f"its process exited with status {code} (see its messages on stderr)"
        return f"its process was killed by {signal.Signals(-code).name} (did the machine run out of memory?)"


class SnapshotMemory:
    """Shared memory that the trainer fills and the writer process reads; reused by later saves."""

    def __init__(self, tempdir: str | os.PathLike[str] | None) -> None:
        if tempdir is None:
            self.fd, self._place = os.memfd_create("varuna-checkpoint"), IN_MEMORY
        else:
            os.makedirs(tempdir, exist_ok=True)
            with tempfile.TemporaryFile(dir=tempdir) as file:  # without a name
                self.fd, self._place = os.dup(file.fileno()), os.fspath(tempdir)
        self._size = 0
        self._bytes = torch.empty(0, dtype=torch.uint8)  # the whole memory
        self._header = b""
        self._tensors: dict[str, Tensor] = {}  # views of the memory
        self._pinned: bool | None = None  # None: not tried yet

    @torch.inference_mode()  # autograd's bookkeeping takes longer than a small copy
    def fill(self, task: SaveTask, tensors: Mapping[str, Tensor]) -> StartSave:
        for key in task.layout.spans:
            check_dense(key, tensors[key])
        text = msgspec.json.encode(task)
        first = task.layout.size
        stop = first + len(text)
        if stop > self._size:
            self._grow((stop // GROWTH_BYTES + 2) * GROWTH_BYTES)
        if task.layout.header != self._header:  # it has the dtype, shape and span of each tensor
            # Create the views once for many saves: creating them takes longer than filling small ones.
            spans = {key: self._bytes[slice(*span)] for key, span in task.layout.spans.items()}
            self._tensors = {
                spec.key: spans[spec.key].view(getattr(torch, spec.dtype)).view(spec.shape)
                for spec in task.specs
            }
            self._header = task.layout.header
        self._copy(tensors)
        self._bytes[first:stop] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return StartSave(first, stop)

    def release(self) -> None:
        self._unmap()
        os.close(self.fd)

    def _grow(self, size: int) -> None:
        try:
            # Allocate now: if memory runs out later, a write to the mapping would kill this process.
            os.posix_fallocate(self.fd, self._size, size - self._size)
        except OSError as error:
            os.ftruncate(self.fd, self._size)
            raise CheckpointError(
                f"not enough space for a snapshot of {size} bytes in {self._place}: {error} "
                "(free some space, or save without tempdir, which needs no snapshot)"
            ) from error
        self._unmap()
        mapping = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self._size = size

    def _unmap(self) -> None:
        """Drop the mapping, which lives as long as a tensor refers to it."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())  # type: ignore[no-untyped-call]
        self._pinned = None
        self._header, self._tensors = b"", {}
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        devices = {tensors[key].device for key in self._tensors if tensors[key].is_cuda}
        if devices and self._pinned is None and self._place == IN_MEMORY:
            self._pinned = self._pin()
        for key, tensor in self._tensors.items():
            tensor.copy_(tensors[key], non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)

    def _pin(self) -> bool:
        """Pin the memory, which makes copies from a GPU five times faster; impossible for a file."""
        register = torch.cuda.cudart().cudaHostRegister  # type: ignore[no-untyped-call]
        if int(register(self._bytes.data_ptr(), self._size, 0)) == 0:
            return True
        with suppress(RuntimeError):  # CUDA reports the failure again at the next launch
            torch.zeros(1, device="cuda")
        return False
