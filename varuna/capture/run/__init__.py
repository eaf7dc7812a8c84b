"""Runs captured programs and verifies them against the model."""
