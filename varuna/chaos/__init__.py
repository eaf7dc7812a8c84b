"""Chaos: runs a job, injects faults into it, and compares the result with an undisturbed run."""
