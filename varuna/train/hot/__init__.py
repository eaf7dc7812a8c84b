"""Hot morphs: a wrapped model enters the next generation of its job in the same process."""
