"""View of a job at one moment: everything that the terminal, the page and the metrics show.

`varuna.morph.metrics.view` builds it in the manager.
"""

from collections.abc import Mapping

import msgspec

from varuna.observe.ledger import LedgerReport

NAME = "job_view.json"
"""The last view of a job, in its log folder."""


class EventView(msgspec.Struct, frozen=True):
    """A line of the event log."""

    at: float  # seconds since 1970
    what: str
    why: str


class LayoutView(msgspec.Struct, frozen=True, kw_only=True):
    generation: int
    stage_map: tuple[tuple[int, ...], ...]  # ranks of each stage
    depth: int
    widths: tuple[int, ...]  # replicas of each stage
    batch_size: int
    microbatch_size: int
    text: str


class MachineView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: str
    ranks: tuple[int, ...] = ()
    step: int | None = None
    step_seconds: float | None = None  # of its slowest worker, like the next two
    compute_seconds: float | None = None
    wait_seconds: float | None = None  # step time that is not compute time; None: compute time not known
    memory_bytes: int | None = None  # of its fullest device, or of all its workers on CPUs
    memory_limit: int | None = None
    device: str = ""
    slow: bool = False
    seen_seconds_ago: float | None = None  # last heartbeat; None: no agent


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    at: float  # seconds since 1970
    begun_at: float
    phase: str
    phase_seconds: float
    reason: str
    step: int = 0
    num_steps: int | None = None
    loss: float | None = None
    has_loss: bool = True  # False: the script computes it, and the library does not know it
    step_seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None  # model FLOP utilisation; None: an unknown device or model
    layout: LayoutView | None = None
    machines: tuple[MachineView, ...] = ()
    eta_seconds: float | None = None
    store: str = ""
    saved_step: int | None = None
    save_seconds: float = 0.0  # time that the last checkpoint blocked training
    save_every_seconds: float = 0.0  # 0: off or unknown
    next_save_seconds: float | None = None
    morphs: int = 0  # changes of the layout so far
    losses: int = 0  # lost machines and failed workers
    last_event: EventView | None = None
    events: tuple[EventView, ...] = ()  # the newest ones, oldest first
    ledger: LedgerReport | None = None
    problems: Mapping[str, str] = {}
    scalars: Mapping[str, float | None] = {}  # newest values of `varuna.log`
    dropped_records: int = 0
    log_dir: str = ""
