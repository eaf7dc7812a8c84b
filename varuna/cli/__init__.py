"""The commands: argv, terminal output and exit codes."""
