"""The connections of this process, most of them gRPC's, which tells nobody of them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

_ESTABLISHED = "01"  # in the kernel's tables


def of_this_process() -> Iterator[socket.socket]:
    """Internet sockets, one by one; each a duplicate that is open for its turn.

    None where a process cannot list its own files (Windows).
    """
    try:
        names = os.listdir("/dev/fd")
    except OSError:
        return
    for name in names:
        try:
            copy = os.dup(int(name))
        except OSError:
            continue  # closed meanwhile
        try:
            connection = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                yield connection


def place(address: object) -> tuple[str, int] | None:
    """(IP address, port) of what a socket calls its address; gRPC writes IPv4 as IPv6."""
    if not isinstance(address, tuple):
        return None  # of another kind of socket
    return str(address[0]).split("%")[0].removeprefix("::ffff:"), int(address[1])


def close_all(places: Collection[tuple[str, int]]) -> int:
    """Closes all TCP connections of this process to these places; gives their number.

    They are gRPC's, which finds them broken. Where a process cannot list its own files (Windows)
    nothing is closed.
    """
    closed = 0
    for connection in of_this_process():
        with contextlib.suppress(OSError):
            if place(connection.getpeername()) in places:
                connection.shutdown(socket.SHUT_RDWR)
                closed += 1
    return closed


def established(port: int) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """At which addresses of this machine there are connections to a port (Linux; else none)."""
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *_ = line.split()
            address, at = local.split(":")
            if state == _ESTABLISHED and int(at, 16) == port:
                found.append(_address(address))
    return found


def _address(digits: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The kernel writes words of four bytes as this machine's integers."""
    words = [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]
    return unmapped(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)))


def unmapped(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The IPv4 address that one of IPv6 stands for, or else the address itself."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
