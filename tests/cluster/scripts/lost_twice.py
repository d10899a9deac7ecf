"""Two threads find the same worker lost in the same moment; it comes back and takes part.

Prints RESULT: the incarnation of that worker's messages by each shard and in the chief; its
steps before and after; the steps counted; and those expected.
"""

import contextlib
import json
import threading

import keras
import numpy as np

import tf_dsgd

STEPS = 200
AT_ONCE_SECONDS = 1.0
INCARNATION = 0  # the column of a shard's counters

strategy = tf_dsgd.DownpourStrategy(push_every=2, fetch_every=2)
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
engine = strategy.engine
x = np.ones((2 * STEPS, 2))


def steps():
    return strategy.ledger().workers[1].steps


class ComesBack(keras.callbacks.Callback):
    """Ends training when worker 1 has taken part again, or after so many epochs."""

    epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1
        self.model.stop_training = steps() > before + 10 or epoch > 1000


def fit(comes_back):
    model.fit(x, x[:, :1], batch_size=2, epochs=100_000, verbose=0, callbacks=[comes_back])


before = 0
first, again = ComesBack(), ComesBack()
fit(first)
before = steps()

both = threading.Barrier(2)
fence = engine.shards[0].fence


def slow_fence(*args):
    """Another who is here, too, has come as far before either goes on."""
    with contextlib.suppress(threading.BrokenBarrierError):
        both.wait(AT_ONCE_SECONDS)
    return fence(*args)


engine.shards[0].fence = slow_fence
threads = [
    threading.Thread(target=engine.rounds.members.lose, args=(engine.tasks[1],)) for _ in range(2)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(30.0)
del engine.shards[0].fence

fit(again)
incarnations = [int(shard.counters().rows[1, INCARNATION]) for shard in engine.shards]
incarnations.append(engine.store.incarnations[1])
expected = STEPS * (first.epochs + again.epochs)
print("RESULT", json.dumps([incarnations, before, steps(), strategy.steps, expected]), flush=True)
