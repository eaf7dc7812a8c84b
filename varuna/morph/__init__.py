"""Morphing: run a job on machines that join, leave and fail. Imports no torch.

`decide` and `rules` decide; `run` carries out; `starters` start agents; `protocol` connects them.
"""
