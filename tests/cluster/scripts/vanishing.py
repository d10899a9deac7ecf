"""Trains until a line comes by stdin; prints RESULT: how often each example counted."""

import json
import os
import sys
import threading

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd

EXAMPLES, BATCH = 64, 4


class UntilTold(keras.callbacks.Callback):
    """Ends `fit` at the end of an epoch."""

    def __init__(self):
        super().__init__()
        self.told = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        sys.stdin.readline()
        self.told.set()

    def on_epoch_end(self, epoch, logs=None):
        print("EPOCH", epoch, flush=True)
        self.model.stop_training = self.told.is_set()


jobs = os.environ.get("JOBS")  # in place of TF_CONFIG, where the chief has no address in it
spec = None if jobs is None else tf.train.ClusterSpec(json.loads(jobs))
timeout = float(os.environ.get("TIMEOUT", "10"))
cluster = tf_dsgd.TFCluster(spec, worker_timeout_seconds=timeout)
if spec is not None or "ps" in json.loads(os.environ["TF_CONFIG"])["cluster"]:
    strategy = tf_dsgd.DownpourStrategy(cluster, push_every=1, fetch_every=1)
else:  # weights are on the workers; each worker's changes count by their mean
    strategy = tf_dsgd.PeriodicAveragingStrategy(cluster, average_every=2)
with strategy.scope():
    inputs = keras.Input((EXAMPLES,))
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Model(inputs, dense(inputs))
    # A weight falls by one for each time that its example was trained on.
    model.compile(keras.optimizers.SGD(float(BATCH)), lambda _, y: keras.ops.sum(y, axis=-1))
x = np.eye(EXAMPLES, dtype="float32")
history = model.fit(
    x, x[:, :1], batch_size=BATCH, epochs=100_000, verbose=0, callbacks=[UntilTold()]
)
counts = -model.trainable_variables[0].numpy()[:, 0]
found = {"epochs": len(history.epoch), "counts": sorted({float(count) for count in counts})}
print("RESULT", json.dumps(found), flush=True)
