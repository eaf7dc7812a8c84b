"""Stores for checkpoints: folders, S3 and other remote places."""
