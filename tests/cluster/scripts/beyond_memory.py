"""Chief and workers that could not hold the table: the address space of each is smaller than it.

Usage: beyond_memory.py ROWS WIDTH. Prints RESULT: the bytes of the table, the highest limit, what
`evaluate` says before and after `fit`, and mini-batches that the shards counted.
"""

import json
import resource
import sys

import keras
import numpy as np
import psutil
import witness

import tf_dsgd

BATCH, STEPS = 32, 60
SPARE_BYTES = 512 << 20  # the arenas of threads that have not begun, and what tracing takes
rows, width = int(sys.argv[1]), int(sys.argv[2])


def data(seed):
    """Ids over all rows, of which few are named often: these are told by their parity."""
    draw = np.random.default_rng(seed)
    often = np.random.default_rng(0).integers(0, rows, 40)
    ids = np.stack([draw.choice(often, BATCH * STEPS), draw.integers(0, rows, BATCH * STEPS)], 1)
    return ids, (ids[:, :1] % 2).astype("float32")


strategy = tf_dsgd.DownpourStrategy(
    tf_dsgd.TFCluster(), push_every=2, fetch_every=2, placement={"table/.*": tf_dsgd.Rows()}
)
limits = []
for process in [psutil.Process(), *witness.worker_processes().values()]:
    limits.append(process.memory_info().vms + SPARE_BYTES)
    process.rlimit(resource.RLIMIT_AS, (limits[-1], limits[-1]))
with strategy.scope():
    ids = keras.Input((2,), dtype="int64")
    features = keras.layers.Flatten()(keras.layers.Embedding(rows, width, name="table")(ids))
    model = keras.Model(ids, keras.layers.Dense(1, "sigmoid")(features))
    model.compile(keras.optimizers.SGD(2.0), "binary_crossentropy")
x, y = data(1)
before = model.evaluate(x, y, batch_size=BATCH, verbose=0)
model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
after = model.evaluate(x, y, batch_size=BATCH, verbose=0)
assert model.predict(x[:10], verbose=0).shape == (10, 1)
nbytes = sum(shard.bytes for shard in strategy.shards())
print("RESULT", json.dumps([nbytes, max(limits), before, after, strategy.steps]), flush=True)
