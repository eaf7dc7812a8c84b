"""Captured models, and the programs that stages run."""
