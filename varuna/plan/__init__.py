"""The planner: predicts the cost of layouts and chooses the fastest one. Imports no torch.

cost/        seconds and bytes of a layout: profile sums, memory, simulation, bounds, forecast
cut/         segments of a model, cuts between stages, devices of stages
search/      the fastest layout for a cluster
*_file.py    profiles, plans and clusters on disk
tables.py    plans and profiles in a terminal
"""

from varuna.plan.cut.partition import balance, balance_over

__all__ = ["balance", "balance_over"]
