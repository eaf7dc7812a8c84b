"""The view of a job as metrics for Prometheus, and their endpoint on loopback.

A counter never decreases, though the ledger may move the seconds of an interrupted step from one cause to
another, and a resumed manager continues from files that are some seconds old: the highest value so far is
shown. The file `metrics_counters.json` in the log folder keeps it.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from socket import SHUT_RDWR, socket
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import msgspec
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from varuna.addresses import is_local_host
from varuna.codec import UNDECODABLE
from varuna.files import write_atomic
from varuna.observe.job_view import JobView

PHASES = ("gathering", "running", "morphing", "saving", "ending", "over")
NAME = "metrics_counters.json"
"""The highest value of each counter so far, in the log folder."""
HOST = "127.0.0.1"
MAX_CONNECTIONS = 16
"""The manager keeps a thread and a descriptor for each."""
REQUEST_SECONDS = 5.0
"""Time limit for a whole request and its answer."""


class JobCollector(Collector):
    """Returns the metrics of the newest view, each with the label `run`: the name of the job."""

    def __init__(self, view: Callable[[], JobView | None], *, folder: Path) -> None:
        """`folder`: the log folder."""
        self._view = view
        self._file = folder / NAME
        self._lock = threading.Lock()  # of the next one: several may ask at once
        self._highest: dict[str, dict[str, float]] = {}  # by the counter's name and label
        with suppress(OSError, *UNDECODABLE):
            data = self._file.read_bytes()
            self._highest = msgspec.json.decode(data, type=dict[str, dict[str, float]])

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        if view is not None:
            with self._lock:
                counters = list(self._counters(view))
                self._keep()
            yield from counters
            yield from job_gauges(view)
            yield from machine_gauges(view)

    def _keep(self) -> None:
        """Write the values before anyone sees them."""
        with suppress(OSError):  # a full disk, which other files report
            write_atomic(self._file, msgspec.json.encode(self._highest).decode(), fsync=False, private=True)

    def _counters(self, view: JobView) -> Iterator[Metric]:
        """Return everything that only grows."""
        ledger = view.ledger
        counts: dict[str, tuple[str, float]] = {
            "varuna_morphs": ("Changes of the layout.", view.morphs),
            "varuna_losses": ("Lost machines and failed workers.", view.losses),
            "varuna_dropped_records": ("Records of very short steps that were thinned out.",
                                       view.dropped_records),
        }  # fmt: skip
        if ledger is not None:
            counts |= {
                "varuna_steps": ("Steps that count.", ledger.steps),
                "varuna_steps_redone": ("Steps that were run again.", ledger.steps_redone),
                "varuna_samples": ("Samples of the steps that count.", ledger.samples),
                "varuna_saves": ("Automatic checkpoints.", ledger.saves),
                "varuna_goodput_seconds": ("Paid machine-seconds that trained.", ledger.useful_seconds),
                "varuna_paid_seconds": ("Paid machine-seconds.", ledger.paid_seconds),
            }
        for name, (text, value) in counts.items():
            counter = CounterMetricFamily(name, text, labels=["run"])
            counter.add_metric([view.job], self._high(name, "", value))
            yield counter
        if ledger is not None:
            lost = CounterMetricFamily(
                "varuna_badput_seconds", "Paid machine-seconds that did not train.", labels=["run", "cause"]
            )
            for cause, seconds in ledger.lost_seconds.items():
                lost.add_metric([view.job, cause], self._high("varuna_badput_seconds", cause, seconds))
            yield lost

    def _high(self, name: str, label: str, value: float) -> float:
        values = self._highest.setdefault(name, {})
        values[label] = max(value, values.get(label, 0.0))
        return values[label]


def job_gauges(view: JobView) -> Iterator[Metric]:
    """Return the numbers of the whole job, as far as they are known."""
    layout = view.layout
    gauges: dict[str, tuple[str, float | None]] = {
        "varuna_step": ("Finished steps.", view.step),
        "varuna_planned_steps": ("Step at which the training ends.", view.num_steps),
        "varuna_loss": ("Loss of the last step.", view.loss),
        "varuna_step_seconds": ("Mean time of the recent steps.", view.step_seconds),
        "varuna_samples_per_second": ("Samples per second.", view.samples_per_second),
        "varuna_tokens_per_second": ("Tokens per second, padding included.", view.tokens_per_second),
        "varuna_mfu_ratio": ("Model FLOP utilisation.", view.mfu),
        "varuna_eta_seconds": ("Predicted time until the end.", view.eta_seconds),
        "varuna_saved_step": ("Step of the newest checkpoint.", view.saved_step),
        "varuna_save_seconds": ("Time that the last checkpoint blocked training.", view.save_seconds or None),
        "varuna_save_interval_seconds": ("Time between automatic checkpoints.",
                                         view.save_every_seconds or None),
        "varuna_next_save_seconds": ("Time until the next automatic checkpoint.", view.next_save_seconds),
        "varuna_problems": ("Problems that `varuna status` shows.", len(view.problems)),
        "varuna_layout_stages": ("Pipeline stages.", layout.depth if layout is not None else None),
        "varuna_layout_ranks": ("Workers.", sum(layout.widths) if layout is not None else None),
    }  # fmt: skip
    for name, (text, value) in gauges.items():
        if value is not None:
            gauge = GaugeMetricFamily(name, text, labels=["run"])
            gauge.add_metric([view.job], value)
            yield gauge
    phase = GaugeMetricFamily("varuna_phase", "1 for the present phase of the job.", labels=["run", "phase"])
    for name in PHASES:
        phase.add_metric([view.job, name], float(view.phase == name))
    yield phase
    scalars = GaugeMetricFamily("varuna_scalar", "Values of varuna.log.", labels=["run", "name"])
    for name, number in view.scalars.items():
        scalars.add_metric([view.job, name], float("nan") if number is None else number)
    yield scalars


def machine_gauges(view: JobView) -> Iterator[Metric]:
    """Return the number of machines in each state, and the numbers of each machine."""
    states: dict[str, int] = {}
    for machine in view.machines:
        state = "waiting" if machine.state.startswith("waits ") else machine.state  # it has a number
        states[state] = states.get(state, 0) + 1
    machines = GaugeMetricFamily("varuna_machines", "Machines by state.", labels=["run", "state"])
    for state, number in states.items():
        machines.add_metric([view.job, state], number)
    yield machines
    for name, text, field in (
        ("varuna_memory_bytes", "Memory of the fullest device, or of all workers on CPUs.", "memory_bytes"),
        ("varuna_memory_limit_bytes", "Memory of a device.", "memory_limit"),
        ("varuna_machine_step_seconds", "Time of the last step.", "step_seconds"),
        ("varuna_machine_compute_seconds", "Compute time of the last step.", "compute_seconds"),
        ("varuna_machine_wait_seconds", "Rest of the last step.", "wait_seconds"),
        ("varuna_machine_slow", "1: computes more slowly than its peers.", "slow"),
    ):
        gauge = GaugeMetricFamily(name, text, labels=["run", "machine"])
        for machine in view.machines:
            value = getattr(machine, field)
            if value is not None:
                gauge.add_metric([view.job, machine.name], float(value))
        yield gauge


class MetricsHandler(WSGIRequestHandler):
    timeout = REQUEST_SECONDS

    def parse_request(self) -> bool:
        found = super().parse_request()
        if found:
            assert isinstance(self.server, MetricsServer)
            self.server.connections.note_request(self.connection)
        return found

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: any local user can make requests."""


