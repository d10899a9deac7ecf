"""Two workers are killed and back before the chief calls them; as one joins TensorFlow meets both.

To the chief the other is there. What its next call raises depends on how far TensorFlow is: that it
does not find a variable, or, for a moment, a function. Prints RESULT: whether the latter means that
worker 0 was lost, and worker 1; the incarnations of both; the steps counted and expected.
"""

import json
import time

import keras
import numpy as np
import tensorflow as tf
import witness

import tf_dsgd
from tf_dsgd.transport import probing

STEPS = 100

strategy = tf_dsgd.DownpourStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
x = np.ones((2 * STEPS, 2))
model.fit(x, x[:, :1], batch_size=2, verbose=0)

engine = strategy.engine
members, connection = engine.rounds.members, engine.rounds.members.connection
before = [process.pid for process in witness.worker_processes().values()]
witness.kill([1, 2])
members.lose(engine.tasks[2])
deadline = time.monotonic() + 60.0
while len({p.pid for p in witness.worker_processes().values()} - set(before)) < 2 or not all(
    probing.answers(connection.peers[m].address, 1.0) for m in (1, 2)
):
    assert time.monotonic() < deadline, "the launcher starts them again"
    time.sleep(0.05)
while not connection.join(2, 1.0):
    assert time.monotonic() < deadline, "worker 2 joins"

missing = tf.errors.NotFoundError(None, None, "a function is not registered")
lost = [members.means_lost(engine.tasks[m], missing) for m in (0, 1)]
epochs = 1
while min(engine.store.incarnations[1:]) < 1 or not all(engine.store.present):
    assert time.monotonic() < deadline, "both train again"
    model.fit(x, x[:, :1], batch_size=2, verbose=0)
    epochs += 1
result = [lost, engine.store.incarnations[1:], strategy.steps, STEPS * epochs]
print("RESULT", json.dumps(result), flush=True)
