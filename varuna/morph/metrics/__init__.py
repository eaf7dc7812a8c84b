"""The path of a job's numbers: worker, agent, manager, view."""
