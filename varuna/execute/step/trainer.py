"""One step of the whole job, seen from one rank: scatter, run, reduce, even out.

The trainer is given a plan, this rank's stage and its ties to the others; it asks a callable for the
program that fits a micro-batch's inputs, and so knows nothing of how models are captured.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from varuna.execute.comm.session import Session
from varuna.execute.comm.stage_links import StageLinks
from varuna.execute.step.division import Division, divide_batch, refuse_other_batches
from varuna.execute.step.engine import Engine, Job
from varuna.execute.step.same_data import given_alike, hash_samples, refuse_misaligned
from varuna.execute.step.scatter import MicroBatch, WeightFunction, scatter, scatter_runs, with_leaves
from varuna.execute.step.stage import Held, Idle, Program, State
from varuna.execute.update.precision import LossScale
from varuna.execute.update.reduce import Reducer, Totals, average_buffers
from varuna.schedule import limit, opportunistic, row
from varuna.types import Plan, Work

log = logging.getLogger("varuna")


class Programs(Protocol):
    """Gives the program for micro-batches of a size and form."""

    def __call__(
        self, inputs: Mapping[str, object], size: int, dims: Mapping[str, int], training: bool
    ) -> Program: ...


class Traits(Protocol):
    """What of a captured model makes a replica's step depend on the other replicas'."""

    @property
    def random(self) -> bool: ...
    @property
    def changes_buffers(self) -> bool: ...  # anywhere in the model: all stages must decide alike
    @property
    def momentum(self) -> Mapping[str, float | None]: ...


@dataclass(frozen=True)
class Shares:
    """How a step's samples lie over the replicas."""

    first_sample: int  # of this replica, within the global batch
    total_weight: float  # of all replicas, or what it is when no batch is ragged
    num_microbatches: Sequence[int]  # of each replica


@dataclass
class Flight:
    """A batch between its forwards and its backwards, as one stage of one replica sees it."""

    jobs: Sequence[Job]
    results: Sequence[Sequence[Tensor]]  # of each micro-batch, on the last stage; none where it has no sample
    held: dict[int, Held]
    division: Division


