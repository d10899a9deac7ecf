"""Training with TensorFlow alone, as fast as it goes, in processes of its own: see `limits.py`.

    python benchmarks/bare.py '{"kind": "steps", "workers": 2}'

No Keras, nothing of this package, no metrics, no counting, no staleness. Steps are a loop in one
TensorFlow function, without XLA, as those of training are. The mini-batches are slices, taken in
order, of a tensor that is there from the first. Prints one line of JSON.

With `steps` there is no exchange. With `pushes` all threads of this process share variables: at
periods of 1 a step reads them and subtracts its gradients from them, under a lock; at longer ones a
thread copies them, makes its steps and subtracts the sum of what these changed, under a lock.
`exchange` is in `bare_cluster.py`.
"""

import dataclasses
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import at_once
import processor_time
import tensorflow as tf

RATE = 0.01
CLASSES = 10
IDS_PER_EXAMPLE = 20
BATCHES = 200
"""How many different ones there are."""
FIRST_CALLS = 2
"""Of each function, that are not timed."""
WAIT_SECONDS = at_once.WAIT_SECONDS


@dataclasses.dataclass(frozen=True)
class Spec:
    """What to run."""

    kind: str = "steps"
    """`steps`: each worker, a thread, trains a model of its own; `processes`: each a process;
    `pushes`: threads push to one model; `exchange`: processes push to a model on a ps process."""
    workers: int = 2
    period: int = 1
    """Steps between two exchanges."""
    steps_per_call: int = 20
    """Steps of one call of TensorFlow; at longer periods it is the period."""
    locked: bool = True
    """Whether one push at a time changes the shared variables."""
    flat: bool = False
    """Of `exchange`: whether all variables travel as one vector."""
    model: str = "mlp"
    variables: int = 6
    rows: int = 1_000_000
    batch_size: int = 64
    intra: int = 1
    """Threads within an operation; 0 is TensorFlow's default."""
    inter: int = 0
    """Operations at a time; 0 is TensorFlow's default."""
    seconds: float = 5.0


Function = Callable[[], Any]


