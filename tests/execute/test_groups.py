"""Process groups: only members of the job take part, and nobody joins later."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool
from varuna.errors import WorkerError
from varuna.execute.comm import groups
from varuna.execute.comm.groups import make_group, secure_group
from varuna.execute.comm.session import open_session
from varuna.secure import credential, listeners
from varuna.secure.credential import JobCredential, adopt_credential, make_credential
from varuna.secure.listeners import SO_LOCK_FILTER, close_gloo_listeners, gloo_listeners, interface_of

OPEN_SECONDS = 0.5  # a connection within the machine takes less than a millisecond


@contextmanager
def member(own: JobCredential) -> Iterator[None]:
    adopt_credential(own)
    try:
        yield
    finally:
        credential._own = None


def all_sum(group: dist.ProcessGroup | None = None) -> float:
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return total.item()


def open_listeners() -> list[int]:
    found = []
    for fd in gloo_listeners():
        with socket.socket(fileno=os.dup(fd)) as listener:
            if not listener.getsockopt(socket.SOL_SOCKET, SO_LOCK_FILTER):
                found.append(fd)
    return found


def address_of(fd: int) -> tuple[str, int]:
    with socket.socket(fileno=os.dup(fd)) as listener:
        return listener.getsockname()[:2]  # type: ignore[no-any-return]


def form_groups_after_closing() -> None:
    server = socket.create_server(("127.0.0.1", 0))  # of the script: TensorBoard, a debugger
    (own,) = open_listeners()  # of the default group
    session = open_session(((0,), (1,)), rank=dist.get_rank(), device=torch.device("cpu"), timeout_seconds=60)
    assert gloo_listeners() and not open_listeners()
    with pytest.raises(TimeoutError):
        socket.create_connection(address_of(own), OPEN_SECONDS)
    socket.create_connection(server.getsockname(), OPEN_SECONDS).close()
    # The script's later groups have sockets of their own; all collectives go on.
    later = dist.new_group([0, 1])
    assert isinstance(later, dist.ProcessGroup)
    assert len(open_listeners()) == 1
    assert all_sum(later) == all_sum() == all_sum(session.group) == 2
    assert close_gloo_listeners() == 1 and close_gloo_listeners() == 0
    assert all_sum(later) == 2
    dist.destroy_process_group(later)
    session.close()
    another = dist.new_group([0, 1])
    assert isinstance(another, dist.ProcessGroup)
    assert all_sum(another) == 2
    server.close()


def test_a_formed_group_accepts_nobody_and_later_groups_still_form(pool: Pool) -> None:
    """SEC-2: gloo's sockets drop new connections; those of the script and of new groups do not."""
    pool.run(form_groups_after_closing, 2)


def test_lazy_groups_keep_their_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "gloo_listeners", lambda: [-1])
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    assert close_gloo_listeners() == 0


def test_a_system_that_refuses_the_filter_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listeners, "gloo_listeners", lambda: [0])

    def refuse(fd: int) -> bool:
        raise OSError("not permitted")

    monkeypatch.setattr(listeners, "drop_new_connections", refuse)
    with caplog.at_level(logging.DEBUG, "varuna"):
        assert close_gloo_listeners() == 0
    assert "a listening socket of gloo stays open: not permitted" in caplog.text


def form_with(credentials: list[JobCredential]) -> str:
    with member(credentials[dist.get_rank()]):
        try:
            group = make_group([2, 0, 1], timeout_seconds=60)
        except WorkerError as error:
            return str(error)
        return f"sum {all_sum(group)}"


def test_every_rank_proves_the_credential_in_a_new_group(pool: Pool) -> None:
    """SEC-2: a rank without it is named on all ranks, with the way out."""
    ours, other = make_credential("ours"), make_credential("other")
    assert pool.run(form_with, 3, [ours] * 3) == ["sum 3.0"] * 3
    found = pool.run(form_with, 3, [ours, ours, other])
    text = "rank 2 of a new process group does not have the credential of this job: another program has"
    assert found[0].startswith(text) and found[1].startswith(text)
    assert "restart the job" in found[0]
    assert found[2].startswith("rank 0 of a new process group does not have")


def form_with_a_silent_stranger(own: JobCredential, seconds: float) -> str:
    """Rank 1 stands for a stranger that has taken a rank's place, which gloo allows, and sends nothing."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        dist.new_group([0, 1], use_local_synchronization=True)
        store.wait(["the other has noticed"])
        return ""
    usual, groups.PROOF_SECONDS = groups.PROOF_SECONDS, seconds
    try:
        with member(own), pytest.raises(WorkerError) as raised:
            make_group([0, 1], timeout_seconds=60)
        return str(raised.value)
    finally:
        groups.PROOF_SECONDS = usual
        store.set("the other has noticed", "")


def test_a_silent_stranger_in_the_place_of_a_rank_ends_the_group_with_an_error(pool: Pool) -> None:
    """SEC-2: gloo itself would wait for its timeout of many minutes."""
    error = pool.run(form_with_a_silent_stranger, 2, make_credential("ours"), 1.0)[0]
    assert error.startswith("a new process group of ranks [0, 1] does not work: ")
    assert "another program has taken its place" in error


def secure_default_group(own: JobCredential) -> float:
    with member(own):
        assert isinstance(dist.group.WORLD, dist.ProcessGroup)
        secure_group(dist.group.WORLD)
    return all_sum()


def test_the_default_group_is_secured_too(pool: Pool) -> None:
    assert pool.run(secure_default_group, 2, make_credential("ours")) == [2, 2]


def test_gloo_listens_on_the_interface_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-2: a job of one machine listens on the loopback interface."""
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None and interface_of("::1") is None
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    listeners.use_interface_of("203.0.113.77")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "the user's choice")
    listeners.use_interface_of("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "the user's choice"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    listeners.use_interface_of("127.0.0.1")
    assert os.environ.pop("GLOO_SOCKET_IFNAME") == "lo"
