"""Runs the page's server: in this process, or for `varuna run` in a child process that ends with it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from varuna.files import make_private_folder, open_private
from varuna.page.address_file import published_address

DEFAULT_PORT = 8737
LOG_FILE = "page.log"

Announce = Callable[[str, Path], None]
"""Gets the address of a page that is ready, and the file that holds it."""


def require_aiohttp() -> None:
    if find_spec("aiohttp") is None:
        raise ValueError(
            "the page needs aiohttp, which is not installed (run `pip install 'varuna-torch[page]'`, "
            "or leave out --page)"
        )


def open_listener(port: int | None) -> socket.socket:
    """Listen on a port of this machine alone. Without a port, take the default one or any that is free."""
    for wanted in (port,) if port is not None else (DEFAULT_PORT, 0):
        try:
            return socket.create_server(("127.0.0.1", wanted), backlog=64)
        except OSError as error:
            why = os.strerror(error.errno or 0)
        except OverflowError:
            why = "ports are 0 to 65535"
    raise ValueError(f"the page cannot listen on port {port}: {why} (choose another; 0 takes a free one)")


def serve_page(
    log_dir: Path, listener: socket.socket, *, home: Path, announce: Announce, parent: int | None
) -> None:
    """Serve until a signal, or until the other end of the pipe `parent` closes."""
    from varuna.page.job_reader import JobReader
    from varuna.page.manager_link import ManagerLink
    from varuna.page.security import PageSecrets
    from varuna.page.server import PageServer

    async def serve() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def end_with(pipe: int) -> None:
            loop.remove_reader(pipe)  # a closed pipe stays readable
            over.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, over.set)
        if parent is not None:
            loop.add_reader(parent, end_with, parent)
        keys = PageSecrets()
        server = PageServer(JobReader(log_dir, ManagerLink(log_dir, home)), keys)
        port = listener.getsockname()[1]
        url = f"http://127.0.0.1:{port}/?token={keys.token}"
        with published_address(log_dir, url) as file:
            announce(url, file)
            await server.serve(listener, over)

    asyncio.run(serve())


class PageProcess:
    """The server of a running job. The token is never an argument or a variable: others can read those."""

    def __init__(
        self,
        log_dir: Path,
        listener: socket.socket,
        *,
        announce: Announce,
        say: Callable[[str], None],
    ) -> None:
        """`announce` is called as soon as the server is ready; the job does not wait for it."""
        self._announce, self._say, self._log_dir = announce, say, log_dir
        self._closing = False
        make_private_folder(log_dir)
        reader, self._writer = os.pipe()
        log = open_private(log_dir / LOG_FILE)
        try:
            self._process = subprocess.Popen(
                [
                    *[sys.executable, "-m", "varuna", "page", str(log_dir)],
                    *["--listener", str(listener.fileno()), "--parent", str(reader)],
                ],
                pass_fds=(listener.fileno(), reader),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the manager
            )
        finally:
            os.close(log)
            os.close(reader)
            listener.close()
        threading.Thread(target=self._watch, name="page", daemon=True).start()

    def _watch(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            url, _, name = lines.readline().decode().strip().partition(" ")
            if url:
                self._announce(url, self._log_dir / name)
            lines.read()
        if not self._closing:
            self._say(
                f"the page has ended (see {self._log_dir / LOG_FILE}); the job goes on, and "
                f"`varuna page {self._log_dir}` shows it"
            )

    def close(self) -> None:
        """End the server, after it has sent the last update."""
        self._closing = True
        os.close(self._writer)
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
