"""Choosing: which segments make a stage, and (in time) the whole layout. Imports no torch."""

from varuna.plan.partition import balance

__all__ = ["balance"]
