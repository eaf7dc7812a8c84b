"""Reduces gradients and updates state."""
