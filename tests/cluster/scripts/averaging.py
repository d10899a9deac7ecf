"""A worker of several: trains in many ways, one after the other, and writes down what came of it.

Usage: averaging.py FOLDER [WAY ...]. For each way a file NAME.WORKER.pickle. All workers run the
same list.
"""

import pickle
import sys
from pathlib import Path

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

import tf_dsgd
from tests.cluster import spmd_models as models
from tf_dsgd.spmd import collectives, exchange

WAYS = {}
averaged = tf_dsgd.callbacks.PeriodicAveraging
ME = averaged().worker_index


def way(function):
    WAYS[function.__name__] = function
    return function


def fit(model, callback, examples=28, epochs=1, worker=None, more=(), **options):
    x, y = models.data(ME if worker is None else worker, examples)
    options = {"batch_size": models.BATCH, "shuffle": False, "verbose": 0, **options}
    return model.fit(x, y, epochs=epochs, callbacks=[callback, *more], **options).history


def weights(model):
    return [keras.ops.convert_to_numpy(w) for w in model.weights]


def error_of(function):
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@way
def collective():
    group = collectives.group(60.0)
    random = np.random.default_rng(ME)
    arrays = [
        random.standard_normal((3, 4)).astype("float32"),
        random.standard_normal(()),
        random.standard_normal(5).astype("float16"),
        random.standard_normal(6).astype(ml_dtypes.bfloat16),
        np.array([ME + 7, -1], "int8"),
        np.array(ME == 0),
        np.array([3_000_000_000 + ME], "uint32"),
        random.standard_normal(5_000_001).astype("float32"),  # in three parts
        np.zeros((0, 3), "float32"),
    ]
    hows = ["mean", "sum", "mean", "mean", "sum", "first", "first", "mean", "mean"]
    specs = [exchange.Spec(a.shape, a.dtype, how) for a, how in zip(arrays, hows, strict=True)]
    joined = exchange.exchange(group, specs)
    joined([np.ones_like(a) for a in arrays])  # and then in the other place
    return {
        "arrays": arrays,
        "exchanged": joined(arrays),
        "copied": group.broadcast(arrays),
        "met": group.meet(ME, 5),
        "texts": group.texts("ä" * (1 + 20 * ME)),
    }


@way
def averages_of_many():
    """One after the other as fast as may be, so that a slow reader would see the next values."""
    model = keras.Sequential([keras.Input((9,)), keras.layers.Dense(1000, use_bias=False)])
    model.weights[0].assign(np.zeros((9, 1000)))
    callback = averaged()
    for _ in range(50):
        model.weights[0].assign_add(np.full((9, 1000), ME + 1.0))
        callback.average(model)
    return {"weights": weights(model)[0].ravel()}


@way
def every_step():
    model = models.curved(keras.optimizers.SGD(0.05), seed=ME)  # the first weights are worker 0's
    x, y = models.data(ME, 20, seed=1)
    seen = []
    after = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
    callback = averaged(average_every=1)
    options = {"validation_data": (x, y), "validation_batch_size": models.BATCH}
    history = fit(model, callback, epochs=3, more=[after], **options)
    return {"weights": weights(model), "history": history, "seen": seen}


@way
def equal_data():
    found = {}
    for policy in ("average", "local"):
        model = models.curved(keras.optimizers.Adam(0.02))
        history = fit(model, averaged(3, optimizer_state=policy), epochs=2, worker=0)
        found[policy] = {"weights": weights(model), "history": history}
    scaled = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.02), initial_scale=4.0, dynamic_growth_steps=5
    )
    model = models.curved(scaled)
    scaled.build(model.trainable_variables)
    fit(model, averaged(3), epochs=2, worker=0)
    found["scaled"] = {"weights": weights(model), "scale": float(scaled.dynamic_scale)}
    model = models.curved(models.ema())
    fit(model, averaged(3), epochs=2, worker=0)
    found["ema"] = {"weights": weights(model)}
    return found


@way
def policies():
    found = {}
    for name, make in models.OPTIMIZERS.items():
        for policy in ("average", "local", "reset"):
            optimizer = make()
            model = models.linear(optimizer)
            after_epoch = []
            iterations = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs, found=after_epoch, optimizer=optimizer: (
                    found.append(int(optimizer.iterations.numpy()))
                )
            )
            callback = averaged(3, optimizer_state=policy)
            fit(model, callback, epochs=2, more=[iterations])
            found[name, policy] = {
                "weights": weights(model),
                "slots": [v.numpy() for v in optimizer.variables if len(v.shape)],
                "iterations": after_epoch,
                "averages": callback.averages,
            }
    return found


