"""The class `RaNNCModule`: a model without annotations, partitioned over all ranks, called as before."""

import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from pyrannc.calls import AgreedCalls, CurrentCall
from pyrannc.configuration import folder_of, read_configuration, take_arguments
from pyrannc.logs import configure_logging
from pyrannc.members import PartMembers
from pyrannc.optimizers import PartitionedOptimizer, partition_optimizer
from pyrannc.partitioned import PartitionedModel
from pyrannc.partitioning import ModelPartitioning, PartitionOptions
from pyrannc.pipeline import BatchInFlight
from pyrannc.process import join, live_modules, reporting_losses, switches
from pyrannc.step_reports import open_step_reports
from varuna.capture.model.lengths import check_dynamic_dims
from varuna.capture.model.state import Initialize, StageCopy, copied_stage
from varuna.capture.trace.trace import LOW_PRECISION
from varuna.errors import WorkerError, check_name
from varuna.execute.comm.address import own_address
from varuna.execute.comm.session import Session, open_session
from varuna.execute.device.facts import find_device
from varuna.execute.step.outputs import Reduction
from varuna.execute.step.scatter import WeightFunction
from varuna.plan.plan_file import write_plan
from varuna.train.programs import agree_on_changes
from varuna.train.rank_errors import report_errors
from varuna.train.validate import check_model
from varuna.types import Plan, PrecisionName, StageMap

log = logging.getLogger("pyrannc")

FIRST_CALL_TIMEOUT_FACTOR = 30.0
"""Multiplies timeouts in the first call, in which rank 0 plans."""


REPLACED = {
    "enable_dropout": "use train() and eval()",
    "is_checkpointing_enabled": "model.plan.stages has `recompute` of each stage",
    "sync_param": "use get_param(name)",
    "sync_param_grad": "use get_param_grad(name)",
    "get_local_param_segment": "use get_param(name)",
    "allreduce_grads_zero": "use allreduce_grads()",
}
"""Methods of RaNNC that have another name."""


