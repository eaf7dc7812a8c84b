"""Refuses optimizers whose update needs more than this rank holds; divides parameter groups over ranks."""

import re
from collections.abc import Iterator, Mapping, Sequence
from inspect import isfunction, unwrap
from typing import Any

import torch
from torch import Tensor

COUPLED = {
    r"\w*LBFGS": "computes one direction from the gradients of all parameters",
    r"DAdapt\w*|Prodigy\w*|DoG|DoWG|Mechan\w*|Momo\w*|AliG": "computes one step size from all parameters",
    r"(G|W|A|E|B|Look|Friendly)?SAM": "divides its ascent by the norm of the gradients of all parameters",
    r"GrokAdamW": "treats a parameter by its place among all, and clips the gradients of a group together",
    r"Ranger21": "divides by the variance of the gradients of all parameters",
    r"(Ada)?(LOMO|Lomo)": "updates in the backward, with the norm of all gradients",
}
"""Names of optimizer classes, and what they compute from all parameters. Packages use the same names."""

ATTACHED = {
    "RiemannianPreconditionedOptimizer": "reads weights and gradients from the modules of the plain model",
    "LoraFAOptimizer": "updates pairs of adapter weights, and keeps their state by names of the plain model",
}
"""Names of optimizer classes that need the parameters of the plain model, also with one stage."""

SEPARATE = "an optimizer that treats each parameter separately, such as AdamW"

COLLECTIVES = frozenset(
    ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "reduce_scatter_tensor")
)


def why_coupled(optimizer: torch.optim.Optimizer) -> str | None:
    """Return what the optimizer computes from all parameters at once; None if it treats each separately."""
    for kind in _kinds(optimizer):
        for pattern, reason in COUPLED.items():
            if re.fullmatch(pattern, kind.__name__):
                return f"{type(optimizer).__name__} {reason}"
        if called := sorted(COLLECTIVES.intersection(_names_used(kind))):
            return f"{type(optimizer).__name__} deals its work to all ranks ({', '.join(called)})"
    for group in optimizer.param_groups:
        norm = group.get("max_grad_norm")
        if isinstance(norm, int | float) and 0 < norm < float("inf"):
            name = type(optimizer).__name__
            return f"{name} with max_grad_norm={norm:g} divides by the norm of all gradients"
    return None


def refuse_coupled_update(optimizer: torch.optim.Optimizer, *, depth: int, shards: bool) -> None:
    """Refuse an optimizer that needs parameters or gradients that its rank does not hold or update."""
    for kind in _kinds(optimizer):
        if kind.__name__ in ATTACHED:
            raise ValueError(
                f"{type(optimizer).__name__} {ATTACHED[kind.__name__]}, but the wrapped model has parameters "
                f"of its own (use {SEPARATE})"
            )
    if depth == 1 and not shards:
        return
    if reason := why_coupled(optimizer):
        way_out = f"use one stage without shard_optimizer, or {SEPARATE}"
        if "max_grad_norm" in reason:
            way_out = "give it max_grad_norm=float('inf'), and clip the gradients before the update"
        raise ValueError(
            f"{reason}, but each stage, and each replica with a sharded optimizer, has only its own "
            f"({way_out})"
        )
    if shards and (found := next(parameter_lists(optimizer), None)):
        raise ValueError(
            f"group {found[0]} of the optimizer has a list with an entry for each parameter, {found[1]!r}, "
            "which cannot be sharded (leave out shard_optimizer, or make a group for each value)"
        )


def parameter_lists(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, str]]:
    """Yield group and key of the lists that have an entry for each parameter, except for torch's names."""
    for index, group in enumerate(optimizer.param_groups):
        for key in _list_keys(optimizer, group):
            if key != "param_names":
                yield index, key


def _list_keys(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> list[str]:
    """Return the keys of lists beside the hyper-parameters that are as long as the list of parameters."""
    count = len(group["params"])
    return [
        key
        for key, value in group.items()
        if key != "params"
        and key not in optimizer.defaults
        and isinstance(value, list | tuple)
        and len(value) == count
    ]


def keep_parameters(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], current: Sequence[Tensor | None]
) -> None:
    """Replace a group's parameters by `current`, and leave out those that are None, in all of its lists."""
    for key in _list_keys(optimizer, group):
        pairs = zip(group[key], current, strict=True)
        group[key] = type(group[key])(value for value, parameter in pairs if parameter is not None)
    group["params"] = [parameter for parameter in current if parameter is not None]


def _kinds(optimizer: torch.optim.Optimizer) -> list[type]:
    """Return the optimizer's class and its bases, except for those that all optimizers have."""
    return [kind for kind in type(optimizer).__mro__ if kind not in torch.optim.Optimizer.__mro__]


def _names_used(kind: type) -> set[str]:
    """Return the global and attribute names that the methods of a class outside of torch.optim use."""
    if kind.__module__.startswith("torch.optim"):
        return set()
    methods = [unwrap(method) for method in vars(kind).values() if isfunction(method)]
    return {name for method in methods for name in method.__code__.co_names}
