"""The job's store as a torch.distributed Store, so that torch's process groups use it.

A worker of a Varuna job has the job's credential. There `init_process_group()` uses this store in place of
torch's TCPStore, which any stranger can read and write. Under torchrun there is no credential, and torch's
own store is used.
"""

import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from varuna.addresses import address_facing
from varuna.environment import VarunaEnvironment
from varuna.errors import PeerHangs, PeerLost
from varuna.secure.credential import JobCredential
from varuna.secure.listeners import close_gloo_listeners, use_interface_of
from varuna.secure.store_client import CONNECT_SECONDS, KeyTimeout, StoreConnection, StoreGone, close_unopened
from varuna.secure.store_server import StoreAnswer, StoreRequest

if TYPE_CHECKING:  # torch declares these names elsewhere than it exports them
    from torch._C._distributed_c10d import Store
else:
    from torch.distributed import Store

JOIN_SECONDS = 300.0
"""Longest wait for other ranks, in place of torch's defaults of 10 and 30 minutes."""
_DEFAULTS = {default_pg_timeout, default_pg_nccl_timeout}

_kept: "set[JobStore]" = set()  # torch's C++ side does not keep the Python object alive


class StoreLost(PeerLost, dist.DistNetworkError):
    """The store of the job has ended, or does not answer."""


class JoinTimeout(PeerHangs, dist.DistStoreError):
    """Another rank has not done its part in time."""


class JobStore(Store):
    """A connection to the job's store. Like a TCPStore it handles one request at a time: use clones."""

    def __init__(
        self,
        host: str,
        port: int,
        credential: JobCredential,
        *,
        rank: int = -1,
        world: int = 0,
        timeout: timedelta = default_pg_timeout,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> None:
        super().__init__()
        self.host, self.port = host, port
        self._credential = credential
        self._rank, self._world = rank, world
        self.set_timeout(timeout)
        try:
            self._connection = StoreConnection(
                host, port, credential, rank=rank, connect_seconds=connect_seconds
            )
        except StoreGone as error:
            raise StoreLost(str(error)) from None
        _kept.add(self)

    def clone(self) -> "JobStore":
        return JobStore(
            self.host, self.port, self._credential, rank=self._rank, world=self._world, timeout=self.timeout
        )

    def disconnect(self) -> None:
        """Let this request of another thread, and all later ones, fail at once with StoreLost."""
        self._connection.close()

    def close(self) -> None:
        """Disconnect. Torch's C++ side must not use this store any more."""
        self.disconnect()
        _kept.discard(self)

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest wait. Torch's defaults mean JOIN_SECONDS; a value of the user's own is kept."""
        self._timeout = timedelta(seconds=JOIN_SECONDS) if timeout in _DEFAULTS else timeout

    # ------------------------------------------------------------ requests; torch's C++ side calls these too

    def set(self, key: str, value: str | bytes) -> None:
        self._request("set", [key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._request("set", keys, values)

    def get(self, key: str) -> bytes:
        return self._request("get", [key], timeout=self._timeout).values[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._request("get", keys, timeout=self._timeout).values)

    def add(self, key: str, amount: int) -> int:
        return self._request("add", [key], number=amount).number

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._request("compare_set", [key], [expected, desired]).values[0]

    def append(self, key: str, value: str | bytes) -> None:
        self._request("append", [key], [value])

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._request("check", keys).number)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = self._timeout if timeout is None else min(timeout, self._timeout)
        self._request("wait", keys, timeout=limit)

    def delete_key(self, key: str) -> bool:
        return bool(self._request("delete_key", [key]).number)

    def num_keys(self) -> int:
        return self._request("num_keys").number

    def list_keys(self) -> list[str]:
        return list(self._request("list_keys").keys)

    def has_extended_api(self) -> bool:
        return True

    deleteKey, getNumKeys = delete_key, num_keys  # names that torch's C++ side looks up

    def _request(
        self,
        what: Any,
        keys: Sequence[str] = (),
        values: Sequence[str | bytes] = (),
        *,
        number: int = 0,
        timeout: timedelta = timedelta(),
    ) -> StoreAnswer:
        data = tuple(value.encode() if isinstance(value, str) else bytes(value) for value in values)
        request = StoreRequest(what, tuple(keys), data, number, timeout.total_seconds())
        try:
            return self._connection.request(request)
        except StoreGone as error:
            raise StoreLost(str(error)) from None
        except KeyTimeout as error:
            raise JoinTimeout(self._explain(error)) from None

    def _explain(self, error: KeyTimeout) -> str:
        absent = [f"rank {rank}" for rank in range(self._world) if rank not in error.ranks]
        if absent:
            verb = "has" if len(absent) == 1 else "have"
            who = f"{', '.join(absent)} {verb} not called init_process_group"
        else:
            who = "a rank is late: it has joined the job but not this group"
        return (
            f"{who} after {error.seconds:g} s (waiting for {', '.join(error.missing)} in the job's store; if "
            "ranks may start so far apart, give init_process_group a longer timeout)"
        )


def disconnect_job_stores() -> None:
    """Let all requests to stores fail at once: groups may still use them."""
    for store in list(_kept):
        store.disconnect()
    close_unopened()


def close_job_stores() -> None:
    """Disconnect from the store of a generation that this process has left: no group uses it."""
    disconnect_job_stores()
    for store in list(_kept):
        store.close()


def rendezvous(
    url: str, credential: JobCredential, *, timeout: timedelta = default_pg_timeout, **options: object
) -> Iterator[tuple[Store, int, int]]:
    """Yield the job's store, this process's rank, and the number of ranks, as torch's rendezvous does."""
    pairs = (pair.split("=", 1) for pair in url.partition("?")[2].split("&") if "=" in pair)
    query = {name: value for name, value in pairs}

    def value(name: str) -> str:
        found = query.get(name.lower()) or os.environ.get(name)
        if not found:
            raise ValueError(f"init_process_group needs the environment variable {name}, which is not set")
        return found

    if VarunaEnvironment.read(os.environ).joins:
        raise RuntimeError(
            "this worker joins a running job, which it does when the model is wrapped and trained; before "
            "that it cannot call init_process_group (leave the call out: wrapping joins the job)"
        )
    rank, world = int(value("RANK")), int(value("WORLD_SIZE"))
    store_waits = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # it opens before the workers
    store = JobStore(
        value("MASTER_ADDR"),
        int(value("MASTER_PORT")),
        credential,
        rank=rank,
        world=world,
        timeout=timeout,
        connect_seconds=CONNECT_SECONDS if store_waits else JOIN_SECONDS,
    )
    use_interface_of(address_facing(store.host))
    try:
        yield store, rank, world
        raise RuntimeError("torch.distributed cannot repeat the rendezvous of a Varuna job")
    finally:  # init_process_group drops this generator when its group has formed
        close_gloo_listeners()
