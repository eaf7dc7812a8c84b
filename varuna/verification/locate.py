"""Finds the first operation where a captured model parts from the plain one.

    forward:   a value of the graph that the plain model never computes, nor anything that follows from it
    backward:  a gradient that the plain backward never computes, of a value whose users' gradients it does
    batch:     an operation that gives a sample other numbers if other samples are in its batch
    again:     an operation that gives other numbers when forward and backward run again

Values are known by their sums and norms, so that views and decompositions do not matter.
"""

import linecache
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import varuna
from varuna.capture import Captured
from varuna.capture.graph.checks import where
from varuna.capture.model.call_convention import find_loss
from varuna.capture.model.tied_weights import named_tensors
from varuna.capture.trace.trace import autocast
from varuna.types import Work
from varuna.verification.plain import SEED, PlainRun
from varuna.verification.subject import VerifySubject, copied, leaves_of

TOLERANCES = {torch.float64: 1e-8}
USUAL_TOLERANCE = 1e-3
MOST_AGREEING = 0.2
"""Share of the values after the first wrong one that may agree by chance: masks, zeros, shapes."""
MOST_USERS = 3
"""Operations that are named if a parameter has several."""
OWN_FOLDERS = (str(Path(torch.__file__).parent), str(Path(varuna.__file__).parent))

Fingerprint = tuple[float, ...]


class Executed(NamedTuple):
    """One operation of the plain model: its name, the line of the model, and its results."""

    name: str
    line: str
    values: tuple[Tensor, ...]


class ValueLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what every operation computes; with `keeps`, the values themselves."""

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: dict[int, list[Fingerprint]] = defaultdict(list)  # by number of elements
        self.executed: list[Executed] = []
        self._keeps = keeps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        values = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        for value in values:
            self.known[value.numel()].append(fingerprint(value))
        if self._keeps:
            copies = tuple(value.detach().clone() for value in values)
            self.executed.append(Executed(str(func), users_line(), copies))
        return out

    def has(self, value: Tensor, tolerance: float) -> bool:
        own = fingerprint(value)
        scale = max(abs(own[1]), 1e-300)

        def agrees(a: float, b: float) -> bool:
            return a == b or abs(a - b) <= tolerance * max(scale, abs(b))

        candidates = self.known.get(value.numel(), ())
        return any(all(map(agrees, own, other)) for other in candidates)


def fingerprint(value: Tensor) -> Fingerprint:
    """Return numbers of a tensor that do not depend on its shape and order: norms and a sum."""
    flat = value.detach()
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    wide = flat.double().nan_to_num().flatten()
    if not wide.numel():
        return (0.0,)
    return float(wide.sum()), float(wide.norm()), float(wide.pow(3).sum().abs().pow(1 / 3))


def first_operation(
    subject: VerifySubject, captured: Captured, run: PlainRun, chunk: int, backward: str | None
) -> str | None:
    """Return a description of the operation; None if no single one parts in the first step.

    `backward` names the parameter whose gradient is the first to differ, if all values of forward agree.
    """
    whole = subject.num_samples(subject.batches[0])
    inputs = {
        name: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in leaves_of(subject.batches[0]).items()
    }
    tensors = {
        name: value.detach().clone().requires_grad_(value.requires_grad)
        for name, value in named_tensors(subject.model).items()
    }
    dtype = next(subject.model.parameters()).dtype
    tolerance = TOLERANCES.get(dtype, USUAL_TOLERANCE)
    with ValueLog() as log:
        for value in (*tensors.values(), *(v for v in inputs.values() if isinstance(v, Tensor))):
            log.known[value.numel()].append(fingerprint(value))
        run.forward_backward(0, subject.batches[0], ((0, whole),))
    graph = GraphRun(captured, tensors, inputs, log, tolerance)
    graph.run(subject)
    found = graph.first_wrong_gradient() if backward else graph.first_wrong_value()
    return found or coupling_operation(subject, run, chunk, tolerance)


class GraphRun(fx.Interpreter):
    """Runs the captured graph, and notes which values and gradients the plain model has computed, too."""

    def __init__(
        self,
        captured: Captured,
        tensors: dict[str, Tensor],
        inputs: dict[str, Any],
        log: ValueLog,
        tolerance: float,
    ) -> None:
        self._program = captured.carve(0, captured.num_segments)
        super().__init__(self._program.graph_module)
        self._nodes: list[fx.Node] = list(self._program.graph_module.graph.nodes)
        self._captured, self._tensors, self._inputs = captured, tensors, inputs
        self._log, self._tolerance = log, tolerance
        self._agrees: dict[fx.Node, bool] = {}
        self._gradient_agrees: dict[fx.Node, bool] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        values = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if values and n.op != "output":
            self._agrees[n] = all(self._log.has(value, self._tolerance) for value in values)
            if len(values) == 1 and values[0].requires_grad and values[0].is_floating_point():
                hook = partial(self._note_gradient, n)
                values[0].register_hook(hook)  # type: ignore[no-untyped-call]
        return result

    def _note_gradient(self, node: fx.Node, grad: Tensor) -> None:
        self._gradient_agrees[node] = self._log.has(grad, self._tolerance)

    def run(self, subject: VerifySubject) -> None:  # type: ignore[override]
        program = self._program
        arguments: list[Any] = [self._tensors[name] for name in program.state]
        arguments += [self._inputs.get(name) for name in program.inputs]
        if program.random:
            arguments.append(Work(seed=SEED, step=0, first_sample=0))
        with autocast(program.precision, torch.device("cpu")):
            outputs = super().run(*arguments, enable_io_processing=False)
        outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
        loss = find_loss(self._captured.structure.filled(list(outputs)), self._choice(subject, outputs))
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]

    def _choice(self, subject: VerifySubject, outputs: Sequence[Tensor]) -> Any:
        """Return how to choose the loss: the outputs of `Varuna` are the loss alone."""
        return None if len(outputs) == 1 and outputs[0].dim() == 0 else subject.options.get("loss")

    def first_wrong_value(self) -> str | None:
        order = {node: i for i, node in enumerate(self._nodes)}
        for node, agrees in self._agrees.items():
            if agrees or node.op in ("placeholder", "get_attr"):
                continue
            after = [other for other in _followers(node, order) if other in self._agrees]
            agreeing = sum(self._agrees[other] for other in after)
            if agreeing <= MOST_AGREEING * len(after):
                return _place(node)
        return None

    def first_wrong_gradient(self) -> str | None:
        """Return the users of the last value whose gradient is wrong, as are those that follow from it."""
        order = {node: i for i, node in enumerate(self._nodes)}
        for node in reversed(self._nodes):
            if self._gradient_agrees.get(node, True):
                continue
            before = [other for other in _leading_to(node, order) if other in self._gradient_agrees]
            agreeing = sum(self._gradient_agrees[other] for other in before)
            users = [user for user in node.users if self._gradient_agrees.get(user, True)]
            if agreeing <= MOST_AGREEING * len(before) and users:
                return "the backward of " + " or of ".join(dict.fromkeys(map(_place, users[:MOST_USERS])))
        return None


def _leading_to(node: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                pending.append(source)
    return sorted(found, key=order.__getitem__)


def _followers(node: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user not in found:
                found.add(user)
                pending.append(user)
    return sorted(found, key=order.__getitem__)


def _place(node: fx.Node) -> str:
    name = getattr(node.target, "__name__", str(node.target)) if callable(node.target) else str(node.target)
    line = where(node)
    return name if line == node.name else f"{name} at {line}"


def coupling_operation(subject: VerifySubject, run: PlainRun, chunk: int, tolerance: float) -> str | None:
    """Return the first operation that gives a sample other numbers if fewer samples are in its batch."""
    batch = subject.batches[0]
    size = subject.num_samples(batch)
    if chunk >= size:
        return None
    logs = []
    forward = 0
    for count in (size, chunk):
        log = ValueLog(keeps=True)
        part = copied(subject.rows(batch, 0, count))
        with log, run.mode(0, 0, count):
            loss = find_loss(subject.model(**part), subject.options.get("loss"))
        forward = len(log.executed)
        with log:
            if loss.requires_grad:
                (loss * (count / size)).backward()  # type: ignore[no-untyped-call]
        logs.append(log.executed)
    for number, (whole, fewer) in enumerate(zip(*logs, strict=False)):
        # Other losses than a mean over samples have other gradients; the user's own backward is named alone.
        in_backward = number >= forward
        if (in_backward and not whole.line) or "empty" in whole.name:  # not initialized
            continue
        if whole.name != fewer.name:
            return None if in_backward else f"{fewer.name} at {fewer.line}: fewer samples take another path"
        for one, other in zip(whole.values, fewer.values, strict=True):
            rows = _same_rows(one, other, size, chunk)
            if rows is not None and not _close(rows, other, tolerance):
                return f"{whole.name} at {whole.line}: it computes a sample from other samples of its batch"
    return None


def changing_operation(subject: VerifySubject, run: PlainRun) -> str | None:
    """Return the first operation that gives other numbers for the same inputs and buffers."""
    batch, buffers = subject.batches[0], dict(subject.model.named_buffers())
    known = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    logs = []
    forward = 0
    for _ in range(2):
        subject.model.zero_grad()
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(known[name])
        size, log = subject.num_samples(batch), ValueLog(keeps=True)
        inputs = copied(subject.rows(batch, 0, size))
        with log, run.mode(0, 0, size):
            loss = find_loss(subject.model(**inputs), subject.options.get("loss"))
        forward = len(log.executed)
        with log:
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        logs.append(log.executed)
    for number, (first, again) in enumerate(zip(*logs, strict=False)):
        if "empty" in first.name:  # not initialized
            continue
        place = "in backward" if number >= forward and not again.line else f"at {again.line}"
        if first.name != again.name:
            return f"{again.name} {place}: it takes another path when it runs again"
        for one, other in zip(first.values, again.values, strict=True):
            if one.shape != other.shape or not _close(one, other, 0.0):
                return f"{first.name} {place}: it computes something else when it runs again"
    return None


def _same_rows(whole: Tensor, part: Tensor, size: int, count: int) -> Tensor | None:
    """Return the samples of the whole that the part has; None if the value has no samples."""
    if whole.dim() != part.dim() or whole.shape == part.shape:
        return None
    dims = [d for d in range(whole.dim()) if whole.shape[d] != part.shape[d]]
    if len(dims) != 1 or whole.shape[dims[0]] * count != part.shape[dims[0]] * size:
        return None
    return whole.narrow(dims[0], 0, part.shape[dims[0]])


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    gap = float((one.double() - other.double()).norm())
    return gap <= tolerance * max(float(other.double().norm()), 1e-300) or math.isnan(gap)


OWN_RUNS = (
    changing_operation.__name__,
    coupling_operation.__name__,
    PlainRun.forward_backward.__name__,
)
"""Functions that call the model: the lines above them are not its own."""


def users_line() -> str:
    """Return the line of the model that runs now: the innermost one outside of torch and this library.

    It is empty in the backward of torch's own operations.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_code.co_name in OWN_RUNS:
            break
        if not file.startswith((*OWN_FOLDERS, "<")):
            text = linecache.getline(file, frame.f_lineno).strip()
            return f"{file}:{frame.f_lineno}: {text}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