@way
def several_optimizers():
    found = {}
    for policy in ("average", "local", "reset"):
        model, callback = models.two_parts(), averaged(3, optimizer_state=policy)
        history = fit(model, callback)
        found[policy] = {
            "weights": weights(model),
            "slots": [v.numpy() for v in models.slots_of(model)],
            "averaged": [each.is_averaged for each in callback._state._optimizers],
            "history": history,
        }
    return found


@way
def statistics():
    model = models.normalised(ME)
    before = [v.numpy() for v in model.non_trainable_variables if "seed" in v.path]
    fit(model, averaged(average_every=4))
    seeds = [v.numpy() for v in model.non_trainable_variables if "seed" in v.path]
    return {"weights": weights(model), "seeds": (before, seeds)}


@way
def constants():
    """A layer that makes constants of what it has seen, each worker's of its own data."""
    model = models.adapted(ME)
    x, y = models.data(ME, 28)
    model.train_on_batch(x[:4], y[:4])  # traced with the worker's own constants
    model.evaluate(x, y, verbose=0)
    history = fit(model, averaged(1), validation_data=models.data(0, 8, seed=1))
    other = models.adapted(ME)  # never started
    averaged().average(other)
    return {
        "history": history,
        "weights": weights(model),
        "means": [keras.ops.convert_to_numpy(m.layers[0].layers[0].mean) for m in (model, other)],
    }


@way
def callable_period():
    asked, model = [], models.linear(keras.optimizers.SGD(0.05))

    def period(step):
        asked.append(step)
        return 1 if step < 2 else 4

    callback = averaged(average_every=period)
    fit(model, callback, examples=48)
    return {"asked": asked, "averages": callback.averages, "weights": weights(model)}


@way
def several_steps_at_once():
    model = models.linear("sgd")
    model.compile(keras.optimizers.SGD(0.05), "mse", steps_per_execution=4)
    callback = averaged(average_every=3)
    fit(model, callback, examples=64)
    return {"averages": callback.averages, "weights": weights(model)}


@way
def incomplete_executions():
    """Of 7 mini-batches, four at once; a dataset that goes on gives an eighth."""
    found = {}
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=1e38)
    for name, policy, optimizer, steps in (
        ("arrays", "average", "adam", None),
        ("overflows", "average", scaled, None),
        ("unknown length", "reset", "adam", -1),
        ("endless", "average", "adam", 7),
    ):
        asked, model = [], models.linear("sgd")
        model.compile(optimizer, "mse", steps_per_execution=4)

        def period(step, asked=asked):
            asked.append(step)
            return 3

        callback = averaged(period, optimizer_state=policy)
        if steps is None:
            fit(model, callback, epochs=2)
        else:
            endless(model, 7, callback, epochs=2, steps=steps)
        found[name] = asked
    model.compile("sgd", "mse", steps_per_execution=4)
    found["unequal"] = error_of(lambda: endless(model, 5 if ME else 7, averaged(6)))
    return found


@way
def own_loop():
    model = models.linear(keras.optimizers.SGD(0.05, momentum=0.9), seed=ME)
    callback = averaged()
    callback.start(model)
    first = weights(model)
    x, y = models.data(ME, 12)
    for k in range(3):
        model.train_on_batch(x[4 * k : 4 * k + 4], y[4 * k : 4 * k + 4])
    local = weights(model)
    callback.average(model)
    slots = [v.numpy() for v in model.optimizer.variables if len(v.shape)]
    other = models.linear("sgd", seed=ME)  # never started: averaged from where it is
    begun = weights(other)
    averaged().average(other)
    return {
        "first": first,
        "local": local,
        "mean": weights(model),
        "slots": slots,
        "other": (begun, weights(other)),
    }


