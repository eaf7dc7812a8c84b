"""The live page of a job: a small web server for this machine, and the files that a browser shows."""
