"""Starters: start agents on machines, by local processes, ssh, Slurm or Ray."""
