"""Whether tasks can be reached, and whether they answer; without TensorFlow."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Iterable


def reachable(address: str, seconds: float) -> bool:
    """Whether something accepts TCP connections at "host:port" within `seconds`."""
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds):
            return True
    except OSError:
        return False


# What an HTTP/2 client says first (RFC 9113, section 3.4): its preface and empty settings.
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
                asked.unregister(key.fileobj)
                with contextlib.suppress(OSError):
                    if key.fileobj.recv(1):  # type: ignore[union-attr]
                        silent.discard(key.data)
    return silent
