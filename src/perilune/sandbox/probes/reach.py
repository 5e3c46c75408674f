"""Probes that try to communicate."""

from collections.abc import Callable, Mapping
from typing import Any

Attempts = Mapping[str, Callable[[], Any]]


def network(facts: Mapping[str, Any]) -> Attempts:
    """Reach this machine and others over the network."""
    import socket

    def connected(family: int, kind: int, address: Any) -> str:
        with socket.socket(family, kind) as client:
            client.settimeout(0.5)
            client.connect(address)
            return f"connected to {address}"

    def sent() -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.sendto(b"probe", ("127.0.0.1", facts["udp"]))
            return "sent a datagram"

    stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
    return {
        "TCP on this machine": lambda: connected(socket.AF_INET, stream, ("127.0.0.1", facts["tcp"])),
        "UDP on this machine": sent,
        "a route to a name server": lambda: connected(socket.AF_INET, datagram, ("192.0.2.53", 53)),
        "listen": lambda: socket.create_server(("127.0.0.1", 0)) and "listening",
    }


def local_sockets(facts: Mapping[str, Any]) -> Attempts:
    """Reach local sockets of this machine."""
    import socket

    def connected(address: str) -> str:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(0.5)
            client.connect(address)
            return "connected"

    def sent_from_a_pair() -> str:
        for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
            end.sendto(b"probe", facts["datagrams"])
        return "sent a datagram"

    return {
        "by its path, from a pair": sent_from_a_pair,
        "by its path": lambda: connected(facts["unix"]),
        "by its abstract name": lambda: connected("\0" + facts["abstract"]),
    }


def other_runs(facts: Mapping[str, Any]) -> Attempts:
    """Communicate with other runs through a library file that all of them read."""
    import ctypes
    import fcntl
    import os
    import struct

    library = os.open(os.__file__, os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)

    def locked() -> str:
        fcntl.flock(library, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return "a lock that others see"

    def looked() -> str:
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
        kind = struct.unpack("hhqqi4x", fcntl.fcntl(library, fcntl.F_GETLK, asked))[0]
        return f"a lock of kind {kind}"

    def watched() -> str:
        watch = libc.inotify_init1(0)
        if watch < 0 or libc.inotify_add_watch(watch, os.__file__.encode(), 0x21) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return "hears when it is opened"

    return {"a lock on it": locked, "who locks it": looked, "who opens it": watched}


def other_families(facts: Mapping[str, Any]) -> Attempts:
    """Open sockets that no network namespace contains, or that change kernel tables."""
    import socket

    def opened(family: str, kind: int) -> str:
        with socket.socket(getattr(socket, family), kind):
            return f"a socket of {family}"

    return {
        "netlink": lambda: opened("AF_NETLINK", socket.SOCK_RAW),
        "vsock": lambda: opened("AF_VSOCK", socket.SOCK_STREAM),
        "packets": lambda: opened("AF_PACKET", socket.SOCK_RAW),
        "the kernel's ciphers": lambda: opened("AF_ALG", socket.SOCK_SEQPACKET),
        "interfaces": lambda: [name for _, name in socket.if_nameindex()],
    }
