"""Choosing: which segments make a stage, and (in time) the whole layout. Imports no torch."""

from varuna.plan.partition import balance, spread_evenly

__all__ = ["balance", "spread_evenly"]
