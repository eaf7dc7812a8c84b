"""What ties this rank to the others of a job: its place, its groups, its links, and the board.

One rank alone has none of these, and needs no torch.distributed.
"""

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from varuna.errors import PeerHangs, PeerLost, WorkerError
from varuna.execute.comm.board import Board
from varuna.execute.comm.fan import Crowd
from varuna.execute.comm.groups import (
    GLOO_PATIENCE,
    choose_channel,
    have_equal_widths,
    make_group,
    reduce_backend,
    seat_at,
    stand_in,
)
from varuna.execute.comm.lanes import open_lanes
from varuna.execute.comm.link import Link
from varuna.execute.comm.pump import Network, connect
from varuna.execute.comm.wait import Waiter
from varuna.execute.step.division import linked_ranks
from varuna.types import ChannelName, StageMap, place_in_map

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
    backend: str = "gloo"  # of the groups that reduce gradients
    channels: Mapping[int, ChannelName] = field(default_factory=dict)  # to the stages before and after
    network: Network | None = None
    waiter: Waiter | None = None
    closed: bool = False

    @property
    def depth(self) -> int:
        return len(self.stage_map)

    @property
    def width(self) -> int:
        """The replicas of this rank's stage."""
        return len(self.stage_map[self.stage])

    @property
    def num_ranks(self) -> int:
        return sum(map(len, self.stage_map))

    @property
    def uneven(self) -> bool:
        """Whether stages differ in their number of replicas."""
        return len({len(row) for row in self.stage_map}) > 1

    def gather(self, value: Anything) -> list[Anything]:
        """Every rank's value, by rank in the order of the map's ranks."""
        if self.everyone is None:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for (size,) in self._all_gather([len(data)], self.everyone)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = data
        parts = [torch.empty_like(padded) for _ in sizes]
        self._wait(dist.all_gather(parts, padded, group=self.everyone, async_op=True))
        return [pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def gather_by_stage(self, numbers: Sequence[float]) -> list[list[list[float]]]:
        """Every rank's numbers, by stage and replica: one small message."""
        assert self.everyone is not None, "a rank alone is a stage alone"
        ranks = sorted(rank for row in self.stage_map for rank in row)
        found = dict(zip(ranks, self._all_gather(numbers, self.everyone), strict=True))
        return [[found[rank] for rank in row] for row in self.stage_map]

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers, as many each: one small message."""
        return [list(numbers)] if self.everyone is None else self._all_gather(numbers, self.everyone)

    def tell(self, value: Anything, source: int) -> Anything:
        """One rank's value, on every rank."""
        if self.everyone is None:
            return value
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = int(self._all_gather([len(data)], self.everyone)[source][0])
        if self.rank != source:
            data = torch.empty(size, dtype=torch.uint8)
        self._wait(dist.broadcast(data, source, group=self.everyone, async_op=True))
        found: Anything = value if self.rank == source else pickle.loads(data.numpy().tobytes())
        return found

    def gather_over_replicas(self, numbers: Sequence[float]) -> list[list[float]]:
        """Every replica's numbers, by replica: one small message."""
        return [list(numbers)] if self.replicas is None else self._all_gather(numbers, self.replicas)

    def _all_gather(self, numbers: Sequence[float], group: dist.ProcessGroup) -> list[list[float]]:
        own = torch.tensor(numbers, dtype=torch.float64)
        parts = [torch.empty_like(own) for _ in range(group.size())]
        self._wait(dist.all_gather(parts, own, group=group, async_op=True))
        return [part.tolist() for part in parts]

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None
        if self.waiter is None:  # while the session opens
            work.wait()
        else:
            self.waiter.for_work(work, lambda: "a word from all ranks")

    def neighbour(self, step: int) -> Link | Crowd | None:
        """The way to the stage before (-1) or after (+1) this one."""
        linked = linked_ranks(self.stage_map, self.stage, self.replica, self.stage + step)
        if self.network is None or not linked:
            return None
        links = {replica: self.network.links[rank] for replica, rank in linked.items()}
        return Crowd(links, sends_gradients=step < 0) if self.uneven else links[self.replica]

    def explain(self, error: Exception, where: str) -> None:
        """Tells the other ranks of an error of this one, and the error where it happened."""
        second_hand = isinstance(error, WorkerError) and not isinstance(error, PeerLost | PeerHangs)
        if self.board is not None and not second_hand:
            self.board.post(error, where)
            self.board.linger()
        if not isinstance(error, WorkerError):
            error.add_note(f"on rank {self.rank}: {where}")

    def close(self) -> None:
        """Hands over what was sent, and says goodbye, so that an orderly end is told from a loss."""
        if self.closed:
            return
        self.closed = True
        if self.network is not None:
            self.network.close()
        if self.board is not None:
            self.board.finished()
            self.board.close()


def open_session(
    stage_map: StageMap,
    *,
    rank: int,
    device: torch.device,
    timeout_seconds: float,
    host: str = "127.0.0.1",
    link_delay: Callable[[int], float] | None = None,
    channel: ChannelName | None = None,
) -> Session:
    """Joins this rank to the others of the map; all of them call it.

    `channel`, the same on all, is how tensors go between stages; None: the best that there is for each two.
    """
    stage, replica = place_in_map(stage_map, rank)
    session = Session(stage_map, rank, stage, replica)
    ranks = sorted(r for row in stage_map for r in row)
    if len(ranks) == 1:
        return session

    def describe(other: int) -> str:
        its_stage, its_replica = place_in_map(stage_map, other)
        return f"rank {other} (stage {its_stage}, replica {its_replica})"

    session.everyone = make_group(ranks, timeout_seconds=timeout_seconds, backend="gloo")
    global _num_sessions
    told = session.gather((_num_sessions, seat_at(device)))
    _num_sessions = 1 + max(number for number, _ in told)  # ranks may have been in unequally many
    seats = {other: seat for other, (_, seat) in zip(ranks, told, strict=True)}
    store = distributed_c10d.PrefixStore(f"varuna/{_num_sessions}", distributed_c10d._get_default_store())
    session.board = Board(store, rank, len(ranks), describe, timeout_seconds=timeout_seconds)
    session.backend = reduce_backend([seat.gpu for seat in seats.values()])
    session.replicas = (
        session.everyone
        if len(stage_map) == 1 and session.backend == "gloo"
        else make_group(stage_map[stage], timeout_seconds=timeout_seconds, backend=session.backend)
    )
    if session.uneven and session.replicas is None:
        stand_in(rank)
    others = {
        other for s in (stage - 1, stage + 1) for other in linked_ranks(stage_map, stage, replica, s).values()
    }
    nccl = session.backend != "gloo"
    session.channels = {
        other: channel or choose_channel(seats[rank], seats[other], nccl=nccl) for other in sorted(others)
    }
    # Between replicas nothing is sent; but a link tells at once who is gone, where a reduction only breaks.
    width = len(stage_map[stage])
    others |= {stage_map[stage][(replica + step) % width] for step in (-1, 1)} - {rank}
    session.network = connect(
        rank,
        {other: describe(other) for other in others},
        session.gather,
        host=host,
        device=device,
        delay=link_delay,
    )
    # In the order of the ranks: whoever waits for a neighbour here waits for one that comes to it in the end.
    for other, chosen in session.channels.items():
        link = session.network.links[other]
        if chosen == "group":
            patience = timeout_seconds * GLOO_PATIENCE
            lanes = open_lanes(rank, other, store, device=device, nccl=nccl, timeout_seconds=patience)
            link.use_lanes(*lanes)
        elif chosen == "host":
            link.use_host()
    session.waiter = Waiter(session.network, session.board, timeout_seconds=timeout_seconds)
    session.board.watch(session.waiter.fail)
    return session


def tie_groups(
    session: Session, ties: Iterable[tuple[int, ...]], *, timeout_seconds: float
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """For each tie (the stages that share a tensor) the group of this replica's ranks among them; of all
    their ranks, where not every stage has such a replica. All ranks are given the ties of all stages."""
    made = {}
    wanted = sorted(set(ties))
    if wanted:  # a word from a rank that has failed comes in time; of a group that it is to join, never
        session.gather_numbers([1.0])
    for stages in wanted:
        if session.stage not in stages:
            stand_in(session.rank)
            continue
        if have_equal_widths(session.stage_map, stages):
            ranks = [session.stage_map[stage][session.replica] for stage in stages]
        else:
            ranks = [rank for stage in stages for rank in session.stage_map[stage]]
        group = make_group(ranks, timeout_seconds=timeout_seconds, backend=session.backend)
        assert group is not None, "a tie has two stages at least"
        made[stages] = group
    return made
