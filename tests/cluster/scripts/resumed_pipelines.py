"""A worker with a pipeline of its own is killed, and then the chief: in the middle of an epoch.

Usage: resumed_pipelines.py FOLDER, twice. The first run ends with "Broken"; the second, which goes
on from the first one's checkpoint, prints RESULT: mini-batches, and how often each example was
trained on at least and at most, by what weights count; and how often both should have been.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd
from tests import faults, helpers

EXAMPLES, BATCH, EPOCHS = 480, 4, 2

folder = Path(sys.argv[1])
first = not folder.exists()
strategy = tf_dsgd.DownpourStrategy(push_every=2, fetch_every=2)
with strategy.scope():
    inputs = keras.Input((EXAMPLES,))
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Model(inputs, dense(inputs))
    model.compile(keras.optimizers.SGD(1.0), lambda _, y: keras.ops.sum(y, axis=-1))


def numbers(context):
    data = tf.data.Dataset.from_tensor_slices((np.eye(EXAMPLES), np.zeros((EXAMPLES, 1))))
    return data.shard(context.num_input_pipelines, context.input_pipeline_id).batch(BATCH)


def strike(batch, logs):
    if batch == 40:
        faults.task("worker", 1).kill()
    if batch == 80:
        engine = strategy.engine
        engine.until(lambda: not engine.store.present[1])
        raise helpers.Broken


callbacks = [tf_dsgd.callbacks.BackupAndRestore(folder, save_freq=7)]
if first:
    callbacks.append(keras.callbacks.LambdaCallback(on_train_batch_end=strike))
data = strategy.distribute_datasets_from_function(numbers)
model.fit(data, epochs=EPOCHS, verbose=0, shuffle=False, callbacks=callbacks)
times = -BATCH * model.trainable_variables[0].numpy()  # a batch's gradient is the mean
result = [strategy.steps, times.min().item(), times.max().item()]
print("RESULT", json.dumps([result, [EPOCHS * EXAMPLES // BATCH, EPOCHS, EPOCHS]]), flush=True)
