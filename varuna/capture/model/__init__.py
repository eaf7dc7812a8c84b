"""Reads a user's model: call convention, batch, state, tied weights, initial values."""
