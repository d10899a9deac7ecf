"""A chief that goes on from another strategy's state, and whose workers are then killed.

Prints DONE, with the faults that struck and the mini-batches that shards have counted.
"""

import json

import keras

import tf_dsgd
from tests import faults

EXAMPLES, BATCH = 800, 4


def make():
    cluster = tf_dsgd.TFCluster(worker_timeout_seconds=10.0)
    strategy = tf_dsgd.DownpourStrategy(cluster, push_every=2, fetch_every=2)
    with strategy.scope():
        model = faults.seen_model(EXAMPLES, keras.optimizers.SGD(0.01))
    return strategy, model


if __name__ == "__main__":
    x, y = faults.data(EXAMPLES)
    strategy, model = make()
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
    state, weights = strategy.state(), model.get_weights()
    strategy, model = make()
    model.set_weights(weights)
    strategy.restore(state)
    script = [faults.fail_at(0, 250), faults.fail_at(1, 330)]
    playing = faults.OnProcesses(strategy, script)
    model.fit(x, y, batch_size=BATCH, epochs=8, verbose=0, callbacks=[playing])
    faults.assert_nothing_lost(strategy, model, 10, EXAMPLES // BATCH)
    print("DONE", json.dumps([len(playing.struck), strategy.steps]), flush=True)
