"""By what this process's gRPC channels tell that a task does not answer: pings, and for how long.

TensorFlow's calls to a task that is stopped wait without end, some of them with Python's lock held:
no thread of Python runs then, not the one that asks tasks whether they are there
(`transport.heartbeat`), and not Ctrl-C. gRPC pings from threads of its own, and ends what waits for
a task that does not answer a ping.

A server of TensorFlow takes pings for an attack that come without an answer of its own between
them: at the fourth it closes the connection (gRFC A8, whose limits TF 2.21 does not let one set). A
client sends one after each call, and from then on one a minute. A worker may take longer than that
for a round, and so may the ps that waits for its message; so the chief has all tasks answer a call
every `deadlines.CALL_EVERY_SECONDS`, by which the count begins anew.
"""

from __future__ import annotations

import os

from tf_dsgd.membership import deadlines

FAIL_FAST = "GRPC_FAIL_FAST"
"""Whether calls to a task that cannot be reached fail, or wait for it; read at each call."""
_OPTIONS = "TF_GRPC_DEFAULT_OPTIONS"
_DIRECT = "grpc.enable_http_proxy=0"
_MOST_MS = (1 << 31) - 1


def of_a_server() -> None:
    """Has a server's calls to others go to them, whatever http_proxy says, and fail at once.

    For channels that are made from now on, as in `configure`.
    """
    os.environ.setdefault(FAIL_FAST, "use_caller")  # or a lost task is waited for
    os.environ.setdefault(_OPTIONS, _DIRECT)


def configure(timeout_seconds: float) -> None:
    """Has calls to a task that does not answer end with an error within `timeout_seconds`.

    For channels that are made from now on, and none was: TensorFlow reads this once. Leaves it to
    the user where the environment variable TF_GRPC_DEFAULT_OPTIONS is set.
    """
    after, answer = deadlines.ping(timeout_seconds)
    connect = min(max(timeout_seconds / 4, 1.0), deadlines.CONNECT_SECONDS)
    options = {
        "grpc.keepalive_time_ms": after,
        "grpc.keepalive_timeout_ms": answer,
        "grpc.http2.ping_timeout_ms": answer,  # of pings that measure how fast data come
        "grpc.min_reconnect_backoff_ms": connect,
        "grpc.max_reconnect_backoff_ms": deadlines.CONNECT_SECONDS,
    }
    told = [f"{k}={max(1, min(round(1e3 * v), _MOST_MS))}" for k, v in options.items()]
    told += ["grpc.http2.max_pings_without_data=1", _DIRECT]
    os.environ.setdefault(_OPTIONS, ",".join(told))
