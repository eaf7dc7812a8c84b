"""The class `Profiler`: measures once what a model costs on one kind of device."""

import inspect
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from varuna.capture import Captured, Source
from varuna.capture.model.call_convention import LossChoice
from varuna.errors import check_name
from varuna.execute.comm.address import own_address
from varuna.execute.comm.groups import make_group
from varuna.execute.device.facts import find_device
from varuna.execute.update.shard import share_values
from varuna.measure.draft import ProfileDraft, ProfileSubject
from varuna.measure.links import MESSAGE_BYTES
from varuna.measure.optimizer import NO_OPTIMIZER, MakeOptimizer
from varuna.measure.reductions import measure_reductions
from varuna.measure.stopwatch import Effort, stopwatch_for
from varuna.observe.progress_bar import capture_progress
from varuna.plan.cut.blocks import partition
from varuna.profile.description import GetBatch, ProfileBatches, describe
from varuna.profile.draft_file import DraftFile, open_draft
from varuna.profile.driver import CompleteSizes, MeasurementDriver
from varuna.profile.link_probe import ProcessCosts, measure_with_processes
from varuna.profile.ranks import find_places, join_ranks, on_all, on_first
from varuna.profile.report import open_report
from varuna.profile.runnable import SegmentFactory
from varuna.profile.timing import SegmentBench, SizeBatch
from varuna.types import PrecisionName, Profile, ReduceCost

log = logging.getLogger("varuna")

OPTIMIZER_EFFORT = Effort(seconds=0.5, fewest=5, most=30, warmups=2)
OPTIMIZER_ELEMENTS = 1 << 26
"""Most weights that an optimizer is measured on: 1 GiB with the state of Adam."""
REDUCE_TIMEOUT_SECONDS = 120.0
MOST_PROCESSES = 7
"""Most processes that a single rank starts to reduce over; larger groups are estimated."""


