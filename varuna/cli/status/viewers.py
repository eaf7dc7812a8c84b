"""Starts and ends everything that shows a running job: the terminal, trackers, the metrics endpoint."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from varuna.cli.status.page import announce_page
from varuna.cli.status.screen import REFRESH_SECONDS, Screen, StatusStyle
from varuna.morph.run.manager import Manager
from varuna.observe.job_view import JobView
from varuna.observe.trackers.tracker import TrackedJob, TrackerThread, check_trackers, open_tracker
from varuna.page.serve import PageProcess
from varuna.types import JobSpec

if TYPE_CHECKING:
    from varuna.observe.prometheus import MetricsEndpoint

STATUS_SHARE = 200
"""The status takes at most one of so many parts of the manager's time."""
VIEW_SECONDS = 2.0
"""A scrape that the manager does not answer within this time gets the last view."""
PORT_SECONDS = 10.0
"""Time between two attempts to use a port that another program has."""


class ViewerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `varuna run` for those who look at the job."""

    status: StatusStyle = "live"
    page: socket.socket | None = None  # listener of the live page
    trackers: tuple[str, ...] = ()
    metrics_port: int | None = None  # 0: choose a free one; None: no endpoint

    @property
    def need_manager(self) -> bool:
        return bool(self.trackers) or self.metrics_port is not None

    def check(self) -> None:
        """Raise ValueError for what cannot work, before anything starts."""
        check_trackers(self.trackers)
        if self.metrics_port is None:
            return
        if not 0 <= self.metrics_port < 2**16:
            raise ValueError(f"--metrics-port must be between 0 and 65535, not {self.metrics_port}")
        try:
            import varuna.observe.prometheus  # noqa: F401
        except ImportError:
            raise ValueError(
                "--metrics-port needs the package 'prometheus-client' "
                "(install it with: pip install 'varuna-torch[metrics]')"
            ) from None


class Viewers:
    """Everything that shows one job, but for its page."""

    def __init__(self, manager: Manager, screen: Screen, options: ViewerOptions) -> None:
        self._manager, self._screen = manager, screen
        self._port = options.metrics_port
        self._endpoint: MetricsEndpoint | None = None
        self._try_port_at = 0.0
        self._view: JobView | None = None  # the newest
        self._view_until = 0.0  # it is new enough until then
        self._loop = asyncio.get_running_loop()
        job = tracked_job(manager.job, manager.contact.job)
        self._trackers = [
            TrackerThread(name, partial(open_tracker, name, job), folder=job.folder)
            for name in options.trackers
        ]
        manager.observer.subscribers += [tracker.add for tracker in self._trackers]

    async def run(self) -> None:
        """Show the job until this task is cancelled."""
        while True:
            if self._screen.needs_view:
                self._screen.update(self._present())
            for tracker in self._trackers:
                self._manager.report_problem(tracker.name, tracker.problem)
            if self._port is not None and self._endpoint is None:
                self._open_endpoint(self._port)
            await asyncio.sleep(max(self._screen.refresh_seconds, self._view_until - time.monotonic()))

    def _present(self) -> JobView:
        """Return a view that is at most `REFRESH_SECONDS` old, or older if the job is large."""
        begun = time.monotonic()
        if self._view is None or begun >= self._view_until:
            self._view = self._manager.observer.view(self._manager.state, now=self._manager.clock.now())
            now = time.monotonic()
            self._view_until = now + max(REFRESH_SECONDS / 2, STATUS_SHARE * (now - begun))
        return self._view

    def _view_for_thread(self) -> JobView | None:
        """Return the present view to another thread; the newest one if the manager is busy or ends."""
        found = Future[JobView]()

        def answer() -> None:
            try:
                found.set_result(self._present())
            except Exception as error:
                found.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(answer)
            return found.result(VIEW_SECONDS)
        except (TimeoutError, RuntimeError):  # RuntimeError: the loop is closed
            return self._view

    def _open_endpoint(self, port: int) -> None:
        if time.monotonic() < self._try_port_at:
            return
        from varuna.observe.prometheus import MetricsEndpoint

        why = ""
        try:
            self._endpoint = MetricsEndpoint(
                port, self._view_for_thread, folder=Path(self._manager.job.log_dir)
            )
            self._manager.log("metrics", self._endpoint.url)
        except OSError as error:
            self._try_port_at = time.monotonic() + PORT_SECONDS
            why = f"port {port} cannot be used: {error.strerror}; the job continues, and tries it again"
        self._manager.report_problem("metrics endpoint", why)

    def close(self) -> None:
        """Write the last values. Free the terminal and the port."""
        for tracker in self._trackers:
            tracker.close()
            if tracker.problem:
                self._manager.say(f"{tracker.name}: {tracker.problem}", error=True)
        if self._endpoint is not None:
            self._endpoint.close()
        self._screen.close()


@asynccontextmanager
async def observing(manager: Manager, screen: Screen, options: ViewerOptions) -> AsyncIterator[None]:
    """Show the job while the block runs."""
    viewers = Viewers(manager, screen, options)
    showing = asyncio.create_task(viewers.run())
    page = None if options.page is None else start_page(manager.job.log_dir, options.page, screen)
    try:
        yield
    finally:
        showing.cancel()
        if page is not None:  # its last update asks the manager, so the event loop must not wait
            await asyncio.to_thread(page.close)
        if showing.done() and not showing.cancelled():
            screen.say(f"the status was not shown to the end: {showing.exception()!r}", error=True)
        await asyncio.to_thread(viewers.close)


def start_page(log_dir: str, listener: socket.socket, screen: Screen) -> PageProcess:
    folder = Path(log_dir)
    announce = partial(announce_page, say=screen.say)
    return PageProcess(folder, listener, announce=announce, say=screen.say)


def tracked_job(job: JobSpec, name: str) -> TrackedJob:
    settings = {"script": job.script, "arguments": " ".join(job.arguments), "log_dir": job.log_dir}
    return TrackedJob(name, Path(job.log_dir), settings)
