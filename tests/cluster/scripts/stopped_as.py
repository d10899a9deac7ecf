"""A worker is stopped in the very moment in which the chief has it do something.

Usage: stopped_as.py METHOD WHEN PIPELINES OPTIONS
    (of what carries rounds out: show, send, inputs; drains or trains; workers or chief; of the
    strategy, in JSON)

Prints RESULT: the seconds that the `fit` took in which this happened; how often each example was
trained on, by what weights count; how many steps were counted; and what they should be.
"""

import json
import sys
import time

import keras
import numpy as np
import psutil
import tensorflow as tf

import tf_dsgd
from tests import faults

EXAMPLES, BATCH = 400, 2


method = sys.argv[1]
cluster = tf_dsgd.TFCluster(worker_timeout_seconds=60.0, late_after_seconds=0.5)
strategy = tf_dsgd.DownpourStrategy(cluster, **json.loads(sys.argv[4]))
with strategy.scope():
    inputs = keras.Input((EXAMPLES,))
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Model(inputs, dense(inputs))
    model.compile(keras.optimizers.SGD(1.0), lambda _, y: keras.ops.sum(y, axis=-1))
x, y = np.eye(EXAMPLES, dtype="float32"), np.zeros((EXAMPLES, 1), "float32")
data = {"x": x, "y": y, "batch_size": BATCH}
if sys.argv[3] == "workers":

    def dataset_fn(context):
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        return batches.shard(context.num_input_pipelines, context.input_pipeline_id)

    data = {"x": strategy.distribute_datasets_from_function(dataset_fn), "shuffle": False}


def fit(epochs):
    start = time.monotonic()
    model.fit(**data, epochs=epochs, verbose=0)
    return time.monotonic() - start


fit(1)
engine = strategy.engine
victim = psutil.Process(faults.task("worker", 1).pid)
METHODS = {
    "show": (engine.rounds.outputs, "bring"),
    "send": (engine.rounds, "send_accrued"),
    "inputs": (engine.rounds, "inputs"),
}
place, name = METHODS[method]
does = getattr(place, name)
stopped = False


def stopping(worker, *args):
    global stopped
    if worker.index == 1 and engine.scheduler.draining == (sys.argv[2] == "drains") and not stopped:
        stopped = True
        victim.suspend()
    return does(worker, *args)


setattr(place, name, stopping)
took = fit(6)
assert victim.status() == psutil.STATUS_STOPPED
victim.resume()
fit(3)
weights = -BATCH * model.trainable_variables[0].numpy()  # a batch's gradient is the mean
counted = [weights.min().item(), weights.max().item(), strategy.steps * BATCH / EXAMPLES]
print("RESULT", json.dumps([took, counted, 10.0]), flush=True)
