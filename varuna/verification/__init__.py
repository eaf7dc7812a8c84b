"""Verifies a model: trains it in one plain process and over many layouts, and compares all numbers."""
