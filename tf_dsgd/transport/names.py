"""Where a host's name leads: all of its places, and the last known while nobody tells them.

Connections live on when a name service is away for a moment, as it is where it is started anew. So
a name that cannot be looked up is still that of its last places. Only who asks for a task for the
first time waits for the name service: a name is looked up again aside.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import socket
import threading
import time
from typing import Any

from tf_dsgd.transport import sockets

_FRESH_SECONDS = 10.0
"""For so long a name is not looked up again: each task is asked every two seconds."""
_FAILED_SECONDS = 1.0
"""The same, of one that nobody has told yet."""
_GONE = {getattr(socket, name, socket.EAI_NONAME) for name in ("EAI_NONAME", "EAI_NODATA")}
"""What a name service says of a name that there is not."""


@dataclasses.dataclass
class _Name:
    """What is known of "host:port"."""

    places: list[Any] = dataclasses.field(default_factory=list)
    until: float = 0.0
    """When it is to be looked up again."""
    is_asked: bool = False
    """Whether it is being looked up, aside."""
    ever: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    """(IP address, port) of all places that it has had."""


_writing = threading.Lock()
_known: dict[str, _Name] = {}


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
    """The places of "host:port", as `look_up` gives them; none while it never had any."""
    with _writing:
        known = _known.setdefault(address, _Name())
        if time.monotonic() < known.until or known.is_asked:
            return known.places
        known.is_asked = True
        aside = known.until > 0
    if not aside:
        _renew(address, known)
    else:
        try:
            threading.Thread(target=_renew, args=(address, known), daemon=True).start()
        except RuntimeError:  # no room for a thread: another time
            known.is_asked = False
    return known.places


def _renew(address: str, known: _Name) -> None:
    host, port = address.rsplit(":", 1)
    found: list[Any] | None = None
    try:
        found = look_up(host, int(port))
    except OSError as error:
        if error.errno in _GONE:
            found = []
    finally:
        with _writing:
            known.is_asked = False
            known.places = known.places if found is None else found
            seconds = _FRESH_SECONDS if known.places else _FAILED_SECONDS
            if known.places and _is_number(host):
                seconds = math.inf  # nobody tells another place of it
            known.until = time.monotonic() + seconds
            known.ever |= _where(known.places)


def _is_number(host: str) -> bool:
    """Whether it is an IP address and no name."""
    try:
        ipaddress.ip_address(host.strip("[]").split("%")[0])
    except ValueError:
        return False
    return True


def _where(places: list[Any]) -> set[tuple[str, int]]:
    found = (sockets.place(entry[4]) for entry in places)
    return {place for place in found if place is not None}


def close_connections(address: str) -> int:
    """Closes this process's connections to "host:port"; gives their number.

    Also those to places that it had before, unless they are another task's now.
    """
    own = _where(places(address))
    with _writing:
        others = [name.places for other, name in _known.items() if other != address]
        before = set(_known[address].ever)
    return sockets.close_all(own | before.difference(*map(_where, others)))
