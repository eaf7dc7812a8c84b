"""The connection of the page to the manager of its job, which may end, or come back at another port."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from varuna.morph.protocol.messages import ManagerReply, ManagerRequest
from varuna.morph.run.client import ManagerClient
from varuna.morph.run.job_folder import JobFolder, ManagerContact
from varuna.processes import is_running
from varuna.secure.framing import FramingError


class ManagerLink:
    """Requests to the manager of the job that writes `log_dir`. Each thread has a connection of its own."""

    def __init__(self, log_dir: Path, home: Path) -> None:
        self._log_dir = log_dir.resolve()
        self._jobs = home / "jobs"
        self._local = threading.local()

    def request(self, what: str, **fields: object) -> ManagerReply:
        """Send a request; `fields` are those of `ManagerRequest`. Raise OSError or ValueError."""
        try:
            return self._send(what, fields)
        except (OSError, FramingError) as error:
            self._close()
            if isinstance(error, TimeoutError):
                raise
        try:  # the manager has closed an idle connection, or was restarted
            return self._send(what, fields)
        except FramingError as error:
            self._close()
            raise ValueError(str(error)) from None
        except OSError:
            self._close()
            raise

    def is_gone(self) -> bool:
        """Return whether the process of the manager has ended. A hanging one, or one elsewhere, has not."""
        try:
            contact = self._contact()
        except (OSError, ValueError):
            return False
        return contact.host == socket.gethostname() and not is_running(contact.pid)

    def _send(self, what: str, fields: dict[str, object]) -> ManagerReply:
        if getattr(self._local, "client", None) is None:
            contact = self._contact()
            client = ManagerClient(contact.address, contact.port, contact.credential)
            self._local.client, self._local.job = client, contact.job
        reply: ManagerReply = self._local.client.request(
            ManagerRequest(self._local.job, what, **fields)  # type: ignore[arg-type]
        )
        if not reply.ok:
            raise ValueError(reply.text)
        return reply

    def _close(self) -> None:
        client, self._local.client = getattr(self._local, "client", None), None
        if client is not None:
            client.__exit__(None, None, None)

    def _contact(self) -> ManagerContact:
        for contact in self._contacts():
            if Path(contact.log_dir).resolve() == self._log_dir:
                return contact
        raise ValueError("this user has no running job with this log folder on this machine")

    def _contacts(self) -> Iterator[ManagerContact]:
        for path in self._jobs.glob("*/manager.json"):
            with suppress(OSError, ValueError):  # of an earlier version, or of a job that begins
                contact = JobFolder(path.parent).read_contact()
                if contact is not None:
                    yield contact
