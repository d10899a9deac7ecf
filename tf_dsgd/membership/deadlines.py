"""Every deadline by which it is decided who is alive, and how long anybody waits.

Of a cluster with a chief. `worker_timeout_seconds` is the user's: how long a task may say nothing
until it counts as lost. docs/cluster.md has the table: what is noticed, by what, within how many
seconds. What equal processes (`spmd`), Spark's tasks and the launcher wait for is theirs to say;
docs/waits.md has all.
"""

from __future__ import annotations

# -- of the chief's main thread and of workers' threads -----------------------------------------

IDLE_SECONDS = 30.0
"""A worker's thread without work for this long ends; the next batch starts it again."""
LOOK_SECONDS = 1.0
"""How often a waiting main thread looks after workers, and for lost ones that are back."""
STALLED_SECONDS = 10.0
"""For how long no worker may begin, with work left, until that is taken for a defect."""
ROW_SECONDS = 0.25
"""How long several rounds in one call may take together, by the last one's time."""
FAST_SECONDS = 0.01
"""For how long after a mini-batch came a worker waits for more, to begin with several."""
LOCK_SECONDS = 10.0
"""After an error, for how long a shard's lock may not change hands until it is taken for lost."""
CLOSE_SECONDS = 5.0
"""At exit, how long to wait for the rounds under way ..."""
CUT_SECONDS = 0.5
"""... and after how long calls to other processes are ended, whose results nobody will see."""

# -- who answers ----------------------------------------------------------------------------

PING_SECONDS = 2.0
"""Between two rounds of probes of all tasks, at most; an eighth of the user's timeout if less."""
CALL_EVERY_SECONDS = 20.0
"""How often each task has to answer a call: servers take gRPC's pings for an attack that come
without an answer of their own between them."""
CONNECT_SECONDS = 2.0
"""Until gRPC takes a connection for failed, and until it tries again: one that is stopped takes it
and says nothing, and calls to one that has come back fail until then."""
PROBE_SECONDS = 1.0
"""Until a task that does not answer a single probe counts as absent."""
GLANCE_SECONDS = 0.2
"""The same, for one that is probed again a second later."""
ANSWER_SECONDS = 5.0
"""The same, for one that TensorFlow would wait for without end; the user's timeout if less."""
CALL_SECONDS = 1.0
"""Between two looks at who is called, while others wait for that."""

SEND_SECONDS = 20.0
"""How long a worker may not reach another one, while both answer the chief."""

# -- joining --------------------------------------------------------------------------------

JOIN_SECONDS = 2.0
"""How long the main thread waits for a worker to join, before it goes on and looks again."""
FIRST_JOIN_SECONDS = 30.0
"""The same, while a strategy is made."""
REACH_SECONDS = 3.0
"""For gRPC to connect to a worker that is there again."""
LEFT_SECONDS = 0.5
"""Between a worker's leaving and its joining anew; twice that after each failure ..."""
MOST_LEFT_SECONDS = 8.0
"""... up to this."""
LAST_SECONDS = 60.0
"""How much longer than its timeout a worker has for joining, if it is there and the only one."""
GRACE_SECONDS = 3.0
"""For the other workers, once one is there, as a strategy is made."""
RETRY_SECONDS = 0.2
"""Between two attempts to reach a task that is not there yet."""
MESSAGE_SECONDS = 5.0
"""Between two messages that say what is waited for."""


def probe_every(timeout_seconds: float) -> float:
    """Seconds between two rounds of probes."""
    return min(PING_SECONDS, timeout_seconds / 8)


def ping(timeout_seconds: float) -> tuple[float, float]:
    """After how many seconds without an answer gRPC pings, and how long it waits for that."""
    return timeout_seconds / 8, 7 * timeout_seconds / 8


def last_question(timeout_seconds: float) -> float:
    """How long a task that has been silent for almost too long is asked for the last time.

    Longer than before: one that is slow, but answers, is there.
    """
    return min(ANSWER_SECONDS, timeout_seconds / 4)


def glance(timeout_seconds: float) -> float:
    """How long one is asked before that, at least."""
    return min(GLANCE_SECONDS, timeout_seconds / 8)


def suspected_after(timeout_seconds: float) -> float:
    """After how many seconds of silence that is.

    The last question, and the probe before it, end within the user's timeout.
    """
    return timeout_seconds - last_question(timeout_seconds) - glance(timeout_seconds)
