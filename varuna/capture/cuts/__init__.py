"""Decides where a captured graph is cut, and carves programs out of it."""
