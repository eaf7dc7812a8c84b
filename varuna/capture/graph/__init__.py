"""The graph of a captured model, and the passes that rewrite it."""
