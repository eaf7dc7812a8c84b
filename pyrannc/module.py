"""The door for models without annotation: class `RaNNCModule`, which is called as the model itself is."""

import logging
import os
import sys
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from pyrannc import deployment
from pyrannc.calls import Agreed, Draft, agree, look_at, sample_of
from pyrannc.configuration import folder_of, read_configuration
from pyrannc.logs import configure_logging
from pyrannc.optimizers import Patched
from pyrannc.pipeline import Passage, Passing, Pipeline, Reduction, Way, classify
from pyrannc.process import join, switches
from pyrannc.profile import ModelMeasurement, first_samples
from varuna.capture import Captured, Source, SpanProgram
from varuna.capture.model.call_convention import StructuredCall
from varuna.capture.model.state import StageState, adopted_state
from varuna.capture.trace.trace import LOW_PRECISION
from varuna.errors import WorkerError, check_name
from varuna.execute.comm.address import machine_identity, own_address
from varuna.execute.comm.session import Session, open_session
from varuna.execute.device.facts import find_device
from varuna.execute.device.out_of_memory import Remedies
from varuna.execute.step.same_data import SampleHashes, find_equal_replicas, hash_batch
from varuna.execute.update.shard import shard_optimizer as shard
from varuna.files import write_atomic
from varuna.observe import merge, to_perfetto
from varuna.observe.progress_bar import capture_progress
from varuna.observe.record import on_one_clock
from varuna.plan.cut.blocks import partition
from varuna.plan.plan_file import PinnedPlan
from varuna.train.assemble import assemble
from varuna.train.rank_errors import explain_out_of_memory, report_errors
from varuna.train.validate import check_model, refuse_inseparable
from varuna.types import Plan, PrecisionName, Profile

log = logging.getLogger("pyrannc")

DEPLOYING_PATIENCE = 30.0
"""While rank 0 plans, the others wait so many times longer than the timeout."""
SYNC_BYTES = 64 << 20
"""Of the values that rank 0 tells the others as one."""


