"""One pipeline stage in one process: runs micro-batches forward, again, and backward.

Between its forward and its backward, a micro-batch is *held*: with its autograd graph; or, if the stage
recomputes, with only the inputs of the forward. Random numbers depend on the step and the samples, so a
recomputed forward needs no saved generator state. Buffers that a forward changes (BatchNorm's) are copied
before it, and the second run changes only the copy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from varuna.execute.step.split import Fork, backward_inputs, backward_weights
from varuna.types import TensorSpec, Work


class TotalsFunction(Protocol):
    """Sums up what the loss divides by, such as counted labels, over a number of samples."""

    def __call__(
        self, tensor: Callable[[str], Tensor], inputs: Mapping[str, object], size: int, device: torch.device
    ) -> Tensor: ...


class StageProgram(Protocol):
    """The computation of a stage: a function of tensors."""

    @property
    def state(self) -> tuple[str, ...]: ...  # names of parameters and buffers
    @property
    def received(self) -> tuple[TensorSpec, ...]: ...
    @property
    def sent(self) -> tuple[TensorSpec, ...]: ...
    @property
    def mutated(self) -> tuple[str, ...]: ...
    @property
    def repeats(self) -> bool: ...  # runs the same operations for all values and all work
    @property
    def totals(
        self,
    ) -> TotalsFunction | None: ...  # None: the loss is a mean over samples, or of another stage
    def __call__(
        self, state: Sequence[Tensor], received: Sequence[Tensor], inputs: Mapping[str, object], work: Work
    ) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class IdleProgram:
    """Program of a micro-batch for which a rank has no samples, or none with a weight in the loss."""

    received: tuple[TensorSpec, ...]
    loss_on: torch.device | None  # on the last stage: the device of its zero loss
    state: tuple[str, ...] = ()
    sent: tuple[TensorSpec, ...] = ()
    mutated: tuple[str, ...] = ()
    repeats: bool = False
    totals: TotalsFunction | None = None

    def __call__(
        self, state: Sequence[Tensor], received: Sequence[Tensor], inputs: Mapping[str, object], work: Work
    ) -> tuple[Tensor, ...]:
        return () if self.loss_on is None else (torch.zeros((), device=self.loss_on),)


class TensorsByName(Protocol):
    """Parameters and buffers of this stage by name."""

    def tensor(self, name: str) -> Tensor: ...


@dataclass
class HeldMicroBatch:
    """A micro-batch between its forward and its backward."""

    program: StageProgram
    received: list[Tensor]
    inputs: Mapping[str, object]
    work: Work
    # Of the outputs that get a gradient; empty until the forward has run with a graph.
    edges: list[GradientEdge | None] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)  # values before the forward, if it recomputes
    pending: Sequence[Fork] | None = None  # work for `backward_weights`
    wants: bool = True  # the previous stage wants gradients of what was received
    trains: bool = True  # it does, or this stage has something to train: else there is no backward


class Stage:
    def __init__(self, state: TensorsByName, *, split_backward: bool = True) -> None:
        self.state = state
        self.split_backward = split_backward  # False: `backward_inputs` does all (a compiled program)
        self.inspect: Callable[[list[Tensor]], None] | None = None  # gets the outputs of `evaluate`
        self.held: dict[int, HeldMicroBatch] = {}
        self.most_held = 0
        self._tensors_of: dict[int, list[Tensor]] = {}  # by program; tensors do not change within a step
        self._trained: dict[int, bool] = {}  # by program: it has a weight that trains

    def forward(
        self,
        microbatch: int,
        program: StageProgram,
        received: list[Tensor],
        inputs: Mapping[str, object],
        work: Work,
        *,
        keep_graph: bool = True,
        wants_gradients: bool = True,
    ) -> list[Tensor]:
        """Return the detached outputs: what is sent, or the loss. `keep_graph=False`: recompute later.

        `wants_gradients`: the previous stage wants those of what was received.
        """
        held = HeldMicroBatch(program, received, inputs, work, wants=wants_gradients)
        held.trains = self._trains(program, received, inputs, wants_gradients)
        if not held.trains:
            outputs = self.evaluate(program, received, inputs, work)
            held.received = []  # nothing depends on them any more
        elif keep_graph:
            outputs = self._run_with_graph(held)
        else:
            held.buffers = {name: self.state.tensor(name).clone() for name in program.mutated}
            outputs = self.evaluate(program, received, inputs, work)
        self.held[microbatch] = held
        self.most_held = max(self.most_held, len(self.held))
        return [output.detach() for output in outputs]

    def evaluate(
        self, program: StageProgram, received: list[Tensor], inputs: Mapping[str, object], work: Work
    ) -> list[Tensor]:
        with torch.no_grad():
            outputs = list(program(self._tensors(program), received, inputs, work))
        if self.inspect is not None:
            self.inspect(outputs)
        return outputs

    def recompute(self, microbatch: int) -> None:
        if self.held[microbatch].trains:
            self._run_with_graph(self.held[microbatch])

    def take_held(self) -> dict[int, HeldMicroBatch]:
        """Return all held micro-batches and hold none, so that the caller can run their backwards later."""
        held, self.held = self.held, {}
        return held

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None], *, again: bool = False
    ) -> list[Tensor]:
        """Add to the weights' gradients and return those of the received tensors.

        `again`: the same forward will have another backward.
        """
        held = self.held[microbatch] if again else self.held.pop(microbatch)
        if not held.trains:
            return []
        roots, flowing = pair_gradients(held.edges, gradients)
        if roots:
            torch.autograd.backward(roots, flowing, retain_graph=again)
        leaves = leaves_of(held)
        found = or_zeros([leaf.grad for leaf in leaves], leaves)
        for leaf in leaves if again else ():
            leaf.grad = None
        return found

    def backward_inputs(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Run the first part of the backward. The micro-batch stays held until `backward_weights`."""
        held = self.held[microbatch]
        if not held.trains:
            held.pending = ()
            return []
        leaves = leaves_of(held)
        roots, flowing = pair_gradients(held.edges, gradients)
        found: list[Tensor | None] = [None] * len(leaves)
        held.pending = ()
        if roots and leaves and self.split_backward:
            found, held.pending = backward_inputs(roots, flowing, leaves)
        elif roots:
            torch.autograd.backward(roots, flowing)
            found = [leaf.grad for leaf in leaves]
        held.edges = []
        return or_zeros(found, leaves)

    def backward_weights(self, microbatch: int) -> None:
        held = self.held.pop(microbatch)
        assert held.pending is not None, f"W before I of micro-batch {microbatch}"
        backward_weights(held.pending)

    def clear(self) -> None:
        self.held.clear()
        self.most_held = 0
        self._tensors_of.clear()
        self._trained.clear()

    def _trains(
        self,
        program: StageProgram,
        received: Sequence[Tensor],
        inputs: Mapping[str, object],
        wants_gradients: bool,
    ) -> bool:
        """Return whether a micro-batch has a backward: for received tensors, inputs or weights."""
        if wants_gradients and received:
            return True
        found = self._trained.get(id(program))
        if found is None:
            found = self._trained[id(program)] = any(t.requires_grad for t in self._tensors(program))
        return found or any(isinstance(value, Tensor) and value.requires_grad for value in inputs.values())

    def _tensors(self, program: StageProgram) -> list[Tensor]:
        found = self._tensors_of.get(id(program))
        if found is None:
            found = self._tensors_of[id(program)] = [self.state.tensor(name) for name in program.state]
        return found

    def _run_with_graph(self, held: HeldMicroBatch) -> list[Tensor]:
        for spec, tensor in zip(held.program.received, held.received, strict=True):
            if spec.needs_grad and held.wants:
                tensor.requires_grad_(True)
        with torch.enable_grad():
            state = self._tensors(held.program)
            if held.buffers:
                named = zip(held.program.state, state, strict=True)
                state = [held.buffers.get(name, tensor) for name, tensor in named]
            outputs = list(held.program(state, held.received, held.inputs, held.work))
        # Unlike the tensor, an edge does not keep the output's memory alive.
        held.edges = [
            get_gradient_edge(output) if output.requires_grad else None
            for output in outputs_with_gradient(held.program, outputs)
        ]
        return outputs


def outputs_with_gradient(program: StageProgram, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs for which the next stage sends a gradient; on the last stage, all outputs."""
    wanted = [spec.needs_grad for spec in program.sent] or [True] * len(outputs)
    return [output for output, is_wanted in zip(outputs, wanted, strict=True) if is_wanted]


def leaves_of(held: HeldMicroBatch) -> list[Tensor]:
    """Return the received tensors that need a gradient."""
    if not held.wants:
        return []
    return [t for spec, t in zip(held.program.received, held.received, strict=True) if spec.needs_grad]


def pair_gradients(
    edges: Sequence[GradientEdge | None], gradients: Sequence[Tensor | None]
) -> tuple[list[GradientEdge], list[Tensor]]:
    """Pair outputs with their gradients. Leave out outputs that need no gradient or got none."""
    pairs = [(e, g) for e, g in zip(edges, gradients, strict=True) if e is not None and g is not None]
    return [edge for edge, _ in pairs], [gradient for _, gradient in pairs]


def or_zeros(gradients: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor]:
    pairs = zip(gradients, leaves, strict=True)
    return [torch.zeros_like(leaf) if gradient is None else gradient for gradient, leaf in pairs]
