"""Messages between manager, agents and commands."""
