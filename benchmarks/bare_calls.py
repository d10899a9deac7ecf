"""What the chief takes to call a function that uses many variables, with TensorFlow alone.

    python benchmarks/bare_calls.py '{"variables": 300}'

The function exchanges all variables with a ps, once or several times, as one vector each way, and
computes nothing. Every variable that a function uses is an input of each call of it. Prints one
line of JSON.
"""

import json
import os
import sys
import time
from dataclasses import dataclass

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import bare
import bare_cluster
import processor_time
import tensorflow as tf

UNITS = 8
WORKER = bare_cluster.device_of("worker", 0)
PS = bare_cluster.device_of("ps", 0)


@dataclass(frozen=True)
class Spec(bare.Spec):
    """What to run."""

    workers: int = 1
    variables: int = 4
    exchanges: int = 1
    """Of a call, one behind the other."""
    calls: int = 300


def make_variables(spec: Spec, device: str) -> list[tf.Variable]:
    shapes = [[UNITS, UNITS] if i % 2 == 0 else [UNITS] for i in range(spec.variables)]
    with tf.device(device):
        return [tf.Variable(tf.zeros(shape)) for shape in shapes]


def exchanging(spec: Spec) -> tf.types.experimental.PolymorphicFunction:
    here, there = make_variables(spec, WORKER), make_variables(spec, PS)
    sizes = [variable.shape.num_elements() for variable in here]

    def divided(vector: tf.Tensor) -> list[tf.Tensor]:
        parts = zip(tf.split(vector, sizes), here, strict=True)
        return [tf.reshape(part, like.shape) for part, like in parts]

    def exchange(_: tf.Tensor) -> None:
        with tf.device(PS):
            fetched = bare_cluster.joined([variable.read_value() for variable in there])
        with tf.device(WORKER):
            for mine, value in zip(here, divided(tf.identity(fetched)), strict=True):
                mine.assign(value, read_value=False)
            pushed = bare_cluster.joined([mine.read_value() for mine in here])
        with tf.device(PS):
            for theirs, value in zip(there, divided(tf.identity(pushed)), strict=True):
                theirs.assign_add(value, read_value=False)

    @tf.function(autograph=False)
    def call() -> None:
        with tf.device(WORKER):
            bare.loop(spec.exchanges, exchange, tf.constant(0))

    return call


def run(spec: Spec) -> dict:
    with bare_cluster.servers(spec) as pids:
        call = exchanging(spec)
        with tf.device(WORKER):
            for _ in range(bare.FIRST_CALLS + spec.calls // 10):
                call()
            before, start = processor_time.read(pids), time.perf_counter()
            cpu = time.process_time()
            for _ in range(spec.calls):
                call()
            cpu = time.process_time() - cpu
        return {
            "steps": spec.calls,
            "seconds": time.perf_counter() - start,
            "chief_cpu_seconds_per_call": cpu / spec.calls,
            "cpu_seconds": processor_time.spent(before, processor_time.read(pids)),
        }


def main() -> None:
    spec = Spec(**json.loads(sys.argv[1]))
    bare.finish(spec, run(spec))


if __name__ == "__main__":
    main()
