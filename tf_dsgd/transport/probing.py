"""Whether tasks can be reached, and whether they answer; without TensorFlow."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Iterable
from typing import Any


def reachable(address: str, seconds: float) -> bool:
    """Whether something accepts TCP connections at "host:port" within `seconds`."""
    return _refusal(address, seconds) is None


def refuses(address: str, seconds: float) -> bool:
    """Whether the host at "host:port" says that nobody listens there.

    Of a host that says nothing, as one that is cut off for a moment, that is not known.
    """
    return isinstance(_refusal(address, seconds), ConnectionRefusedError)


def _refusal(address: str, seconds: float) -> OSError | None:
    """Why no connection is made at "host:port" within `seconds`; None if one is."""
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds):
            return None
    except OSError as error:
        return error


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
    silent = set(addresses)
    with selectors.DefaultSelector() as asked, contextlib.ExitStack() as stack:
        questions = [_Question(address, asked) for address in silent]
        deadline = time.monotonic() + seconds  # once names are resolved
        for question in questions:
            stack.callback(question.end)
            question.begin()
        while asked.get_map():
            ready = asked.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                if key.data.go_on():
                    silent.discard(key.data.address)
    return silent


class _Question:
    """Whether a gRPC server answers at an address, asked without waiting for anything.

    A name may stand for several places, as "localhost" does; the first that takes a connection is
    asked.
    """

    def __init__(self, address: str, selector: selectors.BaseSelector):
        self.address = address
        self._selector = selector
        self._places: list[Any] = []
        self._socket: socket.socket | None = None
        self._is_connected = False
        self._heard = b""
        host, port = address.rsplit(":", 1)
        with contextlib.suppress(OSError):
            self._places = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)

    def begin(self) -> None:
        """Connects to the next place that does not refuse at once, if there is one left."""
        self.end()
        while self._places:
            family, kind, protocol, _, place = self._places.pop(0)
            with contextlib.suppress(OSError):
                self._socket = socket.socket(family, kind, protocol)
                self._socket.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    self._socket.connect(place)
                self._selector.register(self._socket, selectors.EVENT_WRITE, self)
                return
            self.end()

    def go_on(self) -> bool:
        """Does what can be done now; whether a gRPC server has answered."""
        try:
            if not self._is_connected:
                self._greet()
                return False
            received = self._the_socket().recv(_FRAME_HEADER_BYTES - len(self._heard))
        except OSError:
            if self._is_connected:
                self.end()
            else:
                self.begin()
            return False
        self._heard += received
        if not received or len(self._heard) >= _FRAME_HEADER_BYTES:
            self.end()
        return _is_grpc(self._heard)

    def _greet(self) -> None:
        """Says what a client says first, or raises why no connection was made."""
        talk = self._the_socket()
        failed = talk.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            raise OSError(failed, "not connected")
        talk.sendall(_HTTP2_PREFACE)
        self._is_connected = True
        self._selector.modify(talk, selectors.EVENT_READ, self)

    def _the_socket(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionError("closed")
        return self._socket

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
