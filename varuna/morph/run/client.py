"""Client of the manager, for commands and `notify_manager_preempt`."""

import socket
import time
from pathlib import Path

from varuna.morph.failures import shorten_reason
from varuna.morph.journal import JobOver, read_journal
from varuna.morph.protocol.messages import ManagerReply, ManagerRequest, read_from_manager, write_message
from varuna.morph.run.job_folder import JobFolder, home_folder, saved_path
from varuna.secure.credential import JobCredential
from varuna.secure.framing import FrameReader, FramingError, pack_frame

REPLY_SECONDS = 10.0


def request_manager(code_dir: str, what: str, **fields: object) -> ManagerReply:
    """Send a request to the manager of the job in `code_dir`; `fields` are those of `ManagerRequest`."""
    folder = JobFolder(saved_path(home_folder(), Path(code_dir).absolute()).with_suffix(""))
    contact = folder.read_contact()
    if contact is None:
        raise ValueError(f"no job was started from {Path(code_dir).absolute()} (set --code-dir)")
    request = ManagerRequest(contact.job, what, **fields)  # type: ignore[arg-type]
    try:
        return send_request(contact.address, contact.port, contact.credential, request)
    except (OSError, FramingError) as error:
        for record in read_journal(folder.journal).records:
            if isinstance(record, JobOver):
                how, reason = record.verdict.how, shorten_reason(record.verdict.reason)
                raise ValueError(
                    f"{contact.job} is over: {how}: {reason}; logs in {contact.log_dir}"
                ) from None
        raise ValueError(
            f"the manager of {contact.job} does not answer at {contact.address}:{contact.port} ({error}); "
            f"if it was killed, `varuna run --resume --code-dir {code_dir}` resumes the job"
        ) from None


def send_request(address: str, port: int, credential: JobCredential, request: ManagerRequest) -> ManagerReply:
    """Send a request and return the reply. Raise OSError or FramingError."""
    deadline = time.monotonic() + REPLY_SECONDS
    reader = FrameReader()
    with (
        socket.create_connection((address, port), timeout=REPLY_SECONDS) as plain,
        credential.client_context().wrap_socket(plain) as connection,
    ):
        connection.sendall(pack_frame(write_message(request)))
        while data := connection.recv(65536):
            for payload in reader.feed(data):
                reply = read_from_manager(payload)
                if isinstance(reply, ManagerReply):
                    return reply
            connection.settimeout(max(0.001, deadline - time.monotonic()))
    raise ConnectionResetError("the manager closed the connection")
