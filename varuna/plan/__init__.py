"""Choosing: which segments make a stage, what a layout will cost, and the whole layout. Imports no torch.

costs, memory    what a span of segments takes, in seconds and bytes
partition, cuts  where to cut
place            which device runs what
simulate         what a step looks like
bounds           what it takes at least
forecast         what a plan will cost
search           the best plan
stages, uneven   the same where stages may differ in their number of replicas
"""

from varuna.plan.cut.partition import balance, balance_over

__all__ = ["balance", "balance_over"]
