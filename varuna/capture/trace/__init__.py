"""Traces a model with torch.export: cut points, opaque modules, refusals, patches of torch."""
