"""Asks a cloud's metadata service, again and again, whether this machine will be taken away.

Straight to the service: no proxy, no redirect followed, answers bounded in size and time. A service that is
not there, or talks nonsense, is asked again later; it never ends the job.
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

from varuna.morph.notices import Answer, Notice, NoticeError, Request, Service

MOST_BYTES = 1 << 20
ANSWER_SECONDS = 5.0
Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]


async def listen(
    service: Service,
    tell: Callable[[Notice | None], None],
    *,
    warn: Callable[[str], None],
    url: str = "",
    every_seconds: float = 1.0,
    answer_seconds: float = ANSWER_SECONDS,
    now: Clock = time.time,
    sleep: Sleep = asyncio.sleep,
) -> None:
    """Runs until it is cancelled. Tells each change: a notice, or None where one was withdrawn."""
    address = url or service.url
    standing: Notice | None = None
    warned = ""
    pause = every_seconds
    while True:
        try:
            notice = await look(service, address, now=now, answer_seconds=answer_seconds)
        except (NoticeError, OSError, http.client.HTTPException) as error:
            problem = str(error) or type(error).__name__
            if problem != warned:
                warn(f"notices of {address} cannot be heard: {problem}; asking again")
            warned, pause = problem, min(pause * 2, every_seconds * 10)
        else:
            warned, pause = "", every_seconds
            if (notice and notice.reason) != (standing and standing.reason):
                tell(notice)
            standing = notice
        await sleep(pause)


async def look(
    service: Service, url: str, *, now: Clock = time.time, answer_seconds: float = ANSWER_SECONDS
) -> Notice | None:
    """One question, or the few that it takes."""
    talk = service.look()
    request = next(talk)
    while True:
        answer = await ask(url, request, now=now, answer_seconds=answer_seconds)
        try:
            request = talk.send(answer)
        except StopIteration as end:
            notice: Notice | None = end.value
            return notice


async def tell_done(service: Service, notice: Notice, *, url: str = "") -> None:
    """All is saved: the cloud need not wait for the deadline. For a cloud that does not ask, nothing."""
    request = service.done(notice)
    if request is not None:
        answer = await ask(url or service.url, request)
        if not 200 <= answer.status < 300:
            raise NoticeError(
                f"the metadata service refused our approval with {answer.status}: {answer.body[:80]!r}"
            )


async def ask(
    url: str, request: Request, *, now: Clock = time.time, answer_seconds: float = ANSWER_SECONDS
) -> Answer:
    place = urlsplit(url)
    if place.scheme != "http" or not place.hostname:
        raise ValueError(f"a metadata service is reached by http://host[:port], not by {url!r}")
    seconds = answer_seconds + request.wait_seconds
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=seconds)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Answer] = loop.create_future()

    def exchange() -> None:
        try:
            settle: Callable[[], None] = partial(answer.set_result, _exchange(connection, request, now))
        except Exception as error:
            settle = partial(answer.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is over, and with it the question
            loop.call_soon_threadsafe(lambda: None if answer.done() else settle())

    # Not of the loop's own pool, whose end would wait for a service that does not answer.
    threading.Thread(target=exchange, daemon=True, name="metadata service").start()
    try:
        async with asyncio.timeout(seconds):  # the connection's own timeout begins anew with each byte
            return await answer
    finally:
        if connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)  # frees the thread


def _exchange(connection: http.client.HTTPConnection, request: Request, now: Clock) -> Answer:
    with contextlib.closing(connection):
        connection.request(request.method, request.path, request.body or None, dict(request.headers))
        response = connection.getresponse()
        body = response.read(MOST_BYTES + 1)
        if len(body) > MOST_BYTES:
            raise NoticeError(f"the metadata service's answer is longer than {MOST_BYTES} bytes")
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, body, now())
