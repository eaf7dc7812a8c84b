"""Searches for the best layout."""
