"""Finds cuts and carves segments out of a captured graph."""
