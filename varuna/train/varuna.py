"""The door to training: class `Varuna`, which wraps a model and runs its steps over all ranks."""

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, nn

from varuna.capture import Source, SpanProgram, stage_state
from varuna.capture.graph.fused_loss import with_fused_loss
from varuna.capture.model.batch import Batch, find_batch
from varuna.capture.run.chain import ProgramChain, chain_of
from varuna.capture.run.program import start_compiler
from varuna.checkpoint.store.store import open_store
from varuna.environment import VarunaEnvironment
from varuna.errors import CheckpointError, check_name
from varuna.execute.comm.address import machine_identity, own_address
from varuna.execute.comm.session import open_session
from varuna.execute.device.facts import available_bytes, device_name, find_device
from varuna.execute.device.out_of_memory import Remedies
from varuna.execute.step.scatter import WeightFunction
from varuna.execute.update.offload import keep_state_on_host
from varuna.execute.update.precision import LossScale, make_loss_scale
from varuna.execute.update.shard import shard_optimizer as shard
from varuna.morph.run.progress_page import ProgressWriter, open_progress
from varuna.observe.progress_bar import capture_progress
from varuna.observe.record import merge, on_one_clock
from varuna.plan.cut.blocks import partition
from varuna.schedule import held
from varuna.train.assemble import assemble
from varuna.train.autosave import OwnSaves, told_rhythm
from varuna.train.checkpoints import Checkpoints
from varuna.train.layout import Asked, Subject, cut_by_time, look_ahead, plan_told, profile_at_hand, settle
from varuna.train.rank_errors import explain_out_of_memory, report_errors
from varuna.train.report import Reporter
from varuna.train.save_requests import Attention, usr1
from varuna.train.training_state import Stateful, TrainingState
from varuna.train.validate import (
    all_names,
    call_for_sample,
    check_model,
    check_once,
    check_sizes,
    join_job,
    plan_stages,
    refuse_detached,
    refuse_inseparable,
    refuse_unforeseen,
)
from varuna.types import (
    ChannelName,
    Op,
    Plan,
    PrecisionName,
    ScheduleName,
    StagePlan,
    StepReport,
    Timeline,
    parse_stage_map,
    place_in_map,
    spread_evenly,
)

log = logging.getLogger("varuna")

COMPILING_PATIENCE = 15.0
"""A step that compiles may keep its neighbours waiting so many times longer than the timeout."""
REMEDIES = Remedies(
    recompute="recompute=True",
    microbatches=lambda size: f"chunk_size={size}",
    stages=lambda count: (
        f"{count} stages, or offload_optimizer=True, which keeps the optimizer's state on the host"
    ),
)


def get_varuna_config(stage_to_rank_map: str) -> tuple[int, int]:
    """(pipeline depth, number of replicas) of a map."""
    widths = [len(ranks) for ranks in parse_stage_map(stage_to_rank_map)]
    if len(set(widths)) > 1:
        raise ValueError(
            f"the stages of stage_to_rank_map {stage_to_rank_map!r} have {widths} replicas, not all as many "
            "(ask the wrapped model: model.partitions, and model.data_depth for this rank's own stage)"
        )
    return len(widths), widths[0]


def get_this_rank_config_varuna(stage_to_rank_map: str, rank: int) -> tuple[int, int]:
    """(stage, replica) of a rank."""
    return place_in_map(parse_stage_map(stage_to_rank_map), rank)


