"""Rules of the manager: how each event changes the state of a job, and which commands follow."""
