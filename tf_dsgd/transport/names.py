"""Where a host's name leads: all of its places, and the last known while nobody tells them.

Connections live on when a name service is away for a moment, as it is where it is started anew. So
a name that cannot be looked up is still that of its last places.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from tf_dsgd.transport import sockets

_FRESH_SECONDS = 10.0
"""For so long a name is not looked up again: each task is asked every two seconds."""

_writing = threading.Lock()
_known: dict[str, tuple[float, list[Any]]] = {}
_ever: dict[str, set[tuple[str, int]]] = {}


def look_up(host: str, port: int | None = None) -> list[Any]:
    """What `socket.getaddrinfo` gives for TCP.

    Raises:
        OSError: if the name has no address, or the name service does not answer.
    """
    try:
        return list(socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM))
    except UnicodeError as error:  # no name at all
        raise OSError(0, f"{host!r} is no host name") from error


def places(address: str) -> list[Any]:
    """The places of "host:port", as `look_up` gives them; none if it never had any."""
    now = time.monotonic()
    with _writing:
        asked, found = _known.get(address, (-_FRESH_SECONDS, []))
    if now - asked < _FRESH_SECONDS:
        return found
    host, port = address.rsplit(":", 1)
    try:
        found = look_up(host, int(port))
    except OSError:
        if not found:
            return []  # it may have one in a moment
    with _writing:
        _known[address] = now, found
        ever = _ever.setdefault(address, set())
        ever.update(place for entry in found if (place := sockets.place(entry[4])) is not None)
    return found


def ever(address: str) -> set[tuple[str, int]]:
    """(IP address, port) of all places that "host:port" has had."""
    places(address)
    with _writing:
        return set(_ever.get(address, ()))


def close_connections(address: str) -> int:
    """Closes this process's connections to "host:port", also to places that it had before."""
    return sockets.close_all(ever(address))
