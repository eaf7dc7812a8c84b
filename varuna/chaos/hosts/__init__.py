"""Hosts for faults that need a network, a disk or a clock of their own: network namespaces on one machine."""
