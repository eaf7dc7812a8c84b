"""Commands that follow from events, for the manager to carry out."""

from functools import cached_property

import msgspec

from varuna.morph.state import Generation, JobVerdict, match_ranks


class Command(msgspec.Struct, frozen=True, tag=True):
    """Something that the manager must do."""


class StartAgent(Command, frozen=True):
    machine: str


class EndAgent(Command, frozen=True):
    """Dismiss a connected agent; kill one that is not connected or does not respond."""

    machine: str
    why: str
    unresponsive: bool = False


class MakePlan(Command, frozen=True):
    machines: tuple[str, ...]
    devices: int = 0  # of each machine that workers may use; 0: all


class FindCheckpoint(Command, frozen=True):
    store: str


class Launch(Command, frozen=True):
    generation: Generation
    why: str
    reasons: tuple[str, ...] = ()  # "what: why" lines about the plan


class Prepare(Command, frozen=True):
    """Start the joiners of the next generation, while the current one trains."""

    generation: Generation
    joiners: tuple[str, ...]  # machines
    why: str


class Morph(Command, frozen=True, dict=True):
    """Order all workers into the next generation. See `varuna.types.MorphOrder`.

    Workers abandon what they do if `lost` is not empty. If they must, and all ranks live, it has the first
    number that no rank has.
    """

    generation: Generation
    last: Generation
    lost: tuple[int, ...]
    why: str
    reasons: tuple[str, ...] = ()  # "what: why" lines about the plan

    @cached_property
    def _matched(self) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
        return match_ranks(self.last, self.generation, self.lost)

    @property
    def previous(self) -> tuple[int | None, ...]:
        """The old rank of each new rank; None: a joiner."""
        return self._matched[0]

    @property
    def leaving(self) -> tuple[int, ...]:
        """The old ranks that leave."""
        return self._matched[1]


class RepeatOrders(Command, frozen=True):
    """Send the orders of the morph that runs again, to machines that may not have got them."""

    morph: Morph
    machines: tuple[str, ...]


class SaveAndEnd(Command, frozen=True):
    """Make workers save a checkpoint and exit. Sent to agents."""

    generation: int
    machines: tuple[str, ...]
    why: str


class KillWorkers(Command, frozen=True):
    """Kill all workers of this generation and of older ones; the agent confirms. Sent to agents."""

    generation: int
    machines: tuple[str, ...]
    why: str


class DumpStacks(Command, frozen=True):
    """Make workers write stack traces to their logs. Sent to agents."""

    generation: int
    machines: tuple[str, ...]


class ReleaseMachines(Command, frozen=True):
    """Report that machines that will be taken away are no longer needed. Sent to agents."""

    machines: tuple[str, ...]


class LogEvent(Command, frozen=True):
    """Write to the event log and the terminal."""

    what: str
    why: str


class Finish(Command, frozen=True):
    verdict: JobVerdict
