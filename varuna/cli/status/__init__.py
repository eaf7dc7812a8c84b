"""The status of a running job in the terminal."""
