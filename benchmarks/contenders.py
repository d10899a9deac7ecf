"""One contender of a benchmark, in a process of its own with TensorFlow's default threads.

    python benchmarks/contenders.py '{"kind": "downpour", "period": 20}'

Prints one line of JSON. The first `fit`, of one epoch, traces the graphs and is not timed. The
timed one ends when a weight has been read afterwards: a strategy answers that only when every
mini-batch handed out is done and every update is applied, and the steps counted are those that the
shard had then applied.
"""

import dataclasses
import json
import math
import os
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import at_once
import keras
import memory
import numpy as np
import processor_time
import tensorflow as tf

CLASSES = 10
IDS_PER_EXAMPLE = 20
SHAPES = {"cnn": (32, 32, 3), "lstm": (32, 64), "transformer": (32, 64)}
"""Of an example; else it is a vector of 784. LSTM and transformer have 32 places in a row."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """What to run. `period` is both `push_every` and `fetch_every`, or `average_every`."""

    kind: str = "keras"
    """`keras`: plain fit, `member`: one of its processes; `downpour`, `averaging`, `elastic`,
    `peers`: under that strategy."""
    tau: float = 0.0
    """Of `compression=Threshold(tau)`; 0 for no codec."""
    model: str = "mlp"
    """`mlp`, `wide`, `deep`, `embedding`, `dense_embedding`, or one of `SHAPES`."""
    workers: int = 2
    period: int = 20
    steps_per_execution: int = 1
    jit_compile: bool = False
    variables: int = 6
    rows: int = 1_000_000
    batch_size: int = 64
    examples: int = 12_800
    epochs: int = 5
    callback: str = ""
    """`monitor`: StalenessMonitor with a folder; `empty`: one that does nothing at each batch."""
    processes: int = 1
    """Of `keras`: so many at one moment, each with a model and a share of the cores of its own."""
    books: bool = True
    """Whether shards number and count messages; see `without_books`."""


def make_data(spec: Spec) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    if "embedding" in spec.model:
        x = random.integers(0, spec.rows, size=(spec.examples, IDS_PER_EXAMPLE), dtype=np.int32)
    else:
        shape = SHAPES.get(spec.model, (784,))
        x = random.standard_normal((spec.examples, *shape), dtype=np.float32)
    return x, random.integers(0, CLASSES, size=spec.examples)


def records_of(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Examples as rows of float32, for files of records of one length."""
    return np.concatenate([x, y.astype(np.int64)[:, None].view(np.float32)], axis=1)


