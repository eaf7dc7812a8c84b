"""The class `Profiler`, the measurement driver that it shares with pyrannc, and estimated profiles."""
