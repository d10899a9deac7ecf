"""A chief whose workers hold the weights; trains until a worker is killed, or does not answer."""

import keras
import numpy as np

import tf_dsgd

strategy = tf_dsgd.PeriodicAveragingStrategy(
    tf_dsgd.TFCluster(worker_timeout_seconds=5.0), average_every=3
)
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((1200, 1), "float32")
trains = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, logs: epoch == 1 and print("TRAINING", flush=True)
)
model.fit(x, x, batch_size=4, epochs=100_000, verbose=0, callbacks=[trains])
