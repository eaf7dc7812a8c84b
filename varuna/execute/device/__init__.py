"""Device facts, memory errors and timing events."""
