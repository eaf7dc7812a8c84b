"""`Decision`: the state during one call of `decide`, and the commands so far."""

from typing import Any

import msgspec

from varuna.morph import commands
from varuna.morph.state import Generation, JobState, ManagerSettings, Member, Phase


class Decision:
    def __init__(self, state: JobState, now: float) -> None:
        self.state = state
        self.now = now
        self.commands: list[commands.Command] = []

    def do(self, command: commands.Command) -> None:
        self.commands.append(command)

    def log(self, what: str, why: str) -> None:
        self.do(commands.LogEvent(what, why))

    def set(self, **fields: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **fields)

    def set_member(self, name: str, **fields: Any) -> None:
        member = msgspec.structs.replace(self.state.members[name], **fields)
        self.set(members={**self.state.members, name: member})

    def enter(self, phase: Phase, reason: str, **fields: Any) -> None:
        self.set(phase=phase, since=self.now, reason=reason, **fields)

    @property
    def settings(self) -> ManagerSettings:
        return self.state.settings

    @property
    def generation(self) -> Generation:
        assert self.state.generation is not None
        return self.state.generation

    def is_working(self, machine: str, generation: int | None = None) -> bool:
        """Return True while the machine has workers in the current generation (which is `generation`)."""
        return (
            self.state.active
            and generation in (None, self.generation.number)
            and machine in self.generation.machines
            and machine not in self.state.ended
        )

    def all_ended(self) -> bool:
        """Return True when the workers of all machines of the generation have ended."""
        return set(self.state.ended) == set(self.generation.machines)

    def member_of_agent(self, machine: str, agent: str) -> Member | None:
        """Return the machine, or None if this is not its current agent."""
        member = self.state.members.get(machine)
        return member if member is not None and member.agent == agent else None
