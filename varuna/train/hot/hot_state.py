"""The values with which a wrapped model follows the changes of its job's machines in place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from varuna.environment import VarunaEnvironment
from varuna.execute.rebuild.handover import Unit
from varuna.morph.state import MorphParts
from varuna.train.hot.script_files import hash_script
from varuna.types import MorphOrder

T = TypeVar("T")


class Finished(NamedTuple, Generic[T]):
    """The result of a call that counts, although this rank was interrupted in it."""

    value: T


class EarlierStep(NamedTuple):
    """The copies of an earlier step to which all survivors of a loss go back, and the order to do so."""

    step: int
    order: MorphOrder
    copied: Mapping[str, Unit]
    parts: MorphParts


class CompleteMove(NamedTuple):
    """The next state of this rank, complete here. It counts as soon as it is complete on all ranks."""

    generation: int
    use: Callable[[], None]  # give up the last state
    undo: Callable[[], None]  # keep the last state


@dataclass
class HotState:
    """The progress of this rank between two generations."""

    waits_for_orders: bool  # the manager gives orders to morph in place
    generation: int  # that this rank has entered; 0: it waits to join
    script: str = ""  # hash of the user's code when the model was wrapped; "": nobody compares it
    fetches: bool = False  # the library asks for the inputs of each step, and can ask again
    in_batches: bool = False  # the script iterates over `batches`
    batch_share: tuple[int, int] = (0, 1)  # replica and replicas for which `batches` has fetched last
    replaces_inputs: bool = False  # the script gives `step` other tensors than `batches` yields
    joined_at: int | None = None  # the step at which ranks have joined lately
    pending_order: MorphOrder | None = None  # to be carried out before the next call
    going_back: EarlierStep | None = None  # before the next batch; until then, no call trains
    has_joined: bool = False  # this rank has joined a running job
    passed_end: int | None = (
        None  # a joiner has left a loop over `batches` to this step, which was over before
    )
    joins: bool = False  # the state of this rank is not the job's yet: it is in its first morph
    move: CompleteMove | None = None  # this rank does not know yet whether it is complete on all others
    uncommitted: Finished[Any] | None = None  # result of a call that is done here, until its commit
    repeats: bool = False  # the current call runs again after a loss, so PeerLost is no error of it
    reported: str | None = None  # why this rank cannot morph in place, as the manager knows it

    @classmethod
    def of(cls, environment: VarunaEnvironment) -> "HotState":
        """Return the state of a worker that has just started."""
        generation = 0 if environment.joins else environment.generation or 0
        script = hash_script() if environment.progress_file else ""
        joins = environment.joins is not None
        return cls(environment.hot == "1", generation, script=script, joins=joins)
