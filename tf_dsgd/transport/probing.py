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
    asked = set(addresses)
    return asked - _Asked(asked, seconds, connects=True).found


def refusing(addresses: Iterable[str], seconds: float) -> set[str]:
    """Those of the addresses of which the host says that nobody listens there.

    Of a host that says nothing, as one that is cut off for a moment, that is not known.
    """
    return _Asked(addresses, seconds, connects=True).refused


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
    asked = set(addresses)
    return asked - _Asked(asked, seconds).found


class _Asked:
    """What is at addresses, all asked at the same time, and all places of a name.

    Args:
        addresses: them.
        seconds: how long to wait for answers.
        connects: whether a connection is enough of one.
    """

    def __init__(self, addresses: Iterable[str], seconds: float, connects: bool = False):
        self.found: set[str] = set()
        """Addresses at one of whose places somebody answers."""
        self.refused: set[str] = set()
        """Those of which all places that can be reached say that nobody listens."""
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            questions = {
                address: [_Question(place, connects, selector) for place in names.places(address)]
                for address in set(addresses)
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
                        self.found.add(address)
                        for other in questions[address]:
                            other.end()
            for address, asked in questions.items():
                if any(q.is_refused for q in asked) and all(q.has_failed for q in asked):
                    self.refused.add(address)


class _Question:
    """Whether somebody answers at one place, asked without waiting for anything."""

    def __init__(self, place: Any, connects: bool, selector: selectors.BaseSelector):
        self.is_refused = False
        self.has_failed = False
        """Whether no connection is made, for that reason or another."""
        self._family, self._kind, self._protocol, _, self._place = place
        self._connects = connects
        self._selector = selector
        self._socket: socket.socket | None = None
        self._is_connected = False
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
                self._socket.connect(self._place)
            self._selector.register(self._socket, selectors.EVENT_WRITE, self)
        except OSError as error:
            self._fails(error)

    def _fails(self, error: OSError) -> None:
        self.has_failed = not self._is_connected
        self.is_refused = self.has_failed and error.errno == errno.ECONNREFUSED
        self.end()

    def go_on(self) -> bool:
        """Does what can be done now; whether what was asked for has come."""
        talk = self._socket
        if talk is None:
            return False
        try:
            if not self._is_connected:
                failed = talk.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if failed:
                    raise OSError(failed, "not connected")
                self._is_connected = True
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
