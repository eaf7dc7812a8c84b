"""Training: the class `Varuna` and what it is built from."""
