"""SEC-1: nothing in the library unpickles. Whoever can send a pickle to a process can run code in it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [*sorted((ROOT / "varuna").rglob("*.py")), *sorted((ROOT / "pyrannc").rglob("*.py"))]

PICKLERS = {"pickle", "_pickle", "cPickle", "pickle5", "cloudpickle", "dill", "marshal", "shelve"} | {
    "joblib",
    "jsonpickle",
    "multiprocessing",  # its queues, pipes and managers pickle
}
OBJECT_CALLS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "rpc_sync",
    "rpc_async",
    "register_pickle_by_value",
    "__reduce__",
    "__reduce_ex__",
}
"""Calls of torch and others that pickle, and methods that only pickle calls."""

ALLOWED = {
    ("varuna/morph/starters/ray.py", "cloudpickle"): "Ray's own channel; Ray has to be closed to strangers",
    ("varuna/morph/starters/ray.py", "register_pickle_by_value"): "the same",
    (
        "varuna/hf/trainer/one_process.py",
        "__reduce_ex__",
    ): "training_args.bin of transformers: written, not read",
    ("varuna/measure/memory.py", "multiprocessing"): "torch's weak reference to a storage, nothing is sent",
}


def unsafe_uses(source: str) -> Iterator[tuple[int, str]]:
    """Every use of something that unpickles: its line and name."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.FunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value.split(".")[0]] if " " not in node.value else []  # of import_module(...)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if called.endswith("torch.load") and keywords.get("weights_only") != "True":
                yield node.lineno, "torch.load without weights_only=True"
            if keywords.get("allow_pickle", "False") != "False":
                yield node.lineno, "allow_pickle"
        yield from ((node.lineno, name) for name in names if name in PICKLERS | OBJECT_CALLS)  # type: ignore[attr-defined]


def test_no_file_of_the_library_unpickles() -> None:
    found = {
        (str(path.relative_to(ROOT)), name): line
        for path in FILES
        for line, name in unsafe_uses(path.read_text())
    }
    assert not {place: line for place, line in found.items() if place not in ALLOWED}
    assert not set(ALLOWED) - set(found), "an exemption that is not needed any more"


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "def f():\n    import cloudpickle",
        "from ray import cloudpickle",
        "import dill.source",
        "import marshal",
        "import shelve",
        "from multiprocessing.connection import Client",
        "from multiprocessing import Queue",
        "import torch.multiprocessing as mp",
        "importlib.import_module('pickle')",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "numpy.load(path, allow_pickle=True)",
        "dist.all_gather_object(everyone, own)",
        "from torch.distributed import broadcast_object_list",
        "torch.distributed.distributed_c10d.gather_object(own)",
        "dist.scatter_object_list(a, b)",
        "dist.send_object_list(a)",
        "dist.recv_object_list(a)",
        "rpc.rpc_sync('worker', f)",
        "class A:\n    def __reduce__(self):\n        return f, ()",
        "ray.cloudpickle.dumps(a)",
    ],
)
def test_planted_examples_are_found(planted: str) -> None:
    assert list(unsafe_uses(planted))


@pytest.mark.parametrize(
    "harmless",
    [
        "torch.load(path, map_location='cpu', weights_only=True)",
        "msgspec.msgpack.decode(data, type=Plan)",
        "'refused: it is a pickle that calls os.system'",
        "session.gather(own, Plan)",
        "numpy.load(path, allow_pickle=False)",
    ],
)
def test_safe_code_is_not_reported(harmless: str) -> None:
    assert not list(unsafe_uses(harmless))