class RaNNCModule(nn.Module):
    """A model that trains over all ranks and is used as if it were on this one.

        model = pyrannc.RaNNCModule(model, optimizer)
        loss = loss_function(model(x), y)
        loss.backward()
        optimizer.step()

    At its first call the model is captured, cut and spread. Each rank calls it with samples of its own
    (`gather_inputs=False`: rank 0 has them all) and gets the outputs of these; gradients are of the mean
    over all samples. All ranks make the same calls in the same order.
    """

    _model: nn.Module
    _state: StageState  # what this rank holds, once the model is spread

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        gather_inputs: bool = True,
        use_amp_master_params: bool = False,
        load_deployment: str | os.PathLike[str] | bool | None = None,
        *,
        precision: PrecisionName | None = None,
        device: int | str | torch.device = -1,
        batch_dims: Mapping[str, int | None] | None = None,
        scalar_outputs: Reduction = "mean",
        shard_optimizer: bool = False,
        seed: int | None = None,
        timeout_seconds: float = 120.0,
        **options: object,
    ) -> None:
        super().__init__()
        check_model(model)
        if optimizer is not None and _is_of_another(optimizer, model):
            raise ValueError(
                "the optimizer has none of the model's parameters, and would never change it (make it from "
                "those of the very model that you give here: Optimizer(model.parameters()))"
            )
        if isinstance(load_deployment, bool):  # the option of that name: from the deployment_file
            options["load_deployment"] = load_deployment
            load_deployment = None
        home = Path.home()
        configure_logging(folder_of(os.environ, home))
        self._configuration = read_configuration(os.environ, home, options)
        place = join()
        self.device = find_device(device, place.local_rank, place.rank)
        low: PrecisionName = "fp16" if self.device.type == "cuda" else "bf16"
        self._precision: PrecisionName = precision or (low if use_amp_master_params else "fp32")
        check_name("precision", self._precision, get_args(PrecisionName))
        check_name("scalar_outputs", scalar_outputs, get_args(Reduction))
        # The model's own registries: its names are this module's, also for a module around this one.
        for registry in ("_parameters", "_buffers", "_modules"):
            self.__dict__[registry] = getattr(model, registry)
        self.__dict__["_model"] = model
        self.training = model.training
        self._gathers = gather_inputs
        self._deployment_to_load = load_deployment
        self._batch_dims = dict(batch_dims or {})
        self._reduction: Reduction = scalar_outputs
        self._shards_optimizer = shard_optimizer
        self._seed = seed
        self._timeout_seconds = timeout_seconds
        self._optimizer = optimizer
        self._patched = None if optimizer is None else Patched(optimizer, _names(model))
        self._agreed: list[Agreed] = []
        self._callings: list[StructuredCall] = []
        self._ways: dict[int, Way] = {}
        self._programs: dict[object, SpanProgram] = {}
        self._pipeline: Pipeline | None = None
        self._pinned: PinnedPlan | None = None
        self._owners: dict[str, int] = {}
        self._anchor = [torch.zeros((), requires_grad=True)]  # a list: it is no parameter
        ranks = tuple(range(place.world))
        self._session = self._open((ranks,), place.rank)

    # ------------------------------------------------------------ called as the model is

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._errors_reach_everyone("forward"):
            number, leaves, counts = self._settle_call(args, kwargs)
            if self._pipeline is None:
                with self._session.patient(DEPLOYING_PATIENCE):
                    self._deploy(number, leaves, counts)
            assert self._pipeline is not None
            way = self._way(number)
            pipeline = self._pipeline
            pipeline.must_agree_on_overflow |= way.agreed.draft.precision == "fp16"

            def run() -> tuple[list[Tensor], Passing]:
                return pipeline.forward(way, leaves, counts)

            if not way.agreed.draft.keeps:
                results, _ = run()
            else:
                wanting = [leaf.name for leaf in way.agreed.draft.tensors if leaf.has_gradient]
                names = [name for name in wanting if name in leaves]
                given = [leaves[name] for name in names]
                back = self._backward
                apply: Any = Passage.apply
                results = apply(run, back, names, self._anchor[0], *given)
            if self._configuration.trace_events:
                self._write_trace()
            return way.structure.filled(results)

    def _backward(self, passing: Passing, gradients: Any) -> dict[str, Tensor]:
        assert self._pipeline is not None
        with self._errors_reach_everyone("backward"):
            found = self._pipeline.backward(
                passing, gradients, again=switches.keeps_graph, delays=switches.delays_allreduce
            )
            self._let_scalers_agree(self._pipeline)
            return found

    def _let_scalers_agree(self, pipeline: Pipeline) -> None:
        if pipeline.must_agree_on_overflow and pipeline.reduced and self._patched is not None:
            self._patched.stand_in(self.device, overflowed=pipeline.overflowed)

    def _settle_call(self, args: Any, kwargs: Any) -> tuple[int, dict[str, Any], list[int]]:
        """The number under which all ranks know this call, its tensors, and every rank's samples."""
        silent = not self._gathers and self._session.rank != 0
        draft: Draft | None = None
        sizes: dict[str, int] = {}
        leaves: dict[str, Any] = {}
        calling: StructuredCall | None = None
        number, count = -1, 0
        if not silent:
            keeps = torch.is_grad_enabled()
            calling, leaves = StructuredCall.of(self._model, args, kwargs, grad_enabled=keeps)
            draft, sizes = look_at(
                leaves,
                str(calling.key),
                batch_dims=self._batch_dims,
                gradients=calling.gradients,
                training=self.training,
                keeps=keeps,
                precision=self._precision_now(),
            )
            for index, agreed in enumerate(self._agreed):
                found = agreed.num_samples(draft, sizes)
                if found is not None:
                    number, count = index, found
        words = self._session.gather_numbers([number, count])
        speaking = words if self._gathers else words[:1]
        if any(theirs[0] != speaking[0][0] or theirs[0] < 0 for theirs in speaking):
            # Once, for a script that gives all ranks the same data does so from the first batch on.
            looks = self._gathers and self.training and not self._agreed
            given = hash_batch(leaves) if looks else {}
            everyone = self._session.gather((draft, sizes, None if self._gathers else calling, given))
            told = everyone if self._gathers else everyone[:1]
            self._tell_of_equal_batches([theirs for *_, theirs in everyone])
            calls = [(theirs, sizes) for theirs, sizes, *_ in told if theirs is not None]
            agreed = agree([theirs for theirs, _ in calls], [sizes for _, sizes in calls], self._batch_dims)
            calling = calling or everyone[0][2]
            assert calling is not None
            self._agreed.append(agreed)
            self._callings.append(calling)
            counts = [agreed.num_samples(theirs, sizes) or 0 for theirs, sizes in calls]
            number = len(self._agreed) - 1
        else:
            number, counts = int(speaking[0][0]), [int(theirs[1]) for theirs in speaking]
        return number, leaves, counts + [0] * (len(words) - len(counts))

    def _tell_of_equal_batches(self, given: Sequence[SampleHashes]) -> None:
        alike = find_equal_replicas(given)
        if alike is not None and self._session.rank == 0:
            log.warning(
                "ranks %d and %d have called the model with the same samples, so each counts twice (give "
                "each its own: torch's DistributedSampler; or gather_inputs=False, then rank 0 has them all)",
                *alike,
            )

    def _precision_now(self) -> PrecisionName:
        """The one that the model was wrapped in, unless it is called under autocast."""
        if not torch.is_autocast_enabled(self.device.type):
            return self._precision
        dtype = torch.get_autocast_dtype(self.device.type)
        found = next((name for name, low in LOW_PRECISION.items() if low == dtype), None)
        if found is None:
            raise ValueError(
                f"the model is called under torch.autocast with {dtype} (expected bfloat16 or float16)"
            )
        return found

    def _way(self, number: int) -> Way:
        """What all ranks know of a call, found out when it first comes."""
        if number not in self._ways:
            assert self._pipeline is not None
            trainer = self._pipeline.trainer
            trainer.engine.where = f"stage {self._session.stage}, capturing another way to call the model"
            captured = self._capture(number)
            plan = trainer.plan
            if captured.num_segments != plan.stages[-1].stop:
                raise ValueError(
                    f"called so, the model has {captured.num_segments} segments; when it was spread it had "
                    f"{plan.stages[-1].stop} (its CutPoints must not depend on the inputs)"
                )
            refuse_inseparable(plan, captured)
            own = plan.stages[self._session.stage]
            program = captured.carve(own.first, own.stop)
            told = self._session.gather((captured.graph.fingerprint, frozenset(program.inputs)))
            self._refuse_other_models([fingerprint for fingerprint, _ in told], captured)
            state = self._state

            @cache
            def untouched(present: tuple[bool, ...]) -> list[Tensor]:
                return [state.tensor(name) for name in captured.untouched(present) if name in state.canonical]

            self._ways[number] = Way(
                self._agreed[number],
                tuple(map(classify, captured.results)),
                captured.disordered,
                captured.structure,
                partial(self._program, number),
                [inputs for _, inputs in told],
                untouched,
            )
        return self._ways[number]

    def _capture(self, number: int, *, training: bool | None = None, size: int = 2) -> Captured:
        agreed = self._agreed[number]
        inputs, batch = sample_of(agreed.draft, agreed.dims, dict(agreed.shared), size)
        ordered = {name: inputs[name] for name in self._callings[number].names}
        mode = agreed.draft.training if training is None else training
        return self._source.capture(
            ordered,
            training=mode,
            batch=batch,
            convention=self._callings[number],
            precision=agreed.draft.precision,
        )

    # ------------------------------------------------------------ spread over the ranks

    def _deploy(self, number: int, leaves: Mapping[str, Any], counts: Sequence[int]) -> None:
        model, session = self._model, self._session
        if not any(counts):
            raise ValueError("no rank gave a sample (the first call chooses the layout by its batch)")
        self._source = Source(
            model,
            precision=self._agreed[number].draft.precision,
            device_type=self.device.type,
            partition=partition,
            watch=capture_progress(shown=session.rank == 0),
        )
        captured = self._capture(number, training=True)
        self._agree_on_model(captured)
        machines = session.gather(machine_identity())
        seed = session.gather(torch.initial_seed() if self._seed is None else self._seed)[0] % 2**63
        agreed = self._agreed[number]
        inputs, _ = sample_of(agreed.draft, agreed.dims, dict(agreed.shared), 1)
        sample_bytes = sum(inputs[name].nbytes for name in agreed.dims)
        subject = deployment.Subject(self._source, captured, sum(counts), sample_bytes, machines, self.device)
        self._pinned = pinned = self._plan(subject, leaves, counts, agreed.dims)
        plan = pinned.plan
        if self._configuration.sync_params_on_init and switches.syncs_parameters:
            self._take_over_values()
        stage_map = tuple(stage.ranks for stage in plan.stages)
        if stage_map != session.stage_map:
            self._session = self._open(stage_map, session.rank)
            session.close()
            session = self._session
        own = plan.stages[session.stage]
        names = _names(model)
        # Past nn.Module, which would take it for a part of the model.
        self.__dict__["_state"] = adopted_state(
            self._source, captured, own.first, own.stop, model=model, device=self.device, seed=seed
        )
        holders = session.gather(tuple(self._state.canonical))
        for rank, canonical in enumerate(holders):
            for name in canonical:
                self._owners.setdefault(name, rank)
        trainer = assemble(
            plan,
            session,
            captured,
            self._state,
            partial(self._program, number),
            device=self.device,
            seed=seed,
            timeout_seconds=self._timeout_seconds,
        )
        self._pipeline = Pipeline(
            session,
            trainer,
            gathers=self._gathers,
            pipeline_num=self._configuration.pipeline_num,
            reduction=self._reduction,
        )
        if self._patched is not None and self._optimizer is not None:
            held = {name: p for name, p in self._state.named_parameters() if name in self._owners}
            self._patched.spread(held, names, self._gather_named)
            if self._shards_optimizer and session.replicas is not None:
                owners = shard(self._optimizer, replica=session.replica, group=session.replicas)
                reducer = trainer.reducer
                reducer.owned = frozenset(
                    p for p in reducer.parameters if owners.get(p, 0) == session.replica
                )
            if self._shards_optimizer:  # all ranks ask alike, also those of a stage with one replica
                self._patched.share(self._gather_shares)
        log.info("deployed: %s", self._pinned.reason)

    def _plan(
        self,
        subject: deployment.Subject,
        leaves: Mapping[str, Any],
        counts: Sequence[int],
        dims: Mapping[str, int],
    ) -> PinnedPlan:
        """Rank 0 decides, for all."""
        configuration, decides = self._configuration, self._session.rank == 0
        file = self._deployment_to_load
        if file is None and configuration.load_deployment:
            file = configuration.deployment_file
        if file is not None:
            return self._told(deployment.load(file, subject) if decides else None)
        measured = self._measured(subject, leaves, counts, dims)
        pinned = deployment.choose(subject, configuration, measured) if decides else None
        if pinned is not None and configuration.save_deployment:
            deployment.save(configuration.deployment_file, pinned)
        return self._told(pinned)

    def _measured(
        self,
        subject: deployment.Subject,
        leaves: Mapping[str, Any],
        counts: Sequence[int],
        dims: Mapping[str, int],
    ) -> Profile | None:
        """What rank 0 wants to know of the model's costs: known to it already, or found out by all ranks."""
        session, configuration = self._session, self._configuration
        wanted = deployment.Wanted()
        if session.rank == 0:
            wanted = deployment.what_is_wanted(subject, configuration, type(self._optimizer))
        wish = session.broadcast(wanted.wish, 0)
        if wish is None or not any(counts):
            return wanted.known
        donor = max(range(len(counts)), key=counts.__getitem__)
        own = first_samples(leaves, dims, max(wish.microbatch_sizes)) if donor == session.rank else None
        samples = session.broadcast(own, donor)
        assert samples is not None
        source, captured, described = subject.source, subject.captured, subject.described
        measuring = ModelMeasurement(session, source, captured, described, samples, self.device, wish)
        found = measuring.run(self._optimizer, own_address())
        if found is not None and session.rank == 0:
            deployment.keep_costs(found, configuration, wanted.circumstances)
        return found

    def _told(self, pinned: PinnedPlan | None) -> PinnedPlan:
        """Rank 0's, on all ranks."""
        found = self._session.broadcast(pinned, 0)
        assert found is not None
        return found

    def _agree_on_model(self, captured: Captured) -> None:
        shapes = {name: tuple(p.shape) for name, p in self._model.named_parameters(remove_duplicate=False)}
        everyone = self._session.gather((type(self._model).__name__, shapes, captured.graph.fingerprint))
        for rank, (kind, theirs, _) in enumerate(everyone):
            first_kind, first, _ = everyone[0]
            if kind != first_kind:
                raise ValueError(f"rank {rank} has wrapped a {kind}, rank 0 a {first_kind} (build one model)")
            for name in [*first, *theirs]:
                if first.get(name) != theirs.get(name):
                    raise ValueError(
                        f"rank {rank} has wrapped another model than rank 0: {name!r} is "
                        f"{_shape(theirs.get(name))}, there {_shape(first.get(name))} "
                        "(build the same on all ranks)"
                    )
        self._refuse_other_models([fingerprint for *_, fingerprint in everyone], captured)

    def _refuse_other_models(self, fingerprints: list[str], captured: Captured) -> None:
        differing = [rank for rank, theirs in enumerate(fingerprints) if theirs != fingerprints[0]]
        if not differing:
            return
        listings = self._session.gather(captured.listing)
        rank = differing[0]
        pairs = zip(listings[rank], listings[0], strict=False)
        theirs, first = next(
            ((own, other) for own, other in pairs if own != other),
            (f"{len(listings[rank])} operations", f"{len(listings[0])}"),
        )
        raise ValueError(
            f"the model's forward on rank {rank} is another than on rank 0: {theirs!r}, there {first!r} "
            "(does it depend on the rank, on the environment, or on data? Build and call one on all ranks)"
        )

    @torch.no_grad()
    def _take_over_values(self) -> None:
        """Rank 0's, on all ranks: who draws initial values draws other ones in every process."""
        session = self._session
        tensors = [t for t in (*self._model.parameters(), *self._model.buffers()) if not t.is_meta]
        if session.group is None or not tensors:
            return
        on_host = [t.detach().cpu().contiguous() for t in tensors]
        broadcast: Any = torch.distributed._broadcast_coalesced  # type: ignore[attr-defined]
        broadcast(session.group, on_host, SYNC_BYTES, 0)
        for tensor, value in zip(tensors, on_host, strict=True):
            tensor.copy_(value)

    def _program(
        self, number: int, inputs: Mapping[str, object], size: int, dims: Mapping[str, int], training: bool
    ) -> SpanProgram:
        """The program of this stage for micro-batches of a size, captured when first met."""
        key = number, size == 1
        if key not in self._programs:
            assert self._pipeline is not None
            own = self._pipeline.trainer.plan.stages[self._session.stage]
            captured = self._capture(number, size=1 if size == 1 else 2)
            self._programs[key] = captured.carve(own.first, own.stop).to(self.device)
        return self._programs[key]

    # ------------------------------------------------------------ gradients

    def allreduce_grads(self) -> None:
        """Reduces what backwards have added since `pyrannc.delay_grad_allreduce(True)`; all ranks call it."""
        with self._errors_reach_everyone("allreduce_grads"):
            pipeline = self._deployed("allreduce_grads")
            pipeline.allreduce()
            self._let_scalers_agree(pipeline)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Clips the norm of the whole model's gradient; returns what it was. All ranks call it."""
        with self._errors_reach_everyone("clip_grad_norm"):
            return self._deployed("clip_grad_norm").trainer.reducer.clip(float(max_norm))

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                if set_to_none:
                    parameter.grad = None
                else:
                    parameter.grad = torch.zeros_like(parameter.grad)

    # ------------------------------------------------------------ state

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's, once the model is spread; before that, all."""
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if self._pipeline is None or not parameter.is_meta:
                yield name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            if self._pipeline is None or not buffer.is_meta:
                yield name, buffer

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The whole model's as it is now, on every rank; all call it. It fits the unwrapped model."""
        for option in ("no_hook", "amp_master_params", "rank0_only", "sync_all_ranks", "sync_grad"):
            kwargs.pop(option, None)
        found: dict[str, Any] = super().state_dict(*args, **kwargs)
        if self._pipeline is None:
            return found
        prefix = str(kwargs.get("prefix", args[1] if len(args) > 1 else ""))
        with self._errors_reach_everyone("state_dict"):
            own = {name: self._state.tensor(name).detach().cpu().clone() for name in self._state.canonical}
            everyone = self._gather_named(own)
        canonical = self._source.canonical
        for key in list(found):
            if key.startswith(prefix):
                name = key.removeprefix(prefix)
                name = canonical.get(name, name)
                if name in everyone:
                    found[key] = everyone[name]
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """A whole model's, before or after the model is spread; each rank keeps its part."""
        if assign:
            raise ValueError("assign=True would part the optimizer from its parameters (load without it)")
        with warnings.catch_warnings():
            # What other ranks hold is a shell here, and stays one.
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            return super().load_state_dict(state_dict, strict)

    def get_param(self, name: str) -> Tensor:
        """One parameter or buffer, whole, on every rank; all ranks call it."""
        found = self._one(name, lambda tensor: tensor)
        assert found is not None
        return found

    def get_param_grad(self, name: str) -> Tensor | None:
        """One parameter's gradient, on every rank; all ranks call it."""
        return self._one(name, lambda tensor: tensor.grad)

    def _one(self, name: str, look: Any) -> Tensor | None:
        if self._pipeline is None:
            tensors = dict(super().named_parameters()) | dict(super().named_buffers())
        else:
            name = self._source.canonical.get(name, name)
            tensors = {own: self._state.tensor(own) for own in self._state.canonical}
        known = tensors if self._pipeline is None else self._owners
        if name not in known:
            raise KeyError(
                f"{name!r} is no parameter or buffer of the model (it has {', '.join(sorted(known))})"
            )
        if self._pipeline is None:
            found: Tensor | None = look(tensors[name])
            return None if found is None else found.detach().clone()
        with self._errors_reach_everyone("get_param"):
            own = look(tensors[name]) if self._owners[name] == self._session.rank else None
            told: Tensor | None = self._session.broadcast(
                None if own is None else own.detach().cpu().clone(), self._owners[name]
            )
            return told

    def _gather_named(self, own: dict[str, Any]) -> dict[str, Any]:
        """By name what the ranks hold, each name told by its first holder."""
        found: dict[str, Any] = {}
        for rank in sorted(set(self._owners.values())):
            mine = {
                name: value for name, value in own.items() if self._owners.get(name) == self._session.rank
            }
            found.update(self._session.broadcast(mine if rank == self._session.rank else {}, rank))
        return found

    def _gather_shares(self, own: dict[str, Any]) -> dict[str, Any]:
        """The same, where each replica has a share of its own."""
        return {name: value for theirs in self._session.gather(own) for name, value in theirs.items()}

    # ------------------------------------------------------------ the deployment

    @property
    def plan(self) -> Plan:
        if self._pinned is None:
            raise RuntimeError("the model is spread when it is first called (call it once on all ranks)")
        return self._pinned.plan

    def save_deployment(self, file: str | os.PathLike[str]) -> None:
        """Writes how the model is spread; rank 0 does, the others may call it too."""
        self._deployed("save_deployment")
        assert self._pinned is not None
        if self._session.rank == 0:
            deployment.save(file, self._pinned)

    def undeploy(self) -> None:
        """Says goodbye to the other ranks. Not needed at the end of a script."""
        self._session.close()

    def _deployed(self, what: str) -> Pipeline:
        if self._pipeline is None:
            raise RuntimeError(
                f"{what} needs the model to be spread, which its first call does (call the model first)"
            )
        return self._pipeline

    # ------------------------------------------------------------ as nn.Module users expect

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_model")
            if model is None or name.startswith("_"):
                raise
            return getattr(model, name)

    def train(self, mode: bool = True) -> "RaNNCModule":
        super().train(mode)
        self._model.training = mode  # the one module of the model that is not among this one's
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> "RaNNCModule":
        log.warning("to(), cuda(), half() and their like have no effect: the model is on %s", self.device)
        return self

    # ------------------------------------------------------------ inside

    def _open(self, stage_map: Any, rank: int) -> Session:
        session = open_session(
            stage_map,
            rank=rank,
            device=self.device,
            timeout_seconds=self._timeout_seconds,
            host=own_address(),
        )
        weakref.finalize(self, _end, session)
        return session

    @contextmanager
    def _errors_reach_everyone(self, what: str) -> Iterator[None]:
        with report_errors(
            self._session,
            what,
            trainer=lambda: None if self._pipeline is None else self._pipeline.trainer,
            explain_memory=self._explain_out_of_memory,
        ):
            yield

    def _explain_out_of_memory(self, error: torch.OutOfMemoryError) -> Exception | None:
        pipeline = self._pipeline
        if pipeline is None:
            return None
        plan = pipeline.trainer.plan
        share = -(-plan.batch_size // len(plan.stages[self._session.stage].ranks))

        def num_microbatches(size: int) -> int:  # all are held at the end of a forward
            return -(-share // size)

        return explain_out_of_memory(
            error,
            trainer=pipeline.trainer,
            state=self._state,
            optimizer=self._optimizer,
            microbatch_size=pipeline.microbatch_size(share),
            held_microbatches=num_microbatches,
            remedies=Remedies(
                recompute="checkpointing=True",
                microbatches=lambda size: f"pipeline_num={num_microbatches(size)}",
                stages=lambda count: f"partition_num={count} on as many devices or more",
            ),
        )

    def _write_trace(self) -> None:
        assert self._pipeline is not None
        own = self._pipeline.trainer.engine.recorder.timeline(self._session.rank, self._session.stage)
        machines = self._session.gather(machine_identity())
        whole = merge(on_one_clock(self._session.gather(own), machines))
        if self._session.rank == 0:
            write_atomic(Path(self._configuration.event_trace_file), to_perfetto({"last call": whole}))


def _end(session: Session) -> None:
    """Says goodbye to the other ranks; where an error of the script ends this process, that error."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, Exception) and not isinstance(error, WorkerError) and not session.closed:
        session.report_error(error, "the script, between two calls of the model")
    if session.waiter is not None:
        session.waiter.drain_abandoned()
    session.close()


def _is_of_another(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    own = set(model.parameters())
    return bool(own) and own.isdisjoint(p for group in optimizer.param_groups for p in group["params"])


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not there" if shape is None else f"of shape {list(shape)}"
