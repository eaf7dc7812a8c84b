"""The parts of a `Varuna` or `RaNNCModule` that the functions of this package need."""

from typing import NamedTuple

from torch import Tensor, nn

from varuna.capture.model.source import Source
from varuna.capture.model.state import StageState
from varuna.execute.comm.session import Session

LONG_WAIT_FACTOR = 15.0
"""Other ranks wait this many times the timeout while a rank writes."""


class WrappedParts(NamedTuple):
    """The parts that `Varuna` and `RaNNCModule` have in common."""

    session: Session
    state: StageState
    source: Source


def wrapped_parts(model: nn.Module, caller: str) -> WrappedParts:
    """Return the session, the stage and the source of a wrapped model."""
    inside = model.__dict__
    if "_programs" in inside:
        programs = inside["_programs"]
        return WrappedParts(inside["_session"], programs.state, programs.sampled.source)
    if (partitioned := inside.get("_partitioned")) is not None:
        return WrappedParts(inside["_session"], partitioned.state, partitioned.source)
    raise TypeError(
        f"{caller} takes a Varuna, or a RaNNCModule that was called once, not a {type(model).__name__}"
    )


def own_tensors(session: Session, state: StageState) -> dict[str, Tensor]:
    """Return the tensors that this rank writes: the first replica of the first stage that holds them."""
    persistent = tuple(name for name in state.canonical if state.is_persistent(name))
    held = session.gather(persistent if session.replica == 0 else (), tuple[str, ...])
    before = {name for names in held[: session.ranks.index(session.rank)] for name in names}
    if session.replica != 0:
        return {}
    return {name: state.tensor(name).detach() for name in persistent if name not in before}
