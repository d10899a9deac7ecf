"""Two workers and a ps, processes, with TensorFlow alone: the kind `exchange` of `bare.Spec`.

    python benchmarks/bare_cluster.py '{"kind": "exchange", "period": 20}'

This process is the chief. It has a thread for each worker, which calls a function on that worker:
it reads the variables from the ps, computes, and subtracts the gradients, or the sum of what a
period's steps changed, from the variables on the ps, under a lock there.
"""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import bare
import processor_time
import tensorflow as tf

SERVE_SECONDS = 1200.0
"""The longest that a server lives."""
CALLS = 16
"""That a server answers at a time, as those of this package."""


def free_addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def serve(cluster: dict, job: str, task: int, intra: int) -> None:
    """A worker or ps process, which ends when its standard input does."""
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=intra, inter_op_parallelism_threads=CALLS
    )
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster), job_name=job, task_index=task, protocol="grpc", config=config
    )
    select.select([sys.stdin], [], [], SERVE_SECONDS)
    del server
    os._exit(0)


@contextlib.contextmanager
def servers(spec: bare.Spec, ps: int = 1) -> Iterator[processor_time.Pids]:
    """`ps` and workers, to which this process is connected; gives their pids, by role."""
    chief, *addresses = free_addresses(1 + ps + spec.workers)
    cluster = {"ps": addresses[:ps], "worker": addresses[ps:], "chief": [chief]}
    # A call is done when it returns; else it would only be queued. Read when TensorFlow connects.
    os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"] = "False"
    started: list[subprocess.Popen] = []
    try:
        for job in ("ps", "worker"):
            for task, _ in enumerate(cluster[job]):
                command = [sys.executable, __file__, json.dumps([cluster, job, task, spec.intra])]
                started.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec(cluster), job_name="chief", task_index=0, protocol="grpc"
        )
        yield {
            processor_time.CHIEF: [os.getpid()],
            processor_time.PS: [server.pid for server in started[:ps]],
            processor_time.WORKERS: [server.pid for server in started[ps:]],
        }
    finally:
        for server in started:
            server.kill()
            server.wait(bare.WAIT_SECONDS)


def sizes(spec: bare.Spec) -> list[int]:
    return [tf.TensorShape(shape).num_elements() for shape in bare.shapes(spec)]


def joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def divided(spec: bare.Spec, vector: tf.Tensor) -> list[tf.Tensor]:
    parts = tf.split(vector, sizes(spec))
    return [tf.reshape(p, shape) for p, shape in zip(parts, bare.shapes(spec), strict=True)]


def device_of(job: str, task: int) -> str:
    return f"/job:{job}/task:{task}/device:CPU:0"


class Shared:
    """The variables on the ps: as many as the model has, or one vector."""

    def __init__(self, spec: bare.Spec):
        self.spec = spec
        self.device = device_of("ps", 0)
        with tf.device(self.device):
            variables = bare.make_variables(spec)
            if spec.flat:
                variables = [tf.Variable(joined([v.read_value() for v in variables]))]
            self.variables = variables
            self.lock = tf.CriticalSection() if spec.locked else None

    def fetch(self) -> list[tf.Tensor]:
        """Traces that a worker reads all."""
        with tf.device(self.device):
            values = [variable.read_value() for variable in self.variables]
        return divided(self.spec, tf.identity(values[0])) if self.spec.flat else values

    def push(self, tensors: Sequence[tf.Tensor], by_rate: bool) -> None:
        """Traces that these, or these times the rate, are subtracted."""
        sent = [joined(tensors)] if self.spec.flat else list(tensors)

        def subtract(arrived: Sequence[tf.Tensor]) -> None:
            for variable, tensor in zip(self.variables, arrived, strict=True):
                if by_rate:
                    bare.descend(variable, tensor)
                else:
                    variable.assign_sub(tensor, read_value=False)

        with tf.device(self.device):
            arrived = [tf.identity(tensor) for tensor in sent]
            with tf.control_dependencies(arrived):  # nothing is awaited under the lock
                bare.under(self.lock, lambda: subtract(arrived))


def worker(spec: bare.Spec, shared: Shared, m: int) -> bare.Function:
    """A function that makes the steps of one call on a worker."""
    device = device_of("worker", m)
    with tf.device(device):
        data, position = bare.make_data(spec), tf.Variable(0)
        local = bare.make_variables(spec) if spec.period > 1 else []

    def step(k: tf.Tensor) -> None:
        with tf.device(device):
            weights = shared.fetch()
            found = bare.gradients(spec, weights, *bare.batch(spec, data, k))
            shared.push(found, by_rate=True)

    def round_of_steps(first: tf.Tensor) -> None:
        base = shared.fetch()
        for mine, value in zip(local, base, strict=True):
            mine.assign(value, read_value=False)
        bare.loop(
            spec.period,
            lambda k: bare.descend_all(spec, local, *bare.batch(spec, data, k)),
            first,
        )
        changes = [b - mine.read_value() for b, mine in zip(base, local, strict=True)]
        shared.push(changes, by_rate=False)

    @tf.function(autograph=False)
    def call() -> None:
        with tf.device(device):
            first = position.read_value()
            if spec.period > 1:
                round_of_steps(first)
            else:
                bare.loop(spec.steps_per_call, step, first)
            position.assign_add(bare.steps_of_a_call(spec), read_value=False)

    def on_worker() -> Any:
        with tf.device(device):
            return call()

    return on_worker


def run(spec: bare.Spec) -> dict:
    with servers(spec) as pids:
        shared = Shared(spec)
        calls = [worker(spec, shared, m) for m in range(spec.workers)]
        result = bare.measure(spec, calls, pids)
        changed = [float(tf.reduce_sum(tf.abs(v.read_value()))) for v in shared.variables]
        return {**result, "sums": changed}


def main() -> None:
    told = json.loads(sys.argv[1])
    if isinstance(told, list):
        serve(*told)
    else:
        spec = bare.Spec(**told)
        bare.finish(spec, run(spec))


if __name__ == "__main__":
    main()
