"""A real S3 server (moto) in a process of its own, which tests may halt, kill and start again."""

import http.client
import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import IO

from tests.environments import environment
from tests.ports import free_port

PINNED = Path(__file__).with_name("moto-constraints.txt")
BUCKET = "bucket"


class S3Server:
    """Empty when it starts, but for one bucket; it keeps its port when it is started again."""

    def __init__(self) -> None:
        self.port = free_port()
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                environment("moto", PINNED) / "bin" / "python",
                "-m",
                "moto.server",
                "-H",
                "127.0.0.1",
                "-p",
                str(self.port),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdout is not None
        seen = []
        for line in self._process.stdout:
            seen.append(line)
            if found := re.search(r"Running on http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                break
        else:
            raise RuntimeError(f"the S3 server did not start: {''.join(seen)}")
        self._log: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=keep_reading, args=(self._process.stdout, self._log), daemon=True).start()
        self.request("PUT", f"/{BUCKET}")

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a client of this server needs."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    @property
    def options(self) -> dict[str, str]:
        """The same as options of a store."""
        return {
            "endpoint": f"http://127.0.0.1:{self.port}",
            "access_key_id": "test",
            "secret_access_key": "test",
            "region": "us-east-1",
        }

    def request(self, method: str, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request(method, path)
            return connection.getresponse().read()
        finally:
            connection.close()

    def requests(self) -> list[str]:
        """All since the last time, as 'GET /bucket/name 206'."""
        self.request("GET", "/end-of-log")
        found = []
        while True:
            line = re.sub(r"\x1b\[\d*m", "", self._log.get())  # colours
            if "/end-of-log" in line:
                return found
            if entry := re.search(r'"([A-Z]+) (\S+) HTTP/1\.1" (\d+)', line):
                found.append(" ".join(entry.groups()))

    def halt(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    close = kill

    def revive(self) -> None:
        if self._process.poll() is not None:
            self.start()
        self.resume()


def keep_reading(lines: IO[str], log: SimpleQueue[str]) -> None:
    """Read the output: a server stops when the pipe is full."""
    for line in lines:
        log.put(line)