class Profiler:
    """Measures a model's segments, links, reductions and optimizer, and writes `profile.json`.

        profiler = Profiler(model, get_batch, out_folder="profiles")
        profile = profiler.profile_all([1, 2, 4, 8])

    `get_batch(size)` returns a dict of the model's keyword arguments with `size` samples. Results of an
    earlier run, finished or not, are kept and extended. Several processes can run it together, started
    as for training: all of them return the profile, and rank 0 writes it. The older form works as well:
    `Profiler(model, device)`, `initialize(get_batch)`, `profile_all(get_batch, sizes, out_folder=...)`.
    `pstages_to_profile` and `from_cache` are arguments of the original Varuna: all segments are measured,
    and the model is captured in each run. `add_to_existing=False` starts a new profile.
    """

    def __init__(
        self,
        model: nn.Module,
        get_batch: GetBatch | int | str | torch.device | None = None,
        device: int | str | torch.device = -1,
        gpus_per_node: int | None = None,
        fp16: bool = False,
        out_folder: str | os.PathLike[str] = "profiles",
        pstages_to_profile: Sequence[int] | None = None,
        from_cache: bool = True,
        add_to_existing: bool = True,
        *,
        precision: PrecisionName | None = None,
        batch_dims: Mapping[str, int | None] | None = None,
        loss: LossChoice = None,
        shared_weights: Sequence[tuple[str, str]] | None = None,
        initialize: Any = None,
        message_bytes: Sequence[int] = MESSAGE_BYTES,
        effort: Effort = Effort(),  # noqa: B008 - a value, never changed
    ) -> None:
        precision = precision or ("fp16" if fp16 else "fp32")
        check_name("precision", precision, get_args(PrecisionName))
        if gpus_per_node is not None and not _is_positive(gpus_per_node):
            raise ValueError(f"gpus_per_node must be a positive whole number, not {gpus_per_node!r}")
        if get_batch is not None and not callable(get_batch):
            device, get_batch = get_batch, None
        self._ranks = join_ranks()
        if pstages_to_profile is not None and self._ranks.rank == 0:
            log.warning("pstages_to_profile has no effect: the ranks share all segments")
        self.device = find_device(device, int(os.environ.get("LOCAL_RANK", -1)), self._ranks.rank)
        self._get_batch = get_batch
        self._gpus_per_node = gpus_per_node
        self._out_folder = Path(out_folder)
        self._initialize = initialize
        self._extends = add_to_existing
        self._message_bytes = check_sizes("message_bytes", message_bytes)
        self._effort = effort
        self._model = model  # keeps the values alive: the source below does not
        self._source = Source(
            model,
            batch_dims=batch_dims,
            shared_weights=shared_weights,
            precision=precision,
            device_type=self.device.type,
            partition=partition,
            loss=loss,
            watch=capture_progress(shown=self._ranks.rank == 0),
        )
        self._make_optimizer: MakeOptimizer | None = None

    def initialize(self, get_batch: GetBatch) -> None:
        """Set `get_batch`, if it was not given to `Profiler`."""
        self._get_batch = get_batch

    def set_optimizer(
        self,
        optimizer: torch.optim.Optimizer | MakeOptimizer,
        amp_opt_level: str = "O2",
        loss_scale: float | str = "dynamic",
        init_loss_scale: float = 2**20,
        min_loss_scale: float | None = None,
    ) -> None:
        """Set the optimizer to measure: one like yours, or a function that makes one from parameters.

        Without this call an existing profile keeps its optimizer, and a new one uses AdamW. The other
        arguments are those of the original Varuna: a loss scale does not change the measured times.
        """
        self._make_optimizer = (
            same_optimizer(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        )

    def profile_all(
        self,
        microbatch_sizes: Iterable[int] | GetBatch,
        sizes: Iterable[int] = (),
        out_folder: str | os.PathLike[str] | None = None,
    ) -> Profile:
        """Measure what is missing at these micro-batch sizes, and return the whole profile."""
        if callable(microbatch_sizes):
            self._get_batch, microbatch_sizes = microbatch_sizes, sizes
        wanted = check_sizes("the micro-batch sizes", microbatch_sizes)
        if self._get_batch is None:
            raise ValueError("get_batch is missing (pass it to Profiler(model, get_batch) or to initialize)")
        ranks, places = self._ranks, find_places(self._ranks, self.device)
        devices_per_machine = self._gpus_per_node or places.num_on_machine(ranks.rank)
        batches, captured, subject = self._prepare(self._get_batch, devices_per_machine)
        folder = Path(out_folder or self._out_folder)
        draft = on_first(ranks, lambda: open_draft(folder, subject, extends=self._extends), ProfileDraft)
        file = DraftFile(draft, folder if ranks.rank == 0 else None)
        with open_report(enabled=ranks.rank == 0) as report:
            driver = MeasurementDriver(ranks, places, self._source, self.device, file, report)
            self._measure_processes(driver)
            self._measure_optimizer(driver, captured)
            self._measure_sizes(driver, batches, wanted)
        profile = file.draft.profile()
        assert profile is not None
        return profile

    def _prepare(
        self, get_batch: GetBatch, devices_per_machine: int
    ) -> tuple[ProfileBatches, Captured, ProfileSubject]:
        """Capture the model on every rank; raise ValueError if ranks captured different models."""
        prepared: list[tuple[ProfileBatches, Captured, ProfileSubject]] = []

        def prepare() -> str:
            batches = ProfileBatches(get_batch, self._source)
            captured = self._source.capture(batches.sample, training=True)
            subject = describe(
                self._source,
                captured,
                sample_bytes=batches.sample_bytes,
                device=self.device,
                devices_per_machine=devices_per_machine,
            )
            prepared.append((batches, captured, subject))
            return subject.fingerprint

        fingerprints = on_all(self._ranks, prepare, str)
        if len(set(fingerprints)) > 1:
            differing = [rank for rank, other in enumerate(fingerprints) if other != fingerprints[0]]
            raise ValueError(
                f"ranks {differing} profile another model than rank 0 (build the same model, with the same "
                "CutPoints and batches, on every rank)"
            )
        return prepared[0]

    def _measure_processes(self, driver: MeasurementDriver) -> None:
        ranks, file = self._ranks, driver.file
        if file.draft.fixed_bytes is None or file.draft.within is None:
            processes = 1  # for links; more to reduce over on a CPU
            if len(ranks.ranks) == 1 and self.device.type == "cpu":
                processes = max(1, min((self._gpus_per_node or 2) - 1, MOST_PROCESSES))
            with driver.report.item("links within a machine"):
                found = on_first(
                    ranks,
                    lambda: measure_with_processes(processes, self.device, self._message_bytes),
                    ProcessCosts,
                )
                file.add(fixed_bytes=found.fixed_bytes, within=found.link)
                if len(ranks.ranks) == 1:
                    file.add(reductions=found.reductions)
        pair = driver.places.far_pair
        if file.draft.between is None and pair is not None:
            with driver.report.item("links between machines"):
                link = driver.measure_link(pair, self._message_bytes, host=own_address())
                file.add(file.draft.without_note("between"), between=link)
        if file.draft.between is None:
            file.add(file.draft.with_note("between", "all processes ran on one machine"))
        if len(ranks.ranks) > 1:
            self._measure_reductions(driver)
        if not file.draft.reductions:
            why = "each rank must have a device of its own (start one process for each device)"
            file.add(file.draft.with_note("reductions", why))

    def _measure_reductions(self, driver: MeasurementDriver) -> None:
        file = driver.file
        known = {(cost.group_size, cost.between_machines) for cost in file.draft.reductions}
        for ranks, between in driver.places.groups():
            if (len(ranks), between) in known or driver.places.share_a_device(ranks):
                continue
            where = "over machines" if between else "within a machine"
            with driver.report.item(f"all-reduce over {len(ranks)} ranks {where}"):
                found = on_all(
                    self._ranks,
                    lambda: self._reduce(ranks, between),  # noqa: B023 - called here
                    list[ReduceCost],
                )
                file.add(file.draft.without_note("reductions"))
                file.add(reductions=(*file.draft.reductions, *found[ranks[0]]))

    def _reduce(self, ranks: tuple[int, ...], between: bool) -> list[ReduceCost]:
        if self._ranks.rank not in ranks:
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

    def _measure_optimizer(self, driver: MeasurementDriver, captured: Captured) -> None:
        known = driver.file.draft.optimizer
        if known is not None and self._make_optimizer is None:
            return
        make = self._make_optimizer or torch.optim.AdamW
        name = type(make([nn.Parameter(torch.zeros(1))])).__name__
        if known is not None and known.name in (name, NO_OPTIMIZER):
            return
        on_cpu = self.device.type == "cpu"
        sharers = driver.places.num_on_machine(self._ranks.rank) if on_cpu else 1
        with driver.report.item(f"the optimizer, {name}"):
            cost = driver.measure_optimizer(
                make,
                captured,
                workers=driver.places.workers() if on_cpu else [0],
                elements=OPTIMIZER_ELEMENTS // sharers,
                effort=msgspec.structs.replace(OPTIMIZER_EFFORT, quantile=self._effort.quantile),
            )
            driver.file.add(optimizer=cost)

    def _measure_sizes(
        self, driver: MeasurementDriver, batches: ProfileBatches, wanted: Sequence[int]
    ) -> None:
        file = driver.file
        segments = file.draft.subject.segments
        factory = SegmentFactory(self._source, segments, device=self.device, initialize=self._initialize)

        def batch(size: int) -> SizeBatch:
            inputs, found = batches.of(size)
            return SizeBatch(size, self._source.capture(inputs, training=True, batch=found), inputs)

        missing = file.draft.missing_sizes(wanted)
        ranks_on_machine = driver.places.num_on_machine(self._ranks.rank)
        driver.sweep(
            missing,
            batch,
            SegmentBench(factory, self.device, self._effort),
            CompleteSizes(missing, self.device, ranks_on_machine),
        )
        if not file.draft.measured_sizes():
            raise ValueError(
                f"no micro-batch size could be measured: {'; '.join(map(str, file.draft.notes))} "
                "(profile smaller sizes, or use a device with more memory)"
            )


def same_optimizer(optimizer: torch.optim.Optimizer) -> MakeOptimizer:
    """Return a function that makes optimizers of the same class with the same defaults.

    AdamW's defaults have an option that its constructor does not take.
    """
    kind: Any = type(optimizer)
    taken = inspect.signature(kind).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())
    defaults = {name: value for name, value in optimizer.defaults.items() if takes_all or name in taken}
    return lambda parameters: kind(parameters, **defaults)


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
