"""Tied weights: groups of names that mean one tensor."""

from collections.abc import Sequence

from torch import Tensor, nn

from varuna.errors import CaptureError


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name, tied ones under each of their names."""
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return {**tensors, **dict(module.named_buffers(remove_duplicate=False))}


def find_ties(model: nn.Module, declared: Sequence[tuple[str, str]] | None) -> tuple[tuple[str, ...], ...]:
    """Return groups of two or more names of one tensor; the first name of a group is the canonical one."""
    groups: list[list[str]] = []
    by_key: dict[object, list[str]] = {}
    tensors = named_tensors(model)
    for name, tensor in tensors.items():
        keys = id(tensor), _storage_key(tensor)
        group = by_key.get(keys[0]) or by_key.get(keys[1])
        if group is None:
            groups.append(group := [])
        group.append(name)
        by_key |= dict.fromkeys(keys, group)
    for pair in declared or ():
        _join(groups, pair, tensors)
    position = {name: i for i, name in enumerate(tensors)}
    tied = [sorted(group, key=position.__getitem__) for group in groups if len(group) > 1]
    return tuple(tuple(group) for group in sorted(tied, key=lambda group: position[group[0]]))


def _storage_key(tensor: Tensor) -> object:
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _join(groups: list[list[str]], pair: Sequence[str], tensors: dict[str, Tensor]) -> None:
    for name in pair:
        if name not in tensors:
            raise CaptureError(
                f"shared_weights names {name!r}, which is no parameter of the model. "
                "Use the names of model.named_parameters()."
            )
    if len({tuple(tensors[name].shape) for name in pair}) != 1:
        raise CaptureError(
            f"shared_weights ties {' and '.join(map(repr, pair))}, but their shapes differ: "
            f"{', '.join(str(tuple(tensors[name].shape)) for name in pair)}. Tie parameters of equal shape."
        )
    joined = [group for group in groups if any(name in group for name in pair)]
    for other in joined[1:]:
        joined[0].extend(other)
        groups.remove(other)


def canonical_names(ties: Sequence[tuple[str, ...]]) -> dict[str, str]:
    return {name: group[0] for group in ties for name in group}
