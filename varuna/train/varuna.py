"""The class `Varuna`: wraps a model and trains it on all ranks."""

import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from varuna.capture.model.attributes import ModelAttributes
from varuna.capture.model.call_convention import LossChoice
from varuna.capture.model.lengths import check_dynamic_dims
from varuna.capture.model.stage_module import StageModule, stage_module
from varuna.capture.model.state import Initialize, StageCopy, copied_stage
from varuna.capture.run.program import start_compiler
from varuna.environment import VarunaEnvironment
from varuna.errors import PeerLost
from varuna.execute.device.facts import device_facts, device_name, find_device
from varuna.execute.device.out_of_memory import Remedies
from varuna.execute.step.scatter import WeightFunction
from varuna.execute.update.offload import keep_state_on_host
from varuna.execute.update.optimizers import refuse_coupled_update
from varuna.execute.update.precision import LossScale, make_loss_scale
from varuna.execute.update.shard import OptimizerShards
from varuna.execute.update.update_totals import UpdateTotals
from varuna.morph.metrics.update_reporter import UpdateReporter
from varuna.morph.metrics.worker import StepMetrics
from varuna.morph.run.order_page import open_orders
from varuna.morph.run.progress_page import open_progress
from varuna.observe.record import merge, on_one_clock
from varuna.observe.trace_file import open_tracer
from varuna.schedule import held
from varuna.train import build
from varuna.train.data import SampleOrder
from varuna.train.gather import gather_model
from varuna.train.hot.copies import StateCopies, explain_missing_copies
from varuna.train.hot.eligible import report_if_hot
from varuna.train.hot.fetch import Fetch, FetchedInputs
from varuna.train.hot.hot_state import HotState
from varuna.train.hot.recover import survives_losses
from varuna.train.hot.repeat import (
    NOT_TRAINED,
    attempt_step,
    enter_next,
    evaluate,
    follow_losses,
    iterate_batches,
    join_if_new,
    repeat_after_losses,
    run_requests,
)
from varuna.train.rank_errors import explain_out_of_memory, report_errors
from varuna.train.report import Reporter
from varuna.train.saving.autosave import AutosaveTimer, parse_rhythm
from varuna.train.saving.save_requests import SaveRequests, usr1
from varuna.train.saving.saver import Saver
from varuna.train.saving.training_state import Stateful
from varuna.train.validate import (
    WrapOptions,
    call_for_sample,
    check_arguments,
    check_optimizer,
    join_job,
    takes_get_batch_fn,
)
from varuna.types import (
    ChannelName,
    OnNan,
    Op,
    PrecisionName,
    ScheduleName,
    StepReport,
    Timeline,
    parse_stage_map,
    place_in_map,
    spread_evenly,
)

REMEDIES = Remedies(
    recompute="recompute=True",
    microbatches=lambda size: f"chunk_size={size}",
    stages=lambda count: (
        f"{count} stages, or offload_optimizer=True, which keeps the optimizer's state on the host"
    ),
)


REPLACED = {
    "config": "the layout is model.plan",
    "current_step": "the number of finished steps is model.iteration",
    "local_rank": "it is LOCAL_RANK in the environment; the device is model.device",
    "schedule": "the name of the schedule is model.plan.schedule; timeline() returns what ran",
}
"""Attributes of the original Varuna that have another name."""


def get_varuna_config(stage_to_rank_map: str) -> tuple[int, int]:
    """Return (pipeline depth, number of replicas) of a map."""
    widths = [len(ranks) for ranks in parse_stage_map(stage_to_rank_map)]
    if len(set(widths)) > 1:
        raise ValueError(
            f"the stages of stage_to_rank_map {stage_to_rank_map!r} have different numbers of replicas: "
            f"{widths} (use model.partitions, and model.data_depth for the stage of this rank)"
        )
    return len(widths), widths[0]


