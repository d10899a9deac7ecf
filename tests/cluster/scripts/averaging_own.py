"""As `averaging.py`: models, optimizers and backups of a user's own, and fits that go wrong.

Usage: averaging_own.py FOLDER [WAY ...].
"""

import functools
import sys
from pathlib import Path

import keras
import tensorflow as tf

from tests.cluster import spmd_models as models
from tests.cluster.scripts.averaging import ME, averaged, error_of, fit, run_ways

WAYS = {}


def way(function):
    WAYS[function.__name__] = function
    return function


def backup(name, **options):
    """A worker's own, in a list."""
    path = folder(name)
    return [keras.callbacks.BackupAndRestore(str(path), **options)]


def folder(name):
    return Path(sys.argv[1]) / f"backup_{name}_{ME}"


@way
def no_epoch_left():
    """Worker 1's backup is of the last epoch; then those of both are."""

    def train(epochs, more=()):
        return fit(models.linear("sgd"), averaged(3), epochs=epochs, more=more)

    train(2, backup("all", delete_checkpoint=False))
    errors = {"epochs": error_of(lambda: train(2 * ME))}
    train(2, backup("one", delete_checkpoint=False) if ME else ())
    errors["one"] = error_of(lambda: train(2, backup("one") if ME else ()))
    train(0)
    history = train(2, backup("all"))
    return {
        "errors": errors,
        "epochs": len(history.get("loss", [])),
        "left": [name for name in ("all", "one") if folder(name).exists()],
    }


@way
def after_unequal_backups():
    """Worker 1's alone is of an earlier epoch; the next fit of the same model has no backup."""
    fit(models.linear("sgd"), averaged(3), epochs=1, more=backup("next", delete_checkpoint=False))
    model = models.linear("sgd")
    error = error_of(lambda: fit(model, averaged(3), epochs=3, more=backup("next") if ME else ()))
    return error, len(fit(model, averaged(3), epochs=3)["loss"])


class Careful(keras.optimizers.SGD):
    """Leaves out steps with large gradients."""

    def apply(self, grads, trainable_variables=None):
        def update():
            super(Careful, self).apply(grads, trainable_variables)
            return True

        tf.cond(tf.linalg.global_norm(grads) < 1e3, update, lambda: False)


def careful_step(model, data):
    """As `Careful`, in a step."""
    x, y = data
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    grads = tape.gradient(loss, model.trainable_variables)

    def update():
        model.optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return True

    tf.cond(loss < 1e3, update, lambda: False)
    return {"loss": loss}


class OwnStep(keras.Sequential):
    train_step = careful_step


@way
def steps_left_out():
    """Of 7 mini-batches, four at once: at worker 1 the third one makes no update."""
    x, y = models.data(ME, 28)
    y[8:12] += 1e5 * ME
    found = {}
    for name in ("optimizer", "class", "instance"):
        for length in ("known", "unknown"):
            keras.utils.set_random_seed(0)
            kind = OwnStep if name == "class" else keras.Sequential
            model = kind([keras.Input((3,)), keras.layers.Dense(1)])
            optimizer = (Careful if name == "optimizer" else keras.optimizers.SGD)(0.01)
            model.compile(optimizer, "mse", steps_per_execution=4)
            if name == "instance":
                model.train_step = functools.partial(careful_step, model)
            dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
            if length == "unknown":
                dataset = dataset.filter(lambda *_: True)
            asked = []
            every = lambda step, asked=asked: asked.append(step) or 3  # noqa: E731
            options = {"epochs": 2, "verbose": 0, "callbacks": [averaged(every)]}
            error = error_of(lambda: model.fit(dataset, **options))  # noqa: B023
            found[name, length] = error, asked, int(optimizer.iterations)
    return found


class More(keras.Sequential):
    """Its steps return the metrics' results, and one number more."""

    def train_step(self, data):
        return {**super().train_step(data), "more": tf.constant(float(ME))}

    def test_step(self, data):
        return {**super().test_step(data), "more": tf.constant(2.0 * ME)}


class OwnLoss(keras.Sequential):
    """Its loss is the step's own, and at worker 1 alone."""

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "loss": tf.constant(7.0) if ME else logs["loss"], "more": tf.constant(1.0)}


@way
def logs_of_metrics_and_more():
    """The last mini-batches, of which there are as many, are of different sizes."""
    found = {}
    for kind in (keras.Sequential, More, OwnLoss):
        keras.utils.set_random_seed(0)
        model = kind([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae", models.Targets()])
        data = models.data(ME, 20 - 2 * ME, seed=1)
        history = fit(model, averaged(), examples=28 - 3 * ME, validation_data=data)
        found[kind.__name__] = {name: values[0] for name, values in history.items()}
    return found


if __name__ == "__main__":
    run_ways(WAYS)
