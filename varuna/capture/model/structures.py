"""Dataclasses in the inputs and outputs of a model: opened into the tensors that they hold, and closed again.

torch's pytree knows tuples, lists, dicts and registered types. `opened` replaces every other dataclass by a
node that pytree knows; pytree makes the dataclass again when it unflattens.
"""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch.utils import _pytree as pytree


class _OpenedDataclass:
    def __init__(self, kind: type, names: tuple[str, ...], values: list[Any]) -> None:
        self.kind = kind
        self.names = names
        self.values = values


def _close(values: Sequence[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    kind, names = context
    made: Any = object.__new__(kind)  # its __init__ may take other arguments than its fields
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(
    _OpenedDataclass,
    lambda node: (node.values, (node.kind, node.names)),
    _close,  # type: ignore[arg-type]
    flatten_with_keys_fn=lambda node: (
        [(pytree.GetAttrKey(name), value) for name, value in zip(node.names, node.values, strict=True)],
        (node.kind, node.names),
    ),
    serialized_type_name="varuna.dataclass",
)


def opened(tree: Any) -> Any:
    """Replace the dataclasses of a tree; registered types, and dataclass types themselves, stay."""
    return pytree.tree_map(_opened_leaf, tree)


def _opened_leaf(leaf: Any) -> Any:
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    names = tuple(field.name for field in fields(leaf) if hasattr(leaf, field.name))
    return _OpenedDataclass(type(leaf), names, [opened(getattr(leaf, name)) for name in names])
