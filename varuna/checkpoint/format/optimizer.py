"""An optimizer's state by parameter name, so that it fits any other layout of the same model."""

from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from varuna.checkpoint.format.manifest import Json
from varuna.checkpoint.format.tree import pack, unpack
from varuna.errors import CheckpointError

HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that say how an optimizer computes, not what: those of the new optimizer stay."""

OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})
"""What learning rate schedulers write into groups, be it before or after a checkpoint is loaded."""


def pack_groups(optimizer: torch.optim.Optimizer) -> list[bytes]:
    """The hyper-parameters of each group, as JSON that is the same wherever they are the same."""
    packed = []
    for index, group in enumerate(optimizer.param_groups):
        options = {
            key: value.tolist() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        packed.append(msgspec.json.encode(pack(options, f"param_groups[{index}]", {})))
    return packed


def number_groups(of_ranks: Sequence[Sequence[bytes]]) -> tuple[list[Json], list[list[int]]]:
    """All distinct groups of all ranks' optimizers, and for each rank the numbers of its own.

    Stages may have different groups (one without biases, say); those alike in place and content are one.
    """
    numbers: dict[tuple[int, bytes], int] = {}
    of_rank = [
        [numbers.setdefault((index, group), len(numbers)) for index, group in enumerate(groups)]
        for groups in of_ranks
    ]
    return [msgspec.json.decode(group) for _, group in numbers], of_rank


def pack_state(
    optimizer: torch.optim.Optimizer,
    parameter: Tensor,
    name: str,
    *,
    group: int,
    tensors: dict[str, Tensor],
) -> Json:
    state = optimizer.state.get(parameter, {})
    return {"group": group, "state": pack(dict(state), f"optimizer/{name}", tensors)}


def foreign_options(optimizer: torch.optim.Optimizer, groups: Sequence[Json]) -> list[str]:
    """Hyper-parameters of another kind of optimizer; none where this kind saved the groups.

    Another version of the same kind may have more of them, or fewer, but not both.
    """
    own = optimizer.defaults.keys() - HOW
    here = own.union(*(group.keys() for group in optimizer.param_groups))
    saved: set[str] = set().union(*(unpack(group, _no_tensor) for group in groups)) - HOW - OF_SCHEDULERS
    return sorted(saved - here) if own - saved else []


def match_groups(
    optimizer: torch.optim.Optimizer,
    trees: Mapping[Tensor, Json],
    groups: Sequence[Json],
    *,
    name_of: Mapping[Tensor, str],
) -> list[dict[str, object]]:
    """For each of the optimizer's groups the hyper-parameters that its parameters were trained with."""
    known = [unpack(group, _no_tensor) for group in groups]
    return [
        _hyper_parameters(index, group["params"], trees, known, len(optimizer.param_groups), name_of)
        for index, group in enumerate(optimizer.param_groups)
    ]


def unpack_optimizer(
    optimizer: torch.optim.Optimizer,
    trees: Mapping[Tensor, Json],
    groups: Sequence[Mapping[str, object]],
    tensor: Callable[[str], Tensor],
) -> None:
    """Gives the optimizer the state of the parameters in `trees`, and its groups their hyper-parameters.

    Through the optimizer's own load_state_dict, which knows where its tensors belong.
    """
    places: dict[Tensor, int] = {}
    packed_groups = []
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        for key, value in saved.items():
            if key not in HOW:
                options[key] = _in_the_form_of(options.get(key), value)
        for parameter in group["params"]:
            places[parameter] = len(places)
        packed_groups.append({**options, "params": [places[parameter] for parameter in group["params"]]})
    state = {places[p]: unpack(tree["state"], tensor) for p, tree in trees.items()}
    optimizer.load_state_dict({"state": {k: v for k, v in state.items() if v}, "param_groups": packed_groups})


def _no_tensor(key: str) -> Tensor:
    raise AssertionError(f"{key}: hyper-parameters are saved as numbers")


def _hyper_parameters(
    index: int,
    members: Sequence[Tensor],
    trees: Mapping[Tensor, Json],
    known: Sequence[dict[str, object]],
    num_groups: int,
    name_of: Mapping[Tensor, str],
) -> dict[str, object]:
    """Those that the group's parameters were trained with; by its place where it has none here."""
    first: Tensor | None = None
    for parameter in members:
        if parameter not in trees:
            continue
        if first is None:
            first = parameter
        elif known[trees[parameter]["group"]] != known[trees[first]["group"]]:
            raise CheckpointError(
                f"the optimizer's group {index} holds {name_of[first]} and {name_of[parameter]}, which were "
                "trained in two groups with different hyper-parameters (make the same groups as the job that "
                "saved)"
            )
    if first is not None:
        index = int(trees[first]["group"])
        return known[index]
    return known[index] if len(known) == num_groups else {}


def _in_the_form_of(current: object, saved: object) -> object:
    if isinstance(current, Tensor):
        return torch.as_tensor(saved, dtype=current.dtype, device=current.device)
    return saved
