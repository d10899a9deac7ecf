"""Messages between a Spark task and the driver: a JSON header and arrays, under a secret.

A message is

    magic, length of the header, length of the body    16 bytes
    MAC of these and the header                        32 bytes
    header                                             JSON
    body                                               the bytes of all arrays, one after the other
    MAC of the body                                    32 bytes

The MACs are HMAC-SHA256 under a token that Spark hands to the tasks with their code; the token
itself is not sent. That of an answer holds the request's, so an answer to one request is none to
another. Nothing is read of a header whose MAC is wrong, and no body is waited for: who has neither
the token nor a message can have the driver read 1 MB and wait for some seconds. Nothing is
encrypted, and who reads the wire can send a message again, as does a task whose connection failed:
an update counts once, and a piece of the log appears once. Arrays are of numbers; no pickle is read
or written.

Tasks get this module's functions by value, so it imports the standard library and NumPy alone:
importing the package would have each task import TensorFlow, which takes seconds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import math
import re
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

MAGIC = b"tfd1"
MOST_HEADER_BYTES = 1 << 20
MOST_BODY_BYTES = 1 << 30
HEADER_SECONDS = 10.0  # for whoever has not shown yet that the token is known
BODY_SECONDS = 300.0
LATER_SECONDS = 10.0
"""After which a driver that cannot do yet what it is asked for says so."""
SILENT_SECONDS = 60.0
"""After which a driver that no connection reaches counts as gone."""
AGAIN_SECONDS = 0.2
"""Between a connection that failed and the next one."""
_ANY_BYTES = 1 << 62  # of an answer: the model, however large

_PREFIX = ">4sIQ"  # struct's; a Struct could not travel to tasks
_PREFIX_BYTES = struct.calcsize(_PREFIX)
_MAC_BYTES = 32
_KINDS = "biufc"  # of NumPy's dtypes: truth values and numbers
_NAME = re.compile(f"[<|][{_KINDS}][0-9]{{1,2}}", re.ASCII)
_MOST_AXES = 64  # NumPy's own limit
_AT_ONCE = 1 << 20


class BadFrameError(Exception):
    """What came is no message, or not from one who knows the token."""


@dataclasses.dataclass(frozen=True)
class Message:
    """A header and arrays; `mac` is what an answer to it is bound to."""

    header: dict[str, Any]
    arrays: list[np.ndarray]
    mac: bytes = b""


def token() -> bytes:
    """A new secret."""
    return secrets.token_bytes(32)


def encode(
    secret: bytes, header: dict[str, Any], arrays: Sequence[np.ndarray] = (), to: bytes = b""
) -> bytes:
    """A message's bytes.

    Args:
        secret: the token.
        header: what JSON can hold.
        arrays: of numbers.
        to: the MAC of the request that this answers.

    Raises:
        TypeError: for arrays of other things than numbers.
    """
    found = [np.asarray(array) for array in arrays]
    for array in found:
        if array.dtype.kind not in _KINDS:
            raise TypeError(f"Arrays must be of numbers. Received: dtype {array.dtype}.")
    shapes = [[array.dtype.newbyteorder("<").str, list(array.shape)] for array in found]
    body = b"".join(array.astype(array.dtype.newbyteorder("<")).tobytes() for array in found)
    text = json.dumps({**header, "arrays": shapes, "nonce": secrets.token_hex(8)}).encode()
    if len(text) > MOST_HEADER_BYTES:
        raise ValueError(f"A message's header is {len(text)} bytes, above {MOST_HEADER_BYTES}.")
    prefix = struct.pack(_PREFIX, MAGIC, len(text), len(body))
    mac = _mac(secret, to, prefix, text)
    return b"".join((prefix, mac, text, body, _mac(secret, mac, body)))


def mac_of(message: bytes) -> bytes:
    """The MAC of an encoded message's header."""
    return message[_PREFIX_BYTES : _PREFIX_BYTES + _MAC_BYTES]


