"""Has a TensorFlow server take connections at its own address alone.

TensorFlow 2.21's server listens on all interfaces, and has no setting for that. Linux lets a
process attach a small program (a classic BPF filter: `man 7 socket`, SO_ATTACH_FILTER) to a socket
of its own, which sees each packet's header: what is sent to another address of the machine is
dropped, and whoever sends it waits in vain, as behind a firewall. What was connected in the moment
before the filter is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

from absl import logging

from tf_dsgd.transport import names, sockets

EVERYWHERE = "TF_DSGD_LISTEN"
"""The environment variable; "everywhere" leaves all interfaces open."""

_SO_ATTACH_FILTER = 26
# Operations of classic BPF, and where it finds the header of the network layer.
_LOAD_BYTE, _LOAD_WORD, _AND, _JUMP_IF, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
_NETWORK = -0x100000
_DESTINATION = {4: 16, 6: 24}  # within the header, by version of IP
_PASS = 0xFFFFFFFF
_END_SECONDS, _LOOK_SECONDS = 2.0, 0.01

_Place = ipaddress.IPv4Address | ipaddress.IPv6Address


def keep_to(address: str) -> bool:
    """Has this process's server at "host:port" take connections at that host's address alone.

    Left as it is where the host is none of this machine's addresses (behind a NAT or a service of
    Kubernetes), where a name stands for nothing but loopback (as a machine's own name often does),
    where TF_DSGD_LISTEN is "everywhere", and where the system is not Linux.

    Args:
        address: the task's, from the cluster spec.

    Returns:
        Whether it was done.
    """
    host, port = address.rsplit(":", 1)
    host = host.strip("[]")
    if everywhere() or sys.platform != "linux":
        return False
    places = _own_places(host)
    named = host != "localhost" and not _is_number(host)
    if not places or (named and all(place.is_loopback for place in places)):
        logging.info("tf_dsgd: %s is open on all interfaces of this machine", address)
        return False
    program = _program(places)
    found = 0
    for connection in _listening(int(port)):
        _attach(connection, program)
        found += 1
    _end_earlier(int(port), places)
    return found > 0


def everywhere() -> bool:
    """Whether TF_DSGD_LISTEN leaves all interfaces open.

    Raises:
        ValueError: if it has another value, which would be no wish that is understood.
    """
    text = os.environ.get(EVERYWHERE) or ""
    if text not in ("", "everywhere"):
        raise ValueError(f'{EVERYWHERE} must be "everywhere", or not be set. Received: {text!r}.')
    return bool(text)


def _own_places(host: str) -> list[_Place]:
    """Those addresses of a host that are this machine's."""
    try:
        entries = names.look_up(host, 0)
    except OSError:
        return []
    places = []
    for family, *_, place in entries:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(place)
            places.append(ipaddress.ip_address(str(place[0]).split("%")[0]))
    return list(dict.fromkeys(places))


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _listening(port: int) -> Iterator[socket.socket]:
    """This process's sockets that listen at a port, one by one; each is open for its turn."""
    for connection in sockets.of_this_process():
        with contextlib.suppress(OSError):
            listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and connection.getsockname()[1] == port:
                yield connection


def _end_earlier(port: int, places: Sequence[_Place]) -> None:
    """Ends connections that were made elsewhere before the filter was there, and outlive it.

    The kernel may have made one that TensorFlow has not accepted yet, so it is asked, too.
    """
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        for connection in sockets.of_this_process():
            with contextlib.suppress(OSError):
                connection.getpeername()  # none of one that listens
                mine = sockets.place(connection.getsockname())
                if mine and mine[1] == port and ipaddress.ip_address(mine[0]) not in places:
                    connection.shutdown(socket.SHUT_RDWR)
        if not any(at not in places for at in sockets.established(port)):
            return
        time.sleep(_LOOK_SECONDS)


def _program(places: Iterable[_Place]) -> bytes:
    """Passes what is sent to one of the places, drops all else."""
    code = []
    for place in places:
        words = struct.unpack(f">{len(place.packed) // 4}I", place.packed)
        checks: list[tuple[int, int, int, int]] = []
        for number, word in enumerate(words):
            left = 2 * (len(words) - 1 - number) + 1  # to behind the end, if it differs
            where = _NETWORK + _DESTINATION[place.version] + 4 * number
            checks += [(_LOAD_WORD, 0, 0, where), (_JUMP_IF, 0, left, word)]
        checks.append((_RETURN, 0, 0, _PASS))
        code += [
            (_LOAD_BYTE, 0, 0, _NETWORK),
            (_AND, 0, 0, 0xF0),  # the version of IP, in the upper half of the first byte
            (_JUMP_IF, 0, len(checks), place.version << 4),
            *checks,
        ]
    code.append((_RETURN, 0, 0, 0))
    return b"".join(_instruction(*each) for each in code)


def _instruction(operation: int, if_so: int, if_not: int, value: int) -> bytes:
    return struct.pack("HBBI", operation, if_so, if_not, value & 0xFFFFFFFF)


def _attach(connection: socket.socket, program: bytes) -> None:
    held = ctypes.create_string_buffer(program, len(program))
    count = len(program) // len(_instruction(0, 0, 0, 0))
    connection.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", count, ctypes.addressof(held))
    )
