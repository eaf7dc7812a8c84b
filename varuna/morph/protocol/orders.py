"""Interface of the starters, which start agents on machines (local, ssh, Slurm, Ray).

A starter runs `python -m varuna.morph.run.agent` on a machine and writes the agent's orders to its
stdin, as one line of JSON. Everything else goes over the connection that the agent opens to the
manager. So the job's credential appears in no argument list and in no environment.

An agent that its starter cannot reach any more ends by itself: it tries to reach its manager for
`patience_seconds`, then ends its workers and exits.
"""

import sys
from typing import Protocol

import msgspec

from varuna.secure.credential import JobCredential

AGENT_COMMAND = (sys.executable, "-m", "varuna.morph.run.agent")
"""Command that starts an agent on this machine."""


class AgentOrders(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an agent needs to connect to its manager."""

    job: str
    machine: str  # name in the machine list
    manager: str  # "host:port"
    credential: JobCredential
    heartbeat_seconds: float = 0.5
    lease_seconds: float = 10.0  # end the workers after this time without contact to the manager's machine
    cloud: str = ""  # aws, azure or gcp: poll its metadata service for notices
    cloud_url: str = ""  # address of the metadata service, if not the cloud's own
    patience_seconds: float = 60.0  # exit after this time without a manager

    def line(self) -> bytes:
        """Return the line for the agent's stdin."""
        return msgspec.json.encode(self) + b"\n"


class StartedAgent(Protocol):
    """An agent that a starter has started."""

    def ended(self) -> str | None:
        """Return None while the agent may live, else the reason ("exit status 255: host key ..."). Cheap."""

    def kill(self) -> None:
        """Kill the agent and its workers if it can be reached; return at once and never raise."""


class Starter(Protocol):
    """Starts agents. The manager calls it in its own thread, so it may block."""

    def start(self, orders: AgentOrders) -> StartedAgent:
        """Start an agent, without waiting until it connects. Raise OSError or ValueError with a remedy.

        May be called again for a machine whose agent has ended or was killed.
        """
