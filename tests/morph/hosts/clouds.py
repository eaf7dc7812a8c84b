"""Small metadata services on loopback that behave like those of the clouds."""

import email.utils
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

Reply = tuple[int, dict[str, str], bytes]
NO_HEADERS: dict[str, str] = {}


class Cloud(http.server.ThreadingHTTPServer):
    """A metadata service; replies in `broken` are sent first, one per request."""

    daemon_threads = True
    clock = 1_800_000_000.0  # of the service

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.requests: list[str] = []
        self.broken: list[Reply] = []
        self.changed = threading.Condition()

    def wait_for_requests(self, times: int) -> None:
        self.wait_for(lambda: len(self.requests) >= times)

    def wait_for(self, wanted: Callable[[], bool]) -> None:
        """Wait until the condition holds after a request."""
        with self.changed:
            self.changed.wait_for(wanted)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore disconnects of the tests."""

    def reply(self, method: str, path: str, query: dict[str, str], headers: Any, body: bytes) -> Reply:
        return 404, NO_HEADERS, b"not found"


class Aws(Cloud):
    action: dict[str, str] | None = None
    token = "token-1=="

    def reply(self, method: str, path: str, query: dict[str, str], headers: Any, body: bytes) -> Reply:
        if (method, path) == ("PUT", "/latest/api/token"):
            good = headers["X-aws-ec2-metadata-token-ttl-seconds"] and not headers["X-Forwarded-For"]
            return (200, NO_HEADERS, self.token.encode()) if good else (400, NO_HEADERS, b"")
        if headers["X-aws-ec2-metadata-token"] != self.token:
            return 401, NO_HEADERS, b"unauthorized"
        if (method, path) == ("GET", "/latest/meta-data/spot/instance-action") and self.action:
            return 200, NO_HEADERS, json.dumps(self.action).encode()
        return 404, NO_HEADERS, b"not found"


class Azure(Cloud):
    machine = "trainer_7"

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []

    def schedule(self, kind: str, machine: str, *, seconds: float, name: str = "E-1") -> None:
        when = email.utils.formatdate(self.clock + seconds, usegmt=True)
        self.events.append(
            {
                "EventId": name,
                "EventType": kind,
                "ResourceType": "VirtualMachine",
                "Resources": [machine],
                "EventStatus": "Scheduled",
                "NotBefore": when,
                "Description": "",
                "EventSource": "Platform",
                "DurationInSeconds": -1,
            }
        )

    def reply(self, method: str, path: str, query: dict[str, str], headers: Any, body: bytes) -> Reply:
        if headers["Metadata"] != "true" or "api-version" not in query:
            return 400, NO_HEADERS, b"bad request"
        if path == "/metadata/instance/compute/name":
            return 200, NO_HEADERS, self.machine.encode()
        if (method, path) == ("GET", "/metadata/scheduledevents"):
            return 200, NO_HEADERS, json.dumps({"DocumentIncarnation": 1, "Events": self.events}).encode()
        if (method, path) == ("POST", "/metadata/scheduledevents"):
            for request in json.loads(body)["StartRequests"]:
                found = [event for event in self.events if event["EventId"] == request["EventId"]]
                if not found:
                    return 400, NO_HEADERS, b"no such event"
                found[0].update(EventStatus="Started", NotBefore="")
            return 200, NO_HEADERS, b""
        return 404, NO_HEADERS, b"not found"


class Gcp(Cloud):
    preempted = False
    flavor: ClassVar[dict[str, str]] = {"Metadata-Flavor": "Google"}

    def preempt(self) -> None:
        with self.changed:
            self.preempted = True
            self.changed.notify_all()

    def reply(self, method: str, path: str, query: dict[str, str], headers: Any, body: bytes) -> Reply:
        if headers["Metadata-Flavor"] != "Google" or headers["X-Forwarded-For"]:
            return 403, NO_HEADERS, b"forbidden"
        if path != "/computeMetadata/v1/instance/preempted":
            return 404, NO_HEADERS, b"not found"
        with self.changed:
            if query.get("wait_for_change") == "true":
                self.changed.wait_for(
                    lambda: query["last_etag"] != self.etag(), timeout=float(query["timeout_sec"])
                )
            return 200, {**self.flavor, "ETag": self.etag()}, str(self.preempted).upper().encode()

    def etag(self) -> str:
        return f"etag-{self.preempted:d}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Cloud

    def answer(self) -> None:
        place = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(place.query).items()}
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        with self.server.changed:
            self.server.requests.append(f"{self.command} {self.path}")
            self.server.changed.notify_all()
        if self.server.broken:
            status, headers, reply = self.server.broken.pop(0)
        else:
            status, headers, reply = self.server.reply(self.command, place.path, query, self.headers, body)
        self.send_response_only(status)
        self.send_header("Date", email.utils.formatdate(self.server.clock, usegmt=True))
        for name, value in {"Content-Length": str(len(reply)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply)

    do_GET = do_PUT = do_POST = answer

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


@contextmanager
def running(cloud: Cloud) -> Iterator[None]:
    thread = threading.Thread(target=cloud.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield
    finally:
        cloud.shutdown()
        thread.join()
        cloud.server_close()
