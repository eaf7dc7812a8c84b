"""Traces a model with torch.export."""
