"""A worker of several tasks, none of which could hold a copy of the model: its address space ends.

Usage: parts_beyond_memory.py TASKS LAYERS WIDTH ROOM_MB. Each task has as many megabytes beside what it
takes before there is a model, and a part of the layers. Prints RESULT: bytes of the weights, the
loss before and after `fit`, and mini-batches that the shards counted.
"""

import json
import resource
import sys

import keras
import numpy as np
import witness

import tf_dsgd

BATCH, STEPS = 4, 6
tasks, layers, width, room = map(int, sys.argv[1:])


parts = {f"part{p}": p for p in range(tasks)}
strategy = tf_dsgd.DownpourStrategy(tf_dsgd.TFCluster(), model_parallel=tf_dsgd.ModelParallel(parts))
for process in witness.worker_processes().values():
    limit = process.memory_info().vms + (room << 20)
    process.rlimit(resource.RLIMIT_AS, (limit, limit))
with strategy.scope():
    stack = [
        keras.layers.Dense(width, use_bias=False, name=f"part{i * tasks // layers}_{i}")
        for i in range(layers)
    ]
    model = keras.Sequential([keras.Input((width,)), *stack])
    model.compile(keras.optimizers.SGD(0.1), "mse")
x = np.random.default_rng(0).normal(size=(BATCH * STEPS, width)).astype("float32")
y = np.zeros((BATCH * STEPS, width), "float32")
before = model.evaluate(x, y, batch_size=BATCH, verbose=0)
model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
after = model.evaluate(x, y, batch_size=BATCH, verbose=0)
nbytes = sum(shard.bytes for shard in strategy.shards())
print("RESULT", json.dumps([nbytes, before, after, strategy.steps]), flush=True)
