"""Process groups of a plan, and the choice of backends and channels.

Only the members of a group take part in making it. Gloo lets anyone join who is quicker than a rank. So every
rank proves over a new group that it has the job's credential, and the sockets on which gloo listens are
closed to new connections (`varuna.secure.listeners`).
"""

import hmac
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from varuna.environment import VarunaEnvironment
from varuna.errors import PeerLost, WorkerError
from varuna.execute.comm.address import job_key, machine_identity
from varuna.execute.comm.slots import device_uuid, reachable_gpus
from varuna.secure.listeners import close_gloo_listeners
from varuna.types import ChannelName, Plan, StageMap

GLOO_TIMEOUT_FACTOR = 20
"""Gloo times out this much later than the waiter, so that the waiter's error, which names the cause, comes
first."""
PROOF_SECONDS = 60.0
"""Longest wait for the proofs of all ranks of a new group."""


_in_gloo_since = 0.0  # 0: this process does not wait in gloo


@contextmanager
def waiting_in_gloo() -> Iterator[None]:
    """Note that gloo forms a group or waits for a message. It may wait for a rank that is gone.

    Nothing interrupts it then: it forgets a message whose connection ends in the middle.
    """
    global _in_gloo_since
    _in_gloo_since = time.monotonic()
    try:
        yield
    finally:
        _in_gloo_since = 0.0


def seconds_in_gloo() -> float:
    """Return for how long this process has been waiting in gloo; 0: it does not."""
    return time.monotonic() - _in_gloo_since if _in_gloo_since else 0.0


class RankDevice(NamedTuple):
    """The device of a rank, as other ranks need to know it."""

    machine: str
    gpu: str | None  # UUID; None: the rank computes on a CPU
    reachable: tuple[str, ...]  # UUIDs of the GPUs whose memory it can write, its own included
    nccl_name: str | None = None  # of the GPU for NCCL, which refuses two ranks with equal names


def describe_device(device: torch.device) -> RankDevice:
    if device.type != "cuda":
        return RankDevice(machine_identity(), None, ())
    gpu = device_uuid(device)
    return RankDevice(machine_identity(), gpu, reachable_gpus(device), nccl_name(gpu, os.environ))


def nccl_name(gpu: str, environment: Mapping[str, str]) -> str:
    """Return the name by which NCCL knows a GPU. Tests let ranks that share one name hosts of their own."""
    if VarunaEnvironment.read(environment).nccl_on_shared_gpus != "1":
        return gpu
    return f"{gpu} of {environment.get('NCCL_HOSTID', '')}"


def choose_channel(one: RankDevice, other: RankDevice, *, nccl: bool) -> ChannelName:
    """Return how tensors travel between two ranks; the same at both ends.

    `nccl`: NCCL works for the ranks of this job. Shared memory is preferred: a copy engine fills it, while
    NCCL takes multiprocessors from the computation.
    """
    if one.machine == other.machine and one.gpu in other.reachable and other.gpu in one.reachable:
        return "shared"
    return "group" if nccl else "host"


def reduce_backend(gpus: Sequence[str | None]) -> str:
    """Return the backend that reduces gradients, given NCCL's name of every rank's GPU.

    NCCL refuses two ranks on one GPU. Gloo accepts GPU tensors and copies them through host memory. CPU
    tensors are reduced in the same groups.
    """
    separate = None not in gpus and len(set(gpus)) == len(gpus)
    return "cpu:gloo,cuda:nccl" if separate else "gloo"


def make_group(
    ranks: Sequence[int], *, timeout_seconds: float, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Make a group of these ranks; None if there is only one."""
    if len(ranks) < 2:
        return None
    with waiting_in_gloo():
        group = dist.new_group(
            list(ranks),
            timeout=timedelta(seconds=timeout_seconds * GLOO_TIMEOUT_FACTOR),
            backend=backend,
            use_local_synchronization=True,
        )
    assert isinstance(group, dist.ProcessGroup)
    secure_group(group)
    return group


def secure_group(group: dist.ProcessGroup) -> None:
    """Check that all ranks of a new group are of this job, and close it to strangers. All ranks call it."""
    close_gloo_listeners()
    key = job_key("groups")
    if key is not None and _has_host_backend(group):
        prove_members(group, dist.get_process_group_ranks(group), key, dist.get_rank())


def _has_host_backend(group: dist.ProcessGroup) -> bool:
    """Return False for a group of NCCL alone. NCCL's ranks meet in the job's store, which is closed."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True


def prove_members(group: Any, ranks: Sequence[int], key: bytes, own: int) -> None:
    """Raise WorkerError unless every rank answers the numbers that all ranks have drawn.

    `group` is a process group, or a bare backend.
    """
    numbers = b"".join(_exchange(group, ranks, secrets.token_bytes(32)))

    def proof(rank: int) -> bytes:
        return hmac.digest(key, f"rank {rank} of {list(ranks)}: ".encode() + numbers, "sha256")

    for rank, found in zip(ranks, _exchange(group, ranks, proof(own)), strict=True):
        if not hmac.compare_digest(found, proof(rank)):
            raise WorkerError(
                f"rank {rank} of a new process group does not have the credential of this job: another "
                "program has taken its place (restart the job; let only its machines reach its network)"
            )


def _exchange(group: Any, ranks: Sequence[int], own: bytes) -> list[bytes]:
    """Return 32 bytes of every rank."""
    parts = [torch.empty(32, dtype=torch.uint8) for _ in ranks]
    options: Any = distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
    options.timeout = timedelta(seconds=PROOF_SECONDS)  # a mere `wait` would leave the call in the group
    try:
        with waiting_in_gloo():
            group.allgather([parts], [torch.frombuffer(bytearray(own), dtype=torch.uint8)], options).wait()
    except RuntimeError as error:
        raise PeerLost(
            f"a new process group of ranks {list(ranks)} does not work: {error} (a rank has ended, or "
            "another program has taken its place; restart the job)"
        ) from error
    return [part.numpy().tobytes() for part in parts]


def make_placeholder_group(rank: int) -> None:
    """Make a group of one rank in place of a group that only other ranks make.

    Torch names a group by the number of groups that the process has made. Ranks with unequal counts would
    wait for each other forever.
    """
    dist.new_group([rank], backend="gloo", use_local_synchronization=True)
    close_gloo_listeners()


def have_equal_widths(stage_map: StageMap, stages: Sequence[int]) -> bool:
    return len({len(stage_map[stage]) for stage in stages}) == 1


def stages_of_ties(plan: Plan, holders: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return the stages of every parameter that several stages use, given the segments that use it."""

    def stages_with(segments: Sequence[int]) -> tuple[int, ...]:
        spans = enumerate(range(stage.first, stage.stop) for stage in plan.stages)
        return tuple(number for number, span in spans if any(segment in span for segment in segments))

    found = {name: stages_with(segments) for name, segments in holders.items()}
    return {name: stages for name, stages in found.items() if len(stages) > 1}
