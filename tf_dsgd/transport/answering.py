"""The driver's server: answers messages of those who know the token, each in a thread."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import logging

from tf_dsgd.transport import frames

Answer = Callable[[dict[str, Any], list[np.ndarray]], tuple[dict[str, Any], Sequence[np.ndarray]]]
"""From a request's header and arrays to the answer's. Called in several threads at a time."""

_MOST_STRANGERS = 256
_MOST_OF_AN_ERROR = 10_000


class _Strangers:
    """Open connections whose other side has not shown yet that it knows the token.

    Where there are too many, the oldest is ended: who connects and says nothing keeps nobody out,
    for a task shows the token with its first bytes. How many tasks there are is up to Spark.
    """

    def __init__(self, most: int):
        self._most = most
        self._mutex = threading.Lock()
        self._connections: dict[socket.socket, None] = {}  # in the order in which they came

    def add(self, connection: socket.socket) -> None:
        with self._mutex:
            self._connections[connection] = None
            while len(self._connections) > self._most:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                with contextlib.suppress(OSError):  # it has ended by itself
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it

    def remove(self, connection: socket.socket) -> None:
        """Of one that is none any more, or has ended. It may be called twice."""
        with self._mutex:
            self._connections.pop(connection, None)


class Server:
    """Listens at an address of the driver from `__enter__` to `__exit__`.

    Args:
        host: where tasks find the driver: Spark's `spark.driver.host`.
        bind: the address to listen at, if it is another one: `spark.driver.bindAddress`.
        answer: what is done with a request. What it raises is told to the one who asked.
        most_bytes: of a request's arrays.
    """

    def __init__(
        self,
        host: str,
        answer: Answer,
        *,
        bind: str | None = None,
        most_bytes: int = frames.MOST_BODY_BYTES,
    ):
        self.token = frames.token()
        self.refused = 0
        """Connections that brought no message, or one under another token."""
        self._answer, self._most_bytes = answer, most_bytes
        self._host, self._bind = host, bind or host
        self._mutex = threading.Lock()
        self._strangers = _Strangers(_MOST_STRANGERS)

    @property
    def address(self) -> tuple[str, int]:
        """Where tasks find it."""
        return self._host.strip("[]"), self._server.server_address[1]

    def __enter__(self) -> Server:
        self._server = _listen(self._bind, self._strangers.add, self._handle)
        thread = threading.Thread(
            target=self._server.serve_forever, name="tf_dsgd spark server", daemon=True
        )
        thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handle(self, connection: socket.socket) -> None:
        try:
            request = frames.receive(
                connection,
                self.token,
                most_bytes=self._most_bytes,
                known=lambda: self._strangers.remove(connection),
            )
            connection.settimeout(frames.BODY_SECONDS)
            connection.sendall(self._reply(request))
        except (frames.BadFrameError, OSError) as error:
            with self._mutex:
                self.refused += 1
            logging.info("tf_dsgd: a connection to the driver was ended: %s", error)
        finally:
            self._strangers.remove(connection)

    def _reply(self, request: frames.Message) -> bytes:
        try:
            header, arrays = self._answer(request.header, request.arrays)
            return frames.encode(self.token, header, arrays, to=request.mac)
        except Exception as error:  # is told to the task, which ends with it
            said = f"{type(error).__name__}: {error}"[:_MOST_OF_AN_ERROR]
            return frames.encode(self.token, {"error": said}, (), to=request.mac)


def _listen(
    host: str,
    came: Callable[[socket.socket], None],
    handle: Callable[[socket.socket], None],
) -> socketserver.TCPServer:
    """A server that calls `came` as a connection comes, and `handle` with it in a thread."""
    family, *_, place = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            handle(self.request)

    class Listening(socketserver.ThreadingTCPServer):
        address_family = family
        daemon_threads = True
        block_on_close = False
        request_queue_size = 128

        def process_request(self, request: Any, client_address: Any) -> None:
            came(request)
            super().process_request(request, client_address)

    return Listening((str(place[0]), 0), Handler)
