"""Joins this rank to the other ranks of a job: process groups, links to other stages, and the status board.

A job of one rank needs none of these, and no torch.distributed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from varuna.errors import PeerHangs, PeerLost, WorkerError
from varuna.execute.calls import (
    CHANGED,
    RankCall,
    announced_argument,
    announced_call,
    announcement,
    argument_mismatch,
    mismatch,
)
from varuna.execute.comm.address import job_key
from varuna.execute.comm.board import StatusBoard
from varuna.execute.comm.collective import Collective
from varuna.execute.comm.groups import (
    GLOO_TIMEOUT_FACTOR,
    RankDevice,
    choose_channel,
    describe_device,
    have_equal_widths,
    make_group,
    make_placeholder_group,
    reduce_backend,
    secure_group,
)
from varuna.execute.comm.lanes import open_lanes
from varuna.execute.comm.link import PeerLink
from varuna.execute.comm.network import PeerNetwork, connect
from varuna.execute.comm.stage_links import StageLinks
from varuna.execute.comm.wait import CAUSE_SECONDS, Waiter
from varuna.execute.shared_counters import CounterPlace, open_counters
from varuna.execute.step.division import linked_ranks
from varuna.secure.listeners import close_gloo_listeners
from varuna.types import ChannelName, StageMap, place_in_map

_num_sessions = 0  # opened in this process: every session has its own keys in the job's store


@dataclass(kw_only=True)
class Session(Collective):
    """This rank's connection to all ranks of the job, as a `Collective`; open as long as a wrapped model."""

    stage_map: StageMap
    stage: int
    replica: int
    board: StatusBoard | None = None
    replicas: dist.ProcessGroup | None = None  # of this rank's stage
    backend: str = "gloo"  # of the groups that reduce gradients
    channels: Mapping[int, ChannelName] = field(default_factory=dict)  # by rank, to adjacent stages
    network: PeerNetwork | None = None
    closed: bool = False
    num_commits: int = 0  # calls whose results count on all ranks, because all have agreed on it
    closers: list[Callable[[], None]] = field(default_factory=list)  # called when the session closes
    provisional: bool = False  # this rank waits to join the job: it has no connection to other ranks yet
    _in_call: bool = False

    @property
    def depth(self) -> int:
        return len(self.stage_map)

    @property
    def width(self) -> int:
        """Number of replicas of this rank's stage."""
        return len(self.stage_map[self.stage])

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def uneven(self) -> bool:
        """True if stages differ in their number of replicas."""
        return len({len(row) for row in self.stage_map}) > 1

    def gather_by_stage(self, numbers: Sequence[float]) -> list[list[list[float]]]:
        """Return the numbers of all ranks, by stage and replica."""
        found = dict(zip(self.ranks, self.gather_numbers(numbers), strict=True))
        return [[found[rank] for rank in row] for row in self.stage_map]

    def gather_over_replicas(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of this stage's replicas, by replica."""
        stage = Collective(self.rank, self.stage_map[self.stage], self.replicas, self.waiter)
        return stage.gather_numbers(numbers)

    def adjacent_stage(self, offset: int) -> PeerLink | StageLinks | None:
        """Return the connection to the previous (-1) or next (+1) stage, if there is one."""
        linked = linked_ranks(self.stage_map, self.stage, self.replica, self.stage + offset)
        if self.network is None or not linked:
            return None
        links = {replica: self.network.links[rank] for replica, rank in linked.items()}
        return StageLinks(links, sends_gradients=offset < 0) if self.uneven else links[self.replica]

    @contextmanager
    def call(self, name: str, *, announce: bool = True, argument: str = "") -> Iterator[None]:
        """Run a call of the script that all ranks must make. A call inside another one does not count.

        `announce`: compare the calls of all ranks first, with one small message. Not for `step`.
        `argument` must be the same on all ranks.
        """
        self.check_no_barrier()
        waiter = self.waiter
        if waiter is None or self._in_call:
            yield
            return
        waiter.call, waiter.call_number = name, waiter.call_number + 1
        self._in_call = True
        try:
            if announce:
                messages = self.gather_numbers(announcement(name, argument))
                self.check_calls(messages, self.ranks)
                if len({announced_argument(message) for message in messages}) > 1:
                    arguments = self.gather(argument, str)
                    raise argument_mismatch(name, list(zip(self.ranks, arguments, strict=True)))
            yield
        finally:
            self._in_call = False

    def check_calls(self, messages: Sequence[Sequence[float]], ranks: Sequence[int]) -> None:
        """Raise if the first messages of a call show that ranks are in different calls."""
        if self.waiter is None or self.board is None:
            return
        own = self.waiter.call
        names = dict(zip(ranks, map(announced_call, messages), strict=True))
        announced = [RankCall(rank, name) for rank, name in names.items() if name is not None]
        if all(call.name == own for call in announced) and len(announced) in (0, len(names)):
            return
        calls = {call.rank: call for call in (*announced, RankCall(self.rank, own))}
        if all(call.name == own for call in calls.values()):  # the other ranks know their calls
            raise self.board.read_error(CAUSE_SECONDS) or mismatch([calls[self.rank]])
        error = mismatch([calls[rank] for rank in sorted(calls)])
        self.board.post_error(error, f"{own}()")
        self.board.wait_until_seen()
        raise error

    def announce_change(self, change: str) -> None:
        """Raise unless all ranks have noticed a change of the model in this call; they all announce it."""
        waiter = self.waiter
        if waiter is None or self.board is None:
            return
        call, waiter.call = waiter.call, f"{waiter.call}() after {change}"
        messages = self.gather_numbers(announcement(CHANGED))
        unchanged = [r for r, m in zip(self.ranks, messages, strict=True) if announced_call(m) != CHANGED]
        if unchanged:
            calls = [RankCall(self.rank, waiter.call), *(RankCall(rank, call) for rank in unchanged)]
            error = mismatch(sorted(calls, key=lambda one: one.rank))
            self.board.post_error(error, waiter.call)
            self.board.wait_until_seen()
            raise error
        waiter.call = call

    def report_error(self, error: Exception, where: str) -> None:
        """Post an error of this rank for all others, and add its place to the error itself."""
        is_reported = isinstance(error, WorkerError) and not isinstance(error, PeerLost | PeerHangs)
        if self.board is not None and not is_reported:
            self.board.post_error(error, where)
            self.board.wait_until_seen()
        if not isinstance(error, WorkerError):
            error.add_note(f"on rank {self.rank}: {where}")

    def close(self) -> None:
        """Deliver pending messages and say goodbye, so that other ranks see an orderly end, not a loss."""
        if self.closed:
            return
        self.closed = True
        for close in self.closers:
            close()
        if self.network is not None:
            self.network.close()
        if self.board is not None:
            self.board.set_finished()
            self.board.close()

    def abandon(self) -> None:
        """Disconnect without a goodbye: some ranks are lost, and all others have given up their calls."""
        if self.closed:
            return
        self.closed = True
        for close in self.closers:
            close()
        if self.network is not None:
            self.network.abandon()
        if self.board is not None:
            self.board.abandon()


def single_rank_session() -> Session:
    """Return the session of a job with one rank."""
    return Session(rank=0, ranks=(0,), stage_map=((0,),), stage=0, replica=0)


def provisional_session(stage_map: StageMap, rank: int) -> Session:
    """Return the session of a rank that joins a running job, until it gets its order."""
    stage, replica = place_in_map(stage_map, rank)
    return Session(
        rank=rank, ranks=(rank,), stage_map=stage_map, stage=stage, replica=replica, provisional=True
    )


def open_session(
    stage_map: StageMap,
    *,
    rank: int,
    device: torch.device,
    timeout_seconds: float,
    host: str = "127.0.0.1",
    link_delay: Callable[[int], float] | None = None,
    channel: ChannelName | None = None,
    has_order: Callable[[], bool] | None = None,
) -> Session:
    """Join this rank to the other ranks of the map. All ranks call it.

    `channel`, equal on all ranks, is how tensors travel between stages; None: the best one for each pair.
    `has_order`: the manager has lost ranks, so that no rank may wait for others any more.
    """
    stage, replica = place_in_map(stage_map, rank)
    ranks = sorted(other for row in stage_map for other in row)
    session = Session(rank=rank, ranks=ranks, stage_map=stage_map, stage=stage, replica=replica)
    if len(ranks) == 1:
        return session
    try:
        _join_ranks(
            session,
            device=device,
            timeout_seconds=timeout_seconds,
            host=host,
            link_delay=link_delay,
            channel=channel,
            has_order=has_order,
        )
    except BaseException:
        session.abandon()  # its threads and sockets would stay as long as this process
        raise
    return session


def _join_ranks(
    session: Session,
    *,
    device: torch.device,
    timeout_seconds: float,
    host: str,
    link_delay: Callable[[int], float] | None,
    channel: ChannelName | None,
    has_order: Callable[[], bool] | None,
) -> None:
    """Make the groups, the board and the links of a session of several ranks."""
    rank, ranks, stage_map = session.rank, session.ranks, session.stage_map
    stage, replica = session.stage, session.replica
    if dist.get_world_size() == len(ranks):
        assert isinstance(dist.group.WORLD, dist.ProcessGroup)
        secure_group(dist.group.WORLD)  # the script made it, and may use it too
    session.group = make_group(ranks, timeout_seconds=timeout_seconds, backend="gloo")
    devices, store = _exchange_devices(session, device)

    def describe(other: int) -> str:
        its_stage, its_replica = place_in_map(stage_map, other)
        return f"rank {other} (stage {its_stage}, replica {its_replica})"

    session.board = StatusBoard(store, rank, len(ranks), describe, timeout_seconds=timeout_seconds)
    session.backend = reduce_backend([found.nccl_name for found in devices.values()])
    session.replicas = _replica_group(session, timeout_seconds)
    adjacent = {
        other for s in (stage - 1, stage + 1) for other in linked_ranks(stage_map, stage, replica, s).values()
    }
    nccl = session.backend != "gloo"
    session.channels = {
        other: channel or choose_channel(devices[rank], devices[other], nccl=nccl)
        for other in sorted(adjacent)
    }
    # No tensors go to the replicas beside this one. A link notices at once which rank is gone; a reduction
    # only breaks.
    beside = {stage_map[stage][(replica + step) % session.width] for step in (-1, 1)} - {rank}
    session.network = connect(
        rank,
        {other: describe(other) for other in adjacent | beside},
        lambda own: session.gather(own, str),
        host=host,
        key=job_key("links"),
        device=device,
        delay=link_delay,
        has_order=has_order,
    )
    _open_channels(session, session.network, store, device=device, timeout_seconds=timeout_seconds)
    session.waiter = Waiter(session.network, session.board, timeout_seconds=timeout_seconds)
    session.waiter.listen(has_order)
    session.board.watch(session.waiter.fail)
    if len({found.machine for found in devices.values()}) == 1:
        _share_counters(session)


def _share_counters(session: Session) -> None:
    session.counters = open_counters(
        session.ranks.index(session.rank),
        session.num_ranks,
        gather_places=lambda own: session.gather(own, CounterPlace),
        gather_flags=lambda own: session.gather(own, bool),
    )
    if session.counters is not None:
        session.closers.append(session.counters.close)


def _exchange_devices(
    session: Session, device: torch.device
) -> tuple[dict[int, RankDevice], distributed_c10d.Store]:
    """Return the device of every rank, and a store with keys that no other session uses."""
    global _num_sessions
    gathered = session.gather((_num_sessions, describe_device(device)), tuple[int, RankDevice])
    _num_sessions = 1 + max(number for number, _ in gathered)  # ranks may have opened unequally many
    store = distributed_c10d.PrefixStore(f"varuna/{_num_sessions}", distributed_c10d._get_default_store())
    return {rank: found for rank, (_, found) in zip(session.ranks, gathered, strict=True)}, store


def _replica_group(session: Session, timeout_seconds: float) -> dist.ProcessGroup | None:
    if session.depth == 1 and session.backend == "gloo":
        return session.group
    ranks = session.stage_map[session.stage]
    group = make_group(ranks, timeout_seconds=timeout_seconds, backend=session.backend)
    if session.uneven and group is None:
        make_placeholder_group(session.rank)
    return group


def _open_channels(
    session: Session,
    network: PeerNetwork,
    store: distributed_c10d.Store,
    *,
    device: torch.device,
    timeout_seconds: float,
) -> None:
    # In the order of ranks, so that no two ranks wait for each other in a circle.
    for other, channel in session.channels.items():
        link = network.links[other]
        if channel == "group":
            lanes = open_lanes(
                session.rank,
                other,
                store,
                device=device,
                nccl=session.backend != "gloo",
                timeout_seconds=timeout_seconds * GLOO_TIMEOUT_FACTOR,
            )
            link.use_lanes(*lanes)
        elif channel == "host":
            link.use_host()
    close_gloo_listeners()  # of lanes over gloo


def make_tie_groups(
    session: Session, ties: Iterable[tuple[int, ...]], *, timeout_seconds: float
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make the groups of this rank that sum gradients of tied parameters.

    A tie is the tuple of stages that share a parameter; every rank is given the ties of all stages. Its
    group is this replica's ranks of these stages; all their ranks, if stages differ in their replicas.
    """
    made = {}
    wanted = sorted(set(ties))
    if wanted:  # a failed rank shows in this gather; `make_group` would wait for it forever
        session.gather_numbers([1.0])
    for stages in wanted:
        if session.stage not in stages:
            make_placeholder_group(session.rank)
            continue
        if have_equal_widths(session.stage_map, stages):
            ranks = [session.stage_map[stage][session.replica] for stage in stages]
        else:
            ranks = [rank for stage in stages for rank in session.stage_map[stage]]
        group = make_group(ranks, timeout_seconds=timeout_seconds, backend=session.backend)
        assert group is not None, "a tie has at least two stages"
        made[stages] = group
    return made
