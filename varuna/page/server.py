"""Serves the page of one job: its files, its data as JSON, and updates as server-sent events.

The server runs in a process of its own, so no browser can delay the manager. Requests are small and bounded;
whatever reads files or asks the manager runs in threads. All browsers share one reader of the job.
"""

import asyncio
import logging
import socket
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
from aiohttp import web

from varuna.page.buckets import Axis
from varuna.page.job_reader import JobReader, PageUpdate
from varuna.page.log_reader import WorkerLog
from varuna.page.security import Handler, PageSecrets, access_check, add_headers

STATIC = Path(__file__).parent / "static"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MAX_CONNECTIONS = 64
"""Connections with the token that stay open; more are closed after their answer."""
MAX_UNVERIFIED = 128
"""Connections without a request that has the token; of more, the oldest are closed."""
ACCEPT_BATCH = 16
"""Connections that are accepted at once: few, so that requests are read before others close theirs."""
BACKLOG = 128
MAX_STREAMS = 16
"""Open tabs."""
MAX_LINE = 4096
"""Bytes of the longest header or URL."""
ADMIT_SECONDS = 5.0
"""Connections without a request that has the token are closed after this time."""
UPDATE_SECONDS = 1.0
"""Time between two updates while the layout or the machines change."""
STEADY_SECONDS = 2.0
"""Time between two updates of a job that trains or is over: each costs CPU time that workers lack."""
STEP_SECONDS = 2.0
"""Time between two steps that are drawn."""
STEP_SHARE = 100
"""Reading the last step takes at most one of so many parts of one core."""
PING_SECONDS = 10.0
SEND_SECONDS = 15.0
"""Streams of a browser that takes nothing for so long are closed."""
LAST_SECONDS = 0.2
"""Time for all tabs to get the last update."""
MAX_POINTS = 2000


