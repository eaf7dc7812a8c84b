"""Starting agents: the one thing in which a laptop, ssh, Slurm and Ray differ.

An adapter starts `python -m varuna.morph.run.agent` on a machine, and writes its orders to its stdin,
as one line of JSON, and then leaves that stdin open or closes it. All else goes over the connection that the
agent opens to the manager. So the secret is in no argument list and in no environment.

An agent that an adapter cannot reach any more ends by itself: it asks for its manager for
`patience_seconds`, and then ends its workers and goes.
"""

import sys
from typing import Protocol

import msgspec

AGENT_COMMAND = (sys.executable, "-m", "varuna.morph.run.agent")
"""On this machine; adapters for others put the python of that machine first."""


class AgentOrders(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent must know before it can ask for more."""

    job: str
    machine: str  # as the machine list has it
    managers: tuple[str, ...]  # "host:port", in the order in which they are tried
    secret: str  # hex
    heartbeat_seconds: float = 0.5
    lease_seconds: float = 10.0  # a manager that is silent for so long has given this machine up
    cloud: str = ""  # whose notices are listened for: aws, azure or gcp
    cloud_url: str = ""  # where, if not at the cloud's own address
    patience_seconds: float = 60.0  # a manager that is gone for so long does not come back

    def line(self) -> bytes:
        """For the agent's stdin."""
        return msgspec.json.encode(self) + b"\n"


class StartedAgent(Protocol):
    """One agent that was started, as far as its adapter can see it."""

    def ended(self) -> str | None:
        """None while it lives, or may live; else why it does not ("exit status 255: host key ..."). Cheap."""

    def kill(self) -> None:
        """Ends it, and so its workers, as far as it can be reached; returns at once and never raises."""


class Starter(Protocol):
    """Starts agents. The manager calls it in a thread of its own, so it may take its time."""

    def start(self, orders: AgentOrders) -> StartedAgent:
        """Does not wait for the agent to dial in. Raises OSError or ValueError with the way out.

        A machine's agent may be started again after it has ended, or after it was killed.
        """
