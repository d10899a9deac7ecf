"""The same training in a loop of one's own: Keras's layers, loss, metrics and optimizer.

    python benchmarks/own_loop.py '{"kind": "threads", "period": 20}'
    python benchmarks/own_loop.py '{"kind": "processes", "period": 20, "data": "files"}'

Nothing of this package, and no `fit`. What a training must do, and `bare.py` leaves out, is here:
the model is Keras's, with its metrics; the examples are mixed anew in each epoch, and come from
arrays of the chief, or from files that workers read. What `fit` and this package do besides is not:
callbacks, mini-batches handed out one by one, who has which, messages that are numbered and
counted, workers that may be lost, epochs that end. At periods of 1 the shared variables take plain
SGD's step in one pass of TensorFlow's, under a lock, and are read without one. Prints one line of
JSON, with the mean loss of worker 0 since it began.
"""

import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import bare
import bare_cluster
import contenders
import processor_time
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import (  # noqa: TID251 - as `fit` reads
    ArrayDataAdapter,
)

PREFETCHED = 4
"""Calls' mini-batches that the chief has ready."""
SHUFFLED = 1024
"""Examples among which workers that read files mix theirs."""


@dataclass(frozen=True)
class Spec(bare.Spec):
    """What to run; a call makes `period` steps, or at periods of 1 `steps_per_call`."""

    kind: str = "threads"
    """`threads` of this process, or `processes` with a ps."""
    data: str = "arrays"
    """`arrays`: the chief's; `files`: each worker reads its own; `adapter`: the chief's arrays, by
    what `fit` makes of them, a mini-batch at a time; for threads."""
    sums: bool = False
    """Whether gradients are added up beside each local step, as Downpour does, and their sum is
    pushed; else two models are subtracted."""
    flat: bool = True
    examples: int = 12_800


class SharedByThreads:
    """The variables that threads of this process share."""

    def __init__(self, spec: Spec):
        self.variables = bare.make_variables(spec)
        self.lock = tf.CriticalSection()

    def fetch(self) -> list[tf.Tensor]:
        return [variable.read_value() for variable in self.variables]

    def push(self, tensors: Sequence[tf.Tensor], by_rate: bool) -> None:
        def subtract() -> None:
            for variable, tensor in zip(self.variables, tensors, strict=True):
                if by_rate:
                    bare.descend(variable, tensor)
                else:
                    variable.assign_sub(tensor, read_value=False)

        bare.under(self.lock, subtract)


def made(spec: Spec) -> contenders.Spec:
    """Whose model and data are trained."""
    return contenders.Spec(model=spec.model, batch_size=spec.batch_size, examples=spec.examples)


