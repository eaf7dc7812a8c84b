"""Saving and loading while a job trains: when, what, and for which ranks."""
