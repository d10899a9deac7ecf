"""Where workers' time goes: fetch, compute, push, wait.

A worker's thread has a `Stopwatch`, on which it says what it begins to do. Inside one traced
function, `Laps` takes the time between its parts on the machine that runs it.
"""

from __future__ import annotations

import time

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf, _tf_order

KINDS = ("fetch", "compute", "push", "wait")

# A round that is one call, not yet divided into the kinds above.
ROUND = "round"


class Stopwatch:
    """Seconds of one worker, by what it did.

    From `enter` to `leave` every moment counts as one kind. One thread writes, any may read.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys([*KINDS, ROUND], 0.0)
        self._doing: tuple[str, float] | None = None

    def enter(self, kind: str, at: float | None = None) -> None:
        """From now on, or from the moment `at` (by the same clock), the worker does `kind`."""
        now = time.perf_counter() if at is None else at
        if self._doing is not None:
            before, since = self._doing
            now = max(now, since)
            self._seconds[before] += now - since
        self._doing = (kind, now)

    def leave(self) -> None:
        """From now on the worker's time does not count."""
        if self._doing is not None:
            self.enter(self._doing[0])
            self._doing = None

    def divide_rounds(self, fetch: float, compute: float) -> None:
        """Divides the rounds since the last time: that much each, and the rest was the push."""
        whole, self._seconds[ROUND] = self._seconds[ROUND], 0.0
        fetch = min(fetch, whole)
        compute = min(compute, whole - fetch)
        self._seconds["fetch"] += fetch
        self._seconds["compute"] += compute
        self._seconds["push"] += whole - fetch - compute

    def forget_rounds(self) -> None:
        """Of the rounds since then it is not known what they were spent on."""
        self._seconds[ROUND] = 0.0

    @property
    def undivided(self) -> float:
        """Seconds of rounds that are not divided yet."""
        return self._seconds[ROUND]

    def read(self, now: float) -> np.ndarray:
        """Seconds of each of `KINDS` until `now`; rounds that are not divided yet are left out."""
        while True:
            doing = self._doing
            seconds = dict(self._seconds)
            if doing is self._doing:
                break
        if doing is not None:
            seconds[doing[0]] += max(0.0, now - doing[1])
        return np.array([seconds[kind] for kind in KINDS])


def moment(timestamp: float) -> float:
    """A `tf.timestamp()` of this machine as a moment of the stopwatches' clock."""
    return time.perf_counter() - (time.time() - timestamp)


class Laps:
    """Traced: moments between the parts of a worker's function.

    A lap ends when everything that the worker itself does for what was traced so far is done. No
    operation waits for a moment to be taken, so parts that overlap still do; what overlaps counts
    for the earlier part. What runs on other machines is not waited for here: that would send a
    message for each operation.

    Where TensorFlow's operations are to be deterministic all moments are the same.
    """

    def __init__(self) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._seen = len(self._graph.get_operations())
        self.moments: list[tf.Tensor] = []
        self._take([])

    def lap(self) -> tf.Tensor:
        """The moment, in seconds since the epoch, at which what was traced so far is done."""
        operations = self._graph.get_operations()
        new = operations[self._seen :]
        self._seen = len(operations)
        self._take([op for op in new if not op.device and op.type != "Placeholder"])
        return self.moments[-1]

    def _take(self, after: list[tf.Operation]) -> None:
        if _tf.is_deterministic():  # TensorFlow refuses to read a clock then
            self.moments.append(tf.zeros([], tf.float64))
            return
        with tf.control_dependencies(after):
            now = tf.timestamp()
        _tf_order.run_independently(now.op)  # or other stateful operations would wait for it
        self.moments.append(now)

    def add_to(self, seconds: tf.Variable) -> None:
        """Adds the laps' durations to a variable of the worker."""
        moments = tf.stack(self.moments)
        seconds.assign_add(moments[1:] - moments[:-1], read_value=False)
