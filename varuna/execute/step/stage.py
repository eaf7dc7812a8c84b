"""One pipeline stage of one process: runs a micro-batch forward, again, and backward.

Between its forward and its backward a micro-batch is *held*: with its autograd graph, or, where the
stage recomputes, with nothing but what the forward was given. Randomness follows from the work
(step and samples), so a recomputed forward needs no saved generator state; buffers that a forward
changes (BatchNorm's) are kept as they were before it, and the second run changes that copy alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from varuna.execute.step.split import Pending, backward_inputs, backward_weights
from varuna.types import TensorSpec, Work


class Program(Protocol):
    """What a stage computes, as capture carves it: a function of tensors."""

    @property
    def state(self) -> tuple[str, ...]: ...
    @property
    def received(self) -> tuple[TensorSpec, ...]: ...
    @property
    def sent(self) -> tuple[TensorSpec, ...]: ...
    @property
    def mutated(self) -> tuple[str, ...]: ...
    @property
    def repeats(self) -> bool: ...  # whether it does the same operations whatever the values and the work
    def __call__(
        self, state: Sequence[Tensor], received: Sequence[Tensor], inputs: Mapping[str, object], work: Work
    ) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class Idle:
    """The program of a micro-batch of which a rank has no samples, or none that count in the loss."""

    received: tuple[TensorSpec, ...]
    loss_on: torch.device | None  # where the last stage tells its loss; None: this is another stage
    state: tuple[str, ...] = ()
    sent: tuple[TensorSpec, ...] = ()
    mutated: tuple[str, ...] = ()
    repeats: bool = False

    def __call__(
        self, state: Sequence[Tensor], received: Sequence[Tensor], inputs: Mapping[str, object], work: Work
    ) -> tuple[Tensor, ...]:
        return () if self.loss_on is None else (torch.zeros((), device=self.loss_on),)


class State(Protocol):
    """The parameters and buffers of this stage by name."""

    def tensor(self, name: str) -> Tensor: ...


@dataclass
class Held:
    """A micro-batch between its forward and its backward."""

    program: Program
    received: list[Tensor]
    inputs: Mapping[str, object]
    work: Work
    # Of the outputs with gradient; none where the forward has still to be run again.
    edges: list[GradientEdge | None] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)  # as before the forward, where it recomputes
    pending: Pending | None = None


class Stage:
    def __init__(self, state: State, *, split_backward: bool = True) -> None:
        self.state = state
        self.split_backward = split_backward  # False: part I does all (a compiled program cannot be split)
        self.held: dict[int, Held] = {}
        self.most_held = 0
        self._tensors_of: dict[int, list[Tensor]] = {}  # by program, for one step: the state's tensors stay

    def forward(
        self,
        microbatch: int,
        program: Program,
        received: list[Tensor],
        inputs: Mapping[str, object],
        work: Work,
        *,
        keep_graph: bool = True,
    ) -> list[Tensor]:
        """The outputs, detached: what is sent on, or the loss. `keep_graph=False`: R comes before B."""
        held = Held(program, received, inputs, work)
        if keep_graph:
            outputs = self._run_with_graph(held)
        else:
            held.buffers = {name: self.state.tensor(name).clone() for name in program.mutated}
            with torch.no_grad():
                outputs = list(program(self._tensors(program), received, inputs, work))
        self.held[microbatch] = held
        self.most_held = max(self.most_held, len(self.held))
        return [output.detach() for output in outputs]

    def evaluate(
        self, program: Program, received: list[Tensor], inputs: Mapping[str, object], work: Work
    ) -> list[Tensor]:
        with torch.no_grad():
            return list(program(self._tensors(program), received, inputs, work))

    def recompute(self, microbatch: int) -> None:
        self._run_with_graph(self.held[microbatch])

    def take_held(self) -> dict[int, Held]:
        """What is held, handed over to whoever will ask for its backward."""
        held, self.held = self.held, {}
        return held

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None], *, again: bool = False
    ) -> list[Tensor]:
        """Adds to the weights' gradients; returns those of the received tensors that need one.

        `again`: there will be another backward of the same forward.
        """
        held = self.held[microbatch] if again else self.held.pop(microbatch)
        roots, flowing = join(held.edges, gradients)
        if roots:
            torch.autograd.backward(roots, flowing, retain_graph=again)
        leaves = leaves_of(held)
        found = gradients_of([leaf.grad for leaf in leaves], leaves)
        for leaf in leaves if again else ():
            leaf.grad = None
        return found

    def backward_inputs(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Part I of the backward; the micro-batch stays held until part W."""
        held = self.held[microbatch]
        leaves = leaves_of(held)
        roots, flowing = join(held.edges, gradients)
        found: list[Tensor | None] = [None] * len(leaves)
        held.pending = Pending(())
        if roots and leaves and self.split_backward:
            found, held.pending = backward_inputs(roots, flowing, leaves)
        elif roots:
            torch.autograd.backward(roots, flowing)
            found = [leaf.grad for leaf in leaves]
        held.edges = []
        return gradients_of(found, leaves)

    def backward_weights(self, microbatch: int) -> None:
        held = self.held.pop(microbatch)
        assert held.pending is not None, f"W before I of micro-batch {microbatch}"
        backward_weights(held.pending)

    def clear(self) -> None:
        self.held.clear()
        self.most_held = 0
        self._tensors_of.clear()

    def _tensors(self, program: Program) -> list[Tensor]:
        found = self._tensors_of.get(id(program))
        if found is None:
            found = self._tensors_of[id(program)] = [self.state.tensor(name) for name in program.state]
        return found

    def _run_with_graph(self, held: Held) -> list[Tensor]:
        for spec, tensor in zip(held.program.received, held.received, strict=True):
            if spec.needs_grad:
                tensor.requires_grad_(True)
        with torch.enable_grad():
            state = self._tensors(held.program)
            if held.buffers:
                named = zip(held.program.state, state, strict=True)
                state = [held.buffers.get(name, tensor) for name, tensor in named]
            outputs = list(held.program(state, held.received, held.inputs, held.work))
        # An edge, unlike the tensor, does not keep the output's own memory alive.
        held.edges = [
            get_gradient_edge(output) if output.requires_grad else None
            for output in given_gradients(held.program, outputs)
        ]
        return outputs


def given_gradients(program: Program, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Those that the stage after sends one for; all of the last stage's, the loss or what the model gives."""
    wanted = [spec.needs_grad for spec in program.sent] or [True] * len(outputs)
    return [output for output, is_wanted in zip(outputs, wanted, strict=True) if is_wanted]


def leaves_of(held: Held) -> list[Tensor]:
    return [t for spec, t in zip(held.program.received, held.received, strict=True) if spec.needs_grad]


def join(
    edges: Sequence[GradientEdge | None], gradients: Sequence[Tensor | None]
) -> tuple[list[GradientEdge], list[Tensor]]:
    """Pairs outputs with their gradients, leaving out outputs that turned out to need none, or got none."""
    roots, flowing = [], []
    for edge, gradient in zip(edges, gradients, strict=True):
        if edge is not None and gradient is not None:
            roots.append(edge)
            flowing.append(gradient)
    return roots, flowing


def gradients_of(found: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor]:
    return [
        torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(found, leaves, strict=True)
    ]
