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
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds):
            return True
    except OSError:
        return False


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
    """Those of the addresses at which no gRPC server answers within `seconds`."""
    deadline = time.monotonic() + seconds
    silent = set(addresses)
    said: dict[str, bytes] = dict.fromkeys(silent, b"")
    before: dict[str, bytes] = {}
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as asked:
        for address in list(silent):
            host, port = address.rsplit(":", 1)
            left = max(0.1, deadline - time.monotonic())
            with contextlib.suppress(OSError):
                connection = socket.create_connection((host.strip("[]"), int(port)), left)
                stack.enter_context(connection)
                connection.sendall(_HTTP2_PREFACE)
                asked.register(connection, selectors.EVENT_READ, address)
        while asked.get_map():
            ready = asked.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                heard = said[key.data] = said[key.data] + _received(key.fileobj)
                if len(heard) >= _FRAME_HEADER_BYTES or heard == before.get(key.data, b""):
                    asked.unregister(key.fileobj)
                if _is_grpc(heard):
                    silent.discard(key.data)
                before[key.data] = heard
    return silent


def _received(connection: Any) -> bytes:
    try:
        return bytes(connection.recv(_FRAME_HEADER_BYTES))
    except OSError:
        return b""


def _is_grpc(heard: bytes) -> bool:
    """Whether this is how a gRPC server begins, and not another program with an open port."""
    return len(heard) >= _FRAME_HEADER_BYTES and heard[3] == _SETTINGS and not any(heard[5:9])
