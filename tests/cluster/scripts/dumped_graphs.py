"""Trains under several strategies, one after another; TensorFlow is told to dump its graphs."""

import keras
import numpy as np

import tf_dsgd

BY_STEP = "rows of each step"
"""As where ids are not known before a round."""
STRATEGIES = {
    "every step": lambda: tf_dsgd.DownpourStrategy(push_every=1, fetch_every=1),
    "rows": lambda: tf_dsgd.DownpourStrategy(
        push_every=2, fetch_every=2, placement={".*embeddings": tf_dsgd.Rows()}
    ),
    BY_STEP: lambda: tf_dsgd.DownpourStrategy(placement={".*embeddings": tf_dsgd.Rows()}),
    "softsync": lambda: tf_dsgd.SoftsyncStrategy(gradients_per_update=2),
    "averaging": lambda: tf_dsgd.PeriodicAveragingStrategy(average_every=3),
    "elastic": lambda: tf_dsgd.ElasticAveragingStrategy(average_every=3),
}


def main():
    x, y = np.random.randint(0, 50, (96, 4)), np.random.randint(0, 3, 96)
    for name, make in STRATEGIES.items():
        tf_dsgd.TFCluster.reads_rows_by_round = name != BY_STEP
        strategy = make()
        with strategy.scope():
            layers = [keras.layers.Embedding(50, 4), keras.layers.Flatten()]
            layers += [keras.layers.BatchNormalization(), keras.layers.Dense(3)]
            model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
            model.compile(
                keras.optimizers.Adagrad(0.01),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        model.fit(x, y, batch_size=8, epochs=1, verbose=0)
        print(f"TRAINED {name} {strategy.steps}", flush=True)


if __name__ == "__main__":
    main()
