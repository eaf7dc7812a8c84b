"""Profiling: the class `Profiler` and what it is built from."""
