"""Training with a wrapped model on several ranks, and the same training in one plain process."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pyrannc import RaNNCModule
from tests.pyrannc.models import CASES
from varuna import plain_randomness

SEED = 7


def batch_of(name: str, step: int, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return CASES[name].inputs(size, torch.Generator().manual_seed(100 + step))


def rows(tree: Any, first: int, stop: int | None) -> Any:
    def take(leaf: Any) -> Any:
        return leaf.detach()[first:stop] if isinstance(leaf, Tensor) and leaf.dim() else leaf

    return pytree.tree_map(take, tree)


def make(name: str) -> nn.Module:
    torch.manual_seed(3)
    return CASES[name].make()


def own_rows(counts: Sequence[int]) -> tuple[int, int]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return sum(counts[:rank]), sum(counts[: rank + 1])


def train(
    name: str,
    *,
    counts: Sequence[Sequence[int]],  # of each step, the samples of each rank
    options: Mapping[str, Any],
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> dict[str, Any]:
    torch.set_default_dtype(dtype)
    model = make(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01) if list(model.parameters()) else None
    wrapped = RaNNCModule(model, optimizer, device=device, seed=SEED, timeout_seconds=30, **options)
    found: dict[str, Any] = {"losses": [], "outputs": []}
    for step, sizes in enumerate(counts):
        args, kwargs = rows(batch_of(name, step, sum(sizes)), *own_rows(sizes))
        out = wrapped(*args, **kwargs)
        loss = CASES[name].loss(out, args, kwargs)
        if loss.requires_grad:
            loss.backward()
        found["losses"].append(loss.detach())
        found["outputs"].append(
            pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, out)
        )
        if step + 1 == len(counts):
            found["gradients"] = {n: wrapped.get_param_grad(n) for n in dict(make(name).named_parameters())}
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    found["state"] = wrapped.state_dict()
    found["optimizer"] = {} if optimizer is None else optimizer.state_dict()
    found["stages"] = [stage.ranks for stage in wrapped.plan.stages]
    found["local"] = [n for n, _ in wrapped.named_parameters()]
    wrapped.undeploy()
    torch.set_default_dtype(torch.float32)
    return found


def train_plainly(
    name: str,
    *,
    counts: Sequence[Sequence[int]],
    dtype: torch.dtype = torch.float64,
    microbatches: Sequence[Sequence[int]] | None = None,  # of each step, where they matter
) -> dict[str, Any]:
    """One process, the plain model, the whole batch; or such micro-batches, where BatchNorm asks for it."""
    torch.set_default_dtype(dtype)
    model = make(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01) if list(model.parameters()) else None
    found: dict[str, Any] = {"losses": [], "outputs": []}
    for step, sizes in enumerate(counts):
        size = sum(sizes)
        whole = batch_of(name, step, size)
        total, first, outputs = torch.zeros(()), 0, []
        for count in microbatches[step] if microbatches else [size]:
            args, kwargs = rows(whole, first, first + count)
            with plain_randomness(seed=SEED, step=step, batch_size=count, first_sample=first):
                out = model(*args, **kwargs)
            loss = CASES[name].loss(out, args, kwargs) * (count / size)
            if loss.requires_grad:
                loss.backward()
            total = total + loss.detach()
            outputs.append(out)
            first += count
        found["losses"].append(total)
        found["outputs"].append(outputs[0] if len(outputs) == 1 else torch.cat(outputs))
        if step + 1 == len(counts):
            found["gradients"] = {
                n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()
            }
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    found["state"] = {key: value.detach().clone() for key, value in model.state_dict().items()}
    found["optimizer"] = {} if optimizer is None else optimizer.state_dict()
    torch.set_default_dtype(torch.float32)
    return found
