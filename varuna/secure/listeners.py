"""Listening sockets of gloo: which interface they use, and how they stop accepting once a group has formed.

Gloo listens for the other ranks while a group forms, and never closes that socket as long as the group lives.
It takes every caller that sends the right small number for a rank. A filter in the kernel then drops all
packets of new connections; connections that exist are not affected. This module handles sockets only.
"""

import contextlib
import ctypes
import fcntl
import logging
import os
import socket
import struct
from pathlib import Path

log = logging.getLogger("varuna")

SO_ATTACH_FILTER, SO_LOCK_FILTER = 26, 44  # Linux; Python has no names for them
RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A program of the packet filter: keep 0 bytes of every packet, so drop it."""
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"


def close_gloo_listeners() -> int:
    """Make gloo's listening sockets of this process drop new connections. Return how many were open.

    Call it when all groups have formed. A group that forms later opens a socket of its own. With lazy groups
    of torch, which connect at their first use, nothing is closed.
    """
    if os.environ.get(LAZY_VARIABLE, "0").lower() not in ("", "0", "false", "off", "n", "no"):
        return 0
    closed = 0
    for fd in gloo_listeners():
        try:
            closed += drop_new_connections(fd)
        except OSError as error:
            log.debug("a listening socket of gloo stays open: %s", error)
    return closed


def shut_gloo_connections() -> int:
    """End all connections of gloo, so that operations that wait for a peer fail. Return their number."""
    connections = gloo_sockets(listening=False)
    for fd in connections:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:
            found.shutdown(socket.SHUT_RDWR)
    return len(connections)


def gloo_listeners() -> list[int]:
    """Return the file descriptors of gloo's listening sockets."""
    return gloo_sockets(listening=True)


def gloo_sockets(*, listening: bool) -> list[int]:
    """Return the file descriptors of gloo's sockets: those that listen, or those that are connected.

    They are TCP, in an epoll set, and would be inherited by other programs. Sockets of Python, libuv (torch's
    store) and gRPC are not inherited; those of NCCL are in no epoll set.
    """
    fds = Path("/proc/self/fd")
    if not fds.exists():
        return []
    kinds: dict[int, str] = {}
    for entry in fds.iterdir():
        try:
            kinds[int(entry.name)] = os.readlink(entry)
        except OSError:
            continue  # the descriptor of this very listing
    polled: set[int] = set()
    for fd, kind in kinds.items():
        if kind == "anon_inode:[eventpoll]":
            polled |= _polled_by(fd)
    sockets = (fd for fd in polled if kinds.get(fd, "").startswith("socket:"))
    return sorted(fd for fd in sockets if _is_gloo_like(fd, listening=listening))


def _polled_by(epoll: int) -> set[int]:
    try:
        lines = Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split()[1]) for line in lines if line.startswith("tfd:")}


def _is_gloo_like(fd: int, *, listening: bool) -> bool:
    try:
        if fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
            return False
        with socket.socket(fileno=os.dup(fd)) as found:
            listens = bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            return found.family in (socket.AF_INET, socket.AF_INET6) and listens == listening
    except OSError:  # another thread has closed it
        return False


def drop_new_connections(fd: int) -> bool:
    """Attach the filter to a listening socket; return False if it has one already. Raise OSError."""
    program = ctypes.create_string_buffer(RETURN_NOTHING, len(RETURN_NOTHING))
    count_and_address = struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
    with socket.socket(fileno=os.dup(fd)) as listener:
        if listener.getsockopt(socket.SOL_SOCKET, SO_LOCK_FILTER):
            return False
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, count_and_address)
        listener.setsockopt(socket.SOL_SOCKET, SO_LOCK_FILTER, 1)
    return True


def use_interface_of(address: str) -> None:
    """Make gloo listen only on the interface with this address of the machine, unless the user chose one.

    Otherwise gloo listens on the address of the machine's name, which may face other networks.
    """
    if INTERFACE_VARIABLE in os.environ:
        return
    name = interface_of(address)
    if name is None:
        log.debug("gloo chooses its interface: none has %s as its first address", address)
    else:
        os.environ[INTERFACE_VARIABLE] = name


def interface_of(address: str) -> str | None:
    """Return the interface whose first address this is, because gloo uses the first; None: there is none."""
    if ":" in address:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