def get_this_rank_config_varuna(stage_to_rank_map: str, rank: int) -> tuple[int, int]:
    """Return (stage, replica) of a rank."""
    return place_in_map(parse_stage_map(stage_to_rank_map), rank)


def follow_assigned(model: "Varuna | None") -> None:
    """Use values that the script has assigned to tensors of its own model."""
    if model is not None:
        model._programs.tensors.follow()


models: "weakref.WeakSet[Varuna]" = weakref.WeakSet()
"""The wrapped models of this process."""


class Varuna(nn.Module):
    """A model that is split into pipeline stages and replicated; this process holds one stage.

        model = Varuna(model, args.stage_to_rank_map, sample_inputs, batch_size, chunk_size)
        optimizer = torch.optim.AdamW(model.parameters())
        model.set_optimizer(optimizer)
        loss, overflow = model.step(inputs)
        if not overflow:
            optimizer.step()
        model.zero_grad()

    `batch_size` is the number of samples per step of the whole job, `chunk_size` of a micro-batch. `step`
    takes this replica's share of the batch, the same on all stages of the replica. `SampleOrder` computes
    the share, also if the stages have different numbers of replicas. Parameters keep their names.
    """

    average_loss: float | None = None  # of the last step
    grad_norm: float | None = None
    _optimizer: torch.optim.Optimizer | None = None
    _overflow = False
    _num_trained = 0  # calls of `step`

    @takes_get_batch_fn
    def __init__(
        self,
        model: nn.Module,
        stage_to_rank_map: str,
        dummy_inputs: Mapping[str, object] | Callable[..., Mapping[str, object]],
        batch_size: int,
        chunk_size: int,
        fp16: bool = False,
        local_rank: int = -1,
        device: int | str | torch.device = -1,
        shared_weights: Sequence[tuple[str, str]] | None = None,
        from_cache: bool = True,
        *,
        precision: PrecisionName | None = None,
        schedule: ScheduleName | None = None,
        recompute: bool | Sequence[bool] | None = None,
        spans: Sequence[tuple[int, int]] | None = None,
        profile_folder: str | os.PathLike[str] | None = None,
        batch_dims: Mapping[str, int | None] | None = None,
        dynamic_dims: Mapping[str, Mapping[int, str]] | None = None,
        loss: LossChoice = None,
        loss_weight: WeightFunction | None = None,
        initialize: Initialize | None = None,
        shard_optimizer: bool = False,
        offload_optimizer: bool = False,
        compile: bool = False,
        cuda_graphs: bool = False,
        channel: ChannelName | None = None,
        seed: int | None = None,
        on_nan: OnNan = "warn",
        timeout_seconds: float = 120.0,
        link_delay: Callable[[int], float] | None = None,
        compute_delay: Callable[[Op, int], float] | None = None,
    ) -> None:
        options = WrapOptions(
            *(stage_map := parse_stage_map(stage_to_rank_map), batch_size, chunk_size),
            precision=precision or ("fp16" if fp16 else "fp32"),
            device=find_device(device, local_rank, rank := join_job(stage_map)),
            shared_weights=shared_weights,
            from_cache=from_cache,
            schedule=schedule,
            recompute=recompute,
            spans=spans,
            profile_folder=profile_folder,
            batch_dims=dict(batch_dims or {}),
            dynamic_dims=check_dynamic_dims(dynamic_dims or {}),
            loss=loss,
            loss_weight=loss_weight,
            initialize=initialize,
            shard_optimizer=shard_optimizer,
            offload_optimizer=offload_optimizer,
            compile=compile,
            cuda_graphs=cuda_graphs,
            channel=channel,
            seed=seed,
            on_nan=on_nan,
            timeout_seconds=timeout_seconds,
            link_delay=link_delay,
            compute_delay=compute_delay,
        )
        self._build(model, dummy_inputs, options, rank)

    def _build(
        self,
        model: nn.Module,
        dummy_inputs: Mapping[str, object] | Callable[..., Mapping[str, object]],
        options: WrapOptions,
        rank: int,
    ) -> None:
        super().__init__()
        check_arguments(model, options)
        environment = VarunaEnvironment.read(os.environ)
        self.device, self._options = options.device, options
        self._loss_scale = LossScale()
        self._hot = HotState.of(environment)
        self._follows_launcher = environment.chunk_size == options.microbatch_size
        self._progress, self._update = open_progress(), UpdateTotals()
        self._metrics = StepMetrics(device_facts(options.device))
        self._orders = orders = open_orders()
        self._updates = UpdateReporter(self._progress, self._metrics)
        self._tracer = open_tracer(environment, rank)
        self._copies = weakref.WeakSet[StageCopy]()
        if options.compile:
            start_compiler(options.device)
        rhythm = parse_rhythm(environment.saves) if rank == options.stage_map[0][0] else None
        self._requests = SaveRequests(AutosaveTimer(rhythm, environment.checkpoint_store))
        usr1.listen(requests := self._requests)  # before the slow steps below, so that no signal is lost
        weakref.finalize(self, usr1.release, self._requests).atexit = False
        joins = environment.joins is not None
        self._session = session = build.connect(options, rank, joins=joins, has_order=lambda: orders.abandons)
        self._finalizers = [weakref.finalize(self, close) for close in (session.close, self._tracer.close)]
        with self._report_errors("wrapping the model"):
            inputs = call_for_sample(dummy_inputs) if callable(dummy_inputs) else dummy_inputs
            sampled = build.capture(model, inputs, options, session)
            self._progress.alive()
            self.plan, prediction = build.choose_plan(sampled, options, session, environment)
            self._metrics.describe(build.flops(model, sampled), device_name(self.device), options.precision)
            if session.rank == session.ranks[0]:
                build.check(model, sampled, inputs, self.plan, options)
            self._progress.alive()
            self._state, self._programs, self._trainer, self._checkpoints = build.build_stage(
                *(model, sampled, self.plan, session, options),
                has_request=lambda: requests.is_pending() or orders.is_pending,
            )
            self._weights = list(self._state.parameters())
            self._finalizers.append(weakref.finalize(self, self._checkpoints.resources.close))
            if not session.provisional:
                self._checkpoints.claim_early(environment.checkpoint_store)
            self._saver = Saver(self._checkpoints, requests, self._trainer, self._progress, self._tracer)
            # The gather also keeps all ranks together until each has built its stage.
            folder, machines = environment.log_dir, sampled.machines
            reports = session.gather(prediction is not None or folder is not None, bool)[0]
            self._reporter = Reporter(session, machines, prediction, reports=reports, folder=folder)
            self._state_copies = StateCopies(session, machines)
        self._progress.alive()
        # torch refuses an optimizer without parameters, and a stage may have none that trains.
        self._placeholder = nn.Parameter(torch.empty(0))
        if self._trainer.norm is not None:
            self._trainer.norm.add([self._placeholder])
            follow_losses(self._trainer.norm, weakref.ref(self))
        models.add(self)
        self._attributes = sampled.source.attributes  # from now on, those of the model can be set here

    # ------------------------------------------------------------ training

    def set_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        loss_scale: float | str = "dynamic",
        init_loss_scale: float = 2**20,
        min_loss_scale: float | None = 1.0,
    ) -> None:
        """Register an optimizer of this model's parameters. The loss scales are used only in fp16."""
        with self._report_errors("set_optimizer"):
            check_optimizer(optimizer, [*self.parameters(), self._placeholder])
            is_sharded = self._options.shard_optimizer and self._session.width > 1
            refuse_coupled_update(optimizer, depth=self._session.depth, shards=is_sharded)
            self._loss_scale = make_loss_scale(
                self.plan.precision, loss_scale, init_loss_scale, min_loss_scale
            )
            training = self._checkpoints.training
            if training.loaded_before_optimizer:
                raise RuntimeError(
                    f"{training.loaded_before_optimizer} was loaded before set_optimizer, so its optimizer "
                    "state was skipped (call set_optimizer before load_checkpoint)"
                )
            if optimizer is not self._optimizer:  # else the call only changes the loss scale
                model = weakref.ref(self)  # the optimizer must not keep the model alive
                optimizer.register_step_pre_hook(lambda *_: follow_assigned(model()))
                if self._options.shard_optimizer:
                    training.shards = OptimizerShards(optimizer, self._session)
                    training.shards.survives = lambda: (own := model()) is not None and survives_losses(own)
                    self._trainer.reducer.owned = training.shards.counted(self._trainer.reducer.weights)
                if self._options.offload_optimizer and self.device.type == "cuda":
                    keep_state_on_host(optimizer)
            self._optimizer = training.optimizer = optimizer
            training.loss_scale = self._loss_scale

    @overload
    def step(
        self,
        inputs: Mapping[str, object] | Fetch,
        clip_grad_max_norm: float | None = None,
        *,
        order: SampleOrder | None = None,
    ) -> tuple[float, bool]: ...

    @overload
    def step(
        self,
        inputs: Mapping[str, object] | Fetch,
        clip_grad_max_norm: float | None = None,
        *,
        order: SampleOrder | None = None,
        with_norm: Literal[True],
    ) -> tuple[float, bool, float]: ...

    def step(
        self,
        inputs: Mapping[str, object] | Fetch,
        clip_grad_max_norm: float | None = None,
        *,
        order: SampleOrder | None = None,
        with_norm: bool = False,
    ) -> tuple[float, bool] | tuple[float, bool, float]:
        """Run forward and backward of the global batch; the gradients are in `.grad`.

        `inputs` is this replica's share of the batch, or a function that returns the inputs of the samples
        that it is given: this replica's share of the step in `order`, or of the positions 0, 1, 2, ... that
        the steps take one after the other. Returns the loss of the global batch, and whether all ranks must
        skip the update because of an fp16 overflow. After a loss of a stage without replicas it returns
        (nan, True), trains nothing, and `batches` goes on with an earlier step. `clip_grad_max_norm` clips
        the gradient of the whole model; `grad_norm` is its norm before clipping. `with_norm` measures the
        norm without clipping, too, and returns it as a third value.
        """
        if with_norm and clip_grad_max_norm is None:
            clip_grad_max_norm = math.inf
        can_fetch = callable(inputs) or isinstance(inputs, FetchedInputs)
        self._hot.fetches, self._hot.replaces_inputs = can_fetch, self._hot.in_batches and not can_fetch
        now = time.perf_counter()
        self._tracer.enter(now, uninterrupted=self._reporter.pace.is_uninterrupted)
        self._reporter.pace.enter(now)
        totals = None
        while totals is None:
            self._run_traced_requests(can_fetch=can_fetch)
            totals = attempt_step(self, inputs, order, clip_grad_max_norm, can_fetch=can_fetch)
        # Not by __setattr__, which looks for the names in the model first.
        vars(self).update(grad_norm=totals.norm, average_loss=totals.loss, _overflow=totals.overflow)
        vars(self).update(_num_trained=self._num_trained + 1)
        if totals is NOT_TRAINED:
            return (math.nan, True, math.nan) if with_norm else (math.nan, True)
        update, watched = self._update, self._progress.watched
        update.add(totals, self._trainer.engine.recorder.compute_seconds() if watched else 0.0)
        if update.is_open:
            self._progress.alive()
        else:
            self._report_update()
        if with_norm:
            return totals.loss, totals.overflow, math.nan if totals.norm is None else totals.norm
        return totals.loss, totals.overflow

    def _report_update(self) -> None:
        """Report the steps of an update to the manager, the metrics and the losses."""
        if not self._updates.watched:
            return
        update = self._update
        self._updates.finish(
            self.iteration,
            loss=update.loss,
            samples=update.samples,
            batch_size=self.plan.batch_size,
            compute_seconds=update.compute_seconds,
            is_first=self.rank == self._session.ranks[0],
        )
        if self._progress.watched:
            is_first = self._hot.reported is None
            report_if_hot(self)
            if is_first:
                explain_missing_copies(self)

    def batches(
        self, fetch: Fetch, order: SampleOrder | None = None, *, steps: int | None = None
    ) -> Iterator[tuple[int, Mapping[str, object]]]:
        """Yield (step, inputs of this rank) from the current step on, up to `steps`; endlessly without it.

            for step, inputs in model.batches(fetch, order, steps=1000):
                loss, overflow = model.step(inputs)

        `fetch` and `order` are those of `step`. Train each batch once before the next one.
        """
        return iterate_batches(self, fetch, order, steps=steps)

    def _record_step(self) -> None:
        recorded, own = self._trainer.engine.recorder.snapshot(), self._session
        self._reporter.pace.leave(recorded)
        step, number = self._trainer.iteration - 1, self._hot.generation
        self._tracer.leave(step, own.rank, own.stage, own.num_ranks, recorded, generation=number)

    def _run_traced_requests(self, *, can_fetch: bool) -> None:
        started, joins = time.perf_counter(), self._session.provisional
        run_requests(self, can_fetch=can_fetch)
        if not joins:  # else it has waited for the others, which train
            self._tracer.note_between(started)
        self._trainer.engine.records_sends = self._tracer.is_on

    def evaluate(self, inputs: Mapping[str, object] | Fetch, batch_size: int | None = None) -> float:
        """Return the loss of `inputs` (this replica's share) in evaluation mode; change nothing.

        All samples of `inputs` count. `batch_size` is not needed; if it is given, there must not be more.
        `inputs` may also be a function that returns the inputs of the samples that it is given: this
        replica's share of 0, 1, ..., `batch_size` - 1. Then a loss of other ranks does not end the call.
        """
        self._interrupt_steps()
        loss = evaluate(self, inputs, batch_size)
        self._progress.alive()
        return loss

    def _interrupt_steps(self) -> None:
        self._reporter.pace.interrupt()
        self._tracer.flush()

    def predict(self, inputs: Mapping[str, object]) -> Any:
        """Return the model's own outputs, such as logits, in evaluation mode, on the CPU of every rank.

        All ranks pass the same inputs: a whole batch of any size. Samples keep their order.
        """
        from varuna.train.outputs import refuse_different_inputs, whole_outputs  # they import this module

        self._interrupt_steps()

        def run() -> Any:
            refuse_different_inputs(self, inputs)
            return whole_outputs(self, inputs)

        outputs = repeat_after_losses(self, run)
        self._progress.alive()
        return outputs

    def forward(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(
            "a wrapped model cannot be called: use `loss, overflow = model.step(inputs)` to train, "
            "`loss = model.evaluate(inputs)` to evaluate, and `model.predict(inputs)` for outputs"
        )

    def get_loss_scale(self) -> float | None:
        """Return the loss scale of fp16, or None in other precisions."""
        return self._loss_scale.value if self._loss_scale.checks_overflow else None

    def get_status(self) -> dict[str, object]:
        """Return the step, and loss, overflow, gradient norm and loss scale of the last step."""
        return {
            "iteration": self.iteration,
            "average_loss": self.average_loss,
            "overflow": self._overflow,
            "grad_norm": self.grad_norm,
            "loss_scale": self.get_loss_scale(),
        }

    def timeline(self) -> Timeline:
        """Return the operations of all ranks in the last step. All ranks call this."""
        enter_next(self)
        self._reporter.pace.interrupt()
        own = self._trainer.engine.recorder.timeline(self._session.rank, self.stage)
        with self._session.call("timeline"):
            return merge(on_one_clock(self._session.gather(own, Timeline), self._reporter.machines))

    def report(self) -> StepReport:
        """Return measured and predicted step times. All ranks call this and get the same report."""
        enter_next(self)
        with self._session.call("report"):
            return self._reporter.report()

    # ------------------------------------------------------------ checkpoints

    def checkpoint(
        self,
        global_store: str | os.PathLike[str],
        step: int | None = None,
        tempdir: str | os.PathLike[str] | None = None,
        shard: bool = False,
        on_demand: bool = False,
        *,
        keep_last: int | None = None,
    ) -> "Future[str]":
        """Save `varuna_ckpt_<step>` to a folder or URL. All ranks call this, between two steps.

        The checkpoint is complete on return. With `tempdir` ("memory", or a local folder) this returns
        after a copy, and a second process writes it: the future of the first rank is done when the
        checkpoint is complete. `shard` distributes the writing over the replicas. `keep_last` removes all
        but the newest checkpoints. `on_demand` saves at the next step boundary (`on_demand_checkpoint`).
        If the save fails, all ranks raise the same error, no checkpoint is incomplete, and training can
        continue.
        """
        join_if_new(self)
        if on_demand and not self._requests.in_handler:
            return self._saver.save_on_demand(global_store)
        enter_next(self)
        self._reporter.pace.interrupt()
        self._programs.tensors.follow()

        def save() -> "Future[str]":
            with self._session.call("checkpoint"):
                return self._saver.save(
                    global_store, step=step, tempdir=tempdir, shard=shard, keep_last=keep_last
                )

        return repeat_after_losses(self, save)

    def load_checkpoint(
        self,
        global_store: str | os.PathLike[str],
        iteration: int | None = None,
        check_complete: bool = True,
        *,
        strict: bool = True,
        cast: bool = False,
    ) -> int:
        """Load `varuna_ckpt_<iteration>`, or the newest complete checkpoint, of any layout.

        All ranks call this after `set_optimizer`. It loads parameters, buffers, the optimizer's state and
        hyper-parameters, registered objects, loss scale, seed and iteration, and returns the step. If it
        fails, all ranks raise the same error, and the model is unchanged.
        `check_complete=False` loads what exists of an incomplete checkpoint. `strict=False` ignores names
        that differ. `cast=True` converts dtypes. Hashes are always checked.
        """
        if join_if_new(self):
            return self.iteration
        enter_next(self)
        self._reporter.pace.interrupt()
        options = {"check_complete": check_complete, "strict": strict, "cast": cast}
        with self._session.call("load_checkpoint"):
            step = self._saver.load(global_store, iteration, **options)
        self._state_copies.drop(self._progress)
        return step

    def resume(self, global_store: str | os.PathLike[str], *, force: bool = False) -> int:
        """Load the newest checkpoint that verifies, if there is any; return the iteration to continue with.

        The job claims the store: it raises StoreTaken while another job writes there. `force` takes the
        store over, and the other job ends at its next save.
        """
        if join_if_new(self):
            return self.iteration
        enter_next(self)
        self._reporter.pace.interrupt()
        with self._session.call("resume"):
            self._saver.resume(global_store, force=force)
        self._state_copies.drop(self._progress)
        return self.iteration

    def register(self, name: str, thing: Stateful) -> None:
        """Save and load an object with the model, such as a learning rate scheduler.

        It must have `state_dict` and `load_state_dict`, and the same state on all ranks. If a checkpoint is
        already loaded, the object gets its state now.
        """
        self._checkpoints.training.register(name, thing)

    def on_demand_checkpoint(self, global_store: str | os.PathLike[str]) -> None:
        """Save on all ranks before their next step; one rank is enough to call this.

        You can call it at any moment, from any thread and from a signal handler. In the script's own SIGUSR1
        handler, which all ranks run between two steps, it saves at once and returns when the
        checkpoint is complete.
        """
        if self._requests.in_handler:
            self.checkpoint(global_store)
        else:
            self._requests.add(global_store)

    def close(self) -> None:
        """Wait for a running save and disconnect. Not needed at the end of a script."""
        self._saver.close()

    # ------------------------------------------------------------ the place of this rank

    @property
    def rank(self) -> int:
        """Rank of this process in the job."""
        return self._session.rank

    @property
    def stage(self) -> int:
        """Stage that this rank holds, from 0."""
        return self._session.stage

    @property
    def partitions(self) -> int:
        """Number of stages."""
        return self.plan.depth

    @property
    def data_depth(self) -> int:
        """Number of replicas of this rank's stage."""
        return self._session.width

    @property
    def rank_within_stage(self) -> int:
        """Replica that this rank belongs to, from 0."""
        return self._session.replica

    @property
    def batch_size(self) -> int:
        """This replica's samples of a full global batch."""
        return spread_evenly(self.plan.batch_size, parts=self._session.width)[self._session.replica]

    @property
    def micro_batch_size(self) -> int:
        """Samples per micro-batch."""
        return self.plan.microbatch_size

    @property
    def iteration(self) -> int:
        """Number of finished steps."""
        join_if_new(self)
        return self._trainer.iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        if value != self._trainer.iteration:
            self._trainer.iteration = value
            self._state_copies.drop(self._progress)

    @property
    def channels(self) -> dict[int, str]:
        """The transport to each linked rank. Shared memory is used from the first message on."""
        network = self._session.network
        return {} if network is None else {peer: link.transport for peer, link in network.links.items()}

    # ------------------------------------------------------------ names of the original Varuna

    @property
    def model(self) -> StageModule:
        """The original model's modules with this stage's tensors, in `.module`."""
        if "_stage_module" not in self.__dict__:
            # Past nn.Module, which would register it as a submodule.
            self.__dict__["_stage_module"] = stage_module(self._programs.sampled.source, self._state)
        found: StageModule = self.__dict__["_stage_module"]
        return found

    @property
    def partitioned_model(self) -> StageModule:
        """The same as `model`."""
        return self.model

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of `set_optimizer`."""
        return self._optimizer

    @property
    def parameter_names(self) -> dict[nn.Parameter, str]:
        """The name of each of this stage's parameters."""
        return {parameter: name for name, parameter in self._state.named_parameters()}

    # ------------------------------------------------------------ the interface of nn.Module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this stage's parameters with their names in the unwrapped model.

        If none of them trains, an empty one follows, so that an optimizer of those that do has one.
        """
        found = list(self._state.named_parameters(prefix, recurse, remove_duplicate))
        if not any(parameter.requires_grad for _, parameter in found):
            found.append(("varuna_placeholder", self._placeholder))
        return iter(found)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return self._state.named_buffers(prefix, recurse, remove_duplicate)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. nn.Module's version takes longer than the optimizer of a small model."""
        if not set_to_none:
            return super().zero_grad(set_to_none=False)
        for parameter in self._weights:
            parameter.grad = None

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return this stage's part of the state, with the names of the unwrapped model."""
        self._programs.tensors.follow()
        return self._state.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load this stage's part from the state of the whole model, or of this stage."""
        if assign:
            raise ValueError(
                "assign=True would disconnect the optimizer from the parameters (load without assign)"
            )
        unknown = sorted(set(state_dict) - self._checkpoints.names)
        if strict and unknown:
            raise RuntimeError(f"the model has no {unknown[:5]} (strict=False ignores them)")
        own = set(self._state.state_dict())
        return self._state.load_state_dict({k: v for k, v in state_dict.items() if k in own}, strict=strict)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the state of the whole model on every rank, on the CPU. All ranks call this."""

        def gather() -> dict[str, Tensor]:
            own = {name: tensor.detach().cpu() for name, tensor in self.state_dict().items()}
            merged: dict[str, Tensor] = {}
            with self._session.call("full_state_dict"):
                mine = own if self._session.replica == 0 else {}
                for part in self._session.gather(mine, dict[str, Tensor]):
                    merged.update(part)
            return merged

        return repeat_after_losses(self, gather)

    def gather_model(self, rank: int = 0) -> nn.Module | None:
        """Return the whole model, of the original class, on the CPU of `rank`; None on other ranks.

        All ranks call this. Use it to generate, test or export; it is a copy of its own.
        """

        def gather() -> nn.Module | None:
            with self._session.call("gather_model"), self._report_errors("gather_model"):
                return gather_model(self._session, self._programs.sampled.source, self._state, rank)

        return repeat_after_losses(self, gather)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Varuna":
        """Accept `to(model.device)` and similar calls that change nothing; refuse all others."""
        tensors = (*self._state.parameters(), *self._state.buffers())
        with torch.no_grad():
            if all(fn(tensor) is tensor for tensor in tensors):
                return self
        raise RuntimeError(
            "a wrapped model cannot change its device or precision (choose them when wrapping: device=..., "
            f"precision=...; it is on {self.device} in {self.plan.precision})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> StageCopy:
        """Copy this stage's parameters and buffers, for example for torch's AveragedModel."""
        found = copied_stage(self._state, [name for name, _ in self._state.named_parameters()])
        self._copies.add(found)
        return found

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.parameters())
        return (
            f"Varuna(stage {self.stage} of {self.partitions}, replica {self.rank_within_stage} of "
            f"{self.data_depth}, {count:,} parameters in {self.plan.precision} on {self.device})"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes of the model, such as `temperature`, in the model."""
        attributes: ModelAttributes | None = self.__dict__.get("_attributes")
        is_own = name in self.__dict__ or name.startswith("_") or hasattr(type(self), name)
        if attributes is None or is_own or not attributes.assign(name, value):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            attributes = self.__dict__.get("_attributes")
            if attributes is not None and attributes.has_plain(name):
                return getattr(attributes.root, name)
            if name in REPLACED:
                raise AttributeError(f"{error} ({REPLACED[name]})") from None
            raise AttributeError(
                f"{error} (the wrapper does not forward attributes of the original model, such as "
                "save_pretrained or generate: call gather_model() on all ranks; one of them gets a model "
                "that has them)"
            ) from None

    # ------------------------------------------------------------ errors

    @contextmanager
    def _report_errors(self, activity: str) -> Iterator[None]:
        """Report an error in this block to all ranks; not a loss after which the call runs again."""
        lost: PeerLost | None = None
        try:
            with report_errors(
                self._session,
                f"stage {self._session.stage}, {activity}",
                trainer=lambda: self.__dict__.get("_trainer"),
                explain_memory=self._explain_out_of_memory,
            ):
                try:
                    yield
                except PeerLost as error:
                    if not self._hot.repeats:
                        raise
                    lost = error
        except Exception:
            if "_trainer" not in self.__dict__:
                usr1.release(self._requests)  # now: the error may keep this unfinished model alive
            elif self._session.board is not None:
                self._checkpoints.resources.failed = True  # on the other ranks, too
            raise
        if lost is not None:
            raise lost

    def _explain_out_of_memory(self, error: torch.OutOfMemoryError) -> Exception | None:
        if "_trainer" not in self.__dict__:
            return None
        plan, batch_size = self.plan, self.batch_size
        held_of = partial(held, plan.schedule, stage=self.stage, stages=plan.depth)
        return explain_out_of_memory(
            error,
            trainer=self._trainer,
            state=self._state,
            optimizer=self._optimizer,
            microbatch_size=plan.microbatch_size,
            held_microbatches=lambda size: held_of(microbatches=-(-batch_size // size)),
            remedies=REMEDIES,
        )
