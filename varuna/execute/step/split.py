"""The backward in two parts: first gradients of the stage's inputs, later those of its weights.

The previous stage waits only for the input gradients; the weight gradients can fill a bubble. Autograd
computes only what is requested, so nothing is computed twice:

    part I   requests gradients of the received tensors only. It saves the gradient that enters each node
             from which a branch leads to weights (a "fork").
    part W   starts again at each fork with the saved gradient and requests that fork's weights only.

Two forks must not share a weight: a path from one fork through the other would count it twice. If they do
(one weight used twice in a stage), part I runs the whole backward and part W is empty: exact, and as fast as
an unsplit backward. A `torch.autograd.Function` computes all its gradients at once and cannot be started
again, so part I also computes those of its weights. The method is Zero Bubble's (Qi et al., 2023).
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
    """A node on a path to the inputs, and the weights of the branches that leave the path there."""

    node: Node
    weights: tuple[Tensor, ...]
    saved: list[Sequence[Tensor | None]]  # gradients that entered the node in part I


def backward_inputs(
    roots: Sequence[GradientEdge], gradients: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[list[Tensor | None], Sequence[Fork]]:
    """Run part I: return the gradients of `leaves` and the forks for part W."""
    found = _find_forks(roots, leaves)
    if found is None:
        torch.autograd.backward(roots, gradients)
        return [leaf.grad for leaf in leaves], ()
    forks = [fork for fork in found if not isinstance(fork.node, BackwardCFunction)]
    at_once = [w for fork in found if isinstance(fork.node, BackwardCFunction) for w in fork.weights]
    hooks = [fork.node.register_prehook(fork.saved.append) for fork in forks]
    made = torch.autograd.grad(roots, [*leaves, *at_once], gradients, retain_graph=True, allow_unused=True)
    for hook in hooks:
        hook.remove()
    for weight, gradient in zip(at_once, made[len(leaves) :], strict=True):
        if gradient is not None:
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
    return list(made[: len(leaves)]), forks


def backward_weights(forks: Sequence[Fork]) -> None:
    """Run part W: add each weight's gradient to its `.grad`."""
    for fork in forks:
        for saved in fork.saved:  # empty if no gradient reached the fork
            edges = [GradientEdge(fork.node, index) for index, t in enumerate(saved) if t is not None]
            torch.autograd.backward(edges, [t for t in saved if t is not None], inputs=list(fork.weights))
        fork.saved.clear()


def _find_forks(roots: Sequence[GradientEdge], leaves: Sequence[Tensor]) -> list[Fork] | None:
    """Return the forks of a graph; None if it cannot be split."""
    ends = {get_gradient_edge(leaf).node for leaf in leaves}
    order = _children_first([root.node for root in roots])
    on_path: set[Node] = set()  # nodes that lead to the leaves
    weights: dict[Node, dict[Tensor, None]] = {}  # of all other nodes: the weights below them
    for node in order:
        below = [child for child, _ in node.next_functions if child is not None]
        if node in ends or any(child in on_path for child in below):
            on_path.add(node)
        else:
            variable: Any = getattr(node, "variable", None)  # the weight of an AccumulateGrad
            own = {} if variable is None else {variable: None}
            weights[node] = own | {w: None for child in below for w in weights[child]}
    if any(root.node not in on_path for root in roots):
        return None
    forks, seen = [], set[Tensor]()
    for node in order:
        if node in on_path:
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
    """Return all nodes below the roots, each after its children. Graphs are too deep for recursion."""
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
