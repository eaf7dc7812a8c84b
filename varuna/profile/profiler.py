"""The door to measuring: class `Profiler`, which finds out once what a model costs on a kind of device."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn
from torch import Tensor, nn

from varuna.capture import Captured, Source
from varuna.errors import check_name
from varuna.execute.comm.address import machine_identity, own_address
from varuna.execute.comm.groups import make_group
from varuna.execute.device.facts import available_bytes, find_device, ran_out_of_memory
from varuna.execute.update.shard import share_values
from varuna.measure.draft import Draft, Subject
from varuna.measure.links import MESSAGE_BYTES
from varuna.measure.optimizer import NO_OPTIMIZER, Form, MakeOptimizer, measure_optimizer
from varuna.measure.optimizer import merge as merge_optimizers
from varuna.measure.reductions import measure_reductions
from varuna.measure.stopwatch import Effort, stopwatch_for
from varuna.observe.progress_bar import watch
from varuna.plan.cut.blocks import partition
from varuna.profile.draft_file import Book, open_draft
from varuna.profile.link_probe import measure_link_between, measure_with_neighbours
from varuna.profile.ranks import Place, Places, Team
from varuna.profile.runnable import Batches, GetBatch, Parts, describe, finish_in, trained_forms
from varuna.profile.timing import AtSize, Bench, held_at_once, in_short, merged, own_kinds
from varuna.types import (
    OptimizerCost,
    PrecisionName,
    Profile,
    ReduceCost,
)

OPTIMIZER_EFFORT = Effort(seconds=0.5, fewest=5, most=30, warmups=2)
OPTIMIZER_ELEMENTS = 1 << 26
"""As many weights, at most, are made to time an optimizer on: 1 GiB with Adam's state."""
REDUCE_TIMEOUT_SECONDS = 120.0
MOST_NEIGHBOURS = 7
"""Processes that are started to reduce over: an all-reduce over more of them is estimated."""


