"""The format of a checkpoint's files."""