def decode(batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The examples of a mini-batch of such records."""
    numbers = tf.io.decode_raw(batch, tf.float32)
    return numbers[:, :-2], tf.bitcast(numbers[:, -2:], tf.int64)


@tf.custom_gradient
def gather_with_dense_gradient(table, ids):
    """`tf.gather` whose gradient is a whole table, as if embeddings knew no sparse gradients."""

    def gradient(upstream):
        dense = tf.math.unsorted_segment_sum(
            tf.reshape(upstream, [-1, table.shape[1]]), tf.reshape(ids, [-1]), table.shape[0]
        )
        return dense, None

    return tf.gather(table, ids), gradient


class DenseGradientEmbedding(keras.layers.Layer):
    """`keras.layers.Embedding`, but for the gradient."""

    def __init__(self, rows, width, **kwargs):
        super().__init__(**kwargs)
        self.rows, self.width = rows, width

    def build(self, input_shape):
        self.table = self.add_weight(shape=(self.rows, self.width), initializer="uniform")

    def call(self, ids):
        return gather_with_dense_gradient(tf.convert_to_tensor(self.table), ids)


class Block(keras.layers.Layer):
    """A transformer's block: attention and two dense layers, each added to what it is given."""

    def __init__(self, width: int):
        super().__init__()
        layers = keras.layers
        self.attention = layers.MultiHeadAttention(4, width // 4)
        self.dense = keras.Sequential([layers.Dense(4 * width, "gelu"), layers.Dense(width)])
        self.first, self.second = layers.LayerNormalization(), layers.LayerNormalization()

    def build(self, shape):
        self.attention.build(shape, shape)
        for layer in (self.dense, self.first, self.second):
            layer.build(shape)

    def call(self, x):
        x = self.first(x + self.attention(x, x))
        return self.second(x + self.dense(x))


def hidden_layers(spec: Spec) -> list[keras.layers.Layer]:
    layers = keras.layers
    if spec.model == "cnn":
        convolutions = [
            (layers.Conv2D(n, 3, activation="relu"), layers.MaxPooling2D()) for n in (32, 64)
        ]
        return [*(layer for pair in convolutions for layer in pair), layers.Flatten()]
    if spec.model == "lstm":
        return [layers.LSTM(64)]
    if spec.model == "transformer":
        return [Block(64), layers.GlobalAveragePooling1D()]
    if spec.model == "mlp":
        widths = [512, 512]
    elif spec.model == "wide":
        widths = [4096, 4096]
    else:  # two variables for each layer, the last one included
        widths = [64] * (spec.variables // 2 - 1)
    return [keras.layers.Dense(width, "relu") for width in widths]


def build_model(spec: Spec) -> keras.Model:
    if "embedding" in spec.model:
        embedding = keras.layers.Embedding if spec.model == "embedding" else DenseGradientEmbedding
        layers = [
            keras.Input((IDS_PER_EXAMPLE,), dtype="int32"),
            embedding(spec.rows, 64),
            keras.layers.GlobalAveragePooling1D(),
        ]
    else:
        layers = [keras.Input(SHAPES.get(spec.model, (784,))), *hidden_layers(spec)]
    model = keras.Sequential([*layers, keras.layers.Dense(CLASSES)])
    model.compile(
        optimizer=keras.optimizers.SGD(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=spec.steps_per_execution,
        jit_compile=spec.jit_compile,
    )
    return model


class EmptyCallback(keras.callbacks.Callback):
    """What Keras itself takes to call a callback at each batch."""

    def on_train_batch_end(self, batch, logs=None):
        pass


def make_callbacks(spec: Spec, run_dir: str) -> list[keras.callbacks.Callback]:
    if spec.callback == "monitor":
        import tf_dsgd

        return [tf_dsgd.callbacks.StalenessMonitor(run_dir)]
    return [EmptyCallback()] if spec.callback == "empty" else []


def make_strategy(spec: Spec):
    if spec.kind in ("keras", "member"):
        return None
    import tf_dsgd

    cluster = tf_dsgd.LocalCluster(num_workers=spec.workers)
    if spec.kind == "averaging":
        return tf_dsgd.PeriodicAveragingStrategy(cluster, average_every=spec.period)
    if spec.kind == "elastic":
        return tf_dsgd.ElasticAveragingStrategy(cluster, average_every=spec.period)
    codec = tf_dsgd.compression.Threshold(spec.tau) if spec.tau else None
    if spec.kind == "peers":
        return tf_dsgd.CompressedAsyncStrategy(cluster, compression=codec)
    return tf_dsgd.DownpourStrategy(
        cluster, push_every=spec.period, fetch_every=spec.period, compression=codec
    )


def without_books() -> None:
    """From now on shards apply whatever comes, and count nothing but versions and mini-batches.

    No numbers that tell repetitions, no incarnations, no ledger, no staleness, no audit at drains.
    """
    from tf_dsgd.engine.base import Engine
    from tf_dsgd.engine.shard import Shard

    def receive(shard, parcel, unpack, apply):
        def body(arrived):
            content = unpack(arrived)
            _, _, _, version, steps = tf.unstack(content[0], 5)
            shard.count_version(apply(content, shard.version.read_value() - version))
            shard.schedule_step.assign_add(steps, read_value=False)
            return tf.constant(True)

        return shard.locked(parcel, body)

    Shard.receive = receive
    Engine._audit = lambda engine: None


def run_fit(spec: Spec, run_dir: str) -> dict:
    if not spec.books:
        without_books()
    strategy = make_strategy(spec)
    x, y = make_data(spec)
    tf.zeros([1])  # opens the devices, so that memory is counted from here
    before = memory.peak_bytes()
    if strategy is None:
        model = build_model(spec)
    else:
        with strategy.scope():
            model = build_model(spec)
    smallest = min(model.trainable_variables, key=lambda variable: math.prod(variable.shape))
    fit = {"x": x, "y": y, "batch_size": spec.batch_size, "verbose": 0}
    fit["callbacks"] = make_callbacks(spec, run_dir)

    model.fit(**fit)
    smallest.numpy()
    if spec.kind == "member":
        at_once.begin()
    steps_before = strategy.steps if strategy else 0
    start, cpu = time.perf_counter(), time.process_time()
    model.fit(**fit, epochs=spec.epochs)
    smallest.numpy()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    if strategy and spec.books:
        steps = strategy.steps - steps_before
    else:
        steps = spec.epochs * math.ceil(spec.examples / spec.batch_size)

    parameter_bytes = memory.parameter_bytes(model)
    result = {
        "steps": steps,
        "seconds": seconds,
        "steps_per_second": steps / seconds,
        "cpu_seconds": {processor_time.CHIEF: cpu},
        "cpu_seconds_per_step": cpu / steps,
        "parameter_bytes": parameter_bytes,
        "peak_growth_bytes": memory.peak_bytes() - before,
        "live_copies": memory.live_bytes() / parameter_bytes,
    }
    if strategy:
        result["staleness_mean"] = strategy.staleness().mean
    return result


def main() -> None:
    spec = Spec(**json.loads(sys.argv[1]))
    if spec.processes > 1 and spec.kind == "keras":
        own = dataclasses.replace(spec, kind="member")
        command = [sys.executable, __file__, json.dumps(dataclasses.asdict(own))]
        print(json.dumps(at_once.run(command, spec.processes)))
        return
    if spec.kind == "member":
        share = max(1, (os.cpu_count() or 1) // spec.processes)
        tf.config.threading.set_intra_op_parallelism_threads(share)
    with tempfile.TemporaryDirectory() as run_dir:
        result = run_fit(spec, run_dir)
    print(json.dumps({"spec": dataclasses.asdict(spec), **result}))


if __name__ == "__main__":
    main()
