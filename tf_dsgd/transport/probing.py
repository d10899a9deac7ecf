"""Whether tasks can be reached, and whether they answer; without TensorFlow."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Iterable
from typing import Any

from tf_dsgd.transport import names


def reachable(address: str, seconds: float) -> bool:
    """Whether something accepts TCP connections at "host:port" within `seconds`."""
    return not not_reachable([address], seconds)


def not_reachable(addresses: Iterable[str], seconds: float) -> set[str]:
    """Those of the addresses at which nothing accepts TCP connections; asked at the same time."""
    return _Inquiry(addresses, seconds, connects=True).missing


def refusing(addresses: Iterable[str], seconds: float) -> set[str]:
    """Those of the addresses of which the host says that nobody listens there.

    Of a host that says nothing, as one that is cut off for a moment, that is not known.
    """
    return _Inquiry(addresses, seconds, connects=True).refused


# What an HTTP/2 client says first (RFC 9113, section 3.4): its preface and empty settings.
# A gRPC server's first frame is its settings (section 3.4): length, type 4, flags, stream 0.
_FRAME_HEADER_BYTES = 9
_SETTINGS = 4
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def answers(address: str, seconds: float) -> bool:
    """Whether a gRPC server answers at "host:port" within `seconds`.

    Unlike `reachable` it says no of a process that is stopped, whose connections Linux accepts.
    """
    return address not in not_answering([address], seconds)


def not_answering(addresses: Iterable[str], seconds: float) -> set[str]:
    """Those of the addresses at which no gRPC server answers within `seconds`.

    All are asked at the same time, so that one from which nothing comes back, as where a host was
    cut off, takes nothing from the time of the others.
    """
    return _Inquiry(addresses, seconds).missing


_MOST_AT_ONCE = 100
"""Addresses that are asked at the same time: each takes a file or two."""
_LOCAL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
"""Errors that say that this process could not ask, and nothing of the other side."""

_reached: set[tuple[str, Any]] = set()
"""Addresses with those of their places that have taken a connection."""


class _Inquiry:
    """What is at addresses, all asked at the same time, and all places of a name.

    Of one that could not be asked, as no file was left for that, nothing is said.

    Args:
        addresses: them.
        seconds: how long to wait for answers.
        connects: whether a connection is enough of one.
    """

    def __init__(self, addresses: Iterable[str], seconds: float, connects: bool = False):
        self.missing: set[str] = set()
        """Addresses at none of whose places somebody answers."""
        self.refused: set[str] = set()
        """Those of which all places say that nobody listens; or all that ever listened."""
        left = list(set(addresses))
        while left:
            with contextlib.suppress(OSError):  # no file is left to ask with
                self._ask(left[:_MOST_AT_ONCE], seconds, connects)
            del left[:_MOST_AT_ONCE]

    def _ask(self, addresses: list[str], seconds: float, connects: bool) -> None:
        found: set[str] = set()
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            questions = {
                address: [_Question(place, connects, selector) for place in names.places(address)]
                for address in addresses
            }
            deadline = time.monotonic() + seconds  # once names are resolved
            of = {each: address for address, asked in questions.items() for each in asked}
            for question in of:
                stack.callback(question.end)
                question.begin()
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    break
                for key, _ in ready:
                    address = of[key.data]
                    if key.data.is_open and key.data.go_on():
                        found.add(address)
                        for other in questions[address]:
                            other.end()
            for address, asked in questions.items():
                _reached.update((address, q.place) for q in asked if q.is_connected)
                if address in found or any(q.was_not_asked for q in asked):
                    continue
                self.missing.add(address)
                listened = [q for q in asked if (address, q.place) in _reached] or asked
                if listened and all(q.is_refused for q in listened):
                    self.refused.add(address)


class _Question:
    """Whether somebody answers at one place, asked without waiting for anything."""

    def __init__(self, place: Any, connects: bool, selector: selectors.BaseSelector):
        self.is_connected = False
        self.is_refused = False
        self.was_not_asked = False
        self._family, self._kind, self._protocol, _, self.place = place
        self._connects = connects
        self._selector = selector
        self._socket: socket.socket | None = None
        self._heard = b""

    @property
    def is_open(self) -> bool:
        """Whether an answer may come."""
        return self._socket is not None

    def begin(self) -> None:
        """Connects."""
        try:
            self._socket = socket.socket(self._family, self._kind, self._protocol)
            self._socket.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                self._socket.connect(self.place)
            self._selector.register(self._socket, selectors.EVENT_WRITE, self)
        except OSError as error:
            self._fails(error)

    def _fails(self, error: OSError) -> None:
        self.is_refused = not self.is_connected and error.errno == errno.ECONNREFUSED
        self.was_not_asked = error.errno in _LOCAL
        self.end()

    def go_on(self) -> bool:
        """Does what can be done now; whether what was asked for has come."""
        talk = self._socket
        if talk is None:
            return False
        try:
            if not self.is_connected:
                failed = talk.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if failed:
                    raise OSError(failed, "not connected")
                self.is_connected = True
                if self._connects:
                    return True
                talk.sendall(_HTTP2_PREFACE)
                self._selector.modify(talk, selectors.EVENT_READ, self)
                return False
            received = talk.recv(_FRAME_HEADER_BYTES - len(self._heard))
        except OSError as error:
            self._fails(error)
            return False
        self._heard += received
        if not received or len(self._heard) >= _FRAME_HEADER_BYTES:
            self.end()
        return _is_grpc(self._heard)

    def end(self) -> None:
        """Closes its connection, if there is one."""
        if self._socket is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None


def _is_grpc(heard: bytes) -> bool:
    """Whether this is how a gRPC server begins, and not another program with an open port."""
    return len(heard) >= _FRAME_HEADER_BYTES and heard[3] == _SETTINGS and not any(heard[5:9])
