"""A worker of several tasks, each of which takes less memory than a copy of the model would.

Usage: parts_beyond_memory.py TASKS LAYERS WIDTH. Prints RESULT: bytes of the weights, the most
bytes that a task ever had beside what it has before there is a model, the loss before and after
`fit`, and mini-batches that the shards counted.
"""

import json
import pathlib
import sys

import keras
import numpy as np
import witness

import tf_dsgd

BATCH, STEPS = 4, 3
tasks, layers, width = map(int, sys.argv[1:])


def most_bytes(process):
    """The most that was ever resident, by the kernel."""
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


parts = {f"part{p}_.*": p for p in range(tasks)}
strategy = tf_dsgd.DownpourStrategy(
    tf_dsgd.TFCluster(), model_parallel=tf_dsgd.ModelParallel(parts)
)
before = {process: most_bytes(process) for process in witness.worker_processes().values()}
with strategy.scope():
    stack = [
        keras.layers.Dense(width, use_bias=False, name=f"part{i * tasks // layers}_{i}")
        for i in range(layers)
    ]
    model = keras.Sequential([keras.Input((width,)), *stack])
    model.compile(keras.optimizers.SGD(1e-3), "mse")
x = np.random.default_rng(0).normal(size=(BATCH * STEPS, width)).astype("float32")
y = np.zeros((BATCH * STEPS, width), "float32")
at_first = model.evaluate(x, y, batch_size=BATCH, verbose=0)
model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
at_last = model.evaluate(x, y, batch_size=BATCH, verbose=0)
assert len(before) == tasks
most = max(most_bytes(process) - had for process, had in before.items())
nbytes = sum(shard.bytes for shard in strategy.shards())
print("RESULT", json.dumps([nbytes, most, at_first, at_last, strategy.steps]), flush=True)