@way
def other_logs():
    """Numbers that no metric has, from a step of its own and from another callback."""

    class Odd(keras.Sequential):
        def train_step(self, data):
            return {**super().train_step(data), "odd": tf.constant(float(ME))}

    keras.utils.set_random_seed(0)
    model = Odd([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return {"history": fit(model, averaged())}


class OwnSteps(keras.Sequential):
    """Its `train_step` returns numbers of its own, one of them under a metric's name."""

    def train_step(self, data):
        return {"loss": tf.constant(1.0 + ME), "odd": tf.constant(float(ME))}


class OwnTestStep(keras.Sequential):
    def test_step(self, data):
        return {"loss": tf.constant(10.0 + ME), "odd": tf.constant(0.0)}


@way
def own_steps():
    """A loss that a step computes and returns itself, in training alone and in validation alone."""
    found = {}
    for kind in (OwnSteps, OwnTestStep):
        keras.utils.set_random_seed(0)
        model = kind([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        data = models.data(ME, 20 + 8 * ME, seed=1)
        found[kind.__name__] = fit(model, averaged(), validation_data=data)
    return found


@way
def stopping():
    """All stop at the same epoch, by logs that would differ."""
    model = models.linear(keras.optimizers.SGD(0.0))
    stop = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=0.0)
    history = fit(model, averaged(), epochs=9, more=[stop])
    return {"epochs": len(history["loss"]), "steps": int(model.optimizer.iterations.numpy())}


@way
def differences():
    """What differs is named by all, and training may go on afterwards."""
    found = {}
    model = models.linear("sgd")
    found["steps"] = error_of(lambda: fit(model, averaged(2), examples=20 if ME else 28))
    found["unknown steps"] = error_of(lambda: endless(model, 5 if ME else 7))
    wide = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1 + ME)])
    wide.compile("sgd", "mse")
    found["weights"] = error_of(lambda: fit(wide, averaged()))
    other = models.linear(keras.optimizers.SGD(0.1, momentum=0.5 * ME))
    found["optimizer"] = error_of(lambda: fit(other, averaged()))
    found["average_every"] = error_of(lambda: fit(model, averaged(2 + ME)))
    found["epochs"] = error_of(lambda: fit(model, averaged(), initial_epoch=ME, epochs=3))
    validation = {"validation_data": models.data(0, 4)} if ME else {}
    found["validation"] = error_of(lambda: fit(model, averaged(), **validation))
    metrics = models.linear("sgd")
    metrics.compile("sgd", "mse", metrics=["mae"] * ME)
    found["metrics"] = error_of(lambda: fit(metrics, averaged()))
    metrics.compile("sgd", "mse", metrics=["mae" if ME else "mse"])
    found["metrics' names"] = error_of(lambda: fit(metrics, averaged()))
    loss = models.linear("sgd")
    loss.compile("sgd", keras.losses.MeanAbsoluteError() if ME else "mse")
    found["loss"] = error_of(lambda: fit(loss, averaged()))
    found["average"] = error_of(
        lambda: averaged().average(model) if ME else fit(model, averaged(), epochs=2)
    )
    fresh = keras.Sequential([keras.Input((7,)), keras.layers.Dense(2)])
    callback = averaged()
    callback.start(fresh)
    found["start"] = error_of(lambda: (callback.start if ME else callback.average)(fresh))
    fresh.weights[0].assign(np.full((7, 2), ME))
    callback.average(fresh)
    fit(model, averaged())
    return {"errors": found, "weights": weights(model), "fresh": weights(fresh)[0]}


def endless(model, batches, callback=None, epochs=1, steps=-1):
    """A dataset of unknown length, or one that goes on."""
    x, y = models.data(ME, models.BATCH * batches)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(models.BATCH)
    dataset = dataset.filter(lambda *_: True) if steps < 0 else dataset.repeat()
    steps = {} if steps < 0 else {"steps_per_epoch": steps}
    model.fit(dataset, verbose=0, epochs=epochs, callbacks=[callback or averaged(3)], **steps)


@way
def saved():
    """Worker 0 alone loads what was saved."""
    path = Path(sys.argv[1]) / "saved.weights.h5"
    model = models.linear(keras.optimizers.Adam(0.1))
    fit(model, averaged(2, optimizer_state="local"))
    if ME == 0:
        model.save_weights(path)
    again = models.linear(keras.optimizers.Adam(0.1), seed=5 + ME)
    again.optimizer.build(again.trainable_variables)
    if ME == 0:
        again.load_weights(path)
    averaged().start(again)
    return {
        "before": [v.numpy() for v in [*model.weights, *model.optimizer.variables]],
        "after": [v.numpy() for v in [*again.weights, *again.optimizer.variables]],
    }


@way
def resumed():
    """Three epochs at once, and two, and one more by a new model, from each worker's backup."""
    found = {}
    post_local = lambda step: 1 if step < 10 else 4  # noqa: E731
    for name, policy, every in (
        ("average", "average", 3),
        ("reset", "reset", 3),
        ("changing period", "average", post_local),
    ):
        folder = str(Path(sys.argv[1]) / f"backup_{name}_{ME}")
        models_made = []
        for seed, epochs, backup in ((0, 3, False), (0, 2, True), (5, 3, True)):
            model = models.linear(models.adam(), seed=seed)
            more = (
                [keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)]
                if backup
                else []
            )
            fit(model, averaged(every, optimizer_state=policy), epochs=epochs, more=more)
            models_made.append(
                [*weights(model), *(v.numpy() for v in model.optimizer.variables if v.shape)]
            )
        found[name] = models_made
    return found


def run_ways(ways):
    folder = Path(sys.argv[1])
    for name in sys.argv[2:] or ways:
        (folder / f"{name}.{ME}.pickle").write_bytes(pickle.dumps(ways[name]()))
        print("DONE", name, flush=True)


if __name__ == "__main__":
    run_ways(WAYS)