class OpenConnections:
    """Keeps the connections few and short: a client that keeps many open, and is silent, stops no other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._silent: dict[socket, float] = {}  # end of the time of each, the oldest first
        self._answered: dict[socket, float] = {}  # the request is complete

    def add(self, connection: socket) -> None:
        """Add a connection. If there are too many, end the oldest one, first of those without a request."""
        with self._lock:
            while len(self._silent) + len(self._answered) >= MAX_CONNECTIONS:
                group = self._silent or self._answered
                _end(oldest := next(iter(group)))
                del group[oldest]
            self._silent[connection] = time.monotonic() + REQUEST_SECONDS

    def note_request(self, connection: socket) -> None:
        with self._lock:
            end = self._silent.pop(connection, None)
            if end is not None:
                self._answered[connection] = end

    def remove(self, connection: socket) -> None:
        with self._lock:
            self._silent.pop(connection, None)
            self._answered.pop(connection, None)

    def end_late(self) -> None:
        """End the connections whose time is over. Their threads then remove them."""
        now = time.monotonic()
        with self._lock:
            for connection, end in (*self._silent.items(), *self._answered.items()):
                if now >= end:
                    _end(connection)


def _end(connection: socket) -> None:
    """End a connection; the thread that waits for it closes it."""
    with suppress(OSError):  # it is closed already
        connection.shutdown(SHUT_RDWR)


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Answers each request in a thread of its own."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.connections = OpenConnections()
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.remove(request)

    def service_actions(self) -> None:
        """Do this after each request, and every half second."""
        super().service_actions()
        self.connections.end_late()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: the client was silent, or has closed the connection."""


class MetricsEndpoint:
    """Serves `http://127.0.0.1:PORT/metrics` from a thread."""

    def __init__(self, port: int, view: Callable[[], JobView | None], *, folder: Path) -> None:
        """Raise OSError if the port is taken. 0: choose a free one. `folder`: the log folder of the job."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(JobCollector(view, folder=folder))
        answer: Callable[[Any, Any], Iterable[bytes]] = make_wsgi_app(registry)

        def answer_local(environment: Any, start_response: Any) -> Iterable[bytes]:
            if is_local_host([environment.get("HTTP_HOST", "")]):
                return answer(environment, start_response)
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"Use an address of this machine, such as 127.0.0.1 or localhost.\n"]

        self._server = make_server(HOST, port, answer_local, MetricsServer, MetricsHandler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="varuna endpoint", daemon=True
        )
        self._thread.start()
        self.url = f"http://{HOST}:{self._server.server_port}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
