"""A chief that trains by L-BFGS, and waits in the middle of two passes for a line.

Usage: batch_method.py. Says AT n there; prints RESULT with losses, weights and what was counted.
"""

import json
import sys

import keras
import numpy as np

import tf_dsgd

EXAMPLES, FEATURES, BATCH, EPOCHS = 120, 4, 4, 5
WAITS = {1: 10, 3: 12}  # an epoch to a mini-batch of it


def data():
    random = np.random.default_rng(2)
    x = random.standard_normal((EXAMPLES, FEATURES)).astype("float32")
    x *= [1.0, 2.0, 0.3, 3.0]
    return x, np.sin(x.sum(1, keepdims=True))


class Wait(keras.callbacks.Callback):
    """Has whoever started this process do something to the workers."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if WAITS.get(self.epoch) == batch:
            print("AT", self.epoch, flush=True)
            sys.stdin.readline()


def main():
    strategy = tf_dsgd.SandblasterStrategy()
    with strategy.scope():
        dense = keras.layers.Dense(1, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((FEATURES,)), dense])
        model.compile(loss="mse")
    x, y = data()
    history = model.fit(
        x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, shuffle=False, callbacks=[Wait()]
    )
    ledger = strategy.ledger()
    result = {
        "losses": history.history["loss"],
        "weights": np.concatenate([w.ravel() for w in model.get_weights()]).tolist(),
        "steps": [sum(w.steps for w in shard.workers) for shard in ledger.shards],
        "in_flight": ledger.in_flight,
        "evaluations": strategy.steps / (EXAMPLES // BATCH),
    }
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