@dataclass
class Trainer:
    plan: Plan
    session: Session
    engine: Engine
    reducer: Reducer
    state: State
    traits: Traits
    programs: Programs
    mutated: Sequence[str]  # the buffers of this stage that its forwards change
    seed: int
    weigh: WeightFunction | None = None
    first_run_patience: float = 1.0  # multiplies timeouts when a program runs for the first time: it compiles
    iteration: int = 0
    _known_programs: set[int] = field(default_factory=set)
    _aligned: set[bool] = field(default_factory=set)  # a batch was looked at: of training, of evaluation

    def step(
        self,
        inputs: Mapping[str, object],
        *,
        num_samples: int,
        dims: Mapping[str, int],
        training: bool,
        loss_scale: LossScale,
        max_norm: float | None,
    ) -> Totals:
        if self.session.uneven:
            jobs, shares = self._divide(inputs, num_samples, dims, training)
        else:
            self._check_alignment(inputs, dims, training)
            microbatches = self._scatter(inputs, num_samples, dims)
            shares = self._exchange_shares(microbatches, num_samples)
            jobs = self._jobs(microbatches, dims, training, shares.first_sample)
        buffers = self._changing_buffers()
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        self.reducer.begin()
        with self._patience(jobs):
            self._run(jobs, shares.total_weight, loss_scale)
            self.engine.where = f"stage {self.session.stage}, reducing the gradients"
            started = time.perf_counter()
            totals = self.reducer.finish(
                nominal_weight=shares.total_weight,
                loss_scale=loss_scale.value,
                checks_overflow=loss_scale.checks_overflow,
                max_norm=max_norm,
            )
            self.engine.recorder.add("reduce", -1, started, time.perf_counter())
            self._even_out(before, buffers, shares)
        loss_scale.update(overflow=totals.overflow)
        self.iteration += 1
        return totals

    def evaluate(self, inputs: Mapping[str, object], *, num_samples: int, dims: Mapping[str, int]) -> float:
        if self.session.uneven:
            jobs, _ = self._divide(inputs, num_samples, dims, False)
        else:
            self._check_alignment(inputs, dims, False)
            jobs = self._jobs(self._scatter(inputs, num_samples, dims), dims, False, 0)
        with self._patience(jobs):
            with self._buffers_kept(jobs):
                loss = self.engine.evaluate(jobs)
            self.reducer.announce(loss, self._weight_of_losses(jobs))
            return self.reducer.announced_loss()

    def _patience(self, jobs: Sequence[Job]) -> AbstractContextManager[None]:
        """Allow other ranks more time in a step that compiles a program."""
        if self.first_run_patience == 1.0:
            return nullcontext()
        programs = {id(job.program) for job in jobs if not isinstance(job.program, Idle)}
        is_first_run = not programs <= self._known_programs
        self._known_programs |= programs
        return self.session.patient(self.first_run_patience if is_first_run else 1.0)

    @contextmanager
    def _buffers_kept(self, jobs: Sequence[Job]) -> Iterator[None]:
        """Evaluating changes nothing, though a model may change its buffers in evaluation too."""
        names = dict.fromkeys(name for job in jobs for name in job.program.mutated)
        before = {name: self.state.tensor(name).clone() for name in names}
        try:
            yield
        finally:
            for name, value in before.items():
                self.state.tensor(name).data.copy_(value)

    # ------------------------------------------------------------ a step in two halves

    def forwards(
        self,
        inputs: Mapping[str, object],
        *,
        division: Division,
        dims: Mapping[str, int],
        training: bool,
        gradients: Sequence[str],  # inputs that a gradient goes back to
        keeps: bool,  # what a backward needs
    ) -> Flight:
        microbatches = self._part(inputs, dims, division)
        if keeps:
            microbatches = [with_leaves(microbatch, gradients) for microbatch in microbatches]
        first = division.own[0]
        jobs = self._jobs(microbatches, dims, training, first, idle=Idle((), None))
        self._begin_crowds(division, jobs)
        shares = Shares(first, float(division.num_samples), division.num_microbatches)
        buffers = self._changing_buffers() if training else {}
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        recompute = self.plan.stages[self.session.stage].recompute
        results = self.engine.forwards(
            jobs, keep="nothing" if not keeps else "inputs" if recompute else "graph"
        )
        self._even_out(before, buffers, shares)
        self.iteration += training
        return Flight(jobs, results, self.engine.stage.take_held(), division)

    def backwards(
        self,
        flight: Flight,
        gradients: Sequence[Sequence[Tensor | None]],  # of the results, on the last stage
        *,
        again: bool,
        reduces: bool,  # what is in `.grad` too, but for what `begin` has set aside
    ) -> None:
        self.engine.recorder.clear()
        self.engine.stage.held = flight.held
        self._begin_crowds(flight.division, flight.jobs)
        self.engine.backwards(
            flight.jobs,
            gradients,
            again=again,
            before_last=self.reducer.expect_last_backward if reduces else lambda: lambda: None,
        )
        flight.held = self.engine.stage.take_held()
        if reduces:
            self.engine.where = f"stage {self.session.stage}, reducing the gradients"
            self.reducer.settle()

    # ------------------------------------------------------------ parts of a step

    def _changing_buffers(self) -> dict[str, Tensor]:
        """Those that replicas must make equal again.

        By `.data`: a forward whose backward is still to come has kept them, though it does not use them.
        """
        return {name: self.state.tensor(name).data for name in self.mutated} if self.session.width > 1 else {}

    def _scatter(
        self, inputs: Mapping[str, object], num_samples: int, dims: Mapping[str, int]
    ) -> list[MicroBatch]:
        return scatter(
            inputs,
            num_samples=num_samples,
            dims=dims,
            microbatch_size=self.plan.microbatch_size,
            device=self.engine.device,
            weigh=self.weigh,
        )

    def _part(
        self, inputs: Mapping[str, object], dims: Mapping[str, int], division: Division
    ) -> list[MicroBatch]:
        first = division.own[0]
        return scatter_runs(
            inputs,
            dims=dims,
            microbatches=[tuple((a - first, b - first) for a, b in runs) for runs in division.runs],
            device=self.engine.device,
            weigh=self.weigh,
        )

    def _jobs(
        self,
        microbatches: Sequence[MicroBatch],
        dims: Mapping[str, int],
        training: bool,
        first_sample: int,
        *,
        idle: Idle | None = None,  # None: one that tells a loss on the last stage
    ) -> list[Job]:
        programs: dict[int, Program] = {0: idle or Idle((), self.engine.device if self._is_last else None)}
        for microbatch in microbatches:
            if microbatch.size not in programs:
                programs[microbatch.size] = self.programs(microbatch.inputs, microbatch.size, dims, training)
        return [Job(mb, programs[mb.size], self._work(mb, first_sample)) for mb in microbatches]

    def _work(self, microbatch: MicroBatch, first_sample: int) -> Work:
        spans = tuple((first_sample + first, first_sample + stop) for first, stop in microbatch.runs)
        return Work(self.seed, self.iteration, first_sample + microbatch.first_sample, spans=spans)

    def _exchange_shares(self, microbatches: Sequence[MicroBatch], num_samples: int) -> Shares:
        """One small gather over the replicas, where anything depends on what it tells."""
        weight = sum(mb.weight for mb in microbatches)
        if self.plan.width == 1:
            return Shares(0, weight or 1.0, [len(microbatches)])
        if self.weigh is None and not self.traits.random and not self.traits.changes_buffers:
            return Shares(0, float(self.plan.batch_size), [])
        everyone = self.session.gather_over_replicas((weight, num_samples, len(microbatches)))
        return Shares(
            sum(int(theirs) for _, theirs, _ in everyone[: self.session.replica]),
            sum(theirs for theirs, _, _ in everyone) or 1.0,
            [int(count) for _, _, count in everyone],
        )

    def _divide(
        self, inputs: Mapping[str, object], num_samples: int, dims: Mapping[str, int], training: bool
    ) -> tuple[list[Job], Shares]:
        """Where stages differ in their number of replicas: this rank's part of every micro-batch."""
        session = self.session
        counts = session.gather_by_stage([num_samples])
        given = tuple(tuple(int(count) for (count,) in row) for row in counts)
        refuse_other_batches(given, session.stage_map)
        self._check_alignment(inputs, dims, training)
        division = divide_batch(
            given, stage=session.stage, replica=session.replica, microbatch_size=self.plan.microbatch_size
        )
        first = division.own[0]
        jobs = self._jobs(self._part(inputs, dims, division), dims, training, first)
        total, ran = float(division.num_samples), division.num_microbatches
        if self.weigh is not None:
            if self._is_last:  # what counts for nothing may have no finite loss
                jobs = [
                    job
                    if job.microbatch.weight
                    else replace(job, program=Idle(job.program.received, self.engine.device))
                    for job in jobs
                ]
            own = self._weight_of_losses(jobs), sum(not isinstance(job.program, Idle) for job in jobs)
            everyone = session.gather_by_stage(own)
            total = sum(weight for weight, _ in everyone[-1])
            ran = tuple(int(number) for _, number in everyone[session.stage])
        self._begin_crowds(division, jobs)
        return jobs, Shares(first, total or 1.0, ran)

    def _begin_crowds(self, division: Division, jobs: Sequence[Job]) -> None:
        """Tells neighbours of several ranks what is exchanged with each; one rank is sent all there is."""
        for neighbour, pieces, specs in (
            (self.engine.upstream, division.before, [job.program.received for job in jobs]),
            (self.engine.downstream, division.after, [job.program.sent for job in jobs]),
        ):
            if isinstance(neighbour, StageLinks):
                neighbour.begin(pieces, specs)

    def _check_alignment(self, inputs: Mapping[str, object], dims: Mapping[str, int], training: bool) -> None:
        """Once, for a script that gives its data wrongly does so from the first batch on."""
        ranks = self.plan.ranks
        if len(ranks) == 1 or training in self._aligned:
            return
        self._aligned.add(training)
        found = dict(zip(ranks, self.session.gather(hash_samples(inputs, dims)), strict=True))
        by_stage = [[found[rank] for rank in row] for row in self.session.stage_map]
        refuse_misaligned(by_stage)
        alike = given_alike(by_stage[0])
        if alike is not None and training and self.session.rank == ranks[0]:
            log.warning(
                "replicas %d and %d were given the same samples in their first batch, so each counts twice "
                "(deal them out: varuna.SampleOrder with replica=model.rank_within_stage, "
                "num_replicas=model.data_depth, or torch's DistributedSampler with these)",
                *alike,
            )

    def _run(self, jobs: Sequence[Job], total_weight: float, loss_scale: LossScale) -> None:
        if not jobs:  # a replica without samples takes part in the reductions alone
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

    def _weight_of_losses(self, jobs: Sequence[Job]) -> float:
        """Zero where this stage has no loss, so that each sample is counted by one rank."""
        return sum(job.microbatch.weight for job in jobs) if self._is_last else 0.0

    @property
    def _is_last(self) -> bool:
        return self.session.stage == self.plan.depth - 1

    @torch.no_grad()
    def _even_out(self, before: Mapping[str, Tensor], buffers: Mapping[str, Tensor], shares: Shares) -> None:
        if buffers:
            average_buffers(
                before,
                buffers,
                momentum=self.traits.momentum,
                counts=shares.num_microbatches,
                replica=self.session.replica,
                reduce=self.reducer.sum_over_replicas,
            )
