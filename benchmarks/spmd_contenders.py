"""One contender of `spmd_averaging.py`, in each of two equal processes.

    python -m tf_dsgd.launch --spmd --workers 2 benchmarks/spmd_contenders.py \
        '{"kind": "averaging", "period": 20}'

Worker 0 prints what was measured, as JSON. Nothing of another environment is imported at the top:
this file runs in each of them.
"""

import dataclasses
import json
import os
import statistics
import sys
import time

import processor_time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

BATCH_SIZE = 64
CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Spec:
    """What to run."""

    kind: str = "averaging"
    """`averaging`: fit with the callback; `alone`: fit without; `mirrored`: fit by tf_keras on
    MultiWorkerMirroredStrategy; `large`: averages of a large model; `bare`: TensorFlow's own
    `all_reduce` of as many numbers."""
    period: int = 20
    examples: int = 12_800
    epochs: int = 3
    parameters: int = 25_000_000
    variables: int = 150
    calls: int = 10


def config() -> dict:
    return json.loads(os.environ["TF_CONFIG"])


def worker() -> int:
    return config()["task"]["index"]


def data(examples: int):
    import numpy as np

    random = np.random.default_rng(worker())
    x = random.standard_normal((examples, 784), dtype=np.float32)
    return x, random.integers(0, CLASSES, examples)


def mlp(keras):
    dense = keras.layers.Dense
    layers = [keras.Input((784,)), dense(512, "relu"), dense(512, "relu"), dense(CLASSES)]
    model = keras.Sequential(layers)
    model.compile(
        keras.optimizers.SGD(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def fit(spec: Spec) -> dict:
    """Mini-batches of both processes a second, after an epoch that is not timed.

    Both begin to be timed at one moment, so that those that train alone do so side by side.
    """
    import keras

    import tf_dsgd
    from tf_dsgd.spmd import collectives

    callback = tf_dsgd.callbacks.PeriodicAveraging(average_every=spec.period)
    callbacks = [callback] if spec.kind == "averaging" else []
    x, y = data(spec.examples)
    model = mlp(keras)
    options = {"batch_size": BATCH_SIZE, "verbose": 0, "callbacks": callbacks}
    model.fit(x, y, **options)
    group = collectives.group(60.0)
    group.meet()
    pids = processor_time.of_cluster()
    cpu = processor_time.read(pids)
    averages, start = callback.averages, time.perf_counter()
    model.fit(x, y, epochs=spec.epochs, **options)
    seconds = time.perf_counter() - start
    cpu = processor_time.spent(cpu, processor_time.read(pids))
    steps = spec.epochs * -(-spec.examples // BATCH_SIZE)
    mine = int(1e6 * steps / seconds)
    speeds = group.meet(mine)
    return {
        "steps": steps * len(speeds),
        "cpu_seconds": cpu,
        "steps_per_second": float(speeds.sum()) / 1e6,
        "averages": callback.averages - averages,
    }


def mirrored(spec: Spec) -> dict:
    """Mini-batches of 64; a step of the strategy is two."""
    import tensorflow as tf
    import tf_keras as keras

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    workers = strategy.num_replicas_in_sync
    with strategy.scope():
        model = mlp(keras)
    dataset = tf.data.Dataset.from_tensor_slices(data(spec.examples))
    dataset = dataset.repeat().batch(BATCH_SIZE * workers, drop_remainder=True)
    sharding = tf.data.Options()
    sharding.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = dataset.with_options(sharding)
    steps = spec.examples // BATCH_SIZE
    model.fit(dataset, steps_per_epoch=steps, verbose=0)
    pids = processor_time.of_cluster()
    cpu, start = processor_time.read(pids), time.perf_counter()
    model.fit(dataset, steps_per_epoch=steps, epochs=spec.epochs, verbose=0)
    seconds = time.perf_counter() - start
    return {
        "steps": workers * steps * spec.epochs,
        "cpu_seconds": processor_time.spent(cpu, processor_time.read(pids)),
        "steps_per_second": workers * steps * spec.epochs / seconds,
    }


def large(spec: Spec) -> dict:
    """Seconds of an average, header included."""
    import keras
    import numpy as np

    import tf_dsgd

    class Layer(keras.layers.Layer):
        """One variable, which does nothing."""

        def build(self, input_shape):
            width = spec.parameters // spec.variables
            self.kernel = self.add_weight(shape=(width,), initializer="zeros")

        def call(self, inputs):
            return inputs

    model = keras.Sequential([keras.Input((1,)), *(Layer() for _ in range(spec.variables))])
    callback = tf_dsgd.callbacks.PeriodicAveraging()
    callback.start(model)
    for weight in model.weights:
        weight.assign(np.full(weight.shape, float(worker()), "float32"))
    seconds = timed(lambda: callback.average(model), spec.calls)
    got = {float(np.ptp(w)) + float(w[0]) for w in map(keras.ops.convert_to_numpy, model.weights)}
    if got != {0.5}:
        raise SystemExit(f"the mean of 0 and 1 is {got}")
    return {"seconds": seconds}


def bare(spec: Spec) -> dict:
    """Seconds of `all_reduce` of one tensor, and of as many tensors as there are variables."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def mean(tensors):
        def replica(tensors):
            context = tf.distribute.get_replica_context()
            return context.all_reduce("MEAN", [tf.identity(each) for each in tensors])

        return strategy.run(replica, (tensors,))

    def sync(tensors) -> None:
        for each in mean(tensors):
            each[:1].numpy()

    one = [tf.fill([spec.parameters], float(worker()))]
    many = [tf.fill([spec.parameters // spec.variables], 1.0) for _ in range(spec.variables)]
    return {
        "seconds": timed(lambda: sync(one), spec.calls),
        "seconds_many": timed(lambda: sync(many), spec.calls),
    }


def timed(function, calls: int) -> float:
    """The median, after one call that is not counted."""
    function()
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


KINDS = {"averaging": fit, "alone": fit, "mirrored": mirrored, "large": large, "bare": bare}


def main() -> None:
    spec = Spec(**json.loads(sys.argv[1]))
    result = KINDS[spec.kind](spec)
    if worker() == 0:
        print(json.dumps(result), flush=True)
    if spec.kind in ("mirrored", "bare"):
        os._exit(0)  # the strategy's threads would wait for the other process


if __name__ == "__main__":
    main()
