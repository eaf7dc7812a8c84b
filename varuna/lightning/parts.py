"""The modules of a LightningModule that a training step calls, each partitioned over all ranks.

`training_step` stays plain Python, which every rank runs with its own samples. The modules that it calls,
`self(x)` or `self.encoder(x)`, become parts: their calls go to a RaNNCModule. All other parameters are on
every rank, and their gradients are averaged. Evaluation before the first training step, and evaluation of
parts that every rank holds whole, runs the modules themselves.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyrannc.calls import CurrentCall
from pyrannc.module import RaNNCModule
from pyrannc.partitioned import PartitionedModel
from pyrannc.process import switches
from varuna.execute.update.shard import share_values
from varuna.lightning.coverage import forward_covers

CHECKED_BACKWARDS = 2
"""Backwards after which the gradients of replicas are compared."""


class PartModule(RaNNCModule):
    """A part, called in place of its module's forward."""

    counts: tuple[int, ...] = ()  # samples of each rank in the last call

    def _run(self, partitioned: PartitionedModel, call: CurrentCall) -> Any:
        self.__dict__["counts"] = tuple(call.counts)
        return super()._run(partitioned, call)

    @property
    def share(self) -> float:
        """This rank's share of the samples of the last call."""
        return self.counts[self._rank] / sum(self.counts)

    @property
    def is_whole(self) -> bool:
        """True if every rank holds all parameters."""
        return self._session.depth == 1

    def follow_mode(self) -> None:
        """Take over the mode of the module, which Lightning changes."""
        self.__dict__["training"] = self._model.training

    def whole_state(self) -> dict[str, Any]:
        """Return the state of the whole module; all ranks call it."""
        return self.state_dict()

    def compare_gradients(self) -> str | None:
        """Return the name of a parameter whose gradient differs between replicas; all ranks call it."""
        named = sorted(self.named_parameters())
        sums = [_sums(parameter.grad) for _, parameter in named]
        if self._session.num_ranks == 1:
            return None
        everyone = self._session.gather_over_replicas([number for pair in sums for number in pair])
        return _first_difference([name for name, _ in named], everyone)