class PageServer:
    def __init__(self, reader: JobReader, keys: PageSecrets) -> None:
        self._reader = reader
        self._files = {path.name: path for path in sorted(STATIC.iterdir())}
        # Connections without a request that has the token, the oldest first, and the end of their time.
        self._unverified: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        self._verified: set[web.RequestHandler] = set()  # with those that have ended since the last request
        self._connections: Callable[[], Iterable[web.RequestHandler]] = tuple
        self._streams = 0
        self._noted: set[str] = set()
        self._update: PageUpdate | None = None
        self._changed = asyncio.Condition()
        self._wanted = asyncio.Event()
        # One thread follows the job, one the last step, which may be on a machine that does not answer. Four
        # serve what is on this machine, and four the logs of other machines: a slow one stops only these.
        self._follower = ThreadPoolExecutor(1, "follow")
        self._step_follower = ThreadPoolExecutor(1, "steps")
        self._readers = ThreadPoolExecutor(4, "read")
        self._remote_readers = ThreadPoolExecutor(4, "read remote")
        self.app = web.Application(
            middlewares=[access_check(keys, self._admit), self._note_errors],  # type: ignore[list-item]
            client_max_size=1024,
        )
        self.app.on_response_prepare.append(add_headers)
        self.app.cleanup_ctx.append(self._following)
        self.app.router.add_get("/", self.index)
        self.app.router.add_get("/static/{name}", self.file)
        self.app.router.add_get("/api/stream", self.stream)
        self.app.router.add_get("/api/curve", self.curve)
        self.app.router.add_get("/api/timeline", self.timeline)
        self.app.router.add_get("/api/logs", self.logs)
        self.app.router.add_get("/api/log", self.log)

    async def serve(self, listener: socket.socket, until: asyncio.Event) -> None:
        """Serve until the event is set; then send the last update and end."""
        runner = web.AppRunner(
            self.app,
            access_log=None,  # it would hold the token
            logger=logging.Logger("requests", logging.CRITICAL + 1),  # any local user can send wrong ones
            max_line_size=MAX_LINE,
            max_field_size=MAX_LINE,
            keepalive_timeout=30.0,
            shutdown_timeout=0.5,
        )
        await runner.setup()
        loop = asyncio.get_running_loop()
        made = runner.server
        assert made is not None

        self._connections = lambda: made.connections

        def connect() -> asyncio.Protocol:
            while len(self._unverified) >= MAX_UNVERIFIED:
                self._close_unverified(next(iter(self._unverified)))
            protocol = made()
            self._unverified[protocol] = loop.call_later(ADMIT_SECONDS, self._close_unverified, protocol)
            return protocol

        server = await loop.create_server(connect, sock=listener, backlog=ACCEPT_BATCH)
        listener.listen(BACKLOG)
        try:
            await until.wait()
            await self._follow_once()
            await asyncio.sleep(LAST_SECONDS)
            if self._update is not None and self._update.link == "lost":  # its process may be about to end
                await self._follow_once()
                await asyncio.sleep(LAST_SECONDS)
        finally:
            server.close()
            await runner.cleanup()

    def _close_unverified(self, protocol: web.RequestHandler) -> None:
        self._unverified.pop(protocol).cancel()
        if protocol.transport is not None:
            protocol.transport.abort()

    def _admit(self, request: web.Request) -> bool:
        """Note a request that has the token. Return whether its connection may stay open."""
        timer = self._unverified.pop(request.protocol, None)
        if timer is not None:
            timer.cancel()
        self._verified.intersection_update(self._connections())
        self._verified.add(request.protocol)
        return len(self._verified) <= MAX_CONNECTIONS

    # ------------------------------------------------------------ following the job

    async def _following(self, app: web.Application) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._follow_steps())]
        yield
        for task in tasks:
            task.cancel()
        for pool in (self._follower, self._step_follower, self._readers, self._remote_readers):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _follow(self) -> None:
        while True:
            await self._wanted.wait()
            await self._follow_once()
            await asyncio.sleep(self._pause())

    def _pause(self) -> float:
        """Return the seconds until the next update."""
        if self._reader.is_behind:
            return 0.0
        return STEADY_SECONDS if self._reader.is_steady else UPDATE_SECONDS

    async def _follow_once(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            update = await loop.run_in_executor(self._follower, self._reader.update)
        except Exception as error:  # the page says so, and tries again
            self._note(error)
            update = self._reader.failed(error)
        if self._update is not None and update == msgspec.structs.replace(
            self._update, at=update.at, seen_at=update.seen_at
        ):
            return
        async with self._changed:
            self._update = update
            self._changed.notify_all()

    async def _follow_steps(self) -> None:
        loop = asyncio.get_running_loop()
        async with self._changed:  # the last step needs the layout
            await self._changed.wait_for(lambda: self._update is not None)
        while True:
            await self._wanted.wait()
            cost = await loop.run_in_executor(self._step_follower, self._update_timeline)
            await asyncio.sleep(max(STEP_SECONDS, STEP_SHARE * cost))

    def _update_timeline(self) -> float:
        """Return the seconds that this took of a core."""
        begun = time.thread_time()
        try:
            self._reader.update_timeline()
        except Exception as error:  # the page keeps the step that it has, and tries again
            self._note(error)
        return time.thread_time() - begun

    def _note(self, error: Exception) -> None:
        """Print the traceback, once for each message."""
        if repr(error) not in self._noted:
            self._noted.add(repr(error))
            traceback.print_exception(error)

    @web.middleware
    async def _note_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException:
            raise
        except Exception as error:
            self._note(error)
            raise web.HTTPInternalServerError from None

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Send every update. A browser that is slow skips some."""
        if self._streams >= MAX_STREAMS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_STREAMS} tabs show this job; close one")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self._streams += 1
        self._wanted.set()
        try:
            await response.prepare(request)
            sent: PageUpdate | None = None
            while True:
                if self._update is sent:
                    await self._wait_for_change()
                found, data = self._update, b": ping\n\n"
                if found is not None and found is not sent:
                    data = b"data: " + msgspec.json.encode(found) + b"\n\n"
                sent = found
                await asyncio.wait_for(response.write(data), SEND_SECONDS)
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
            return response
        finally:
            self._streams -= 1
            if not self._streams:
                self._wanted.clear()

    async def _wait_for_change(self) -> None:
        with suppress(TimeoutError):
            async with self._changed, asyncio.timeout(PING_SECONDS):
                await self._changed.wait()

    # ------------------------------------------------------------ files and data

    async def index(self, request: web.Request) -> web.StreamResponse:
        return self._file("index.html")

    async def file(self, request: web.Request) -> web.StreamResponse:
        return self._file(request.match_info["name"])

    def _file(self, name: str) -> web.StreamResponse:
        path = self._files.get(name)
        if path is None:
            raise web.HTTPNotFound
        return web.Response(body=path.read_bytes(), content_type=KINDS[path.suffix], charset="utf-8")

    async def curve(self, request: web.Request) -> web.StreamResponse:
        axis: Axis = "time" if request.query.get("axis") == "time" else "step"
        first, last = number(request, "first", float("-inf")), number(request, "last", float("inf"))
        points = min(MAX_POINTS, max(2, whole_number(request, "points") or 600))
        return await self._read(lambda: self._reader.curve(first, last, axis=axis, points=points))

    async def timeline(self, request: web.Request) -> web.StreamResponse:
        return _json(bytes(self._reader.timeline.read()))  # it is encoded: this needs no thread

    async def logs(self, request: web.Request) -> web.StreamResponse:
        generation = whole_number(request, "generation")
        return await self._read(lambda: self._reader.logs.index(generation))

    async def log(self, request: web.Request) -> web.StreamResponse:
        log = WorkerLog(
            whole_number(request, "generation") or 0,
            whole_number(request, "rank") or 0,
            "err" if request.query.get("stream") == "err" else "out",
        )
        start, stop = whole_number(request, "start"), whole_number(request, "stop")
        logs, loop = self._reader.logs, asyncio.get_running_loop()
        is_here = await loop.run_in_executor(self._readers, logs.is_here, log)
        pool = self._readers if is_here else self._remote_readers
        return await self._read(lambda: logs.page(log, start=start, stop=stop), pool)

    async def _read(
        self, work: Callable[[], object], pool: ThreadPoolExecutor | None = None
    ) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(pool or self._readers, lambda: msgspec.json.encode(work()))
        return _json(found)


def _json(text: bytes) -> web.Response:
    return web.Response(body=text, content_type="application/json", charset="utf-8")


def number(request: web.Request, name: str, default: float) -> float:
    try:
        return float(request.query.get(name, default))
    except ValueError:
        raise web.HTTPBadRequest(text=f"{name} must be a number") from None


def whole_number(request: web.Request, name: str) -> int | None:
    text = request.query.get(name)
    if text is not None and not (text.isdecimal() and text.isascii() and len(text) < 19):
        raise web.HTTPBadRequest(text=f"{name} must be a whole number")
    return None if text is None else int(text)
