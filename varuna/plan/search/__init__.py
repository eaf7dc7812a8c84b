"""Search for the fastest layout."""
