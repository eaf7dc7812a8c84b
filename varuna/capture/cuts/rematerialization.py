"""Rematerialization: values that are recomputed after a cut, in place of being sent over it.

These are views of a parameter, and values that follow cheaply from the inputs.
"""

from torch import Tensor, fx

from varuna.capture.graph.flow import Flow

_MAX_NODES = 256  # recomputing more would cost more than a message


class Rematerialization:
    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        state = flow.flat.state
        self._state = set(state.values())
        self._parameters = {state[name] for name in flow.flat.parameters}
        self._changed = {root for root in flow.writers if root in self._state}

    def reads(self, node: fx.Node) -> list[fx.Node]:
        """Return the state that a node reads; a view, which is recomputed where it is used, reads nothing."""
        if self._is_view(node):
            return []
        return list(dict.fromkeys(state for arg in node.all_input_nodes for state in self.state_of(arg)))

    def state_of(self, value: fx.Node) -> list[fx.Node]:
        """Return the state that a user of a value must hold."""
        if value in self._state:
            return [value]
        return [self._flow.root[value]] if self._is_view(value) else []

    def _is_view(self, node: fx.Node) -> bool:
        root = self._flow.root[node]
        if node is root or root not in self._state or root in self._changed:
            return False
        return self.closure(node, len(self._flow.order)) is not None

    def closure(self, value: fx.Node, limit: int) -> frozenset[fx.Node] | None:
        """Return the nodes that recompute a value as it is at position `limit`; None if it must be sent."""
        flow, root = self._flow, self._flow.root[value]
        of_state = root in self._state and root not in self._changed
        closure: set[fx.Node] = set()
        pending = [value, *flow.writers_before(root, limit)]
        while pending:
            node = pending.pop()
            if node in closure:
                continue
            if node.op == "placeholder":
                trained = node in self._parameters and not of_state
                if node is flow.flat.work or node in self._changed or trained:
                    return None
                continue
            if node.op == "call_module" or "random" in node.meta:
                return None
            closure.add(node)
            if len(closure) > _MAX_NODES:
                return None
            if of_state and flow.root[node] is not root and isinstance(node.meta.get("val"), Tensor):
                return None  # a view of state may depend on sizes, but on no other tensor
            pending.extend(flow.dependencies(node))
        return frozenset(closure)
