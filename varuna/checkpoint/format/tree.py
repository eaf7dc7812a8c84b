"""States of optimizers, schedulers and the like as JSON and tensors, without pickle.

JSON has no tuples, no keys but strings, no infinity and no tensors: whatever it lacks becomes an
object with one field that says what it is. A tensor is named, and kept elsewhere.
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
    """The JSON of a value; its tensors go into `tensors`, keyed by where in it they stand."""
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
        "(it holds tensors, numbers, strings, bytes, and lists, tuples, sets and dicts of them; leave it out "
        "of the state_dict, or put it in such a form)"
    )


def unpack(value: Json, tensor: Callable[[str], Tensor]) -> Any:
    """The value that `pack` was given; `tensor(key)` finds a tensor by the name it was kept under."""
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
    """The names of all tensors that belong to a packed value."""
    if isinstance(value, list):
        return [name for item in value for name in tensors_in(item)]
    if not isinstance(value, dict):
        return []
    ((kind, content),) = value.items()
    return [content] if kind == "tensor" else tensors_in(content)
