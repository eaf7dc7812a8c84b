"""Reads a user's model: names, calls, batches, state."""