class Varuna(nn.Module):
    """A model, cut into pipeline stages and replicated, of which this process holds one stage.

        model = Varuna(model, args.stage_to_rank_map, sample_inputs, batch_size, chunk_size)
        optimizer = torch.optim.AdamW(model.parameters())
        model.set_optimizer(optimizer)
        loss, overflow = model.step(inputs)
        if not overflow:
            optimizer.step()
        model.zero_grad()

    `batch_size` is the whole job's, `chunk_size` the micro-batch's; `step` takes this replica's share
    of the batch, the same on all stages of the replica. Where the map gives stages unequal numbers of
    replicas, each rank takes its share by its place in its own stage, in order, as `SampleOrder` deals it
    out. The parameters keep their names.
    """

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
        loss_weight: WeightFunction | None = None,
        initialize: Mapping[str, Tensor] | Callable[[str, Tensor], object] | None = None,
        shard_optimizer: bool = False,
        offload_optimizer: bool = False,
        compile: bool = False,
        cuda_graphs: bool = False,
        channel: ChannelName | None = None,
        seed: int | None = None,
        timeout_seconds: float = 120.0,
        link_delay: Callable[[int], float] | None = None,
        compute_delay: Callable[[Op, int], float] | None = None,
    ) -> None:
        super().__init__()
        check_model(model)
        stage_map = parse_stage_map(stage_to_rank_map)
        precision = precision or ("fp16" if fp16 else "fp32")
        check_sizes(batch_size, chunk_size)
        check_name("schedule", schedule or "varuna", get_args(ScheduleName))
        check_name("precision", precision, get_args(PrecisionName))
        if channel is not None:
            check_name("channel", channel, get_args(ChannelName))
        rank = join_job(stage_map)
        self.device = find_device(device, local_rank, rank)
        self.grad_norm: float | None = None
        self._batch_dims = dict(batch_dims or {})
        self._compiles = compile
        if compile:
            start_compiler(self.device)
        self._shards_optimizer = shard_optimizer
        self._offloads_optimizer = offload_optimizer
        self._optimizer: torch.optim.Optimizer | None = None
        self._loss_scale = LossScale()
        self._programs: dict[object, SpanProgram | ProgramChain] = {}
        self._sample = Batch(1, {})
        self._attention = Attention()
        self._asked_for: list[Future[str]] = []  # checkpoints on demand, until they are there
        environment = VarunaEnvironment.read(os.environ)
        self._progress = open_progress()
        usr1.tell(self._attention)  # first of all: no signal is lost, however long the rest takes
        weakref.finalize(self, usr1.release, self._attention).atexit = False
        self._session = open_session(
            stage_map,
            rank=rank,
            device=self.device,
            timeout_seconds=timeout_seconds,
            host=own_address(),
            link_delay=link_delay,
            channel=channel,
        )
        weakref.finalize(self, self._session.close)  # at the latest when the script ends
        is_first = (self._session.stage, self._session.replica) == (0, 0)
        self._own_saves = OwnSaves(told_rhythm(environment.saves) if is_first else None)
        # Or where the script has saved, or goes on from.
        self._saves_to = environment.checkpoint_store
        with self._report_errors("wrapping the model"):
            inputs = call_for_sample(dummy_inputs) if callable(dummy_inputs) else dummy_inputs
            self._sample = self._batch(inputs)
            self._source = Source(
                model,
                batch_dims=self._batch_dims,
                shared_weights=shared_weights,
                precision=precision,
                device_type=self.device.type,
                partition=partition,
                watch=capture_progress(shown=rank == min(map(min, stage_map))),
            )
            captured = self._source.capture(inputs, training=True)
            refuse_detached(captured, model)
            self._num_segments = captured.num_segments
            self._sampled = captured
            seed, machines = self._agree_on(captured.graph.fingerprint, seed)
            subject = Subject(
                captured.graph.fingerprint,
                precision,
                device_name(self.device),
                stage_map,
                machines,
                shard_optimizer,
            )
            asked = Asked(batch_size, chunk_size, schedule, recompute, spans)
            told = plan_told(environment.plan, subject)
            first = rank == min(map(min, stage_map))
            profile = None
            if first:  # it may be the only one that reaches the folder
                folder = profile_folder or environment.profile
                profile = profile_at_hand(folder, subject, needed=told is None)
            cut = cut_by_time(profile, subject, asked) if profile is not None and told is None else None
            cut = self._session.gather(cut)[0]
            settled = settle(asked, cut if told is None else told.plan)
            self.plan = Plan(
                stages=plan_stages(
                    stage_map, captured, settled.spans, settled.recompute, from_cache=from_cache
                ),
                batch_size=batch_size,
                microbatch_size=chunk_size,
                schedule=settled.schedule,
                precision=precision,
                fingerprint=captured.graph.fingerprint,
            )
            refuse_inseparable(self.plan, captured)
            outlook = look_ahead(self.plan, profile, told, subject) if first else None
            if rank == self.plan.ranks[0]:
                check_once(model, captured, inputs, self.plan, from_cache=from_cache)
            self._names = all_names(model)
            self._state = stage_state(
                self._source,
                captured,
                self._own.first,
                self._own.stop,
                device=self.device,
                initialize=initialize,
                seed=seed,
            )
            self._weights = list(self._state.parameters())
            self._trainer = assemble(
                self.plan,
                self._session,
                captured,
                self._state,
                self._program,
                device=self.device,
                seed=seed,
                timeout_seconds=timeout_seconds,
                split_backward=not compile,
                cuda_graphs=cuda_graphs,
                weigh=loss_weight,
                delay=compute_delay,
                has_request=self._asks,
                first_run_patience=COMPILING_PATIENCE if self._compiles else 1.0,
            )
            self._checkpoints = Checkpoints(
                self._session,
                self.plan,
                TrainingState(self._state, self._trainer, shard_optimizer),
                ties=captured.graph.ties,
                names=self._names,
                timeout_seconds=timeout_seconds,
            )
            weakref.finalize(self, self._checkpoints.resources.close)
            self._reporter = Reporter(
                self._session,
                machines,
                speaks=self._session.gather(outlook is not None)[0],  # no rank begins before all are there
                outlook=outlook,
                folder=environment.log_dir,
            )
        # A stage without weights still gets an optimizer, and torch refuses one without parameters.
        self._placeholder = nn.Parameter(torch.empty(0), requires_grad=False)

    # ------------------------------------------------------------ training

    def set_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        loss_scale: float | str = "dynamic",
        init_loss_scale: float = 2**20,
        min_loss_scale: float = 1.0,
    ) -> None:
        """Registers an optimizer made from this model's parameters; the scales matter to fp16 alone."""
        with self._report_errors("set_optimizer"):
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(
                    f"set_optimizer takes one torch.optim.Optimizer, not a {type(optimizer).__name__} "
                    "(different settings for different parameters are its parameter groups)"
                )
            own = set(self.parameters())
            foreign = sum(p not in own for group in optimizer.param_groups for p in group["params"])
            if foreign:
                raise ValueError(
                    f"{foreign} of the optimizer's parameters are not this stage's "
                    "(make the optimizer after wrapping: Optimizer(model.parameters()))"
                )
            self._loss_scale = make_loss_scale(
                self.plan.precision, loss_scale, init_loss_scale, min_loss_scale
            )
            if skipped := self._checkpoints.training.loaded_before_optimizer:
                raise RuntimeError(
                    f"{skipped} was loaded before set_optimizer, so its optimizer state was skipped "
                    "(call set_optimizer before load_checkpoint)"
                )
            is_new = optimizer is not self._optimizer  # else it may be given to set another loss scale
            if is_new and self._shards_optimizer and self._session.replicas is not None:
                shard(optimizer, replica=self._session.replica, group=self._session.replicas)
            if is_new and self._offloads_optimizer and self.device.type == "cuda":
                keep_state_on_host(optimizer)
            self._optimizer = self._checkpoints.training.optimizer = optimizer
            self._checkpoints.training.loss_scale = self._loss_scale

    def step(
        self, inputs: Mapping[str, object], clip_grad_max_norm: float | None = None
    ) -> tuple[float, bool]:
        """Forwards and backwards of the whole global batch; leaves the gradients in `.grad`.

        `inputs` is this replica's share. Returns the global batch's loss, and whether an overflow in
        fp16 asks every rank to skip the update. With `clip_grad_max_norm` the whole model's gradient
        is clipped, and its norm before clipping is in `grad_norm` (infinity: only measured).
        """
        self._reporter.pace.enter(time.perf_counter())
        with self._report_errors("step"):
            self._see_to_requests()
            self._progress.enter()
            if self._optimizer is None:
                raise RuntimeError(
                    "no optimizer is set (call model.set_optimizer(optimizer) before the first step)"
                )
            batch = self._batch(inputs)
            if batch.size > self.batch_size:
                raise ValueError(
                    f"step was given {batch.size} samples, but replica {self.rank_within_stage} of "
                    f"{self.data_depth} takes {self.batch_size} of the global batch's {self.plan.batch_size} "
                    "(give each replica its own share, e.g. by varuna.SampleOrder)"
                )
            totals = self._trainer.step(
                inputs,
                num_samples=batch.size,
                dims=batch.dims,
                training=self.training,
                loss_scale=self._loss_scale,
                max_norm=clip_grad_max_norm,
            )
            self._reporter.pace.leave(self._trainer.engine.recorder.snapshot())
            self._reporter.report_if_due()
        self.grad_norm = totals.norm
        if self._progress.watched:
            self._progress.leave(self.iteration, self._trainer.engine.recorder.compute_seconds())
        return totals.loss, totals.overflow

    def evaluate(self, inputs: Mapping[str, object]) -> float:
        """The loss on `inputs` (this replica's share) in evaluation mode; changes nothing."""
        self._reporter.pace.interrupt()
        with self._report_errors("evaluate"):
            batch = self._batch(inputs)
            loss = self._trainer.evaluate(inputs, num_samples=batch.size, dims=batch.dims)
        self._progress.alive()
        return loss

    def forward(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(
            "a wrapped model is not called: use `loss, overflow = model.step(inputs)` to train and "
            "`loss = model.evaluate(inputs)` to evaluate"
        )

    def get_loss_scale(self) -> float | None:
        return self._loss_scale.value if self._loss_scale.checks_overflow else None

    def timeline(self) -> Timeline:
        """What every rank did in the last step; all ranks call it, all get the whole."""
        self._reporter.pace.interrupt()
        own = self._trainer.engine.recorder.timeline(self._session.rank, self.stage)
        return merge(on_one_clock(self._session.gather(own), self._reporter.machines))

    def report(self) -> StepReport:
        """What steps take, beside what a profile or plan foretold; all ranks call it, all get the same."""
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
        """Writes `varuna_ckpt_<step>` to a folder or URL that all ranks reach; all call it, between steps.

        Complete when it returns. With `tempdir` ("memory", or a local folder) it returns as soon as the
        state is copied there, and a process of its own carries it to the store: the future of the
        first rank is done when the checkpoint is complete. `shard` spreads the writing over the replicas;
        `keep_last` removes all but so many; `on_demand` asks for it as `on_demand_checkpoint` does. Where
        it fails, all ranks raise the same error, nothing is left half there, and training can go on.
        """
        if on_demand and not self._attention.at_boundary:
            asked: Future[str] = Future()
            self._asked_for.append(asked)
            self.on_demand_checkpoint(global_store)
            return asked
        self._reporter.pace.interrupt()
        return self._save(global_store, step=step, tempdir=tempdir, shard=shard, keep_last=keep_last)

    def load_checkpoint(
        self,
        global_store: str | os.PathLike[str],
        iteration: int | None = None,
        check_complete: bool = True,
        *,
        strict: bool = True,
        cast: bool = False,
    ) -> int:
        """Goes on from `varuna_ckpt_<iteration>`, or the newest complete one, whatever layout wrote it.

        All ranks call it, after `set_optimizer`. Takes over parameters, buffers, the optimizer's
        state and hyper-parameters, what is registered, loss scale, seed and iteration; returns its
        step. Where it fails, all ranks raise the same error and nothing has changed.
        `check_complete=False` takes what is there of an incomplete one, `strict=False` what the model
        knows of another's, `cast=True` other dtypes; hashes are checked always.
        """
        self._reporter.pace.interrupt()
        step = self._checkpoints.load(
            global_store, iteration, check_complete=check_complete, strict=strict, cast=cast
        )
        self._progress.uses(self._checkpoints.store)
        if step != self.iteration:
            self._own_saves.give_up()
        return step

    def resume(self, global_store: str | os.PathLike[str]) -> int:
        """Loads the newest complete checkpoint where there is one; returns the iteration to go on with."""
        step = self._checkpoints.newest(global_store)
        if step is None:  # what is saved on demand belongs there too
            self._checkpoints.store = open_store(os.fspath(global_store)).url
            self._progress.uses(self._checkpoints.store)
        else:
            self.load_checkpoint(global_store, step)
        self._saves_to = self._checkpoints.store
        return self.iteration

    def register(self, name: str, thing: Stateful) -> None:
        """Saves and loads something along with the model: a learning rate scheduler, say.

        Anything with `state_dict` and `load_state_dict` whose state is the same on all ranks. Where a
        checkpoint has been loaded already, it gets its state at once.
        """
        self._checkpoints.training.register(name, thing)

    def on_demand_checkpoint(self, global_store: str | os.PathLike[str]) -> None:
        """Saves on all ranks before their next step, though perhaps one rank alone was asked.

        It may be called at any moment, in a signal handler, from any thread; it only asks, and training
        goes on. In the script's own SIGUSR1 handler, which all ranks run between two steps, it saves
        at once, and returns when the checkpoint is complete.
        """
        if self._attention.at_boundary:
            self.checkpoint(global_store)
        else:
            self._attention.ask(global_store)

    def close(self) -> None:
        """Waits for what is being saved, then says goodbye. Not needed at the end of a script."""
        self._checkpoints.resources.close()
        self._session.close()
        usr1.release(self._attention)

    # ------------------------------------------------------------ the place of this rank

    @property
    def stage(self) -> int:
        return self._session.stage

    @property
    def partitions(self) -> int:
        return self.plan.depth

    @property
    def data_depth(self) -> int:
        """The replicas of this rank's stage."""
        return self._session.width

    @property
    def rank_within_stage(self) -> int:
        return self._session.replica

    @property
    def batch_size(self) -> int:
        """This replica's samples of a full global batch."""
        return spread_evenly(self.plan.batch_size, parts=self._session.width)[self._session.replica]

    @property
    def micro_batch_size(self) -> int:
        return self.plan.microbatch_size

    @property
    def iteration(self) -> int:
        """Steps done so far."""
        return self._trainer.iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        self._trainer.iteration = value

    @property
    def channels(self) -> dict[int, str]:
        """How tensors reach the ranks that this one is linked to; what is shared is shared from a first
        message on."""
        network = self._session.network
        return {} if network is None else {peer: link.transport for peer, link in network.links.items()}

    @property
    def _own(self) -> StagePlan:
        return self.plan.stages[self._session.stage]

    # ------------------------------------------------------------ as nn.Module users expect

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This stage's parameters, under the names that they have in the unwrapped model."""
        found = list(self._state.named_parameters(prefix, recurse, remove_duplicate))
        return iter(found or [("varuna_placeholder", self._placeholder)])

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return self._state.named_buffers(prefix, recurse, remove_duplicate)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As nn.Module's; walking all modules by name would cost a small model more than its optimizer."""
        if not set_to_none:
            return super().zero_grad(set_to_none=False)
        for parameter in self._weights:
            parameter.grad = None

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """This stage's part of the unwrapped model's state, under its names."""
        return self._state.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Takes this stage's part out of a whole model's state, or of this stage's own."""
        if assign:
            raise ValueError(
                "assign=True would part the optimizer from the parameters; values are copied instead"
            )
        unknown = sorted(set(state_dict) - self._names)
        if strict and unknown:
            raise RuntimeError(f"the model has no {unknown[:5]} (strict=False ignores them)")
        own = set(self._state.state_dict())
        return self._state.load_state_dict({k: v for k, v in state_dict.items() if k in own}, strict=strict)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's state on every rank, on the CPU; all ranks call it."""
        own = {name: tensor.detach().cpu() for name, tensor in self.state_dict().items()}
        merged: dict[str, Tensor] = {}
        for part in self._session.gather(own if self._session.replica == 0 else {}):
            merged.update(part)
        return merged

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Varuna":
        raise RuntimeError(
            "a wrapped model stays on its device and in its precision (choose them when wrapping: "
            f"device=..., precision=...; it is on {self.device} in {self.plan.precision})"
        )

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.parameters())
        return (
            f"Varuna(stage {self.stage} of {self.partitions}, replica {self.rank_within_stage} of "
            f"{self.data_depth}, {count:,} parameters in {self.plan.precision} on {self.device})"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(
                f"{error} (what the plain model has, such as save_pretrained or generate, is there alone: "
                "load full_state_dict(), which all ranks call, into it)"
            ) from None

    # ------------------------------------------------------------ inside

    @contextmanager
    def _report_errors(self, activity: str) -> Iterator[None]:
        """Report an error in this block to all ranks."""
        try:
            with report_errors(
                self._session,
                f"stage {self._session.stage}, {activity}",
                trainer=lambda: self.__dict__.get("_trainer"),
                explain_memory=self._explain_out_of_memory,
            ):
                yield
        except Exception:
            if "_trainer" not in self.__dict__:
                usr1.release(self._attention)  # now: the error may keep this unfinished model alive
            elif self._session.board is not None:
                self._checkpoints.resources.failed = True  # on the other ranks, too
            raise

    def _explain_out_of_memory(self, error: torch.OutOfMemoryError) -> Exception | None:
        if "_trainer" not in self.__dict__:
            return None
        plan, stage = self.plan, self._session.stage

        def held_microbatches(size: int) -> int:
            count = -(-self.batch_size // size)
            return held(plan.schedule, stage=stage, stages=plan.depth, microbatches=count)

        return explain_out_of_memory(
            error,
            trainer=self._trainer,
            state=self._state,
            optimizer=self._optimizer,
            microbatch_size=plan.microbatch_size,
            held_microbatches=held_microbatches,
            remedies=REMEDIES,
        )

    def _see_to_requests(self) -> None:
        """What any rank has been asked for (SIGUSR1, a checkpoint on demand), on all ranks at this step."""
        usr1.hold()
        if self._trainer.reducer.request_seen:
            self._trainer.reducer.request_seen = False
            self._trainer.engine.where = f"stage {self.stage}, what was asked for between two steps"
            self._progress.on_demand(True)
            sharers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            self._attention.act(
                self._session.gather,
                save=self._save_on_demand,
                keep=self._save_by_itself,
                usual_store=self._checkpoints.store,
                due=self._saves_to if self._own_saves.due else None,
                has_room=self._checkpoints.fits_in_memory(
                    available_bytes(torch.device("cpu")), ranks_on_machine=sharers
                ),
                leave=self.close,
            )
            self._progress.on_demand(False)
            self._reporter.pace.enter(time.perf_counter())  # none of that was part of a step

    def _asks(self) -> bool:
        return self._attention.asked() or (self._own_saves.due and self._saves_to is not None)

    def _save(
        self, global_store: str | os.PathLike[str], *, by_itself: bool = False, **options: Any
    ) -> "Future[str]":
        started, step = time.monotonic(), options.get("step")
        done = self._checkpoints.save(global_store, autosave=by_itself, **options)
        waited = time.monotonic() - started
        self._saves_to = self._checkpoints.store
        self._progress.uses(self._checkpoints.store)
        written = self.iteration if step is None else step
        if written != self.iteration:
            self._own_saves.give_up()
        self._own_saves.saved(done, waited, own=by_itself)
        self._progress.saves_every(self._own_saves.every_seconds)

        def tell(ended: "Future[str]", progress: ProgressWriter = self._progress) -> None:
            if ended.exception() is None:
                progress.saved(written, waited)

        done.add_done_callback(tell)
        return done

    def _save_by_itself(self, global_store: str, in_background: bool) -> None:
        """It is time: what is lost with a machine would be more than a save costs."""
        tempdir = self._checkpoints.tempdir if in_background else None
        try:
            self._save(global_store, by_itself=True, tempdir=tempdir, gradients=True)
        except CheckpointError as error:  # on all ranks
            log.error("the job could not save by itself: %s", error)
            self._own_saves.failed()

    def _save_on_demand(self, global_store: str, by_itself: bool) -> "Future[str]":
        try:
            done = self._save(global_store, by_itself=by_itself, gradients=True)
        except CheckpointError as error:
            while self._asked_for:
                self._asked_for.pop().set_exception(error)
            raise
        while self._asked_for:
            self._asked_for.pop().set_result(done.result())
        return done

    def _batch(self, inputs: object) -> Batch:
        if not isinstance(inputs, Mapping):
            raise TypeError(
                f"inputs must be a dict of the model's keyword arguments, not {type(inputs).__name__} "
                "(write {'x': x, 'y': y} for a model that is called as model(x=x, y=y))"
            )
        batch = find_batch(inputs, self._batch_dims)
        if batch.size == 1 and self._sample.size > 1:
            # One sample does not show which leading 1 is its batch; the sample inputs did.
            batch = Batch(1, {name: dim for name, dim in batch.dims.items() if name in self._sample.dims})
        return batch

    def _program(
        self, inputs: Mapping[str, object], size: int, dims: Mapping[str, int], training: bool
    ) -> SpanProgram | ProgramChain:
        """The program of this stage for inputs of this form, captured when first met."""
        batch = Batch(size, dims)
        key = training, self._source.signature(inputs, batch)
        if key not in self._programs:
            captured = self._source.capture(inputs, training=training, batch=batch)
            if captured.num_segments != self._num_segments:
                raise ValueError(
                    f"with these inputs the model has {captured.num_segments} segments, with the sample's "
                    f"it had {self._num_segments} (its CutPoints must not depend on the inputs)"
                )
            span = self._own.first, self._own.stop
            if training:
                refuse_unforeseen(captured, self._sampled, self._state, self.plan, self.stage)
            if self._compiles and not captured.cut_automatically:
                self._programs[key] = chain_of(self._source, captured, *span, self.device).compiled()
            else:
                # Segments that nobody marked are too short to be compiled each alone.
                program = captured.carve(*span).to(self.device)
                self._programs[key] = program.compiled() if self._compiles else with_fused_loss(program)
        return self._programs[key]

    def _agree_on(self, fingerprint: str, seed: int | None) -> tuple[int, list[str]]:
        """One seed for all ranks, who must have captured one and the same model; and everyone's machine."""
        own = (fingerprint, torch.initial_seed() if seed is None else seed, machine_identity())
        everyone = self._session.gather(own)
        ranks = sorted(rank for row in self._session.stage_map for rank in row)
        differing = [r for r, other in zip(ranks, everyone, strict=True) if other[0] != own[0]]
        if differing:
            raise ValueError(
                f"ranks {differing} have wrapped another model than rank {self._session.rank} "
                "(build the same model, with the same CutPoints and sample inputs, on every rank)"
            )
        return everyone[0][1] % 2**63, [machine for _, _, machine in everyone]
