"""Drawing mini-batches from the chief's input fails for a worker that is lost in that moment.

That each example was applied once an epoch is asserted.
"""

import threading

import keras
import tensorflow as tf

import tf_dsgd
from tests import faults

EXAMPLES, BATCH, EPOCHS, AT = 1600, 4, 3, 20

strategy = tf_dsgd.DownpourStrategy(tf_dsgd.TFCluster(worker_timeout_seconds=30.0))
with strategy.scope():
    model = faults.seen_model(EXAMPLES, keras.optimizers.SGD(0.01))

dequeue = tf.raw_ops.QueueDequeueManyV2
mine = {"calls": 0}


def dequeue_or_lose(**arguments):
    """As worker 1 draws for the 20th time it dies, and its thread learns of it now."""
    if threading.current_thread().name == "tf_dsgd worker 1":
        mine["calls"] += 1
        if mine["calls"] == AT:
            process = faults.task("worker", 1)
            process.kill()
            process.wait(10.0)
            raise tf.errors.UnavailableError(None, None, "worker 1 is gone")
    return dequeue(**arguments)


tf.raw_ops.QueueDequeueManyV2 = dequeue_or_lose
x, y = faults.data(EXAMPLES)
history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0)
assert mine["calls"] >= AT, mine
assert strategy.engine.store.incarnations[1] == 1
faults.assert_metrics_whole(history, y)
ledger = faults.assert_nothing_lost(strategy, model, EPOCHS, EXAMPLES // BATCH)
print("RESULT", [worker.steps for worker in ledger.workers], flush=True)
