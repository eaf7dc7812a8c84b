"""Benchmarks of time and memory against PyTorch's own tools."""