def receive(
    connection: socket.socket,
    secret: bytes,
    to: bytes = b"",
    *,
    most_bytes: int = MOST_BODY_BYTES,
    header_seconds: float = HEADER_SECONDS,
    known: Callable[[], object] | None = None,
) -> Message:
    """The message that comes over a connection.

    Args:
        connection: open; its timeout is changed.
        secret: the token.
        to: the MAC of the request that this must answer.
        most_bytes: of a body.
        header_seconds: how long to wait for the header. A body has `BODY_SECONDS` more.
        known: is called once the header has shown that the other side knows the token.

    Raises:
        BadFrameError: if it is no message.
        OSError: if the connection ends, or nothing comes in time (TimeoutError).
    """
    deadline = time.monotonic() + header_seconds
    prefix = _read(connection, _PREFIX_BYTES, deadline)
    magic, header_length, body_length = struct.unpack(_PREFIX, prefix)
    if magic != MAGIC or header_length > MOST_HEADER_BYTES:
        raise BadFrameError("it does not begin as a message")
    mac = _read(connection, _MAC_BYTES, deadline)
    text = _read(connection, header_length, deadline)
    if not hmac.compare_digest(mac, _mac(secret, to, prefix, text)):
        raise BadFrameError("its sender does not know the token")
    if known is not None:
        known()
    if body_length > most_bytes:
        raise BadFrameError(f"its arrays have {body_length} bytes, above {most_bytes}")
    deadline = time.monotonic() + BODY_SECONDS
    body = _read(connection, body_length, deadline)
    if not hmac.compare_digest(_read(connection, _MAC_BYTES, deadline), _mac(secret, mac, body)):
        raise BadFrameError("its arrays are not those that were sent")
    try:
        header = json.loads(text)
        return Message(header, _arrays(header.pop("arrays"), body), mac)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadFrameError(f"its header states no arrays ({type(error).__name__})") from None


def _mac(secret: bytes, *parts: bytes) -> bytes:
    digest = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
    parts = []
    while count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the rest of a message did not come in time")
        connection.settimeout(left)
        part = connection.recv(min(count, _AT_ONCE))
        if not part:
            raise ConnectionError("the connection ended within a message")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _arrays(shapes: list[Any], body: bytes) -> list[np.ndarray]:
    """The arrays that the header states; each a copy, which may be changed."""
    found, start = [], 0
    for name, shape in shapes:
        sizes = [size for size in shape if type(size) is int and 0 <= size <= _ANY_BYTES]
        if not _NAME.fullmatch(name) or len(sizes) != len(shape) or len(shape) > _MOST_AXES:
            raise ValueError("no array of numbers")
        dtype = np.dtype(name)
        count = math.prod(sizes)
        if start + count * dtype.itemsize > len(body):
            raise ValueError("more arrays than bytes")
        found.append(np.frombuffer(body, dtype, count, start).reshape(sizes).copy())
        start += count * dtype.itemsize
    if start != len(body):
        raise ValueError("more bytes than arrays")
    return found


def ask(
    address: tuple[str, int],
    secret: bytes,
    header: dict[str, Any],
    arrays: Sequence[np.ndarray] = (),
    *,
    seconds: float = BODY_SECONDS,
) -> Message:
    """Sends a request to the driver, and gives its answer.

    Args:
        address: host and port.
        secret: the token.
        header: with "do", what is asked for.
        arrays: that travel with it.
        seconds: how long to wait for the connection, for the sending, and for the answer's begin.

    Raises:
        OSError: if there is no driver that answers.
        BadFrameError: if what answers does not know the token.
        RuntimeError: if the driver could not do it, with its reason.
    """
    request = encode(secret, header, arrays)
    with socket.create_connection(address, timeout=seconds) as connection:
        connection.sendall(request)
        answer = receive(
            connection, secret, mac_of(request), most_bytes=_ANY_BYTES, header_seconds=seconds
        )
    if "error" in answer.header:
        raise RuntimeError(answer.header["error"])
    return answer


def ask_until_done(
    address: tuple[str, int],
    secret: bytes,
    header: dict[str, Any],
    arrays: Sequence[np.ndarray] = (),
    *,
    seconds: float = LATER_SECONDS,
) -> Message:
    """Asks the driver again until its answer's "done" is true, and past connections that fail.

    A connection may fail where the driver is well: a stranger's flood may have it end any whose
    side has not shown the token yet. So what is asked for must be one thing if it comes twice.

    Args:
        address: host and port.
        secret: the token.
        header: with "do", what is asked for.
        arrays: that travel with it.
        seconds: for how long the driver may wait before it answers that it is not done.

    Returns:
        The last answer.

    Raises:
        OSError: if connections have failed for `SILENT_SECONDS`, and none did not.
        BadFrameError, RuntimeError: as `ask`.
    """
    failed_since = None
    while True:
        try:
            answer = ask(address, secret, {**header, "seconds": seconds}, arrays)
        except OSError:
            now = time.monotonic()
            failed_since = now if failed_since is None else failed_since
            if now - failed_since > SILENT_SECONDS:
                raise
            time.sleep(AGAIN_SECONDS)
        else:
            if answer.header["done"]:
                return answer
            failed_since = None