def arrays_of(spec: Spec) -> Iterator[Any]:
    """The examples of one call after the other; each epoch is in an order of its own."""
    x, y = (tf.constant(array) for array in contenders.make_data(made(spec)))
    count = bare.steps_of_a_call(spec) * spec.batch_size

    def examples(chosen: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.gather(x, chosen), tf.gather(y, chosen)

    order = tf.data.Dataset.range(spec.examples).shuffle(spec.examples).repeat()
    batches = order.batch(count, drop_remainder=True).map(examples, tf.data.AUTOTUNE)
    return iter(batches.prefetch(PREFETCHED))


def file_of(spec: Spec, worker: int, folder: str) -> Any:
    """An iterator over a worker's mini-batches, where variables are created."""
    records = contenders.records_of(*contenders.make_data(made(spec)))
    path = os.path.join(folder, f"{worker}.bin")
    records[worker :: spec.workers].tofile(path)
    dataset = tf.data.FixedLengthRecordDataset(path, 4 * records.shape[1]).repeat()
    dataset = dataset.shuffle(SHUFFLED).batch(spec.batch_size, drop_remainder=True)
    return iter(dataset.map(contenders.decode))


def adapter_of(spec: Spec) -> Any:
    """An iterator over the mini-batches that `fit` makes of arrays, epoch after epoch."""
    x, y = contenders.make_data(made(spec))
    adapter = ArrayDataAdapter(x, y, batch_size=spec.batch_size, shuffle=True)
    return iter(adapter.get_tf_dataset().repeat().prefetch(tf.data.AUTOTUNE))


class Worker:
    """One worker: a model of its own, and a function that makes the steps of a call.

    Args:
        spec: what to run.
        shared: what all workers fetch from, and push to.
        device: where it computes; None for here.
        read: gives an iterator on that device, or None where the chief hands in what is trained.
    """

    def __init__(self, spec: Spec, shared: Any, device: str | None, read: Callable[[], Any] | None):
        self.spec, self.shared, self.device = spec, shared, device
        with tf.device(device):
            self.model = contenders.build_model(made(spec))
            self.model.optimizer.build(self.model.trainable_variables)
            self.model.train_step(self._first())  # the metrics' variables are made, on the device
            self.weights = [variable.value for variable in self.model.trainable_variables]
            self.sums = [tf.Variable(tf.zeros_like(w)) for w in self.weights] if spec.sums else []
            self.iterator = read() if read else None

    def _first(self) -> tuple[tf.Tensor, tf.Tensor]:
        shape = self.model.input_shape[1:]
        size = self.spec.batch_size
        return tf.zeros([size, *shape]), tf.zeros([size], tf.int64)

    def _gradients(self, x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        """What Keras's own step does before it applies them."""
        model = self.model
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = model.compute_loss(x=x, y=y, y_pred=outputs, training=True)
        model._loss_tracker.update_state(loss)  # noqa: SLF001 - as Keras's own step does
        gradients = tape.gradient(loss, self.weights)
        model.compute_metrics(x, y, outputs)
        return gradients

    def _batch(self, given: Sequence[tf.Tensor], k: tf.Tensor) -> Any:
        if not given:
            return self.iterator.get_next()
        at = k * self.spec.batch_size
        return [part[at : at + self.spec.batch_size] for part in given]

    def _take(self, weights: Sequence[tf.Tensor]) -> None:
        for mine, value in zip(self.weights, weights, strict=True):
            mine.assign(value, read_value=False)

    def _step(self, given: Sequence[tf.Tensor], k: tf.Tensor) -> None:
        """Fetches, computes and pushes."""
        self._take(self.shared.fetch())
        self.shared.push(self._gradients(*self._batch(given, k)), by_rate=True)

    def _local_step(self, given: Sequence[tf.Tensor], k: tf.Tensor) -> None:
        gradients = self._gradients(*self._batch(given, k))
        for total, gradient in zip(self.sums, gradients, strict=False):
            total.assign_add(gradient, read_value=False)
        pairs = zip(gradients, self.model.trainable_variables, strict=True)
        self.model.optimizer.apply_gradients(pairs)

    @tf.function(autograph=False)
    def steps(self, *given: tf.Tensor) -> None:
        """Those of one call; `given` are their examples, if the worker reads none itself."""
        first = tf.constant(0)
        with tf.device(self.device):
            if self.spec.period == 1:
                step = functools.partial(self._step, given)
                bare.loop(self.spec.steps_per_call, step, first)
                return
            base = self.shared.fetch()
            self._take(base)
            for total in self.sums:
                total.assign(tf.zeros_like(total), read_value=False)
            bare.loop(self.spec.period, functools.partial(self._local_step, given), first)
            if self.sums:
                self.shared.push([total.read_value() for total in self.sums], by_rate=True)
                return
            now = [mine.read_value() for mine in self.weights]
            changes = [b - n for b, n in zip(base, now, strict=True)]
            self.shared.push(changes, by_rate=False)


def trained(
    spec: Spec,
    shared: Any,
    devices: Sequence[str | None],
    pids: processor_time.Pids,
    folder: str,
) -> dict:
    """Trains for a while, a worker on each device."""
    arrays = arrays_of(spec) if spec.data == "arrays" else None
    adapter = adapter_of(spec) if spec.data == "adapter" else None
    workers = []
    for m, device in enumerate(devices):
        read = None if arrays else functools.partial(file_of, spec, m, folder)
        if adapter is not None:
            read = lambda: adapter  # noqa: E731 - one for all, as `fit` has one
        workers.append(Worker(spec, shared, device, read))

    def call(worker: Worker) -> None:
        given = next(arrays) if arrays else ()
        with tf.device(worker.device):
            worker.steps(*given)

    calls = [functools.partial(call, worker) for worker in workers]
    result = bare.measure(spec, calls, pids)
    return {**result, "loss": float(workers[0].model.metrics[0].result())}


def run(spec: Spec) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        if spec.kind == "threads":
            tf.config.threading.set_intra_op_parallelism_threads(spec.intra)
            pids = {processor_time.CHIEF: [os.getpid()]}
            return trained(spec, SharedByThreads(spec), [None] * spec.workers, pids, folder)
        with bare_cluster.servers(spec) as pids:
            devices = [bare_cluster.device_of("worker", m) for m in range(spec.workers)]
            return trained(spec, bare_cluster.Shared(spec), devices, pids, folder)


def main() -> None:
    spec = Spec(**json.loads(sys.argv[1]))
    bare.finish(spec, run(spec))


if __name__ == "__main__":
    main()
