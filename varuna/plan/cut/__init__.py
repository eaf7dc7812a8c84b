"""Divides a model into stages and places them on devices."""
