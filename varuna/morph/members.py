"""Members of a job, with an index of those that a rule may have to do something about.

Most of a thousand machines are listed, ready, and have nothing before them. `decide` looks at the others.
"""

from collections.abc import Mapping, Sequence

import msgspec

from varuna.morph.state import Member


def is_steady(member: Member) -> bool:
    """Return True if a member is listed and ready, and is not about to leave, start, wait or end."""
    return (
        bool(member.agent and member.warm and member.listed)
        and not (member.kept or member.drained or member.welcome_at or member.trial_until or member.retry_at)
        and member.leave_by is None
        and member.dismissed_at is None
    )


class Members(dict[str, Member]):
    """Members by name. Only `[name] = member`, `drop` and `start_workers` change it."""

    def __init__(self, known: Mapping[str, Member] | None = None) -> None:
        super().__init__(known or {})
        self.unsteady = set(unsteady_names(known or {}))

    def __setitem__(self, name: str, member: Member) -> None:
        super().__setitem__(name, member)
        if is_steady(member):
            self.unsteady.discard(name)
        else:
            self.unsteady.add(name)

    def drop(self, name: str) -> None:
        self.pop(name, None)
        self.unsteady.discard(name)

    def start_workers(self, machines: Sequence[str], number: int) -> None:
        """Note the generation of the workers of these machines. It makes no member steady or unsteady."""
        replace = msgspec.structs.replace
        self.update({name: replace(self[name], workers=number) for name in machines})


def unsteady_names(members: Mapping[str, Member]) -> set[str]:
    if isinstance(members, Members):
        return members.unsteady
    return {name for name, member in members.items() if not is_steady(member)}


def unsteady_members(members: Mapping[str, Member]) -> list[Member]:
    """Return the members that are not steady, in the order of all members."""
    return [members[name] for name in filter(unsteady_names(members).__contains__, members)]
