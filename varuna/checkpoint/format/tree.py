"""State of optimizers and schedulers as JSON and tensors, without pickle.

JSON has no tuples, non-string keys, infinities or tensors. `pack` writes such a value as an object with
one field, whose name is its type. Tensors are stored separately, by name.
"""

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from varuna.checkpoint.format.manifest import Json

CONTAINERS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "tuple"}
MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
MAKERS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
}
LARGEST = 2**63 - 1


def pack(value: object, path: str, tensors: dict[str, Tensor]) -> Json:
    """Return a value as JSON, and add its tensors to `tensors` under their path in the value."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if type(value) is int:
        return value if -LARGEST <= value <= LARGEST else {"int": str(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) is list:
        return [pack(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
    if type(value) in CONTAINERS:
        items = [pack(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]  # type: ignore[arg-type, var-annotated]
        return {CONTAINERS[type(value)]: items}
    if type(value) in MAPPINGS:
        assert isinstance(value, Mapping)
        pairs = [
            [pack(key, f"{path}/key", {}), pack(item, f"{path}/{key}", tensors)]
            for key, item in value.items()
        ]
        return {MAPPINGS[type(value)]: pairs}
    if isinstance(value, deque):
        items = [pack(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
        return {"deque": [items, value.maxlen]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return pack(value.item(), path, tensors)
    raise TypeError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold "
        "(supported: tensors, numbers, strings, bytes, and lists, tuples, sets and dicts of them; convert "
        "it, or leave it out of the state_dict)"
    )


def unpack(value: Json, tensor: Callable[[str], Tensor]) -> Any:
    """Return the value that was packed; `tensor(key)` returns the tensor with this name."""
    if isinstance(value, list):
        return [unpack(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensor(content)
    if kind in ("int", "float"):
        return int(content) if kind == "int" else float(content)
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "deque":
        items, maxlen = content
        return deque((unpack(item, tensor) for item in items), maxlen)
    items = [unpack(item, tensor) for item in content]
    return MAKERS[kind](items)


def tensors_in(value: Json) -> list[str]:
    """Return the names of all tensors in a packed value."""
    if isinstance(value, list):
        return [name for item in value for name in tensors_in(item)]
    if not isinstance(value, dict):
        return []
    ((kind, content),) = value.items()
    return [content] if kind == "tensor" else tensors_in(content)
