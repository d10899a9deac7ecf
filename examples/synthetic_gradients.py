"""Two parts of a model that train at the same time: the lower one on a predicted gradient.

    python examples/synthetic_gradients.py
    python examples/synthetic_gradients.py --seeds 5 --workers 2

With model parallelism a lower part waits for the upper one: the gradient of what it gave comes back
from there. Synthetic gradients (Jaderberg et al., Decoupled Neural Interfaces using Synthetic
Gradients, ICML 2017) take that wait away. A small third network beside the lower part predicts the
gradient from what the lower part gives and the label; the lower part steps on the prediction at
once, while the upper part computes, and the predictor learns from the gradient that comes back.

Trains scikit-learn's handwritten digits three times with each seed, on two devices: coupled, as
usual; decoupled; and with the lower part as it began, which is what a prediction must beat.
"""

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_dsgd

CLASSES = 10


class Decoupled(keras.Model):
    """Two parts, of which the lower one steps on a gradient that a third one predicts.

    Args:
        lower: gives `[examples, values]`.
        upper: takes that, and gives logits `[examples, CLASSES]`.
        predictor: takes both `[examples, values]` and labels `[examples, CLASSES]`, 0 or 1, and
            gives `[examples, values]`: of each example's loss the gradient by what `lower` gave.
            None: the lower part does not train.
    """

    def __init__(self, lower: keras.Model, upper: keras.Model, predictor: keras.Model | None):
        super().__init__()
        self.lower = lower
        self.upper = upper
        self.predictor = predictor

    def call(self, inputs, training=False):
        return self.upper(self.lower(inputs, training=training), training=training)

    def predicted(self, given, labels):
        """The predicted gradient of each example's loss, and the variables that it hangs on."""
        if self.predictor is None:
            return tf.zeros_like(given), []
        values = self.predictor([given, tf.one_hot(labels, CLASSES)], training=True)
        return values, self.predictor.trainable_variables

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as lower_tape:
            given = self.lower(x, training=True)
        # From here on the upper part leads to the lower one by the predictor's loss alone.
        apart = tf.stop_gradient(given)
        with tf.GradientTape() as predictor_tape:
            predicted, predictor_weights = self.predicted(apart, y)
        with tf.GradientTape() as upper_tape:
            upper_tape.watch(apart)
            logits = self.upper(apart, training=True)
            loss = self.compute_loss(x, y, logits)
        examples = tf.cast(tf.shape(given)[0], given.dtype)  # the loss is their mean
        back, *upper_gradients = upper_tape.gradient(loss, [apart, *self.upper.trainable_variables])
        lower_gradients = lower_tape.gradient(
            given, self.lower.trainable_variables, output_gradients=predicted / examples
        )
        # Of half the squared distance, the mean over examples.
        predictor_gradients = predictor_tape.gradient(
            predicted, predictor_weights, output_gradients=predicted / examples - back
        )
        self.optimizer.apply(
            [*lower_gradients, *upper_gradients, *predictor_gradients],
            [
                *self.lower.trainable_variables,
                *self.upper.trainable_variables,
                *predictor_weights,
            ],
        )
        return self.compute_metrics(x, y, logits)


def network(kind: str, width: int = 16) -> keras.Model:
    """Two parts, known by their names.

    Args:
        kind: "coupled", "decoupled" or "lower part as it began".
        width: values between the parts. Few: of many random ones the upper part learns well alone.
    """
    dense = keras.layers.Dense
    lower = keras.Sequential(
        [keras.Input((64,)), dense(48, "relu"), dense(48, "relu"), dense(width, "relu")],
        name="lower",
    )
    upper = keras.Sequential(
        [keras.Input((width,)), dense(64, "relu"), dense(CLASSES)], name="upper"
    )
    if kind == "coupled":
        model = keras.Sequential([keras.Input((64,)), lower, upper])
    else:
        predictor = None
        if kind == "decoupled":
            given, label = keras.Input((width,)), keras.Input((CLASSES,))
            hidden = dense(128, "relu")(keras.layers.Concatenate()([given, label]))
            # It begins with no opinion, as in the paper.
            out = dense(width, kernel_initializer="zeros")(hidden)
            predictor = keras.Model([given, label], out, name="predictor")
        model = Decoupled(lower, upper, predictor)
    model.compile(
        optimizer=keras.optimizers.Adam(0.002),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(kind: str, seed: int, data, options: argparse.Namespace) -> tuple[float, float, float]:
    """Held-out accuracy, and seconds and the processor's seconds in all but the first epoch."""
    keras.utils.set_random_seed(seed)
    places = {"lower/.*": 0, "upper/.*": 1}
    if kind == "decoupled":
        places["predictor/.*"] = 0
    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.LocalCluster(options.workers, devices_per_worker=2),
        model_parallel=tf_dsgd.ModelParallel(places),
    )
    with strategy.scope():
        model = network(kind)
    x, held_x, y, held_y = data
    fit = {"batch_size": 32, "verbose": 0}
    model.fit(x, y, epochs=1, **fit)
    began, spent = time.perf_counter(), time.process_time()
    model.fit(x, y, epochs=options.epochs, initial_epoch=1, **fit)
    seconds, processor = time.perf_counter() - began, time.process_time() - spent
    return model.evaluate(held_x, held_y, verbose=0)[1], seconds, processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype("float32")
    kinds = ("coupled", "decoupled", "lower part as it began")
    found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    for seed in range(options.seeds):
        data = train_test_split(x, y, test_size=360, random_state=seed, stratify=y)
        for kind in kinds:
            found[kind].append(train(kind, seed, data, options))
    for kind, results in found.items():
        accuracies, seconds, processor = np.array(results).T
        each = ", ".join(f"{accuracy:.3f}" for accuracy in accuracies)
        print(
            f"{kind}: held-out accuracy {accuracies.mean():.3f} ({each}); "
            f"{np.median(seconds):.1f} s, {np.median(processor):.1f} of the processor"
        )


if __name__ == "__main__":
    main()
