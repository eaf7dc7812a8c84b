"""Simulates jobs on machines that come and go as a trace says, with the manager's own decisions."""
