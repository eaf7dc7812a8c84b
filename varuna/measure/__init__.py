"""The stopwatch: what segments, messages, reductions, optimizers and the engine itself cost."""
