"""What ties this rank to the others of a job: its place, its groups, its links, and the board.

One rank alone has none of these, and needs no torch.distributed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from varuna.errors import WorkerError
from varuna.execute.board import Board
from varuna.execute.groups import make_group
from varuna.execute.link import Link
from varuna.execute.pump import Network, connect
from varuna.execute.wait import Waiter
from varuna.types import StageMap, place_in_map

Anything = TypeVar("Anything")

_num_sessions = 0  # in this process: every session has keys of its own in the job's store


@dataclass
class Session:
    """Open while a wrapped model lives. `rank`, `stage` and `replica` say who this is."""

    stage_map: StageMap
    rank: int
    stage: int
    replica: int
    board: Board | None = None
    everyone: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None
    network: Network | None = None
    waiter: Waiter | None = None

    @property
    def depth(self) -> int:
        return len(self.stage_map)

    @property
    def width(self) -> int:
        return len(self.stage_map[0])

    def gather(self, value: Anything) -> list[Anything]:
        """Every rank's value, by rank in the order of the map's ranks."""
        if self.everyone is None:
            return [value]
        return _gather(value, self.everyone)

    def gather_over_replicas(self, value: Anything) -> list[Anything]:
        return [value] if self.replicas is None else _gather(value, self.replicas)

    def neighbour(self, step: int) -> Link | None:
        """The link to the stage before (-1) or after (+1) this one."""
        other = self.stage + step
        if self.network is None or not 0 <= other < self.depth:
            return None
        return self.network.links[self.stage_map[other][self.replica]]

    def explain(self, error: Exception, where: str) -> None:
        """Tells the other ranks of an error of this one, and the error where it happened."""
        if self.board is not None and not isinstance(error, WorkerError):
            self.board.post(error, where)
            self.board.linger()
        if where and not isinstance(error, WorkerError):
            error.add_note(f"on rank {self.rank}: {where}")

    def close(self) -> None:
        if self.network is not None:
            self.network.close()
        if self.board is not None:
            self.board.close()


def open_session(
    stage_map: StageMap,
    *,
    rank: int,
    device: torch.device,
    timeout_seconds: float,
    host: str = "127.0.0.1",
    link_delay: Callable[[int], float] | None = None,
) -> Session:
    """Joins this rank to the others of the map; all of them call it."""
    stage, replica = place_in_map(stage_map, rank)
    session = Session(stage_map, rank, stage, replica)
    ranks = sorted(r for row in stage_map for r in row)
    if len(ranks) == 1:
        return session
    global _num_sessions
    _num_sessions += 1

    def describe(other: int) -> str:
        its_stage, its_replica = place_in_map(stage_map, other)
        return f"rank {other} (stage {its_stage}, replica {its_replica})"

    store = dist.PrefixStore(f"varuna/{_num_sessions}", distributed_c10d._get_default_store())
    session.board = Board(store, rank, len(ranks), describe, timeout_seconds=timeout_seconds)
    session.everyone = make_group(ranks, timeout_seconds=timeout_seconds, backend="gloo")
    session.replicas = (
        session.everyone
        if len(stage_map) == 1
        else make_group(stage_map[stage], timeout_seconds=timeout_seconds)
    )
    others = [stage_map[s][replica] for s in (stage - 1, stage + 1) if 0 <= s < len(stage_map)]
    session.network = connect(
        rank,
        {other: describe(other) for other in others},
        session.gather,
        host=host,
        device=device,
        delay=link_delay,
    )
    session.waiter = Waiter(session.network, session.board, timeout_seconds=timeout_seconds)
    session.board.watch(session.waiter.fail)
    return session


def _gather(value: Anything, group: dist.ProcessGroup) -> list[Anything]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def tie_groups(
    session: Session, ties: Sequence[tuple[int, ...]], *, timeout_seconds: float
) -> list[dist.ProcessGroup | None]:
    """For each tie (the stages that share a tensor) the group of this replica's ranks among them."""
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for stages in ties:
        if session.stage in stages and stages not in made:
            ranks = [session.stage_map[stage][session.replica] for stage in stages]
            made[stages] = make_group(ranks, timeout_seconds=timeout_seconds)
    return [made.get(stages) for stages in ties]
