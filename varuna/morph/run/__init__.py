"""The processes of a job: manager, agents, workers."""
