"""The backward in two parts: gradients of the stage's inputs first, of its weights later.

The neighbour upstream waits only for the input gradients; the weights' can fill a bubble. Autograd
computes just what is asked for, node by node, so nothing is computed twice:

    part I   asks for the stage's received tensors only, and catches on its way the gradient that
             enters each node from which a branch leaves towards weights (a "fork")
    part W   starts again at each fork with the caught gradient, asking for that fork's weights only

Forks may share no weight: a path from one fork through the next would count it twice. Where they
do (one weight used twice in a stage), part I does the whole backward and part W is empty: exact,
and only as fast as an unsplit backward. A function written in Python (`torch.autograd.Function`)
makes all its gradients at one go and cannot be started again, so part I takes those of its weights too.
The method of splitting is Zero Bubble's (Qi et al., 2023).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass(frozen=True)
class Fork:
    """A node on the way to the inputs, and the weights of the branches that leave the way there."""

    node: Node
    weights: tuple[Tensor, ...]
    caught: list[Sequence[Tensor | None]]  # what entered the node, once part I has run


@dataclass(frozen=True)
class Pending:
    """What part W has still to do."""

    forks: tuple[Fork, ...]


def backward_inputs(
    roots: Sequence[GradientEdge], gradients: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[list[Tensor | None], Pending]:
    """Part I: the gradients of `leaves`, and what is left for part W."""
    found = _find_forks(roots, leaves)
    if found is None:
        torch.autograd.backward(roots, gradients)
        return [leaf.grad for leaf in leaves], Pending(())
    forks = [fork for fork in found if not isinstance(fork.node, BackwardCFunction)]
    whole = [fork for fork in found if isinstance(fork.node, BackwardCFunction)]
    at_once = [weight for fork in whole for weight in fork.weights]
    hooks = [fork.node.register_prehook(fork.caught.append) for fork in forks]
    made = torch.autograd.grad(roots, [*leaves, *at_once], gradients, retain_graph=True, allow_unused=True)
    for hook in hooks:
        hook.remove()
    for weight, gradient in zip(at_once, made[len(leaves) :], strict=True):
        if gradient is not None:
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
    return list(made[: len(leaves)]), Pending(tuple(forks))


def backward_weights(pending: Pending) -> None:
    """Part W: adds each weight's gradient to its `.grad`."""
    for fork in pending.forks:
        for caught in fork.caught:  # empty where no gradient came this way
            edges = [
                GradientEdge(fork.node, index) for index, tensor in enumerate(caught) if tensor is not None
            ]
            torch.autograd.backward(
                edges, [tensor for tensor in caught if tensor is not None], inputs=list(fork.weights)
            )
        fork.caught.clear()


def _find_forks(roots: Sequence[GradientEdge], leaves: Sequence[Tensor]) -> list[Fork] | None:
    """The forks of a graph, or None where it cannot be split."""
    ends = {get_gradient_edge(leaf).node for leaf in leaves}
    order = _children_first([root.node for root in roots])
    on_the_way: set[Node] = set()
    weights: dict[Node, dict[Tensor, None]] = {}  # of nodes off the way: the weights below them
    for node in order:
        below = [child for child, _ in node.next_functions if child is not None]
        if node in ends or any(child in on_the_way for child in below):
            on_the_way.add(node)
        else:
            variable: Any = getattr(node, "variable", None)  # an AccumulateGrad's weight
            own = {} if variable is None else {variable: None}
            weights[node] = own | {w: None for child in below for w in weights[child]}
    if any(root.node not in on_the_way for root in roots):
        return None
    forks, seen = [], set[Tensor]()
    for node in order:
        if node in on_the_way:
            branches = [weights[child] for child, _ in node.next_functions if child in weights]
            own = {weight: None for branch in branches for weight in branch}
            if not own:
                continue
            if seen & own.keys() or sum(map(len, branches)) != len(own):
                return None
            seen |= own.keys()
            forks.append(Fork(node, tuple(own), []))
    return forks


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """All nodes below the roots, each after its children; no recursion, graphs are deep."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None)
    return order
