"""A span of segments as a pure function of tensors: the program that a stage runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from traceback import walk_tb
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from varuna.capture.graph.loss_totals import TotalsProgram
from varuna.capture.trace.data_branches import ModelCheck
from varuna.capture.trace.trace import autocast
from varuna.types import LOSS_TOTALS, PrecisionName, TensorSpec, Work

OPERATION = re.compile(r"\btorch\.ops\.(\w+\.\w+\.\w+)(?=\()")


@dataclass(frozen=True)
class SpanProgram:
    """A function (state, received, inputs, work) → the tensors to send, or the loss."""

    graph_module: fx.GraphModule  # placeholders: state, received, inputs, and the work if it is random
    state: tuple[str, ...]  # canonical names of the parameters and buffers that it reads, in call order
    received: tuple[TensorSpec, ...]  # tensors from the previous stage
    sent: tuple[TensorSpec, ...]  # tensors for the next stage; () in the last one
    mutated: tuple[str, ...]  # buffers that it changes in place
    inputs: tuple[str, ...]  # inputs of the model that it reads
    random: bool
    leaves: Mapping[str, nn.Module]  # opaque modules by their names in the model
    precision: PrecisionName
    device: torch.device
    totals: TotalsProgram | None = None  # of the last stage, if losses of micro-batches add up to a sum

    @property
    def repeats(self) -> bool:
        """True if it runs the same operations for all values and all work."""
        return not self.random and not self.leaves and not self._has_checks

    @cached_property
    def _has_checks(self) -> bool:
        return any(isinstance(node.target, ModelCheck) for node in self.graph_module.graph.nodes)

    def __call__(
        self, state: Sequence[Tensor], received: Sequence[Tensor], inputs: Mapping[str, object], work: Work
    ) -> tuple[Tensor, ...]:
        given = (inputs[name] if name != LOSS_TOTALS else inputs.get(name) for name in self.inputs)
        arguments = [*state, *received, *given]
        if self.random:
            arguments.append(work)
        if self.precision == "fp32":
            return self._forward(*arguments)
        with autocast(self.precision, self.device):
            return self._forward(*arguments)

    @cached_property
    def _forward(self) -> Callable[..., tuple[Tensor, ...]]:
        compiled = not isinstance(self.graph_module, fx.GraphModule)
        return self.graph_module if compiled else bind(self.graph_module)

    def with_specs(self, received: tuple[TensorSpec, ...], sent: tuple[TensorSpec, ...]) -> SpanProgram:
        """Return the same computation for values of other sizes."""
        new = replace(self, received=received, sent=sent)
        new.__dict__["_forward"] = self._forward
        return new

    def compiled(self) -> SpanProgram:
        """Return the program compiled at its first run; random operations stay uncompiled."""
        return replace(self, graph_module=torch.compile(self.graph_module))  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> SpanProgram:
        """Return the program with its constants and new tensors on another device."""
        device = torch.device(device)
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph_module.graph, {}))
        constants = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in attributes(self.graph_module).items()
        }
        for node in graph.nodes:
            node.args, node.kwargs = on_device((node.args, node.kwargs), device)
            if isinstance(node.target, UnderAutocast):
                node.target = node.target.on(device.type)
        return replace(self, graph_module=build(graph, constants), device=device)


def start_compiler(device: torch.device) -> None:
    """Start the compiler's processes early: they take seconds to start."""
    if device.type == "cuda":
        with suppress(ImportError):  # another torch version: compiling only takes longer
            from torch._inductor.async_compile import maybe_warm_pool  # a slow import

            maybe_warm_pool()


def build(graph: fx.Graph, attributes: Mapping[str, Any]) -> fx.GraphModule:
    """Return a module of a graph with its constants, nested graphs and opaque leaves."""
    root = nn.Module()
    for name, value in attributes.items():
        if isinstance(value, nn.Module):
            root.add_module(name, value)
        elif isinstance(value, Tensor):
            root.register_buffer(name, value, persistent=False)
        else:
            setattr(root, name, value)
    module = fx.GraphModule(root, graph, class_name="Program")
    module.recompile()
    return module


