"""Timing and memory measurements of segments, messages, reductions, optimizers and the engine."""