class RaNNCModule(PartMembers):
    """A model that is partitioned over all ranks, and used as if this rank held all of it.

        model = pyrannc.RaNNCModule(model, optimizer)
        loss = loss_function(model(x), y)
        loss.backward()
        optimizer.step()

    The first call captures the model, cuts it, and distributes its stages. Each rank calls it with its own
    samples and gets their outputs (`gather_inputs=False`: rank 0 has all samples). Gradients are those of
    the mean over all samples. All ranks make the same calls in the same order.
    """

    _partitioned: PartitionedModel | None

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        gather_inputs: bool = True,
        use_amp_master_params: bool | str | os.PathLike[str] = False,
        load_deployment: str | os.PathLike[str] | bool | None = None,
        *,
        precision: PrecisionName | None = None,
        device: int | str | torch.device = -1,
        batch_dims: Mapping[str, int | None] | None = None,
        dynamic_dims: Mapping[str, Mapping[int, str]] | None = None,
        scalar_outputs: Reduction | None = None,
        loss_weight: WeightFunction | None = None,
        shard_optimizer: bool = False,
        initialize: Initialize | None = None,
        seed: int | None = None,
        timeout_seconds: float = 120.0,
        **options: object,
    ) -> None:
        super().__init__()
        check_model(model)
        if isinstance(use_amp_master_params, str | os.PathLike):  # later versions of RaNNC have it here
            use_amp_master_params, load_deployment = False, use_amp_master_params
        original = take_arguments(options)
        use_amp_master_params |= original.enable_apex_amp
        shard_optimizer |= original.enable_zero
        if isinstance(load_deployment, bool):  # the option with this name, which loads deployment_file
            options["load_deployment"], load_deployment = load_deployment, None
        configure_logging(folder_of(os.environ, Path.home()))
        configuration = read_configuration(os.environ, Path.home(), options)
        process = join()
        self.device = find_device(device, process.local_rank, process.rank)
        low: PrecisionName = "fp16" if self.device.type == "cuda" else "bf16"
        self._precision: PrecisionName = precision or (low if use_amp_master_params else "fp32")
        check_name("precision", self._precision, get_args(PrecisionName))
        check_name("scalar_outputs", scalar_outputs or "mean", get_args(Reduction))
        _share_members(self, model)
        self._calls = AgreedCalls(model, dict(batch_dims or {}), gather_inputs=gather_inputs)
        self._optimizers = _partition_optimizers(optimizer, model, sharded=shard_optimizer)
        self._options = PartitionOptions(
            configuration=configuration,
            device=self.device,
            gather_inputs=gather_inputs,
            scalar_outputs=scalar_outputs,
            dynamic_dims=check_dynamic_dims(dynamic_dims or {}),
            loss_weight=loss_weight,
            deployment_file=load_deployment,
            shard_optimizer=shard_optimizer,
            initialize=initialize,
            seed=seed,
            timeout_seconds=timeout_seconds,
        )
        self._rank = process.rank
        self._reports = open_step_reports(self.device, self._rank) if self._optimizers else None
        if self._reports is not None:
            self._reports.follow(partitioned.optimizer for partitioned in self._optimizers)
        self._session = self._open_session((tuple(range(process.world)),))
        live_modules.add(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._session.closed:
            raise RuntimeError(
                "the model was undeployed, by undeploy() or pyrannc.clear() (wrap it again to go on)"
            )
        with self._report_errors("forward"):
            partitioned = self._partitioned
            attributes = None if partitioned is None else partitioned.source.attributes
            changes = [] if attributes is None else attributes.changes()
            call = self._calls.agree(
                self._session,
                args,
                kwargs,
                training=self.training or self._model_trains(),
                precision=self._current_precision(),
                changed=bool(changes),
            )
            if partitioned is not None:
                if call.changed:
                    agree_on_changes(self._session, partitioned.source.attributes, changes)
                return self._run(partitioned, call)
            partitioning = ModelPartitioning(self._model, self._optimizers, self._calls, self._options)
            with self._session.patient(FIRST_CALL_TIMEOUT_FACTOR):
                planned = partitioning.plan(call, self._session)
            stage_map = tuple(stage.ranks for stage in planned.pinned.plan.stages)
            if stage_map != self._session.stage_map:
                flat_session, self._session = self._session, self._open_session(stage_map)
                flat_session.close()
        # A block of its own: errors are reported to the ranks of the new session.
        with self._report_errors("forward"):
            partitioned = partitioning.build(planned, self._session)
            partitioned.pipeline.keeps_losses = self._reports is not None
            self.__dict__["_partitioned"] = partitioned
            return self._run(partitioned, call)

    def _model_trains(self) -> bool:
        """Return whether any module is in train mode, though the model as a whole is in eval mode."""
        partitioned = self._partitioned
        if partitioned is None:
            return any(module.training for module in self._model.modules())
        return partitioned.source.attributes.any_training

    def _run(self, partitioned: PartitionedModel, call: CurrentCall) -> Any:
        reports, trains = self._reports, self.training and torch.is_grad_enabled()
        with nullcontext() if reports is None else reports.call(call.leaves, trains=trains):
            outputs = partitioned.run(call, self._backward)
        if self._options.configuration.trace_events:
            partitioned.write_trace(Path(self._options.configuration.event_trace_file))
        return outputs

    def _backward(self, batch: BatchInFlight, gradients: Any) -> dict[str, Tensor]:
        reports = self._reports
        reported = nullcontext() if reports is None else reports.backward(batch, gradients)
        with self._report_errors("backward"), reported:
            partitioned = self._require_partitioned("backward")
            input_gradients = partitioned.pipeline.backward(
                batch,
                gradients,
                keep_graph=switches.keeps_graph,
                delay_reduction=switches.delays_allreduce,
            )
            self._sync_scalers(partitioned)
            return input_gradients

    def _sync_scalers(self, partitioned: PartitionedModel) -> None:
        """Make the gradient scalers of all ranks see the same overflows."""
        pipeline = partitioned.pipeline
        if pipeline.must_agree_on_overflow and pipeline.reduced:
            for optimizer in self._optimizers:
                optimizer.add_placeholder(self.device, overflowed=pipeline.overflowed)

    def _current_precision(self) -> PrecisionName:
        """Return the precision of autocast if the model is called under it, else that of this module."""
        if not torch.is_autocast_enabled(self.device.type):
            return self._precision
        dtype = torch.get_autocast_dtype(self.device.type)
        for name, low in LOW_PRECISION.items():
            if low == dtype:
                return name
        raise ValueError(
            f"the model is called under torch.autocast with {dtype} (expected bfloat16 or float16)"
        )

    def allreduce_grads(self) -> None:
        """Reduce the gradients of all backwards since `delay_grad_allreduce(True)`; all ranks call it."""
        with self._report_errors("allreduce_grads"):
            partitioned = self._require_partitioned("allreduce_grads")
            partitioned.pipeline.allreduce()
            self._sync_scalers(partitioned)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Clip the gradient norm of the whole model, and return the norm before. All ranks call it."""
        with self._report_errors("clip_grad_norm"):
            reducer = self._require_partitioned("clip_grad_norm").pipeline.trainer.reducer
            return reducer.clip(float(max_norm))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state of the whole model, which the original model can load; all ranks call it."""
        for option in ("no_hook", "amp_master_params", "rank0_only", "sync_all_ranks", "sync_grad"):
            kwargs.pop(option, None)
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        if self._partitioned is None:
            return state
        self._partitioned.tensors.follow()
        prefix = str(kwargs.get("prefix", args[1] if len(args) > 1 else ""))
        held = self._partitioned.state
        with self._report_errors("state_dict", announce=True):
            own = {name: held.tensor(name).detach().cpu().clone() for name in held.canonical}
            everyone = self._partitioned.gather_named(own)
        canonical = self._partitioned.source.canonical
        for key in state:
            name = key.removeprefix(prefix)
            name = canonical.get(name, name)
            if key.startswith(prefix) and name in everyone:
                state[key] = everyone[name]
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the state of a whole model, before or after the first call; each rank keeps its part."""
        if assign:
            raise ValueError(
                "assign=True would replace the parameters that the optimizer holds (load without assign)"
            )
        with warnings.catch_warnings():
            # The tensors of other ranks are on `meta` here, and stay there.
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            return super().load_state_dict(state_dict, strict)

    @property
    def name_to_param(self) -> dict[str, nn.Parameter]:
        """All parameters of the model by name; those that other ranks hold are on `meta`."""
        return dict(self._model.named_parameters())

    def get_param(self, name: str, amp_master_param: bool = False) -> Tensor:
        """Return one whole parameter or buffer on every rank; all ranks call it.

        `amp_master_param` changes nothing: in every precision, optimizers step the parameters themselves.
        """
        tensor = self._broadcast_tensor("get_param", name, lambda tensor: tensor)
        assert tensor is not None
        return tensor

    def get_param_grad(self, name: str, amp_master_param: bool = False) -> Tensor | None:
        """Return the gradient of one parameter on every rank; all ranks call it."""
        return self._broadcast_tensor("get_param_grad", name, lambda tensor: tensor.grad)

    def _broadcast_tensor(
        self, call: str, name: str, select: Callable[[Tensor], Tensor | None]
    ) -> Tensor | None:
        partitioned = self._partitioned
        local: dict[str, Tensor] = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        if partitioned is not None:
            name = partitioned.source.canonical.get(name, name)
        known: Mapping[str, object] = local if partitioned is None else partitioned.owners
        if name not in known:
            raise KeyError(
                f"{name!r} is no parameter or buffer of the model (it has {', '.join(sorted(known))})"
            )
        if partitioned is None:
            tensor = select(local[name])
            return None if tensor is None else tensor.detach().clone()
        with self._report_errors(call, announce=True, argument=name):
            owner = partitioned.owners[name]
            own = select(partitioned.state.tensor(name)) if owner == self._rank else None
            return self._session.broadcast(
                None if own is None else own.detach().cpu().clone(), owner, Tensor | None
            )

    @property
    def plan(self) -> Plan:
        """The plan that the model was partitioned by. Available after the first call."""
        return self._require_partitioned("plan").pinned.plan

    def save_deployment(self, file: str | os.PathLike[str]) -> None:
        """Write the layout to a file. Rank 0 writes; other ranks may call it, too."""
        partitioned = self._require_partitioned("save_deployment")
        if self._session.rank == 0:
            write_plan(Path(file), partitioned.pinned)

    def undeploy(self) -> None:
        """Close the connections to the other ranks. Not needed at the end of a script."""
        self._session.close()

    def _require_partitioned(self, what: str) -> PartitionedModel:
        if self._partitioned is None:
            raise RuntimeError(
                f"{what} needs a partitioned model, but it is not partitioned yet (call the model once on "
                "every rank first)"
            )
        return self._partitioned

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_model")
            if model is None or name.startswith("_"):
                raise
            if name in REPLACED and not hasattr(model, name):
                raise AttributeError(f"RaNNCModule has no {name!r} ({REPLACED[name]})") from None
            return getattr(model, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> StageCopy:
        """Copy this rank's parameters and buffers, for example for torch's AveragedModel."""
        partitioned = self._require_partitioned("copy.deepcopy (as in torch's AveragedModel)")
        return copied_stage(partitioned.state, [name for name, _ in self.named_parameters()])

    def train(self, mode: bool = True) -> "RaNNCModule":
        super().train(mode)
        self._model.training = mode  # it is not registered as a submodule
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> "RaNNCModule":
        log.warning("to(), cuda(), half() and similar calls have no effect: the model is on %s", self.device)
        return self

    def _open_session(self, stage_map: StageMap) -> Session:
        session = open_session(
            stage_map,
            rank=self._rank,
            device=self.device,
            timeout_seconds=self._options.timeout_seconds,
            host=own_address(),
        )
        weakref.finalize(self, _close_session, session)
        return session

    @contextmanager
    def _report_errors(self, call: str, *, announce: bool = False, argument: str = "") -> Iterator[None]:
        """Run a call that all ranks make, and report its error to all of them."""

        def explain(error: torch.OutOfMemoryError) -> Exception | None:
            optimizer = self._optimizers[0].optimizer if self._optimizers else None
            partitioned = self._partitioned
            return None if partitioned is None else partitioned.explain_out_of_memory(error, optimizer)

        reported = report_errors(
            self._session,
            call,
            trainer=lambda: None if self._partitioned is None else self._partitioned.pipeline.trainer,
            explain_memory=explain,
        )
        named = self._session.call(call, announce=announce, argument=argument)
        with reporting_losses(self._session), named, reported:
            yield


def _close_session(session: Session) -> None:
    """Close a session; if an error of the script ends this process, report it to the other ranks."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, Exception) and not isinstance(error, WorkerError) and not session.closed:
        session.report_error(error, "the script, between two calls of the model")
    if session.waiter is not None:
        session.waiter.drain_abandoned()
    session.close()


def _share_members(wrapper: nn.Module, model: nn.Module) -> None:
    """Share the registries of the model: its names are the wrapper's, also inside a larger module."""
    for registry in ("_parameters", "_buffers", "_modules"):
        wrapper.__dict__[registry] = getattr(model, registry)
    wrapper.__dict__["_model"] = model  # past nn.Module, which would register it as a submodule
    wrapper.__dict__["_partitioned"] = None
    wrapper.training = model.training


def _partition_optimizers(
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    model: nn.Module,
    *,
    sharded: bool,
) -> list[PartitionedOptimizer]:
    """Let the optimizers keep only this rank's parameters later; each must have some of the model's."""
    listed = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers or ())
    own = set(model.parameters())
    for optimizer in listed:
        if own and own.isdisjoint(p for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                "the optimizer has none of the model's parameters, so it would never change the model (make "
                "it from the model that you pass here: Optimizer(model.parameters()))"
            )
    partitioned = [partition_optimizer(optimizer, model) for optimizer in listed]
    if sharded and (len(listed) > 1 or any(optimizer.num_models > 1 for optimizer in partitioned)):
        raise ValueError(
            "shard_optimizer=True needs one optimizer for each wrapped model (make one from "
            "model.parameters(), or leave shard_optimizer out)"
        )
    return partitioned
