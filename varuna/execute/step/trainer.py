"""One step of the whole job on one rank: scatter the batch, run the stage, reduce, synchronize buffers.

The trainer gets a plan, this rank's stage and its session. A callable returns the program for a micro-batch's
inputs, so the trainer does not depend on how models are captured.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from varuna.execute.comm.session import Session
from varuna.execute.comm.stage_links import StageLinks
from varuna.execute.device.profiled import profiled
from varuna.execute.device.queued_work import wait_for_queued
from varuna.execute.step.division import Division, check_equal_batches, divide_batch
from varuna.execute.step.engine import Engine, Keep, MicroBatchJob
from varuna.execute.step.nonfinite import NonFiniteLosses, NonFiniteSearch
from varuna.execute.step.same_data import check_same_samples, find_equal_replicas, hash_samples
from varuna.execute.step.scatter import MicroBatch, WeightFunction, scatter, scatter_runs, with_leaves
from varuna.execute.step.stage import HeldMicroBatch, IdleProgram, StageProgram, TensorsByName
from varuna.execute.step.whole_batch import own_totals, with_totals
from varuna.execute.update.buffers import synchronize_buffers
from varuna.execute.update.clipping import ModelNorm
from varuna.execute.update.precision import LossScale
from varuna.execute.update.reduce import Reducer, StepTotals
from varuna.schedule import limit, opportunistic, row
from varuna.types import Plan, Work, spread_evenly

log = logging.getLogger("varuna")


Programs = Callable[[Mapping[str, object], int, Mapping[str, int], bool], StageProgram]
"""Returns the program for micro-batches with these inputs, size and dims, in training or not."""


def _one(_inputs: object) -> float:
    """Weight of micro-batches whose losses add up."""
    return 1.0


class StepCommit(Protocol):
    """Tells all ranks that the gradients are whole here, and waits until they are whole on all ranks."""

    def begin(self) -> None: ...  # possible as soon as this rank needs no other rank any more in this step
    def finish(self, totals: StepTotals, /) -> object: ...  # begins, if nobody has


class ModelTraits(Protocol):
    """Properties of a model that make a replica's step depend on the other replicas."""

    @property
    def random(self) -> bool: ...
    @property
    def changes_buffers(self) -> bool: ...  # anywhere in the model, so that all stages decide alike
    @property
    def momentum(self) -> Mapping[str, float | None]: ...


@dataclass(frozen=True)
class ReplicaShares:
    """Distribution of a step's samples over the replicas."""

    first_sample: int  # of this replica, within the global batch
    total_weight: float  # of all replicas, or of a full batch
    num_microbatches: Sequence[int]  # by replica
    totals: Tensor | None = None  # of the whole batch, if the loss divides by any
    num_samples: int | None = None  # of the whole batch, if the ranks have exchanged them


@dataclass
class ForwardedBatch:
    """A batch between its forwards and its backwards, on one rank."""

    jobs: Sequence[MicroBatchJob]
    results: Sequence[Sequence[Tensor]]  # of each micro-batch, on the last stage; empty without samples
    held: dict[int, HeldMicroBatch]
    division: Division


