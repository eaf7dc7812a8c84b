"""The state of an optimizer by parameter name, so that it fits any layout of the model."""

from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from varuna.checkpoint.format.manifest import Json
from varuna.checkpoint.format.tree import pack, unpack
from varuna.errors import CheckpointError

SPEED_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that do not change results: loading keeps those of the new optimizer."""

PARAMETER_KEYS = frozenset({"params", "param_names"})
"""Lists of a group's parameters on this rank: no hyper-parameters."""

SCHEDULER_OPTIONS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})
"""Options that learning rate schedulers add to groups."""


def pack_groups(optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Return the hyper-parameters of each group as JSON; equal groups give equal bytes."""
    packed = []
    for index, group in enumerate(optimizer.param_groups):
        options = {
            key: value.tolist() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in PARAMETER_KEYS
        }
        packed.append(msgspec.json.encode(pack(options, f"param_groups[{index}]", {})))
    return packed


def number_groups(groups_of_ranks: Sequence[Sequence[bytes]]) -> tuple[list[Json], list[list[int]]]:
    """Return the distinct groups of all ranks, and for each rank the numbers of its groups.

    Stages may have different groups. Groups with the same index and content are one group.
    """
    numbers: dict[tuple[int, bytes], int] = {}
    of_rank = [
        [numbers.setdefault((index, group), len(numbers)) for index, group in enumerate(groups)]
        for groups in groups_of_ranks
    ]
    return [msgspec.json.decode(group) for _, group in numbers], of_rank


def foreign_options(optimizer: torch.optim.Optimizer, groups: Sequence[Json]) -> list[str]:
    """Return the saved hyper-parameters that another optimizer class has; [] if the class is the same.

    Another version of the same class may have more hyper-parameters, or fewer, but not both.
    """
    own = optimizer.defaults.keys() - SPEED_OPTIONS
    here = own.union(*(group.keys() for group in optimizer.param_groups))
    saved: set[str] = (
        set().union(*(unpack(group, _no_tensor) for group in groups))
        - SPEED_OPTIONS
        - SCHEDULER_OPTIONS
        - PARAMETER_KEYS
    )
    return sorted(saved - here) if own - saved else []


def match_groups(
    optimizer: torch.optim.Optimizer,
    trees: Mapping[Tensor, Json],
    groups: Sequence[Json],
    *,
    name_of: Mapping[Tensor, str],
) -> list[dict[str, object]]:
    """Return, for each group of the optimizer, the hyper-parameters its parameters were trained with."""
    known: list[dict[str, object]] = [unpack(group, _no_tensor) for group in groups]
    matched = []
    for index, group in enumerate(optimizer.param_groups):
        members = [parameter for parameter in group["params"] if parameter in trees]
        if not members:  # this rank has none of its parameters: choose by index
            matched.append(known[index] if len(known) == len(optimizer.param_groups) else {})
            continue
        first = members[0]
        matched.append(known[trees[first]["group"]])
        for parameter in members:
            if known[trees[parameter]["group"]] != matched[-1]:
                raise CheckpointError(
                    f"the optimizer's group {index} holds {name_of[first]} and {name_of[parameter]}, which "
                    "were trained in two groups with different hyper-parameters (use the same parameter "
                    "groups as the job that saved)"
                )
    return matched


def unpack_optimizer(
    optimizer: torch.optim.Optimizer,
    trees: Mapping[Tensor, Json],
    groups: Sequence[Mapping[str, object]],
    tensor: Callable[[str], Tensor],
) -> None:
    """Load the state of the parameters in `trees` and the hyper-parameters of the groups.

    This uses the optimizer's own load_state_dict, which puts tensors on the right devices.
    """
    places: dict[Tensor, int] = {}
    packed_groups = []
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        for key, value in saved.items():
            if key not in SPEED_OPTIONS | PARAMETER_KEYS:
                options[key] = _like(options.get(key), value)
        for parameter in group["params"]:
            places[parameter] = len(places)
        packed_groups.append({**options, "params": [places[parameter] for parameter in group["params"]]})
    state = {places[p]: unpack(tree["state"], tensor) for p, tree in trees.items()}
    optimizer.load_state_dict({"state": {k: v for k, v in state.items() if v}, "param_groups": packed_groups})


def _no_tensor(key: str) -> Tensor:
    raise AssertionError(f"{key}: hyper-parameters are saved as numbers")


def _like(current: object, saved: object) -> object:
    if isinstance(current, Tensor):
        return torch.as_tensor(saved, dtype=current.dtype, device=current.device)
    return saved
