"""Ways out of refusals: where the library refuses a model, and the rows of tests that follow its advice.

A row provokes one refusal, and runs the script as its message says. `sites()` finds every place that raises a
CaptureError; tests/test_ways_out.py asserts that each one has a row.
"""

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import pytest

from varuna.errors import CaptureError

ROOT = Path(__file__).parent.parent


class Way(NamedTuple):
    """A refusal: its place, a script that provokes it, words of its message, the script as changed by it."""

    site: str
    refused: Callable[[], object]
    words: str
    changed: Callable[[], object]


def refusal_classes() -> set[str]:
    """Return the names of CaptureError and all classes derived from it."""
    import pyrannc  # noqa: F401

    found, waiting = set(), [CaptureError]
    while waiting:
        one = waiting.pop()
        found.add(one.__name__)
        waiting.extend(one.__subclasses__())
    return found


@cache
def sites() -> dict[str, tuple[Path, range]]:
    """Return the file and lines of each refusal; "FILE find_batch 2" is the second one in a function."""
    names = refusal_classes()
    found: dict[str, tuple[Path, range]] = {}
    for path in sorted([*(ROOT / "varuna").rglob("*.py"), *(ROOT / "pyrannc").rglob("*.py")]):
        for function, node in _raises(ast.parse(path.read_text()), [], names):
            key, number = f"{path.relative_to(ROOT)} {function}", 1
            while (site := key if number == 1 else f"{key} {number}") in found:
                number += 1
            found[site] = path, range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return found


def _raises(tree: ast.AST, path: list[str], names: set[str]) -> Iterator[tuple[str, ast.Raise]]:
    for node in ast.iter_child_nodes(tree):
        inner = [*path, node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else path
        call = node.exc if isinstance(node, ast.Raise) else None
        name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
        if isinstance(node, ast.Raise) and name in names:
            yield ".".join(path), node
        yield from _raises(node, inner, names)


def site_of(error: BaseException) -> str:
    """Return the place that raised an error."""
    known = sites()
    trace: TracebackType | None = error.__traceback__
    found = "no refusal of the library"
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        matching = (
            site for site, (path, lines) in known.items() if path == file and trace.tb_lineno in lines
        )
        found = next(matching, found)
        trace = trace.tb_next
    return found


def follow(way: Way) -> None:
    """Assert that the script is refused at its site, and that the way out works."""
    with pytest.raises(CaptureError) as caught:
        way.refused()
    assert site_of(caught.value) == way.site, f"{site_of(caught.value)}: {caught.value}"
    assert way.words in str(caught.value), str(caught.value)
    way.changed()
