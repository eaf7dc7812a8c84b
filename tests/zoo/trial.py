"""Trains a wrapped model and the plain one, and compares them element by element on every rank."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pyrannc.partitioning
from pyrannc import RaNNCModule
from tests.tasks import RememberingSource
from varuna import plain_randomness
from varuna.capture import Captured, Source
from varuna.types import spread_evenly

SEED = 7
BATCHES = (7, 7, 5)
"""Batch sizes of the steps. No model has a dimension of these sizes."""

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A model with its inputs and its loss."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Call]  # for a number of samples
    loss: Callable[[Any], Tensor]
    by_microbatch: bool = False  # as with BatchNorm: the samples of a micro-batch influence each other
    options: Mapping[str, Any] = field(default_factory=dict)  # of the wrapper
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True)
class Layout:
    """The replicas of each stage, and the micro-batches of each replica."""

    replicas: tuple[int, ...]
    microbatches: int = 2

    @property
    def world(self) -> int:
        return sum(self.replicas)

    def __str__(self) -> str:
        return "+".join(map(str, self.replicas))


def shares(step: int, layout: Layout) -> tuple[int, ...]:
    """Return the samples of each rank; in the last step of several ranks, the first has none."""
    size, ranks = BATCHES[step], layout.world
    if step < len(BATCHES) - 1 or ranks == 1:
        return spread_evenly(size, parts=ranks)
    return 0, *spread_evenly(size, parts=ranks - 1)


def run(case: Case, layout: Layout, *, key: Hashable) -> None:
    """Raise, on every rank, if the wrapped model differs from the plain one."""
    with default_dtype(case.dtype), remembering(key):
        _compare(_wrapped(case, layout), _plain(case, layout), layout)


def fits(case: Case, layout: Layout) -> bool:
    """Return whether one process can compute the same, although samples may influence each other."""
    return not case.by_microbatch or len(set(layout.replicas)) == 1


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def made(case: Case) -> nn.Module:
    torch.manual_seed(3)
    return case.make().to(case.dtype).train()


def made_plain(case: Case) -> nn.Module:
    """Drop the cache for generation from the outputs: a wrapped model makes none."""
    model = made(case)
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False
    return model


def batch_of(case: Case, step: int, size: int) -> Call:
    torch.manual_seed(0)
    return case.inputs(size, torch.Generator().manual_seed(100 + step))


def rows(case: Case, call: Call, first: int, stop: int, size: int) -> Call:
    args, kwargs = call
    dims: Mapping[str, Any] = case.options.get("batch_dims", {})

    def part(leaf: Any, dim: int | None = 0) -> Any:
        if isinstance(leaf, Tensor) and dim is not None and leaf.dim() and leaf.shape[dim] == size:
            return leaf.narrow(dim, first, stop - first)
        return leaf

    named = {
        name: pytree.tree_map(lambda leaf, n=name: part(leaf, dims.get(n, 0)), value)
        for name, value in kwargs.items()
    }
    return tuple(pytree.tree_map(part, args)), named


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer | None:
    # With decay: a parameter that got no gradient is left alone, one that got zeros is not.
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=0.003, weight_decay=0.1, eps=1e-4) if trained else None


def _wrapped(case: Case, layout: Layout) -> dict[str, Any]:
    model = made(case)
    names = [name for name, _ in model.named_parameters()]
    optimizer = optimizer_of(model)
    rank = dist.get_rank()
    wrapped = RaNNCModule(
        model,
        optimizer,
        device="cpu",
        seed=SEED,
        timeout_seconds=60,
        replica_num=layout.replicas,
        pipeline_num=layout.microbatches,
        **case.options,
    )
    outputs, losses = [], []
    gradients: list[dict[str, Tensor | None]] = []
    for step, size in enumerate(BATCHES):
        counts = shares(step, layout)
        first = sum(counts[:rank])
        args, kwargs = rows(case, batch_of(case, step, size), first, first + counts[rank], size)
        out = wrapped(*args, **kwargs)
        loss = case.loss(out)
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.detach())
        outputs.append(_detached(out))
        gradients.append({name: wrapped.get_param_grad(name) for name in names})
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    state = wrapped.state_dict()
    found = tuple(len(stage.ranks) for stage in wrapped.plan.stages)
    wrapped.undeploy()
    assert found == layout.replicas
    return {"outputs": outputs, "losses": losses, "gradients": gradients, "state": state}


def _plain(case: Case, layout: Layout) -> dict[str, Any]:
    model = made_plain(case)
    optimizer = optimizer_of(model)
    outputs, losses = [], []
    gradients: list[dict[str, Tensor | None]] = []
    for step, size in enumerate(BATCHES):
        whole = batch_of(case, step, size)
        spans = _microbatches(step, layout) if case.by_microbatch else [(0, size)]
        parts, total = [], torch.zeros(())
        for first, stop in spans:
            args, kwargs = rows(case, whole, first, stop, size)
            with plain_randomness(seed=SEED, step=step, batch_size=stop - first, first_sample=first):
                out = model(*args, **kwargs)
            loss = case.loss(out) * ((stop - first) / size)
            if loss.requires_grad:
                loss.backward()
            total = total + loss.detach()
            parts.append(_detached(out))
        losses.append(total)
        outputs.append(parts[0] if len(parts) == 1 else None)
        gradients.append(
            {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        )
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return {"outputs": outputs, "losses": losses, "gradients": gradients, "state": model.state_dict()}


def _microbatches(step: int, layout: Layout) -> list[tuple[int, int]]:
    """Divide a batch like the pipeline: over replicas (one stage: as given), then into micro-batches."""
    found, first = [], 0
    (width,) = set(layout.replicas)
    one_stage = len(layout.replicas) == 1
    for count in shares(step, layout) if one_stage else spread_evenly(BATCHES[step], parts=width):
        chunk = max(1, -(-count // layout.microbatches))
        found += [(first + i, first + min(i + chunk, count)) for i in range(0, count, chunk)]
        first += count
    return found


def _detached(out: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, out)


def _compare(found: Mapping[str, Any], expected: Mapping[str, Any], layout: Layout) -> None:
    for step, (mine, theirs) in enumerate(zip(found["gradients"], expected["gradients"], strict=True)):
        largest = max(
            (float(g.nan_to_num().abs().max()) for g in theirs.values() if g is not None and g.numel()),
            default=0.0,
        )
        for name, gradient in theirs.items():
            assert (gradient is None) == (mine[name] is None), (
                f"step {step}: the gradient of {name} is {_kind(mine[name])}, expected {_kind(gradient)}"
            )
            if gradient is not None:
                close(
                    mine[name], gradient, f"step {step}: the gradient of {name}", atol=1e-6 * largest + 1e-12
                )
    assert found["state"].keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        close(found["state"][name], value, f"the state {name}", atol=1e-6)
    rank = dist.get_rank()
    for step, size in enumerate(BATCHES):
        whole = expected["outputs"][step]
        if whole is None:
            continue
        ours, spec = pytree.tree_flatten(found["outputs"][step])
        theirs, other = pytree.tree_flatten(whole)
        assert str(spec) == str(other), f"step {step}: the outputs are nested as {spec}, expected {other}"
        counts = shares(step, layout)
        first = sum(counts[:rank])
        for i, (mine, value) in enumerate(zip(ours, theirs, strict=True)):
            if not isinstance(value, Tensor):
                assert mine == value, f"step {step}: output {i} is {mine!r}, expected {value!r}"
                continue
            dim = next((d for d, n in enumerate(value.shape) if n and n % size == 0), None)
            if dim is not None:
                each = value.shape[dim] // size
                value = value.narrow(dim, first * each, counts[rank] * each)
            close(mine, value, f"step {step}: output {i}", atol=1e-6)


def _kind(gradient: Tensor | None) -> str:
    return "None" if gradient is None else "zeros" if not gradient.any() else "there"


def close(found: Any, expected: Tensor, what: str, *, atol: float) -> None:
    if expected.dtype == torch.float32:  # rounding of sums in another order
        atol = max(atol, 1e-5)
    torch.testing.assert_close(
        found, expected, rtol=1e-5, atol=atol, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


class _Remembering(RememberingSource):
    """Remembers the captures of the current case only."""

    remembered: ClassVar[dict[Hashable, Captured]] = {}


@contextmanager
def remembering(case: Hashable) -> Iterator[None]:
    """Remember captures of this case inside the context."""
    if case != _Remembering.toy:
        _Remembering.remembered.clear()
    pyrannc.partitioning.Source, _Remembering.toy = _Remembering, case  # type: ignore[misc]
    try:
        yield
    finally:
        pyrannc.partitioning.Source = Source  # type: ignore[misc]
