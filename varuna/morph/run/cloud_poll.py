"""Polls a cloud's metadata service for notices that this machine will be taken away.

Requests go directly to the service, without proxy and redirects; replies are limited in size and time.
A service that is missing or sends invalid replies is polled again later and never ends the job.
"""

import asyncio
import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from urllib.parse import urlsplit

from varuna.morph.events import Event, NoticeWithdrawn
from varuna.morph.notices import (
    CloudNotice,
    MetadataReply,
    MetadataRequest,
    MetadataService,
    NoticeError,
    metadata_service,
)
from varuna.morph.protocol.messages import ManagerMessage, PreemptionReport
from varuna.morph.protocol.orders import AgentOrders

MAX_BYTES = 1 << 20
REPLY_SECONDS = 5.0
POLL_SECONDS = 1.0
Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]


class CloudListener:
    """Reports the notices of a cloud to the manager, and approves them when the machine is released."""

    def __init__(self, orders: AgentOrders, send: Callable[[ManagerMessage | Event], None]) -> None:
        self._service = metadata_service(orders.cloud)
        self._url = orders.cloud_url
        self._machine = orders.machine
        self._send = send
        self._notice: CloudNotice | None = None
        self._approved = ""  # event id of the last approved notice

    async def poll(self) -> None:
        await poll_notices(self._service, self._report, warn=_print, url=self._url)

    def _report(self, notice: CloudNotice | None) -> None:
        self._notice = notice
        if notice is None:
            self._send(NoticeWithdrawn(self._machine))
        else:
            self._send(PreemptionReport(notice.deadline - time.time(), notice.reason))

    def approve(self) -> None:
        """Approve the current notice in the background, once."""
        if self._notice is not None and self._notice.event != self._approved:
            self._approved = self._notice.event
            self._approving = asyncio.create_task(self._approve(self._notice))

    async def _approve(self, notice: CloudNotice) -> None:
        try:
            await approve_notice(self._service, notice, url=self._url)
        except (OSError, ValueError, http.client.HTTPException) as error:  # the cloud waits for its deadline
            _print(f"the notice was not approved: {error}")


def _print(text: str) -> None:
    print(text, flush=True)


async def poll_notices(
    service: MetadataService,
    on_change: Callable[[CloudNotice | None], None],
    *,
    warn: Callable[[str], None],
    url: str = "",
    reply_seconds: float = REPLY_SECONDS,
    now: Clock = time.time,
    sleep: Sleep = asyncio.sleep,
) -> None:
    """Call `on_change` with each new notice, and with None when it is withdrawn. Runs until cancelled."""
    address = url or service.url
    current: CloudNotice | None = None
    warned = ""
    pause = POLL_SECONDS
    while True:
        try:
            notice = await find_notice(service, address, now=now, reply_seconds=reply_seconds)
        except (NoticeError, OSError, http.client.HTTPException) as error:
            problem = str(error) or type(error).__name__
            if problem != warned:
                warn(f"the metadata service at {address} cannot be polled: {problem}; retrying")
            warned, pause = problem, min(pause * 2, 10 * POLL_SECONDS)
        else:
            warned, pause = "", POLL_SECONDS
            if (notice and notice.reason) != (current and current.reason):
                on_change(notice)
            current = notice
        await sleep(pause)


async def find_notice(
    service: MetadataService, url: str, *, now: Clock = time.time, reply_seconds: float = REPLY_SECONDS
) -> CloudNotice | None:
    """Send the requests of one poll, and return the current notice."""
    poll = service.poll()
    request = next(poll)
    while True:
        reply = await send_request(url, request, now=now, reply_seconds=reply_seconds)
        try:
            request = poll.send(reply)
        except StopIteration as end:
            notice: CloudNotice | None = end.value
            return notice


async def approve_notice(service: MetadataService, notice: CloudNotice, *, url: str = "") -> None:
    """Report that the machine may be taken away now, to clouds that support it."""
    request = service.approval(notice)
    if request is not None:
        reply = await send_request(url or service.url, request)
        if not 200 <= reply.status < 300:
            raise NoticeError(
                f"the metadata service rejected the approval with {reply.status}: {reply.body[:80]!r}"
            )


async def send_request(
    url: str, request: MetadataRequest, *, now: Clock = time.time, reply_seconds: float = REPLY_SECONDS
) -> MetadataReply:
    place = urlsplit(url)
    if place.scheme != "http" or not place.hostname:
        raise ValueError(f"expected the metadata service as http://host[:port], found {url!r}")
    seconds = reply_seconds + request.wait_seconds
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=seconds)
    loop = asyncio.get_running_loop()
    reply: asyncio.Future[MetadataReply] = loop.create_future()

    def exchange() -> None:
        try:
            settle: Callable[[], None] = partial(reply.set_result, _exchange(connection, request, now))
        except Exception as error:
            settle = partial(reply.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(lambda: None if reply.done() else settle())

    # Not in the event loop's pool, which would wait at exit for a service that does not reply.
    threading.Thread(target=exchange, daemon=True, name="metadata service").start()
    try:
        async with asyncio.timeout(seconds):  # the timeout of the connection restarts with each byte
            return await reply
    finally:
        if connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)  # ends the thread


def _exchange(connection: http.client.HTTPConnection, request: MetadataRequest, now: Clock) -> MetadataReply:
    with contextlib.closing(connection):
        connection.request(request.method, request.path, request.body or None, dict(request.headers))
        response = connection.getresponse()
        body = response.read(MAX_BYTES + 1)
        if len(body) > MAX_BYTES:
            raise NoticeError(f"the reply of the metadata service is longer than {MAX_BYTES} bytes")
        headers = {name.lower(): value for name, value in response.getheaders()}
        return MetadataReply(response.status, headers, body, now())
