"""Client of the manager, for commands and `notify_manager_preempt`."""

import codecs
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from varuna.morph.failures import shorten_reason
from varuna.morph.journal import JobOver, read_journal
from varuna.morph.protocol.messages import (
    LogPage,
    ManagerReply,
    ManagerRequest,
    read_from_manager,
    write_message,
)
from varuna.morph.protocol.stream import MessageReader, pack_message
from varuna.morph.run.job_folder import JobFolder, home_folder, saved_path
from varuna.secure.credential import JobCredential
from varuna.secure.framing import FramingError

REPLY_SECONDS = 10.0
"""Time limit without a byte from the manager."""


class JobIsOver(ValueError):
    """The job of a command has ended."""


class ManagerClient:
    """A connection to the manager. Methods raise OSError or FramingError."""

    def __init__(self, address: str, port: int, credential: JobCredential) -> None:
        self._reader = MessageReader()
        plain = socket.create_connection((address, port), timeout=REPLY_SECONDS)
        try:
            self._connection = credential.client_context().wrap_socket(plain)
        except BaseException:
            plain.close()
            raise

    def request(self, request: ManagerRequest) -> ManagerReply:
        """Send a request and return the reply."""
        self._connection.sendall(pack_message(write_message(request)))
        while data := self._connection.recv(2**18):
            for payload in self._reader.feed(data):
                reply = read_from_manager(payload)
                if isinstance(reply, ManagerReply):
                    return reply
        raise ConnectionResetError("the manager closed the connection")

    def read_log(
        self, job: str, rank: int, *, lines: int, generation: int | None = None
    ) -> Iterator[tuple[str, str]]:
        """Yield the last lines of a worker's stdout and stderr in pieces: (title, text). Raise ValueError."""
        refusals = []
        found = ManagerRequest(job, "logs", rank=rank, generation=generation)
        for stream in ("out", "err"):
            found = msgspec.structs.replace(found, stream=stream, lines=lines, start=0, stop=None)
            if (reply := self.request(found)).log is None:
                refusals.append(reply.text)
                continue
            # The next requests must reach the same file, also if the job changes its machines meanwhile.
            found = msgspec.structs.replace(found, machine=reply.machine, generation=reply.generation)
            title = f"==> rank_{rank}.{stream} of generation {reply.generation} <=="
            yield from ((title, text) for text in self._read_stream(found, reply))
        if len(refusals) == 2:
            raise ValueError(refusals[0])

    def _read_stream(self, request: ManagerRequest, reply: ManagerReply) -> Iterator[str]:
        """Search for the start of the lines, then yield the text from there to the end."""
        assert reply.log is not None
        end, page = reply.log.stop, reply.log
        while page.lines:
            page = self._page(msgspec.structs.replace(request, lines=page.lines, stop=page.start))
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while page.start < end:
            page = self._page(msgspec.structs.replace(request, lines=0, start=page.start, stop=end))
            if not page.data:
                return  # the file became shorter
            yield decoder.decode(page.data)

    def _page(self, request: ManagerRequest) -> LogPage:
        reply = self.request(request)
        if reply.log is None:
            raise ValueError(reply.text)
        return reply.log

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()


@contextmanager
def connect_manager(code_dir: str) -> Iterator[tuple[ManagerClient, str]]:
    """Connect to the manager of the job in `code_dir`; yield the client and the job. Raise ValueError."""
    folder = JobFolder(saved_path(home_folder(), Path(code_dir).absolute()).with_suffix(""))
    contact = folder.read_contact()
    if contact is None:
        raise ValueError(f"no job was started from {Path(code_dir).absolute()} (set --code-dir)")
    try:
        with ManagerClient(contact.address, contact.port, contact.credential) as client:
            yield client, contact.job
    except (OSError, FramingError) as error:
        for record in read_journal(folder.journal).records:
            if isinstance(record, JobOver):
                how, reason = record.verdict.how, shorten_reason(record.verdict.reason)
                raise JobIsOver(
                    f"{contact.job} is over: {how}: {reason}; logs in {contact.log_dir}"
                ) from None
        raise ValueError(
            f"the manager of {contact.job} does not answer at {contact.address}:{contact.port} ({error}); "
            f"if it was killed, `varuna run --resume --code-dir {code_dir}` resumes the job"
        ) from None


def request_manager(code_dir: str, what: str, **fields: object) -> ManagerReply:
    """Send a request to the manager of the job in `code_dir`; `fields` are those of `ManagerRequest`."""
    with connect_manager(code_dir) as (client, job):
        return client.request(ManagerRequest(job, what, **fields))  # type: ignore[arg-type]


def send_request(address: str, port: int, credential: JobCredential, request: ManagerRequest) -> ManagerReply:
    with ManagerClient(address, port, credential) as client:
        return client.request(request)
