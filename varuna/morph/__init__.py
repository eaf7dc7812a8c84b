"""Machines and processes: who runs where, what each worker is told, and why a job ended.

Everything here decides and nothing acts: no torch, no clock, no environment. The doors act.
"""