def shapes(spec: Spec) -> list[list[int]]:
    """Of the variables, as `contenders.py` has them."""
    if spec.model == "embedding":
        return [[spec.rows, 64], [64, CLASSES], [CLASSES]]
    widths = {"mlp": [512, 512], "wide": [4096, 4096], "small": [200]}
    hidden = widths.get(spec.model, [64] * (spec.variables // 2 - 1))
    sizes = [64 if spec.model == "small" else 784, *hidden, CLASSES]
    return [s for rows, columns in itertools.pairwise(sizes) for s in ([rows, columns], [columns])]


def make_variables(spec: Spec) -> list[tf.Variable]:
    first = [
        tf.random.normal(shape, stddev=0.05) if len(shape) == 2 else tf.zeros(shape)
        for shape in shapes(spec)
    ]
    return [tf.Variable(value) for value in first]


def make_data(spec: Spec) -> tuple[tf.Tensor, tf.Tensor]:
    examples = BATCHES * spec.batch_size
    if spec.model == "embedding":
        x = tf.random.uniform([examples, IDS_PER_EXAMPLE], maxval=spec.rows, dtype=tf.int32)
    else:
        x = tf.random.normal([examples, shapes(spec)[0][0]])
    return x, tf.random.uniform([examples], maxval=CLASSES, dtype=tf.int64)


def batch(spec: Spec, data: tuple[tf.Tensor, tf.Tensor], k: tf.Tensor) -> list[tf.Tensor]:
    at = tf.math.floormod(k, BATCHES) * spec.batch_size
    return [part[at : at + spec.batch_size] for part in data]


def gradients(spec: Spec, weights: Sequence[Any], x: tf.Tensor, y: tf.Tensor) -> list[Any]:
    """Of the mean loss, by `weights`, which are variables or tensors."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(weights)
        hidden, layers = x, list(weights)
        if spec.model == "embedding":
            hidden = tf.reduce_mean(tf.gather(layers.pop(0), x), 1)
        for index in range(0, len(layers), 2):
            hidden = hidden @ layers[index] + layers[index + 1]
            if index + 2 < len(layers):
                hidden = tf.nn.relu(hidden)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y, hidden)
        loss = tf.reduce_mean(loss)
    return tape.gradient(loss, weights)


def descend(variable: tf.Variable, gradient: Any) -> None:
    """Subtracts the gradient, times the rate, in one pass over memory."""
    if isinstance(gradient, tf.IndexedSlices):
        variable.scatter_sub(tf.IndexedSlices(RATE * gradient.values, gradient.indices))
    else:
        tf.raw_ops.ResourceApplyGradientDescent(
            var=variable.handle, alpha=RATE, delta=gradient, use_locking=False
        )


def descend_all(spec: Spec, weights: Sequence[tf.Variable], x: tf.Tensor, y: tf.Tensor) -> None:
    for weight, gradient in zip(weights, gradients(spec, weights, x, y), strict=True):
        descend(weight, gradient)


def loop(count: int, body: Callable[[tf.Tensor], None], first: tf.Tensor) -> None:
    """Traces `body(first)`, `body(first + 1)` ..., one after the other."""
    if count == 1:
        body(first)
        return

    def next_one(k: tf.Tensor) -> tf.Tensor:
        body(first + k)
        return k + 1

    tf.while_loop(lambda k: k < count, next_one, [tf.constant(0)], parallel_iterations=1)


# -- workers that are threads ----------------------------------------------------------------------


def steps_alone(spec: Spec) -> Function:
    """A worker with a model of its own."""
    weights, data, position = make_variables(spec), make_data(spec), tf.Variable(0)

    @tf.function(autograph=False)
    def call() -> None:
        first = position.read_value()
        loop(
            spec.steps_per_call, lambda k: descend_all(spec, weights, *batch(spec, data, k)), first
        )
        position.assign_add(spec.steps_per_call, read_value=False)

    return call


def under(lock: tf.CriticalSection | None, action: Callable[[], None]) -> None:
    """Traces `action`, under the lock if there is one."""
    if lock is None:
        action()
        return

    def locked() -> tf.Tensor:
        action()
        return tf.constant(0)

    lock.execute(locked)


def pushes(spec: Spec, shared: Sequence[tf.Variable], lock: tf.CriticalSection | None) -> Function:
    """A worker that fetches from, and pushes to, `shared`."""
    data, position = make_data(spec), tf.Variable(0)
    local = make_variables(spec) if spec.period > 1 else []

    def step(k: tf.Tensor) -> None:
        weights = [weight.read_value() for weight in shared]
        found = gradients(spec, weights, *batch(spec, data, k))
        under(lock, lambda: [descend(w, g) for w, g in zip(shared, found, strict=True)])

    def round_of_steps(first: tf.Tensor) -> None:
        base = [weight.read_value() for weight in shared]
        for mine, value in zip(local, base, strict=True):
            mine.assign(value, read_value=False)
        loop(spec.period, lambda k: descend_all(spec, local, *batch(spec, data, k)), first)
        changes = [b - mine.read_value() for b, mine in zip(base, local, strict=True)]
        under(lock, lambda: [w.assign_sub(c) for w, c in zip(shared, changes, strict=True)])

    @tf.function(autograph=False)
    def call() -> None:
        first = position.read_value()
        if spec.period > 1:
            round_of_steps(first)
        else:
            loop(spec.steps_per_call, step, first)
        position.assign_add(steps_of_a_call(spec), read_value=False)

    return call


def steps_of_a_call(spec: Spec) -> int:
    return spec.period if spec.period > 1 else spec.steps_per_call


def run_threads(spec: Spec) -> dict:
    """The workers are threads of this process."""
    tf.config.threading.set_intra_op_parallelism_threads(spec.intra)
    tf.config.threading.set_inter_op_parallelism_threads(spec.inter)
    if spec.kind == "steps":
        calls = [steps_alone(spec) for _ in range(spec.workers)]
    else:
        shared = make_variables(spec)
        lock = tf.CriticalSection() if spec.locked else None
        calls = [pushes(spec, shared, lock) for _ in range(spec.workers)]
    return measure(spec, calls, {processor_time.CHIEF: [os.getpid()]})


def measure(spec: Spec, calls: Sequence[Function], pids: processor_time.Pids) -> dict:
    """Calls each function in a thread of its own until the time is over.

    The first calls, one function after the other, are not timed.
    """
    for call in calls:
        for _ in range(FIRST_CALLS):
            call()
    done = [0] * len(calls)
    before, start = processor_time.read(pids), time.perf_counter()

    def work(worker: int) -> None:
        while time.perf_counter() - start < spec.seconds:
            calls[worker]()
            done[worker] += steps_of_a_call(spec)

    threads = [threading.Thread(target=work, args=(m,), daemon=True) for m in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(spec.seconds + WAIT_SECONDS)
    seconds = time.perf_counter() - start
    if any(thread.is_alive() for thread in threads) or not all(done):
        raise SystemExit(f"{spec}: a worker's thread did not end well; steps: {done}")
    return {
        "steps": sum(done),
        "seconds": seconds,
        "steps_per_second": sum(done) / seconds,
        "cpu_seconds": processor_time.spent(before, processor_time.read(pids)),
    }


# -- workers that are processes --------------------------------------------------------------------


def run_processes(spec: Spec) -> dict:
    """Each worker is a process with one thread of Python; they begin at one moment."""
    own = dataclasses.replace(spec, kind="member", workers=1)
    command = [sys.executable, __file__, json.dumps(dataclasses.asdict(own))]
    return at_once.run(command, spec.workers, spec.seconds)


def run_member(spec: Spec) -> dict:
    """One of these processes: says when it is ready, and is told when to begin."""
    tf.config.threading.set_intra_op_parallelism_threads(spec.intra)
    tf.config.threading.set_inter_op_parallelism_threads(spec.inter)
    call = steps_alone(spec)
    call()
    at_once.begin()
    return measure(spec, [call], {processor_time.WORKERS: [os.getpid()]})


RUNS: dict[str, Callable[[Spec], dict]] = {
    "steps": run_threads,
    "pushes": run_threads,
    "processes": run_processes,
    "member": run_member,
}


def main() -> None:
    spec = Spec(**json.loads(sys.argv[1]))
    finish(spec, RUNS[spec.kind](spec))


def finish(spec: Spec, result: dict) -> NoReturn:
    """Prints the result, and ends the process."""
    print(json.dumps({"spec": dataclasses.asdict(spec), **result}), flush=True)
    os._exit(0)  # TensorFlow's threads would wait for servers that were ended


if __name__ == "__main__":
    main()
