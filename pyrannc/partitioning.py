"""The first call of a model: plan its layout on rank 0, and build this rank's stage."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from pyrannc import deployment
from pyrannc.calls import AgreedCalls, CurrentCall
from pyrannc.configuration import Configuration
from pyrannc.layouts import DeploymentTask
from pyrannc.model_costs import keep_costs, measure_request, read_known_costs
from pyrannc.optimizers import PartitionedOptimizer
from pyrannc.partitioned import PartitionedModel, check_same_forward
from pyrannc.pipeline import Pipeline
from pyrannc.process import reporting_losses, switches
from pyrannc.profile import MeasureRequest, MeasureSamples, ModelMeasurement, first_samples
from varuna.capture import Captured, Source
from varuna.capture.model.hooks import BackwardHooks
from varuna.capture.model.lengths import DynamicDims
from varuna.capture.model.state import Initialize, ModelTensors, adopted_state, model_values
from varuna.capture.run.verify import CHECKED_SAMPLES
from varuna.execute.comm.address import machine_identity, own_address
from varuna.execute.comm.session import Session
from varuna.execute.comm.values import PlainValue
from varuna.execute.step.outputs import Reduction
from varuna.execute.step.scatter import WeightFunction
from varuna.execute.update.clipping import ListedNorm, NormMeasurement
from varuna.execute.update.initial_values import share_initial_values
from varuna.execute.update.optimizers import refuse_coupled_update
from varuna.execute.update.shard import OptimizerShards
from varuna.observe.progress_bar import capture_progress
from varuna.plan.cut.blocks import partition
from varuna.plan.plan_file import PinnedPlan, write_plan
from varuna.train.assemble import assemble
from varuna.train.validate import check_once, refuse_coupled_losses
from varuna.types import Profile

log = logging.getLogger("pyrannc")


@dataclass(frozen=True)
class PartitionOptions:
    """Options of `RaNNCModule` that matter in its first call."""

    configuration: Configuration
    device: torch.device
    gather_inputs: bool
    dynamic_dims: DynamicDims
    scalar_outputs: Reduction | None
    loss_weight: WeightFunction | None
    deployment_file: str | os.PathLike[str] | None  # to load
    shard_optimizer: bool
    initialize: Initialize | None
    seed: int | None
    timeout_seconds: float


class PlannedModel(NamedTuple):
    """A captured model and the plan for it, the same on all ranks."""

    source: Source
    captured: Captured
    pinned: PinnedPlan
    seed: int
    number: int  # of the first call


@dataclass
class ModelPartitioning:
    """Partitions one model over all ranks. All ranks make the same calls."""

    model: nn.Module
    optimizers: Sequence[PartitionedOptimizer]
    calls: AgreedCalls
    options: PartitionOptions

    def plan(self, call: CurrentCall, session: Session) -> PlannedModel:
        """Choose a layout by the batch of this call; in `session` there are no stages yet."""
        if not sum(call.counts):
            raise ValueError("no rank gave a sample (the batch of the first call decides the layout)")
        options = self.options
        source = Source(
            self.model,
            precision=self.calls.calls[call.kind].signature.precision,
            dynamic_dims=options.dynamic_dims,
            device_type=options.device.type,
            partition=partition,
            watch=capture_progress(shown=session.rank == 0),
        )
        captured = self.calls.calls[call.kind].capture(source, training=True)
        self._check_same_model(captured, session)
        own_seed = torch.initial_seed() if options.seed is None else options.seed
        seed = session.gather(own_seed, int)[0] % 2**63
        pinned = self._choose(source, captured, call, session)
        self._check_capture(captured, call, pinned, session)
        session.gather(True, bool)  # a refusal reaches all ranks before they open other connections
        return PlannedModel(source, captured, pinned, seed, call.kind)

    def build(self, planned: PlannedModel, session: Session) -> PartitionedModel:
        """Keep this stage's part of the model and of the optimizer, and make its pipeline."""
        source, captured, pinned, seed, number = planned
        options, plan = self.options, pinned.plan
        own = plan.stages[session.stage]
        before = list(self.model.parameters())
        given = options.initialize
        whole = model_values(source, given) if session.rank == 0 and session.num_ranks > 1 else {}
        adopt = partial(adopted_state, model=self.model, device=options.device, initialize=given, seed=seed)
        state = adopt(source, captured, own.first, own.stop)
        if options.configuration.sync_params_on_init and switches.syncs_parameters:
            share_initial_values(session, state.by_name(), whole, log)
        owners: dict[str, int] = {}
        for rank, held in enumerate(session.gather(tuple(state.canonical), tuple[str, ...])):
            for name in held:
                owners.setdefault(name, rank)
        hooks = BackwardHooks(self.model)
        partitioned = PartitionedModel(
            self.calls,
            source,
            session,
            captured,
            pinned,
            state,
            owners,
            options.device,
            hooks,
            ModelTensors(source, state),
        )
        trainer = assemble(
            plan,
            session,
            captured,
            state,
            partial(partitioned.program, number),
            device=options.device,
            seed=seed,
            timeout_seconds=options.timeout_seconds,
            weigh=options.loss_weight,
        )
        if trainer.norm is not None:
            trainer.norm.add([*before, *self.model.parameters()])
            trainer.norm.repeat = partial(_measure_norm, session)
            for optimizer in self.optimizers:
                optimizer.clip_together(trainer.norm)
        partitioned.pipeline = Pipeline(
            session,
            trainer,
            gather_inputs=options.gather_inputs,
            pipeline_num=options.configuration.pipeline_num,
            reduction=options.scalar_outputs,
            loss_weight=options.loss_weight,
        )
        for optimizer in self.optimizers:
            self._partition_optimizer(optimizer, partitioned)
        log.info("deployed: %s", pinned.reason)
        return partitioned

    def _check_capture(
        self, captured: Captured, call: CurrentCall, pinned: PinnedPlan, session: Session
    ) -> None:
        """Compare the captured model with the original, on the rank with the most samples."""
        if session.rank != call.donor:
            return
        agreed = self.calls.calls[call.kind]
        # At least two: the graph is of several samples.
        count = max(2, min(call.counts[session.rank], CHECKED_SAMPLES))
        inputs = first_samples(call.leaves, agreed.dims, count).of(count)
        check_once(
            self.model,
            captured,
            inputs,
            pinned.plan,
            device=self.options.device,
            convention=agreed.convention,
        )
        if self.options.scalar_outputs is None and self.options.loss_weight is None:
            refuse_coupled_losses(
                self.model,
                captured,
                inputs,
                pinned.plan,
                device=self.options.device,
                ways_out="compute the loss outside the model; or, if a mean over micro-batches is what you "
                'want, pass scalar_outputs="mean"',
            )

    def _partition_optimizer(self, optimizer: PartitionedOptimizer, partitioned: PartitionedModel) -> None:
        state, session = partitioned.state, partitioned.session
        shards = self.options.shard_optimizer and session.width > 1
        refuse_coupled_update(optimizer.optimizer, depth=session.depth, shards=shards)
        held = {name: p for name, p in state.named_parameters() if name in partitioned.owners}
        optimizer.partition(self.model, held, partitioned.gather_states)
        if not self.options.shard_optimizer:
            return
        before = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
        if session.replicas is not None:
            reducer = partitioned.pipeline.trainer.reducer
            reducer.owned = OptimizerShards(optimizer.optimizer, session).counted(reducer.weights)
        # Ranks whose stage has one replica take part as well: gathering is collective.
        optimizer.shard(self.model, before, partial(_gather_shards, session))

    def _choose(self, source: Source, captured: Captured, call: CurrentCall, session: Session) -> PinnedPlan:
        """Return the plan of rank 0: loaded from a file, or chosen."""
        configuration, is_first = self.options.configuration, session.rank == 0
        sample_bytes = self.calls.calls[call.kind].sample_bytes
        machines = session.gather(machine_identity(), str)
        task = DeploymentTask(source, captured, sum(call.counts), sample_bytes, machines, self.options.device)
        file = self.options.deployment_file
        if file is None and configuration.load_deployment:
            file = configuration.deployment_file
        if file is not None:
            pinned = deployment.load(file, task) if is_first else None
        else:
            measured = self._measure(task, call, session)
            pinned = deployment.choose(task, configuration, measured) if is_first else None
            if pinned is not None and configuration.save_deployment:
                write_plan(Path(configuration.deployment_file), pinned)
        agreed = session.broadcast(pinned, 0, PinnedPlan | None)
        assert agreed is not None
        return agreed

    def _measure(self, task: DeploymentTask, call: CurrentCall, session: Session) -> Profile | None:
        """Return the costs of the model: those that rank 0 knows, or measured by all ranks."""
        configuration = self.options.configuration
        optimizer = self.optimizers[0].optimizer if self.optimizers else None
        needed, known, circumstances = None, None, ""  # `circumstances`: the key of cached costs
        if session.rank == 0:
            needed = measure_request(task, configuration)
            circumstances = str((needed, task.subject.device, task.machines, type(optimizer)))
            known = read_known_costs(task, configuration, circumstances)
        request = session.broadcast(needed if known is None else None, 0, MeasureRequest | None)
        if request is None:
            return known
        own = None
        if call.donor == session.rank:
            dims = self.calls.calls[call.kind].dims
            own = first_samples(call.leaves, dims, max(request.microbatch_sizes))
        samples = session.broadcast(own, call.donor, MeasureSamples | None)
        assert samples is not None
        measurement = ModelMeasurement(
            session, task.source, task.captured, task.subject, samples, self.options.device, request
        )
        profile = measurement.run(optimizer, own_address())
        if profile is not None and session.rank == 0:
            keep_costs(profile, configuration, circumstances)
        return profile

    def _check_same_model(self, captured: Captured, session: Session) -> None:
        """Raise ValueError with the first difference, if ranks wrapped different models."""
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters(remove_duplicate=False)}
        everyone = session.gather(
            (type(self.model).__name__, shapes, captured.graph.fingerprint),
            tuple[str, dict[str, tuple[int, ...]], str],
        )
        first_kind, first, _ = everyone[0]
        for rank, (kind, theirs, _) in enumerate(everyone):
            if kind != first_kind:
                raise ValueError(
                    f"rank {rank} wrapped a {kind}, rank 0 a {first_kind} (build the same model on all ranks)"
                )
            for name in [*first, *theirs]:
                if first.get(name) != theirs.get(name):
                    raise ValueError(
                        f"rank {rank} wrapped another model than rank 0: {name!r} is "
                        f"{_shape_text(theirs.get(name))}, on rank 0 {_shape_text(first.get(name))} "
                        "(build the same model on all ranks)"
                    )
        check_same_forward(session, [fingerprint for *_, fingerprint in everyone], captured)


def _measure_norm(session: Session, measure: NormMeasurement, _local: NormMeasurement) -> ListedNorm:
    with reporting_losses(session):
        return measure()


def _gather_shards(session: Session, own: dict[str, Any]) -> dict[str, Any]:
    """Return the optimizer's state of all ranks by name."""
    with reporting_losses(session):
        everyone = session.gather(PlainValue(own), PlainValue)
    return {name: state for states in everyone for name, state in states.value.items()}


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {list(shape)}"
