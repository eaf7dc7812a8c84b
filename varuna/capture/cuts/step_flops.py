"""Floating-point operations of a step, for the model FLOP utilisation: a frozen weight needs no gradient."""

from collections.abc import Collection

from torch import fx

from varuna.capture.cuts.summary import flops_per_sample, operation_name
from varuna.capture.graph.flow import Flow

FACTORS = {
    **dict.fromkeys(("linear", "matmul", "mm", "bmm"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm"), (1, 2)),
}
"""Arguments that a product multiplies."""


def step_flops(flow: Flow, trained: Collection[str]) -> float:
    """Return the operations of a forward and a backward of one sample, if these parameters are trained.

    The backward of a product has one product for each factor that needs a gradient: one or none if weights
    are frozen. That of any other operation costs twice its forward, or nothing.
    """
    names = {node: name for name, node in flow.flat.state.items()}
    calls = set(flow.flat.calls)
    needing: set[fx.Node] = set()  # values that need a gradient
    total = 0.0
    for node in flow.order:
        if node not in calls:
            if node in flow.needs_grad and names.get(node) in (None, *trained):
                needing.add(node)
            continue
        forward = flops_per_sample(node, flow.flat)
        total += forward
        if node in flow.gets_grad and any(arg in needing for arg in node.all_input_nodes):
            needing.update((node, *flow.writes[node]))
            total += forward * _backward_share(node, needing)
    return total


def _backward_share(node: fx.Node, needing: Collection[fx.Node]) -> int:
    name = operation_name(node)
    places = (0, 1) if name.startswith("conv") else FACTORS.get(name)
    return 2 if places is None else sum(node.args[place] in needing for place in places)
