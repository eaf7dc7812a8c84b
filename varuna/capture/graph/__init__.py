"""Rewrites a captured graph."""
