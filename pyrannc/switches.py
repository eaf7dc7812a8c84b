"""What is set for the whole process: when gradients are reduced, and whether graphs outlive a backward."""

from dataclasses import dataclass


@dataclass
class Switches:
    delays_allreduce: bool = False
    keeps_graph: bool = False
    syncs_parameters: bool = True


switches = Switches()


def delay_grad_allreduce(enable: bool) -> None:
    """`True`: backwards add to gradients without reducing them, until `allreduce_grads()` of the module."""
    switches.delays_allreduce = bool(enable)


def keep_graph(enable: bool) -> None:
    """`True`: several backwards may follow one forward."""
    switches.keeps_graph = bool(enable)


def sync_params_on_init(enable: bool) -> None:
    """`True`, as it is at first: all ranks begin with rank 0's values."""
    switches.syncs_parameters = bool(enable)
