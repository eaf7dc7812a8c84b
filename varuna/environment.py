"""The names of the environment variables that the library reads and writes."""

AGENT_SOCKET = "VARUNA_AGENT_SOCKET"
SAVES = "VARUNA_SAVES"
