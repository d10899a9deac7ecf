"""A chief that trains by Hogwild! while its workers are killed; prints a RESULT line.

Each mini-batch has rows of its own, so each row tells how often its mini-batch was applied: once an
epoch.
"""

import json

import keras
import numpy as np

import tf_dsgd
from tests import faults

BATCHES, BATCH, EPOCHS = 400, 4, 4


strategy = tf_dsgd.HogwildStrategy(tf_dsgd.TFCluster(worker_timeout_seconds=5.0))
rows = BATCHES * BATCH
with strategy.scope():
    ids = keras.Input((1,), dtype="int32")
    table = keras.layers.Embedding(rows, 2, "zeros", name="table")
    model = keras.Model(ids, keras.ops.sum(table(ids), axis=1))
    model.compile(keras.optimizers.SGD(float(BATCH)), lambda _, y: -keras.ops.sum(y, axis=-1))
script = [faults.fail_at(m, step) for m in (0, 1) for step in (20 + 7 * m, 150 + 11 * m)]
playing = faults.OnProcesses(strategy, script)
x = np.arange(rows, dtype="int32")[:, None]
model.fit(x, x, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[playing])
times = model.get_weights()[0].reshape(BATCHES, -1)
ledger = strategy.ledger()
result = {
    "struck": len(playing.struck),
    "least": float(times.min()),
    "most": float(times.max()),
    "steps": [sum(w.steps for w in shard.workers) for shard in ledger.shards],
    "in_flight": [shard.in_flight for shard in ledger.shards],
    "sent": [shard.sent for shard in ledger.shards],
    "counted": [shard.applied + shard.refused for shard in ledger.shards],
}
print("RESULT", json.dumps(result), flush=True)
