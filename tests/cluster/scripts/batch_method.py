"""A chief that trains by L-BFGS, and says when a worker has a part of a pass's sum.

Usage: batch_method.py. Says AT e n once the worker that is to be struck in epoch e holds n
mini-batches that nobody else has; prints RESULT with losses, weights and what was counted.
"""

import json
import threading
import time

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd

EXAMPLES, FEATURES, BATCH, EPOCHS = 120, 4, 2, 5
STRUCK = {1: 1, 3: 2}
"""An epoch to the worker."""
HELD = 8
"""Of a call's four at a time: one call's are summed, and the next ones are being computed."""


def data():
    random = np.random.default_rng(2)
    x = random.standard_normal((EXAMPLES, FEATURES)).astype("float32")
    x *= [1.0, 2.0, 0.3, 3.0]
    return x, np.sin(x.sum(1, keepdims=True))


class Slow(keras.layers.Layer):
    """Changes nothing, and takes a twentieth of a second."""

    def call(self, inputs):
        first = tf.fill([256, 256], tf.reduce_sum(tf.stop_gradient(inputs)))
        _, last = tf.while_loop(
            lambda n, _: n < 60, lambda n, m: (n + 1, tf.tanh(m @ m)), (0, first)
        )
        return inputs + tf.minimum(tf.reduce_sum(tf.square(last)), 0.0)


class Says(keras.callbacks.Callback):
    """Lets whoever started this process strike in the middle of a pass."""

    def __init__(self, strategy):
        super().__init__()
        self.tasks = strategy.engine.scheduler.tasks
        self.watching = None

    def on_epoch_begin(self, epoch, logs=None):
        if epoch in STRUCK:
            self.watching = threading.Thread(target=self.watch, args=(epoch, STRUCK[epoch]))
            self.watching.start()

    def on_epoch_end(self, epoch, logs=None):
        if self.watching is not None:
            self.watching.join()

    def watch(self, epoch, worker):
        deadline = time.monotonic() + 60.0
        while self.tasks[worker].unsent < HELD and time.monotonic() < deadline:
            time.sleep(0.001)
        print("AT", epoch, self.tasks[worker].unsent, flush=True)


def main():
    cluster = tf_dsgd.TFCluster(late_after_seconds=1.0, worker_timeout_seconds=90.0)
    strategy = tf_dsgd.SandblasterStrategy(cluster)
    with strategy.scope():
        dense = keras.layers.Dense(1, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((FEATURES,)), Slow(), dense])
        model.compile(loss="mse")
    x, y = data()
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
        shuffle=False,
        callbacks=[Says(strategy)],
    )
    ledger = strategy.ledger()
    result = {
        "losses": history.history["loss"],
        "weights": np.concatenate([w.ravel() for w in model.get_weights()]).tolist(),
        "steps": [sum(w.steps for w in shard.workers) for shard in ledger.shards],
        "in_flight": ledger.in_flight,
        "evaluations": strategy.steps / (EXAMPLES // BATCH),
        "by_a_backup_task": strategy.engine.scheduler.tasks[STRUCK[3]].owes is not None,
    }
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
