"""Runs one training step of one stage."""