class Profiler:
    """Measures a model's segments, the links, reductions and the optimizer, and writes `profile.json`.

        profiler = Profiler(model, get_batch, out_folder="profiles")
        profile = profiler.profile_all([1, 2, 4, 8])

    `get_batch(size)` returns a dict of the model's keyword arguments with so many samples. What an
    earlier run has measured, finished or not, is kept and extended. Any number of processes may run
    it together, started as for training; all get the profile, the first one writes it. The older form
    works too: `Profiler(model, device)`, `initialize(get_batch)`, `profile_all(get_batch, sizes,
    out_folder=...)`.
    """

    def __init__(
        self,
        model: nn.Module,
        get_batch: GetBatch | int | str | torch.device | None = None,
        device: int | str | torch.device = -1,
        gpus_per_node: int | None = None,
        fp16: bool = False,
        out_folder: str | os.PathLike[str] = "profiles",
        *,
        precision: PrecisionName | None = None,
        batch_dims: Mapping[str, int | None] | None = None,
        shared_weights: Sequence[tuple[str, str]] | None = None,
        initialize: Any = None,
        add_to_existing: bool = True,
        message_bytes: Sequence[int] = MESSAGE_BYTES,
        effort: Effort = Effort(),  # noqa: B008 - a value, never changed
    ) -> None:
        precision = precision or ("fp16" if fp16 else "fp32")
        check_name("precision", precision, get_args(PrecisionName))
        if gpus_per_node is not None and not _is_positive(gpus_per_node):
            raise ValueError(f"gpus_per_node must be a positive whole number, not {gpus_per_node!r}")
        if get_batch is not None and not callable(get_batch):
            device, get_batch = get_batch, None
        self._team = Team()
        self.device = find_device(device, int(os.environ.get("LOCAL_RANK", -1)), self._team.rank)
        self._get_batch = get_batch
        self._gpus_per_node = gpus_per_node
        self._out_folder = Path(out_folder)
        self._initialize = initialize
        self._extends = add_to_existing
        self._message_bytes = check_sizes("message_bytes", message_bytes)
        self._effort = effort
        self._model = model  # the source below keeps none of its values
        self._source = Source(
            model,
            batch_dims=batch_dims,
            shared_weights=shared_weights,
            precision=precision,
            device_type=self.device.type,
            partition=partition,
            watch=watch(speaks=self._team.rank == 0),
        )
        self._make_optimizer: MakeOptimizer | None = None

    def initialize(self, get_batch: GetBatch) -> None:
        """Says where samples come from, where that was not said at once."""
        self._get_batch = get_batch

    def set_optimizer(self, optimizer: torch.optim.Optimizer | MakeOptimizer) -> None:
        """An optimizer like the one that will train, or what makes one of parameters.

        Without, a profile keeps the one that it has, and a new one is made with AdamW.
        """
        if isinstance(optimizer, torch.optim.Optimizer):
            kind: Any = type(optimizer)
            defaults = dict(optimizer.defaults)
            self._make_optimizer = lambda parameters: kind(parameters, **defaults)
        else:
            self._make_optimizer = optimizer

    def profile_all(
        self,
        microbatch_sizes: Iterable[int] | GetBatch,
        sizes: Iterable[int] = (),
        out_folder: str | os.PathLike[str] | None = None,
    ) -> Profile:
        """Measures what is not measured yet, at these micro-batch sizes, and returns the whole profile."""
        if callable(microbatch_sizes):
            self._get_batch, microbatch_sizes = microbatch_sizes, sizes
        wanted = check_sizes("the micro-batch sizes", microbatch_sizes)
        if self._get_batch is None:
            raise ValueError(
                "no get_batch is known (give it to Profiler(model, get_batch), or to initialize)"
            )
        batches, captured, subject, places = self._prepare(self._get_batch)
        folder = Path(out_folder or self._out_folder)
        draft = self._team.on_first(lambda: open_draft(folder, subject, extends=self._extends))
        book = Book(folder, draft, writes=self._team.rank == 0)
        with reporting(self._team.rank == 0) as report:
            self._measure_processes(book, places, report)
            self._measure_optimizer(book, captured, places, report)
            self._measure_sizes(book, batches, wanted, places, report)
        profile = book.draft.profile()
        assert profile is not None
        return profile

    def _prepare(self, get_batch: GetBatch) -> tuple[Batches, Captured, Subject, Places]:
        """Looks at the model; all ranks must see the same."""
        cores = len(os.sched_getaffinity(0)) // torch.get_num_threads()
        places = Places(self._team.gather(Place(machine_identity(), str(self.device), cores)))
        found: list[tuple[Batches, Captured, Subject]] = []

        def look() -> str:
            batches = Batches(get_batch, self._source)
            captured = self._source.capture(batches.sample, training=True)
            subject = describe(
                self._source,
                captured,
                sample_bytes=batches.sample_bytes,
                device=self.device,
                devices_per_machine=self._gpus_per_node or places.beside(self._team.rank),
            )
            found.append((batches, captured, subject))
            return subject.fingerprint

        fingerprints = self._team.together(look)
        if len(set(fingerprints)) > 1:
            differing = [rank for rank, other in enumerate(fingerprints) if other != fingerprints[0]]
            raise ValueError(
                f"ranks {differing} profile another model than rank 0 (build the same model, with the same "
                "CutPoints and batches, on every rank)"
            )
        return *found[0], places

    # ------------------------------------------------------------ what goes between processes

    def _measure_processes(self, book: Book, places: Places, report: Report) -> None:
        team, draft = self._team, book.draft
        if draft.fixed_bytes is None or draft.within is None:
            with report.item("links within a machine"):
                near = team.on_first(
                    lambda: measure_with_neighbours(self._neighbours(), self.device, self._message_bytes)
                )
                book.add(fixed_bytes=near.fixed_bytes, within=near.link)
                if team.size == 1:
                    book.add(reductions=near.reductions)
        pair = places.far_pair
        if draft.between is None and pair is not None:
            with report.item("links between machines"):
                host = own_address()
                far = team.together(
                    lambda: measure_link_between(
                        pair,
                        team.rank,
                        team.gather,
                        device=self.device,
                        sizes=self._message_bytes,
                        host=host,
                    )
                )
                book.add(book.draft.without_note("between"), between=far[pair[0]])
        if book.draft.between is None:
            book.add(book.draft.with_note("between", "all processes ran on one machine"))
        if team.size > 1:
            self._measure_reductions(book, places, report)
        if not book.draft.reductions:
            why = "each rank must have a device of its own (start one process for each)"
            book.add(book.draft.with_note("reductions", why))

    def _neighbours(self) -> int:
        """How many processes to start beside this one: for links one, to reduce over as many as there are."""
        if self._team.size > 1 or self.device.type != "cpu":
            return 1
        return max(1, min((self._gpus_per_node or 2) - 1, MOST_NEIGHBOURS))

    def _measure_reductions(self, book: Book, places: Places, report: Report) -> None:
        known = {(cost.group_size, cost.between_machines) for cost in book.draft.reductions}
        for ranks, between in places.groups():
            if (len(ranks), between) in known or places.share_a_device(ranks):
                continue
            where = "over machines" if between else "within a machine"
            with report.item(f"all-reduce over {len(ranks)} ranks {where}"):
                found = self._team.together(lambda: self._reduce(ranks, between))  # noqa: B023 - called here
                book.add(book.draft.without_note("reductions"))
                book.add(reductions=(*book.draft.reductions, *found[ranks[0]]))

    def _reduce(self, ranks: tuple[int, ...], between: bool) -> list[ReduceCost]:
        if self._team.rank not in ranks:
            return []
        group = make_group(ranks, timeout_seconds=REDUCE_TIMEOUT_SECONDS)
        assert group is not None

        def all_reduce(tensor: Tensor) -> None:
            dist.all_reduce(tensor, group=group)

        return measure_reductions(
            all_reduce,
            lambda owned: share_values(owned, group),
            group_size=len(ranks),
            between_machines=between,
            device=self.device,
            stopwatch=stopwatch_for(self.device),
            sizes=self._message_bytes,
        )

    # ------------------------------------------------------------ what comes once a step

    def _measure_optimizer(self, book: Book, captured: Captured, places: Places, report: Report) -> None:
        """On the cores of a processor by all workers at once, for they share its memory when they train."""
        known = book.draft.optimizer
        if known is not None and self._make_optimizer is None:
            return
        make = self._make_optimizer or torch.optim.AdamW
        name = type(make([nn.Parameter(torch.zeros(1))])).__name__
        if known is not None and known.name in (name, NO_OPTIMIZER):
            return
        every = trained_forms(self._source, captured)
        together = self.device.type == "cpu"
        workers = places.workers() if together else [0]
        many = first_of(every, OPTIMIZER_ELEMENTS // (places.beside(self._team.rank) if together else 1))
        few = first_of(every, sum(form.numel for form in many) // 4)

        def measure() -> OptimizerCost | None:
            if self._team.rank not in workers:
                return None
            return measure_optimizer(
                make,
                few,
                many,
                device=self.device,
                finish=finish_in(self._source.precision),
                stopwatch=stopwatch_for(self.device),
                effort=msgspec.structs.replace(OPTIMIZER_EFFORT, quantile=self._effort.quantile),
            )

        with report.item(f"the optimizer, {name}"):
            found = self._team.together(measure)
            book.add(optimizer=merge_optimizers([cost for cost in found if cost is not None]))

    # ------------------------------------------------------------ the segments

    def _measure_sizes(
        self, book: Book, batches: Batches, wanted: Sequence[int], places: Places, report: Report
    ) -> None:
        missing = book.draft.missing_sizes(wanted)
        segments = book.draft.subject.segments
        parts = Parts(self._source, segments, device=self.device, initialize=self._initialize)
        for size in missing:
            about = f"micro-batch size {size}"
            with report.item(about):
                found = self._team.together(lambda: self._at_size(size, book.draft, batches, parts, places))  # noqa: B023
                why = next((one for one in found if isinstance(one, str)), None)
                if why is None:
                    measured = [one for one in found if isinstance(one, AtSize)]
                    overheads = book.draft.overheads or measured[0].overheads
                    draft = book.draft.without_note(about).with_sizes(merged(measured))
                    book.add(draft, overheads=overheads)
            if why is not None:
                self._leave_out(book, size, missing, why, report)
                break
        if not book.draft.measured_sizes():
            raise ValueError(
                f"no micro-batch size could be measured: {'; '.join(map(str, book.draft.notes))} "
                "(profile smaller ones, or on a device with more memory)"
            )

    def _leave_out(self, book: Book, size: int, missing: Sequence[int], why: str, report: Report) -> None:
        draft = book.draft.with_note(f"micro-batch size {size}", why)
        skipped = [other for other in missing if other > size]
        for other in skipped:
            draft = draft.with_note(f"micro-batch size {other}", f"not tried, for {size} was too large")
        book.add(draft)
        more = f"; {', '.join(map(str, skipped))} not tried" if skipped else ""
        report.say(f"micro-batch size {size} is left out: {why}{more}")

    def _at_size(
        self, size: int, draft: Draft, batches: Batches, parts: Parts, places: Places
    ) -> AtSize | str | None:
        """What those kinds of segments cost that fall to this rank; or why that cannot be known."""
        kinds = self._own_kinds(draft, places)
        if not kinds:
            return None
        why = _no_room(draft, size, available_bytes(self.device), places.beside(self._team.rank))
        if why is not None:
            return why
        inputs, batch = batches.of(size)
        captured = self._source.capture(inputs, training=True, batch=batch)
        bench = Bench(parts, self.device, self._effort)
        with_overheads = draft.overheads is None
        try:
            if self.device.type == "cpu":
                return bench.as_chain(
                    size, captured, inputs, num_kinds=len(kinds), with_overheads=with_overheads
                )
            return bench.one_by_one(size, captured, inputs, kinds=kinds, with_overheads=with_overheads)
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
            why = in_short(error)
        # From here on the error is gone, and with it the frames that held what it failed on.
        bench.let_go()
        return why

    def _own_kinds(self, draft: Draft, places: Places) -> list[int]:
        weights = [kind.parameter_bytes for kind in draft.subject.kinds]
        return own_kinds(self._team.rank, places, weights, self.device)


def check_sizes(what: str, sizes: object) -> list[int]:
    found = list(sizes) if isinstance(sizes, Iterable) and not isinstance(sizes, str) else []
    if not found or not all(map(_is_positive, found)):
        raise ValueError(
            f"{what} must be positive whole numbers, at least one, not {sizes!r} "
            "(write them as a list: [1, 2, 4, 8])"
        )
    return sorted(set(found))


def _is_positive(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def first_of(forms: Sequence[Form], elements: int) -> list[Form]:
    """As many of the first ones as have so many elements together; one at least, where there is any."""
    found: list[Form] = []
    for form in forms:
        if found and sum(other.numel for other in [*found, form]) > elements:
            break
        found.append(form)
    return found


def _no_room(draft: Draft, size: int, available: int | None, ranks: int) -> str | None:
    """Why a size is not even tried: where memory is lent beyond what there is, asking for it means death."""
    known = draft.measured_sizes()
    if available is None or not known:
        return None
    costs = [cost for kind in draft.sizes for cost in kind if cost.microbatch_size == known[-1]]
    most = max(cost.working_bytes + cost.split_bytes for cost in costs)
    held = held_at_once(len(draft.subject.segments), len(draft.sizes))
    activations = sum(cost.activation_bytes for cost in costs) * held
    needed = round((activations + most) * size / known[-1] * ranks)
    if needed <= available:
        return None
    return f"out of memory (it would need about {needed >> 20} MiB, {available >> 20} MiB are available)"


# ---------------------------------------------------------------- how far it is


class Report:
    """A line for each item that is done."""

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks

    @contextmanager
    def item(self, what: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.say(f"profiled {what} in {time.monotonic() - started:.1f} s")

    def say(self, text: str) -> None:
        if self._speaks:
            print(f"varuna: {text}", file=sys.stderr, flush=True)


class Bar(Report):
    """For a person who looks on: what is being measured, and what has been."""

    def __init__(self, bar: Progress) -> None:
        super().__init__(True)
        self._bar = bar

    @contextmanager
    def item(self, what: str) -> Iterator[None]:
        task = self._bar.add_task(what, total=None)
        yield
        self._bar.update(task, total=1, completed=1)

    def say(self, text: str) -> None:
        self._bar.console.print(text)


@contextmanager
def reporting(speaks: bool) -> Iterator[Report]:
    console = Console(stderr=True)
    if not speaks or not console.is_terminal:
        yield Report(speaks)
        return
    with Progress("{task.description}", BarColumn(), TimeElapsedColumn(), console=console) as bar:
        yield Bar(bar)
