"""A chief whose workers average, and are killed meanwhile.

Usage: barrier.py SEED. Prints RESULT with what was counted.
"""

import json
import sys

import keras
import numpy as np
import witness

import tf_dsgd

STEPS = 300

# As the outer optimizer this is the plain mean; it is made before this process is in the cluster.
strategy = tf_dsgd.PeriodicAveragingStrategy(
    average_every=3, outer_optimizer=keras.optimizers.SGD(1.0)
)
with strategy.scope():
    # Two weights, one on each ps. The gradient of both is 1, so that Adam's steps are 1, too.
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.Adam(1.0), lambda y, prediction: prediction)
killer = witness.Killer(strategy, ["one", "all"], seed=int(sys.argv[1]))
x = np.ones((4 * STEPS, 1), "float32")
model.fit(x, x, batch_size=4, epochs=10_000, verbose=0, callbacks=[killer])
ledger = strategy.ledger()
result = {
    "epochs": killer.epochs,
    "killed": killer.killed,
    "came_back": killer.came_back,
    "steps": [sum(w.steps for w in shard.workers) for shard in ledger.shards],
    "in_flight": [shard.in_flight for shard in ledger.shards],
    "cut_off": ledger.cut_off,
    "averages": strategy.updates,
    "iterations": int(model.optimizer.iterations),
    "weights": [float(w.numpy().item()) for w in model.trainable_variables],
}
print("RESULT", json.dumps(result), flush=True)