def bind(module: fx.GraphModule) -> Callable[..., Any]:
    """Return the module's forward with every operation looked up once.

    The code of fx looks each one up through four attributes in every call: a seventh of a small model's
    forward. If the forward raises, the error gets a note with the model's line.
    """
    code = module.graph.python_code("self")
    space = dict(code.globals)
    names: dict[str, str] = {}

    def bound(match: re.Match[str]) -> str:
        if match[0] not in names:
            names[match[0]] = f"operation_{len(names)}"
            operation = attrgetter(match[1])(torch.ops)
            space[names[match[0]]] = getattr(operation, "_op", operation)
        return names[match[0]]

    exec(compile(OPERATION.sub(bound, code.src), "<stage>", "exec"), space)
    forward: FunctionType = space["forward"]

    def run(*arguments: Any) -> Any:
        try:
            return forward(module, *arguments)
        except Exception as error:
            steps = walk_tb(error.__traceback__)
            number = next((number for frame, number in steps if frame.f_code is forward.__code__), None)
            if number is not None:
                # A statement of the generated forward assigns to its node's name.
                statement = code.src.splitlines()[number - 1].strip()
                name = statement.partition("=")[0].strip()
                lines = (node.meta.get("stack_trace") for node in module.graph.nodes if node.name == name)
                error.add_note(f"in the model: {next(lines, None) or statement}")
            raise

    return run


def attributes(module: fx.GraphModule) -> dict[str, Any]:
    names = {str(node.target) for node in module.graph.nodes if node.op in ("get_attr", "call_module")}
    return {name: getattr(module, name) for name in names}


def on_device(args: Any, device: torch.device) -> Any:
    return torch.fx.node.map_aggregate(args, lambda arg: device if isinstance(arg, torch.device) else arg)


class UnderAutocast:
    """An operation in a precision of its own, where the model changes it for a few lines."""

    def __init__(self, operation: Callable[..., Any], device_type: str, dtype: Any, enabled: bool) -> None:
        self.operation = operation
        self._options = (device_type, dtype, enabled)
        name = getattr(operation, "__name__", type(operation).__name__).replace(".", "_")
        # Generated code uses the name; segments are compared by the qualified name.
        self.__name__ = f"{name}_under_autocast"
        text = str(operation) if isinstance(operation, torch._ops.OpOverload) else operation.__qualname__
        self.__qualname__ = f"{text} under autocast {self._options}"
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device_type, dtype, enabled = self._options
        with torch.autocast(device_type, dtype, enabled=enabled):
            return self.operation(*args, **kwargs)

    def on(self, device_type: str) -> UnderAutocast:
        return UnderAutocast(self.operation, device_type, *self._options[1:])


def memory_order(value: Tensor) -> list[int] | None:
    """Return the order of a tensor's dimensions in memory, without gaps; None for the usual order.

    Strides of dimensions of size 1 and of expanded ones mean nothing: these dimensions keep their places.
    """
    sizes, strides = [_hint(size) for size in value.shape], [_hint(stride) for stride in value.stride()]
    if None in sizes or None in strides:
        return None
    ordered = [dim for dim in range(value.dim()) if sizes[dim] != 1 and strides[dim] != 0]
    outermost_first = iter(sorted(ordered, key=lambda dim: -strides[dim]))
    order = [next(outermost_first) if dim in ordered else dim for dim in range(value.dim())]
    return None if order == list(range(value.dim())) else order


def _hint(size: Any) -> Any:
    """Return a size of the example; comparing the symbol itself would fix it."""
    return size if isinstance(size, int) else size.node.hint


def in_memory_order(x: Tensor, order: Sequence[int]) -> Tensor:
    """Lay out a received tensor in memory as the model had it, so that sums are equal bit for bit."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return x.permute(*order).contiguous().permute(*back)