class ModelParts:
    """Finds the parts of a module, and calls them in its place, until `release`."""

    def __init__(
        self,
        root: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        options: Mapping[str, Any],
        modules: Sequence[str] | None = None,
    ) -> None:
        self.root = root
        self.parts: dict[str, PartModule] = {}  # by the module's name in the root; "": the root itself
        self._optimizers = list(optimizers)
        self._device = device
        self._options = dict(options)
        self._last: PartModule | None = None
        self._num_backwards = 0
        self._handles: list[Any] = []
        self._candidates = _find_candidates(root, modules)
        self._is_covered = True if modules is not None else None  # None: not known yet
        self._forwards = {
            name: self._redirected(name, module, module.forward) for name, module in self._candidates.items()
        }
        self._redirect()

    # ------------------------------------------------------------ calls

    def _redirect(self) -> None:
        for name, module in self._candidates.items():
            module.__dict__["forward"] = self._forwards[name]

    def _unredirect(self) -> None:
        for module in self._candidates.values():
            module.__dict__.pop("forward", None)

    @contextmanager
    def plain_forwards(self) -> Iterator[None]:
        """Let the modules be called as they are: a part captures and copies them."""
        self._unredirect()
        try:
            yield
        finally:
            self._redirect()

    def _redirected(self, name: str, module: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            part = self._find_part(name, args, kwargs)
            if part is None:
                return plain(*args, **kwargs)
            self._last = part
            part.follow_mode()
            with self.plain_forwards():
                return part(*args, **kwargs)

        return forward

    def _find_part(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PartModule | None:
        """Return the part that runs a call of this module; None if the module runs itself."""
        trains = torch.is_grad_enabled() and self.root.training
        part = self.parts.get(name)
        if part is not None:
            partitioned = part._partitioned is not None
            return part if torch.is_grad_enabled() or not (partitioned and part.is_whole) else None
        around = next((other for other in self.parts if _is_inside(name, other)), None)
        if around is not None and (trains or not self.parts[around].is_whole):
            raise RuntimeError(
                f"{_call(name)} is called, but {_call(around)}, which contains it, was called in a training "
                f"step before and is partitioned as a whole (name the modules to partition, and call only "
                f"them: VarunaStrategy(modules=[{name!r}, ...]))"
            )
        if not trains or around is not None or any(_is_inside(other, name) for other in self.parts):
            return None
        if not name and not self._covers_root(args, kwargs):
            return None
        return self._make_part(name)

    def _covers_root(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether `self(...)` uses all of the root: else its submodules are the parts."""
        if self._is_covered is None:
            others = [name for name in self._candidates if name]
            with self.plain_forwards():
                self._is_covered = forward_covers(self.root, others, args, kwargs, self._device)
        return self._is_covered

    def _make_part(self, name: str) -> PartModule:
        module = self._candidates[name]
        own = set(module.parameters())
        optimizers = [
            optimizer
            for optimizer in self._optimizers
            if not own.isdisjoint(p for group in optimizer.param_groups for p in group["params"])
        ]
        with self.plain_forwards():
            part = PartModule(module, optimizers, device=self._device, **self._options)
        self.parts[name] = part

        def complete(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
            """Replace the tensors that other ranks hold; all ranks call `state_dict`."""
            if part._partitioned is not None and not part.is_whole:
                state.update({prefix + key: value for key, value in part.whole_state().items()})

        # A function, not a method: a copy of the module must not copy this object.
        register: Any = module.register_state_dict_post_hook
        self._handles.append(register(complete))
        return part

    @contextmanager
    def announce(self, call: str) -> Iterator[None]:
        """Run a call that all ranks make at the same time; ranks that call a part meanwhile get an error."""
        part = next(iter(self.parts.values()), None)
        if part is None or part._session.closed:
            yield
        else:
            with part._session.call(call):
                yield

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Add an optimizer that was made after the module was set up."""
        own = {p for group in optimizer.param_groups for p in group["params"]}
        if not own.isdisjoint(self.root.parameters()):
            if self.parts:
                raise RuntimeError(
                    "the optimizer is set up after the first training step, when other ranks hold a part of "
                    "the model (call fabric.setup_optimizers before the first call of the model)"
                )
            self._optimizers.append(optimizer)

    # ------------------------------------------------------------ gradients

    @property
    def share(self) -> float:
        """This rank's share of the samples of the current batch."""
        if self._last is None:
            raise RuntimeError(
                "no module was called before backward, so there is nothing to partition (call self(x) or a "
                "direct submodule with parameters, such as self.model(x), in training_step)"
            )
        return self._last.share

    @property
    def counts(self) -> tuple[int, ...]:
        """Samples of each rank in the current batch; empty before the first call."""
        return () if self._last is None else self._last.counts

    def loose_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters outside of all parts, which every rank holds."""
        return [
            (name, parameter)
            for name, parameter in self.root.named_parameters()
            if not any(_is_inside(name, part) for part in self.parts)
        ]

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Average the new gradients of loose parameters, and compare the gradients of replicas."""
        if loss.is_meta:
            raise RuntimeError(
                "the loss depends on parameters that other ranks hold (compute penalties on weights inside "
                "the module that is partitioned, or use the optimizer's weight_decay)"
            )
        loose = self.loose_parameters()
        earlier = {parameter: parameter.grad for _, parameter in loose}
        for parameter in earlier:
            parameter.grad = None
        yield
        if earlier and dist.is_initialized() and dist.get_world_size() > 1:
            self._average([parameter for _, parameter in loose])
            _refuse_loose_statistics(self.root, self.parts, loose)
        for parameter, gradient in earlier.items():
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
        if not switches.delays_allreduce:
            self._num_backwards += 1
            self.check_gradients()

    def _average(self, parameters: Sequence[nn.Parameter]) -> None:
        has_gradient = torch.tensor([float(p.grad is not None) for p in parameters], device=self._device)
        dist.all_reduce(has_gradient)
        for parameter, present in zip(parameters, has_gradient.tolist(), strict=True):
            if present:
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = own.detach() * self.share
                dist.all_reduce(parameter.grad)

    def check_gradients(self) -> None:
        """Compare the gradients of replicas after the first backwards; all ranks call it."""
        if self._num_backwards > CHECKED_BACKWARDS:
            return
        for name, part in self.parts.items():
            if part._partitioned is None:
                continue
            found = part.compare_gradients()
            if found is not None:
                inner = f"{name}.{found}".lstrip(".")
                raise RuntimeError(
                    f"the gradient of {inner!r} differs between ranks: training_step uses it outside of "
                    f"{_call(name)}, for example as self.{inner}, or by a method that is not called through "
                    f"{_call(name)}, so it is not averaged (use it inside {_call(name)} only; or leave "
                    "that module out of VarunaStrategy(modules=[...]))"
                )

    # ------------------------------------------------------------ the end

    def release(self, *, gather: bool) -> None:
        """Give the modules back; `gather`: with all their values, as all ranks call it."""
        partitioned = [part for part in self.parts.values() if part._partitioned is not None]
        # In the order of all ranks: their states are gathered.
        optimizers = dict.fromkeys(optimizer for part in partitioned for optimizer in part._optimizers)
        if gather:
            states = {optimizer: optimizer.state_dict() for optimizer in optimizers}
            for part in partitioned:
                if not part.is_whole:
                    _fill(part._model, part.whole_state())
            for optimizer, state in states.items():
                optimizer.release(state)
        for handle in self._handles:
            handle.remove()
        self._unredirect()
        for part in self.parts.values():
            part.undeploy()
        self.parts = {}


def start_equal(module: nn.Module) -> None:
    """Give all ranks the first rank's parameters and buffers."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        assert dist.group.WORLD is not None
        tensors = [*module.parameters(), *module.buffers()]
        share_values([[tensor for tensor in tensors if not tensor.is_meta]], dist.group.WORLD)


def _find_candidates(root: nn.Module, modules: Sequence[str] | None) -> dict[str, nn.Module]:
    """Return the modules that may become parts, by name."""
    named = dict(root.named_modules())
    if modules is not None:
        unknown = [name for name in modules if name not in named]
        if unknown:
            children = ", ".join(name for name, _ in root.named_children()) or "none"
            raise ValueError(
                f"modules names {unknown[0]!r}, which {type(root).__name__} does not have (its submodules: "
                f"{children}; '' is its own forward)"
            )
        return {name: named[name] for name in modules}
    found = {"": root} if _has_forward(root) else {}
    for name, child in named.items():
        parent = name.rpartition(".")[0]
        if name and (not parent or _is_container(named[parent])) and not _is_container(child):
            reached = all(_is_container(named[above]) for above in _parents(name))
            if reached and any(True for _ in child.parameters()):
                found[name] = child
    return found


def _parents(name: str) -> list[str]:
    pieces = name.split(".")[:-1]
    return [".".join(pieces[: count + 1]) for count in range(len(pieces))]


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _has_forward(module: nn.Module) -> bool:
    defined = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    return defined is not nn.Module and defined.__name__ != "LightningModule"


def _is_inside(name: str, module: str) -> bool:
    """Return whether the name is of this module, or of something in it."""
    return not module or name == module or name.startswith(f"{module}.")


def _call(name: str) -> str:
    return f"self.{name}(...)" if name else "self(...)"


def _sums(gradient: Tensor | None) -> tuple[float, float]:
    if gradient is None:
        return 0.0, 0.0
    values = gradient.detach().double()
    return float(values.sum()), float(values.abs().sum())


def _first_difference(names: Sequence[str], everyone: Sequence[Sequence[float]]) -> str | None:
    first = everyone[0]
    for numbers in everyone[1:]:
        for index, (own, other) in enumerate(zip(numbers, first, strict=True)):
            size = abs(first[index | 1]) + abs(numbers[index | 1])
            if abs(own - other) > 1e-6 * size:
                return names[index // 2]
    return None


def _refuse_loose_statistics(
    root: nn.Module, parts: Mapping[str, object], loose: Sequence[tuple[str, nn.Parameter]]
) -> None:
    """Raise if a BatchNorm outside of all parts has trained: its statistics would differ between ranks."""
    trained = {name.rpartition(".")[0] for name, parameter in loose if parameter.grad is not None}
    for name, module in root.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and name in trained:
            raise RuntimeError(
                f"{name!r} normalizes over the batch, but it is outside of all partitioned modules "
                f"({', '.join(map(_call, parts)) or 'none'}), so each rank would use its own statistics "
                "(call the module that contains it through its forward, such as self.model(x))"
            )


@torch.no_grad()
def _fill(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give the module the tensors that are on `meta`; tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for registry in (owner._parameters, owner._buffers):
            for key, tensor in registry.items():
                name = f"{prefix}.{key}".lstrip(".")
                if tensor is None or not tensor.is_meta or name not in state:
                    continue
                if isinstance(tensor, nn.Parameter):
                    fresh = made.get(id(tensor))
                    if fresh is None:
                        fresh = nn.Parameter(state[name].clone(), requires_grad=tensor.requires_grad)
                        made[id(tensor)] = fresh
                    owner._parameters[key] = fresh
                else:
                    owner._buffers[key] = state[name].clone()
