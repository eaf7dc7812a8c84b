"""Runs a training step over many processes with the same result as in one: stage, links, reduction."""