@dataclass
class Trainer:
    plan: Plan
    session: Session
    engine: Engine
    reducer: Reducer
    state: TensorsByName
    traits: ModelTraits
    programs: Programs
    mutated: Sequence[str]  # buffers of this stage that its forwards change
    seed: int
    losses: NonFiniteLosses
    weigh: WeightFunction | None = None
    sums_losses: bool = False  # losses of micro-batches add up; else the loss is their mean by weight
    num_totals: int = 0  # numbers of the whole batch that this stage's programs read
    first_run_patience: float = 1.0  # multiplies timeouts when a program runs for the first time: it compiles
    iteration: int = 0
    random_step: int | None = None  # step that seeds random numbers; None: the iteration
    norm: ModelNorm | None = None  # None: torch's clipping functions are not used
    commit: StepCommit | None = None
    _checked: set[bool] = field(default_factory=set)  # a batch of evaluation (False), of training (True)
    _known_programs: set[int] = field(default_factory=set)

    def step(
        self,
        inputs: Mapping[str, object],
        *,
        num_samples: int,
        dims: Mapping[str, int],
        training: bool,
        loss_scale: LossScale,
        max_norm: float | None,
    ) -> StepTotals:
        if self.session.uneven:
            jobs, shares = self._divide(inputs, num_samples, dims, training)
        else:
            self._check_samples(inputs, dims, training)
            microbatches = self._scatter(inputs, num_samples, dims)
            own = self._own_totals(inputs, num_samples, dims, training, microbatches)
            shares = self._exchange_shares(microbatches, num_samples, own)
            jobs = self._jobs(self.programs, microbatches, dims, training, shares.first_sample)
            jobs = with_totals(jobs, shares.totals)
        self.reducer.begin()
        self.reducer.on_whole = self._early_commit()
        before = self.copy_buffers() if self.losses.skips else {}
        with self._patience(jobs), self._synchronized_buffers(shares):
            self._run(jobs, shares.total_weight, loss_scale)
            self.engine.where = f"stage {self.session.stage}, reducing the gradients"
            started = time.perf_counter()
            with profiled("reduce"):
                totals = self.reducer.finish(
                    nominal_weight=shares.total_weight,
                    loss_scale=loss_scale.value,
                    checks_overflow=loss_scale.checks_overflow,
                    max_norm=max_norm,
                    skips_nan=self.losses.skips,
                    sums=self.sums_losses,
                )
            self.engine.recorder.add("reduce", -1, started, time.perf_counter())
        totals = replace(totals, samples=self._count_samples(shares, totals.weight, own=num_samples))
        loss_scale.update(overflow=totals.overflow)
        if not math.isfinite(totals.loss):
            self.restore_buffers(before)
        self.losses.handle(
            totals.loss,
            self.iteration,
            self.reducer.weights,
            lambda search: self._repeat_forward(search, inputs, num_samples, dims, training, shares),
        )
        if self.commit is not None:
            wait_for_queued(self.engine.device, self.session.waiter)  # else wrong gradients may count
            self.commit.finish(totals)
        self.iteration += 1
        return totals

    def _early_commit(self) -> Callable[[], None]:
        """Return what begins the commit while the gradients are scaled, if nothing can fail afterwards."""
        waits_afterwards = bool(self.mutated) or self.engine.device.type == "cuda"
        return (lambda: None) if self.commit is None or waits_afterwards else self.commit.begin

    def evaluate(self, inputs: Mapping[str, object], *, num_samples: int, dims: Mapping[str, int]) -> float:
        if self.session.uneven:
            jobs, _ = self._divide(inputs, num_samples, dims, False)
        else:
            self._check_samples(inputs, dims, False)
            microbatches = self._scatter(inputs, num_samples, dims)
            own = self._own_totals(inputs, num_samples, dims, False, microbatches)
            jobs = self._jobs(self.programs, microbatches, dims, False, 0)
            jobs = with_totals(jobs, self._sum_totals(own))
        with self._patience(jobs):
            with self._buffers_restored(jobs):
                loss = self.engine.evaluate(jobs)
            self.reducer.announce(loss, self._weight_of_losses(jobs))
            return self.reducer.announced_loss(sums=self.sums_losses)

    def _patience(self, jobs: Sequence[MicroBatchJob]) -> AbstractContextManager[None]:
        """Allow other ranks more time in a step that compiles a program."""
        if self.first_run_patience == 1.0:
            return nullcontext()
        programs = {id(job.program) for job in jobs if not isinstance(job.program, IdleProgram)}
        is_first_run = not programs <= self._known_programs
        self._known_programs |= programs
        return self.session.patient(self.first_run_patience if is_first_run else 1.0)

    def _repeat_forward(
        self,
        search: NonFiniteSearch,
        inputs: Mapping[str, object],
        num_samples: int,
        dims: Mapping[str, int],
        training: bool,
        shares: ReplicaShares,
    ) -> None:
        """Run the forwards of this step again and give the outputs of this stage to the search."""
        if self.session.uneven:
            jobs, _ = self._divide(inputs, num_samples, dims, training)
        else:
            microbatches = self._scatter(inputs, num_samples, dims)
            jobs = self._jobs(self.programs, microbatches, dims, training, shares.first_sample)
            jobs = with_totals(jobs, shares.totals)
        self.engine.stage.inspect = search.check
        try:
            with self._buffers_restored(jobs):
                self.engine.forwards(jobs, keep="nothing")
        finally:
            self.engine.stage.inspect = None

    @contextmanager
    def _buffers_restored(self, jobs: Sequence[MicroBatchJob]) -> Iterator[None]:
        """Restore buffers afterwards: a model may change them in evaluation too."""
        names = dict.fromkeys(name for job in jobs for name in job.program.mutated)
        before = self.copy_buffers(names)
        try:
            yield
        finally:
            self.restore_buffers(before)

    def copy_buffers(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Copy buffers; None: those that forwards change."""
        return {name: self.state.tensor(name).clone() for name in (self.mutated if names is None else names)}

    def restore_buffers(self, before: Mapping[str, Tensor]) -> None:
        for name, value in before.items():
            self.state.tensor(name).data.copy_(value)

    def forwards(
        self,
        inputs: Mapping[str, object],
        *,
        programs: Programs,
        division: Division,
        dims: Mapping[str, int],
        training: bool,
        gradients: Sequence[str],  # inputs that get a gradient
        keeps: bool,  # keep what a backward needs
        num_totals: int = 0,  # numbers of the whole batch that these programs read
    ) -> ForwardedBatch:
        # Other stages than the last one may not have the inputs.
        microbatches = self._own_microbatches(inputs, dims, division, self.weigh if self._is_last else None)
        first, stop = division.own
        own = self._own_totals(
            inputs, stop - first, dims, training, microbatches, programs=programs, num_totals=num_totals
        )
        totals = self._sum_totals(own)
        if keeps:
            microbatches = [with_leaves(microbatch, gradients) for microbatch in microbatches]
        jobs = self._jobs(programs, microbatches, dims, training, first, idle=IdleProgram((), None))
        jobs = with_totals(jobs, totals)
        self._begin_stage_links(division, jobs)
        shares = ReplicaShares(first, float(division.num_samples), division.num_microbatches)
        recompute = self.plan.stages[self.session.stage].recompute
        keep: Keep = "nothing" if not keeps else "inputs" if recompute else "graph"
        with self._synchronized_buffers(shares) if training else nullcontext():
            results = self.engine.forwards(jobs, keep=keep)
        self.iteration += training
        return ForwardedBatch(jobs, results, self.engine.stage.take_held(), division)

    def backwards(
        self,
        batch: ForwardedBatch,
        gradients: Sequence[Sequence[Tensor | None]],  # of the results, on the last stage
        *,
        again: bool,
        reduces: bool,  # reduce all of `.grad` that `begin` has not set aside
    ) -> None:
        self.engine.recorder.clear()
        self.engine.stage.held = batch.held
        self._begin_stage_links(batch.division, batch.jobs)
        self.engine.backwards(
            batch.jobs,
            gradients,
            again=again,
            before_last=self.reducer.expect_last_backward if reduces else lambda: lambda: None,
        )
        batch.held = self.engine.stage.take_held()
        if reduces:
            self.engine.where = f"stage {self.session.stage}, reducing the gradients"
            self.reducer.reduce_gradients()

    @contextmanager
    def _synchronized_buffers(self, shares: ReplicaShares) -> Iterator[None]:
        """Make the buffers that forwards in this block change equal on all replicas."""
        if self.session.width == 1 or not self.mutated:
            yield
            return
        # As `.data`: autograd has saved them for a later backward, which does not use their values.
        buffers = {name: self.state.tensor(name).data for name in self.mutated}
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        yield
        with torch.no_grad():
            synchronize_buffers(
                before,
                buffers,
                momentum=self.traits.momentum,
                counts=shares.num_microbatches,
                replica=self.session.replica,
                reduce=self.reducer.sum_over_replicas,
            )

    def _scatter(
        self, inputs: Mapping[str, object], num_samples: int, dims: Mapping[str, int]
    ) -> list[MicroBatch]:
        return scatter(
            inputs,
            num_samples=num_samples,
            dims=dims,
            microbatch_size=self.plan.microbatch_size,
            device=self.engine.device,
            weigh=_one if self.sums_losses else self.weigh,
        )

    def _own_microbatches(
        self,
        inputs: Mapping[str, object],
        dims: Mapping[str, int],
        division: Division,
        weigh: WeightFunction | None,
    ) -> list[MicroBatch]:
        first = division.own[0]
        own = [tuple((a - first, b - first) for a, b in runs) for runs in division.runs]
        return scatter_runs(inputs, dims=dims, microbatches=own, device=self.engine.device, weigh=weigh)

    def _jobs(
        self,
        programs: Programs,
        microbatches: Sequence[MicroBatch],
        dims: Mapping[str, int],
        training: bool,
        first_sample: int,
        *,
        idle: IdleProgram | None = None,  # None: one with a zero loss on the last stage
    ) -> list[MicroBatchJob]:
        idle = idle or IdleProgram((), self.engine.device if self._is_last else None)
        by_size: dict[int, StageProgram] = {0: idle}
        step = self.iteration if self.random_step is None else self.random_step
        jobs = []
        for mb in microbatches:
            if mb.size not in by_size:
                by_size[mb.size] = programs(mb.inputs, mb.size, dims, training)
            spans = tuple((first_sample + first, first_sample + stop) for first, stop in mb.runs)
            work = Work(self.seed, step, first_sample + mb.first_sample, spans=spans)
            jobs.append(MicroBatchJob(mb, by_size[mb.size], work))
        return jobs

    def _own_totals(
        self,
        inputs: Mapping[str, object],
        num_samples: int,
        dims: Mapping[str, int],
        training: bool,
        microbatches: Sequence[MicroBatch],
        *,
        programs: Programs | None = None,  # None: of the first call
        num_totals: int | None = None,
    ) -> Tensor | None:
        """Return the totals over this rank's samples, if this stage needs those of the whole batch."""
        programs = programs or self.programs
        length = self.num_totals if num_totals is None else num_totals
        if not length:
            return None
        sizes = {mb.size: mb for mb in microbatches if mb.size}
        return own_totals(
            {size: programs(mb.inputs, size, dims, training) for size, mb in sizes.items()},
            inputs,
            num_samples,
            dims=dims,
            length=length,
            tensor=self.state.tensor,
            device=self.engine.device,
        )

    def _sum_totals(self, own: Tensor | None) -> Tensor | None:
        """Sum totals over the replicas of this stage."""
        if own is not None and self.session.width > 1:
            own = torch.tensor(self.session.gather_over_replicas(own.tolist()), dtype=torch.float64).sum(0)
        return None if own is None else own.to(self.engine.device, non_blocking=True)

    def _exchange_shares(
        self, microbatches: Sequence[MicroBatch], num_samples: int, own: Tensor | None
    ) -> ReplicaShares:
        """Gather the shares of all replicas, if the step depends on them. One small message."""
        weight = sum(mb.weight for mb in microbatches)
        if self.sums_losses:
            return self._exchange_totals(num_samples, len(microbatches), own)
        if self.plan.width == 1:
            return ReplicaShares(0, weight or 1.0, [len(microbatches)], num_samples=num_samples)
        if self.weigh is None and not self.traits.random and not self.traits.changes_buffers:
            return ReplicaShares(0, float(self.plan.batch_size), [])
        gathered = self.session.gather_over_replicas((weight, num_samples, len(microbatches)))
        self.session.check_calls(gathered, self.session.stage_map[self.session.stage])
        return ReplicaShares(
            sum(int(theirs) for _, theirs, _ in gathered[: self.session.replica]),
            sum(theirs for theirs, _, _ in gathered) or 1.0,
            [int(count) for _, _, count in gathered],
            num_samples=sum(int(theirs) for _, theirs, _ in gathered),
        )

    def _exchange_totals(self, num_samples: int, count: int, own: Tensor | None) -> ReplicaShares:
        """Gather shares and totals. A single total fits into the message with the shares."""
        if self.plan.width == 1:
            return ReplicaShares(0, 1.0, [count], self._sum_totals(own), num_samples)
        if own is None and not self.traits.random and not self.traits.changes_buffers:
            return ReplicaShares(0, 1.0, [])
        fits = own is not None and len(own) == 2
        message = (num_samples, count, float(own[1]) if own is not None and fits else 0.0)
        gathered = self.session.gather_over_replicas(message)
        self.session.check_calls(gathered, self.session.stage_map[self.session.stage])
        counts = [int(theirs) for theirs, _, _ in gathered]
        totals = None if fits else self._sum_totals(own)
        if fits:
            both = [sum(counts), sum(total for _, _, total in gathered)]
            totals = torch.tensor(both, dtype=torch.float64, device=self.engine.device)
        first = sum(counts[: self.session.replica])
        return ReplicaShares(first, 1.0, [int(number) for _, number, _ in gathered], totals, sum(counts))

    def _count_samples(self, shares: ReplicaShares, weight: float, *, own: int) -> int:
        """Return the samples of the whole batch; estimate them if the ranks have exchanged no such number."""
        if shares.num_samples is not None:
            return shares.num_samples
        if not self.sums_losses:
            return round(weight)
        share = spread_evenly(self.plan.batch_size, parts=self.plan.width)[self.session.replica]
        return round(self.plan.batch_size * own / share) if share else self.plan.batch_size

    def _divide(
        self, inputs: Mapping[str, object], num_samples: int, dims: Mapping[str, int], training: bool
    ) -> tuple[list[MicroBatchJob], ReplicaShares]:
        """Return this rank's part of every micro-batch, if stages differ in their number of replicas."""
        session = self.session
        counts = session.gather_by_stage([num_samples, 0, 0])
        for ranks, messages in zip(session.stage_map, counts, strict=True):
            session.check_calls(messages, ranks)
        given = tuple(tuple(int(count) for count, *_ in messages) for messages in counts)
        check_equal_batches(given, session.stage_map)
        self._check_samples(inputs, dims, training)
        division = divide_batch(
            given, stage=session.stage, replica=session.replica, microbatch_size=self.plan.microbatch_size
        )
        first = division.own[0]
        weigh = _one if self.sums_losses else self.weigh
        microbatches = self._own_microbatches(inputs, dims, division, weigh)
        jobs = self._jobs(self.programs, microbatches, dims, training, first)
        total, num_microbatches = float(division.num_samples), division.num_microbatches
        if self.weigh is not None:
            for number, job in enumerate(jobs):  # the loss of a micro-batch with weight 0 may not be finite
                if self._is_last and not job.microbatch.weight:
                    idle = IdleProgram(job.program.received, self.engine.device)
                    jobs[number] = replace(job, program=idle)
            num_run = sum(not isinstance(job.program, IdleProgram) for job in jobs)
            gathered = session.gather_by_stage((self._weight_of_losses(jobs), num_run))
            total = sum(weight for weight, _ in gathered[-1])
            num_microbatches = tuple(int(number) for _, number in gathered[session.stage])
        own = self._own_totals(inputs, num_samples, dims, training, microbatches)
        totals = self._sum_totals(own)
        self._begin_stage_links(division, jobs)
        total = 1.0 if self.sums_losses else total or 1.0
        shares = ReplicaShares(first, total, num_microbatches, totals, division.num_samples)
        return with_totals(jobs, totals), shares

    def _begin_stage_links(self, division: Division, jobs: Sequence[MicroBatchJob]) -> None:
        """Set what is exchanged with each replica of an adjacent stage. A single peer gets everything."""
        for adjacent, slices, specs in (
            (self.engine.upstream, division.before, [job.program.received for job in jobs]),
            (self.engine.downstream, division.after, [job.program.sent for job in jobs]),
        ):
            if isinstance(adjacent, StageLinks):
                adjacent.begin(slices, specs)

    def _check_samples(self, inputs: Mapping[str, object], dims: Mapping[str, int], training: bool) -> None:
        """Compare the samples of all ranks in the first batch: wrong loaders are wrong from the start."""
        ranks = self.plan.ranks
        if len(ranks) == 1 or training in self._checked:
            return
        self._checked.add(training)
        found = dict(
            zip(ranks, self.session.gather(hash_samples(inputs, dims), dict[str, list[bytes]]), strict=True)
        )
        by_stage = [[found[rank] for rank in row] for row in self.session.stage_map]
        check_same_samples(by_stage)
        equal = find_equal_replicas(by_stage[0])
        if equal is not None and training and self.session.rank == ranks[0]:
            log.warning(
                "replicas %d and %d were given the same samples in their first batch, so each counts twice "
                "(split them: varuna.SampleOrder with replica=model.rank_within_stage, "
                "num_replicas=model.data_depth, or torch's DistributedSampler with these)",
                *equal,
            )

    def _run(self, jobs: Sequence[MicroBatchJob], total_weight: float, loss_scale: LossScale) -> None:
        if not jobs:  # a replica without samples only takes part in the reductions
            self.engine.recorder.clear()
            self.reducer.announce(0.0, 0.0)
            return
        name, stage, stages = self.plan.schedule, self.session.stage, self.plan.depth
        recompute = self.plan.stages[stage].recompute
        self.engine.train(
            jobs,
            row=row(name, stage=stage, stages=stages, microbatches=len(jobs), recompute=recompute),
            limit=limit(name, stage=stage, stages=stages, microbatches=len(jobs)),
            opportunistic=opportunistic(name),
            seed_gradients=[job.microbatch.weight / total_weight * loss_scale.value for job in jobs],
            announce=lambda loss: self.reducer.announce(loss, self._weight_of_losses(jobs)),
            before_last_backward=self.reducer.expect_last_backward,
        )

    def _weight_of_losses(self, jobs: Sequence[MicroBatchJob]) -> float:
        """Return zero except on the last stage, so that each sample is counted by one rank."""
        return sum(job.microbatch.weight for job in jobs) if self._is_last else 0.0

    @property
    def _is_last(self) -> bool:
        return self.session.stage == self.plan.depth - 1
