"""Training: the class `Varuna` and its parts."""
