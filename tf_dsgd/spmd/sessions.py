"""Graphs on the TensorFlow servers of equal processes: sessions, variables, queues.

A `tf.compat.v1.Session` runs small graphs on a `tf.distribute.Server` of this process, and parts of
them on the others' servers; TensorFlow's Send and Recv carry tensors between them.
`tf.distribute.MultiWorkerMirroredStrategy` must be made before anything else of TensorFlow, and
moves all devices of the process to a cluster. A server and a session of their own can be made at
any time, and the training beside them stays as it is.

TensorFlow refuses a run now and then, for nothing. Each has a random number, by which a server
knows those that come twice, and remembers 100,000. The numbers are drawn in a thread that begins
with the run, from a generator with a seed of 32 bits, so that one in 43,000 is of a run that was:
"The same RunGraph (Worker) request was received twice" (seen in TensorFlow 2.21.0). The same could
befall a Recv, in the middle. Then it runs again (`Program.begin`), and a graph must bear that:

- What takes something away is on this process's server alone, which refuses before it begins.
- What others are given may come again, and they know what they have.
- Nothing on another's server waits for a tensor from here. Where our part, which would send it, is
  refused, TensorFlow may ask the other server to end its part before that has quite begun; then it
  goes on waiting, and the run never ends, not even when its time is over (three times in 200,000
  rounds). What is fed is such a tensor, so what is given to another runs in a session on its
  server.

TensorFlow's collectives (`CollectiveGather`, `CollectiveReduce`) cannot: they break down in all
processes where one is refused. Besides, each left a thread behind in every process; after 16,000
there was no room for another, which ended the process.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dsgd.transport import channels, cluster_spec, listening

_LOOK_SECONDS = 0.5  # so often a wait looks whether what it waits for may still come


class Sessions:
    """TensorFlow's server of this process, on its address in TF_CONFIG, and sessions on it."""

    def __init__(self, cluster: cluster_spec.Tasks):
        job, index = str(cluster.task_type), cluster.task_index
        self._config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
        self._cluster = cluster
        channels.of_a_server()
        cluster_spec.check_port(cluster)
        self._server = tf.distribute.Server(
            cluster.cluster_spec(), job_name=job, task_index=index, config=self._config
        )
        listening.keep_to(cluster.own_address)

    def open(self, graph: tf.Graph, at: tuple[str, int] | None) -> Any:
        """A session.

        Args:
            graph: what it runs.
            at: the job and number of the task on whose server it is; None if it is this process's,
                and reads from others' as well.
        """
        if at is None:
            return tf.compat.v1.Session(self._server.target, graph=graph, config=self._config)
        # It would connect to all tasks, at their pace, and ask all for their devices.
        config = tf.compat.v1.ConfigProto()
        config.CopyFrom(self._config)
        job, index = at
        config.device_filters.append(f"/job:{job}/task:{index}")
        is_own = at == (self._cluster.task_type, self._cluster.task_index)
        target = self._server.target if is_own else f"grpc://{self._cluster.jobs[job][index]}"
        return tf.compat.v1.Session(target, graph=graph, config=config)


class Cell:
    """A variable on a process's server, which all processes know by its name."""

    def __init__(self, device: str, name: str, dtype: Any, size: int):
        self._device, self._dtype = device, tf.as_dtype(dtype)
        with tf.device(device):
            self._handle = tf.raw_ops.VarHandleOp(
                dtype=self._dtype, shape=[size], shared_name=f"tf_dsgd_exchange/{name}"
            )

    def assign(self, value: Any) -> Any:
        with tf.device(self._device):
            return tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)

    def read(self) -> Any:
        with tf.device(self._device):
            return tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._dtype)

    def free(self) -> Any:
        with tf.device(self._device):
            return tf.raw_ops.DestroyResourceOp(resource=self._handle, ignore_lookup_error=True)


def messages_of(rank: int) -> Any:
    """The queue of a process's messages, on the server of the open device."""
    return tf.raw_ops.FIFOQueueV2(component_types=[tf.int64], shared_name=f"tf_dsgd_meeting/{rank}")


class MainThreadCalls:
    """A thread that makes calls, so that the main thread can be interrupted as it waits.

    Not an executor's, which would be waited for when Python ends.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]]
        self._work = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name="collectives").start()

    def begin(self, function: Callable[[], Any]) -> Answer:
        """Has it called, after what was begun before."""
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._work.put((function, done))
        return Answer(done)

    def _serve(self) -> None:
        while True:
            function, done = self._work.get()
            try:
                done.put((function(), None))
            except BaseException as error:
                done.put((None, error))
            del function, done


class Answer:
    """What a call returns, or raises."""

    def __init__(self, done: queue.SimpleQueue[Any]):
        self._done = done

    def get(self, deadline: float, look: Callable[[], None] | None = None) -> Any:
        """Waits for it.

        Args:
            deadline: until when, by `time.monotonic`.
            look: raises an error, now and then, if it will not come. Who ends may have said his
                last a moment before, so a little more is waited for then.

        Raises:
            TimeoutError: if it takes longer.
        """
        hopeless: Exception | None = None
        while (left := deadline - time.monotonic()) > 0:
            try:
                result, error = self._done.get(timeout=min(_LOOK_SECONDS, left))
            except queue.Empty:
                if hopeless is not None:
                    raise hopeless from None
                try:
                    if look is not None:
                        look()
                except Exception as error_of_look:
                    hopeless = error_of_look
                continue
            if error is not None:
                raise error
            return result
        raise TimeoutError("no answer of TensorFlow in time")
