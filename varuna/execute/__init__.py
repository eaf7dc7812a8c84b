"""One training step over many processes, equal to that of one: engine, stage, links, reduction."""
