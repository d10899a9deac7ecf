"""Learning-rate schedules of several optimizers in one scope: each goes by its own mini-batches."""

import contextlib

import keras
import numpy as np
import pytest
from keras import optimizers

import tf_dsgd
from tests import helpers
from tests.equivalence import twin

STRATEGIES = {
    "downpour": tf_dsgd.DownpourStrategy,
    "update": lambda c: tf_dsgd.DownpourStrategy(c, local_rule="optimizer"),
    "averaging": lambda c: tf_dsgd.PeriodicAveragingStrategy(c, average_every=1),
}
if not helpers.ON_CLUSTER:
    STRATEGIES["two_shards"] = lambda c: tf_dsgd.DownpourStrategy(
        tf_dsgd.SimulatedCluster(1, compute_seconds=1.0, num_shards=2)
    )
    STRATEGIES["peers"] = lambda c: tf_dsgd.CompressedAsyncStrategy(
        c, compression=tf_dsgd.compression.Cast("float16")
    )


def rate(steps=6):
    return optimizers.schedules.PiecewiseConstantDecay([steps - 1], [0.1, 0.0])


def dense(optimizer):
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


def fit(model, batches, data=None):
    x, y = twin.data() if data is None else data
    settings = {"batch_size": twin.BATCH, "shuffle": False, "verbose": 0}
    model.fit(x[: batches * twin.BATCH], y[: batches * twin.BATCH], **settings)


def train_on_batch(model):
    x, y = twin.data()
    model.train_on_batch(x[: twin.BATCH], y[: twin.BATCH])


def assert_same_as_plain(run, strategy, tolerance=1e-6):
    """`run` is a generator of weights: after each part of the training."""
    results = []
    for scope in (contextlib.nullcontext(), strategy.scope()):
        keras.utils.set_random_seed(7)
        with scope:
            results.append([[np.array(w) for w in weights] for weights in run()])
    plain, ours = results
    for part, (got, want) in enumerate(zip(ours, plain, strict=True)):
        helpers.assert_close(got, want, tolerance, f"part {part}")
    return plain


@pytest.mark.few(3)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_optimizer_of_another_compile_begins_at_its_first_step(name):
    def run():
        model = dense(optimizers.SGD(rate()))
        for _ in range(2):
            fit(model, 6)
            yield model.get_weights()
            fit(model, 2)  # the rate is 0 by now
            yield model.get_weights()
            model.compile(optimizers.SGD(rate()), "mse")

    tolerance = 1e-2 if name == "peers" else 1e-6  # a cast change is a rounded one
    first, still, second, _ = assert_same_as_plain(
        run, STRATEGIES[name](helpers.workers(1)), tolerance
    )
    assert (first[0] == still[0]).all() and abs(second[0] - first[0]).max() > 0.05


def test_two_models_trained_in_turn_have_a_schedule_each():
    def run():
        one, other = dense(optimizers.SGD(rate(5))), dense(optimizers.Adam(rate(8)))
        for part in range(3):
            fit(one, 2)
            train_on_batch(other)
            fit(other, 2)
            train_on_batch(one)
            yield [*one.get_weights(), *other.get_weights()]
            rates = [
                float(keras.ops.convert_to_numpy(o.optimizer.learning_rate)) for o in (one, other)
            ]
            assert rates == pytest.approx([0.1 if part == 0 else 0.0, 0.1 if part < 2 else 0.0])

    assert_same_as_plain(run, tf_dsgd.DownpourStrategy(helpers.workers(1)))


def test_a_model_that_is_loaded_moves_no_other_ones_schedule(tmp_path):
    def run():
        saved = dense(optimizers.SGD(rate(20)))
        fit(saved, 6)
        saved.save(tmp_path / "model.keras")
        model = dense(optimizers.SGD(rate()))
        fit(model, 3)
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        assert int(loaded.optimizer.iterations) == 6
        fit(model, 3)
        yield model.get_weights()
        fit(model, 3)
        fit(loaded, 6)
        yield [*model.get_weights(), *loaded.get_weights()]

    assert_same_as_plain(run, tf_dsgd.DownpourStrategy(helpers.workers(1)))


def test_a_second_phase_counts_mini_batches_whatever_the_periods():
    """A rate of 1 at steps 0 to 16: five pushes of 4 that arrive until then move by 4 each."""
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1), push_every=4, fetch_every=4)
    x, y = helpers.ones(8 * 32)
    schedule = optimizers.schedules.PiecewiseConstantDecay([16], [1.0, 0.0])
    with strategy.scope():
        model = helpers.constant_gradient_model(optimizers.SGD(schedule))
    for phase in (1, 2):
        model.fit(x, y, batch_size=8, verbose=0)
        assert float(model.get_weights()[0][0, 0]) == -20.0 * phase
        with strategy.scope():
            model.compile(optimizers.SGD(schedule), model.loss)
    assert strategy.steps == 64


class Interrupted(Exception):
    pass


class InterruptAt(keras.callbacks.Callback):
    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise Interrupted


def test_a_second_phase_resumes_where_its_schedule_was(tmp_path):
    """18 mini-batches of the second optimizer are at a rate of 1; a backup is made after 12.

    By updates it would be after 16, as each epoch of 6 ends with a message of 2.
    """

    def phases(*interrupts):
        cluster = tf_dsgd.SimulatedCluster(1, compute_seconds=1.0, network_seconds=0.0, seed=0)
        strategy = tf_dsgd.DownpourStrategy(cluster, push_every=4, fetch_every=4)
        x, y = helpers.ones(2 * 6)
        with strategy.scope():
            model = helpers.constant_gradient_model(optimizers.SGD(0.5))
            model.fit(x, y, batch_size=2, verbose=0)
            schedule = optimizers.schedules.PiecewiseConstantDecay([17], [1.0, 0.0])
            model.compile(optimizers.SGD(schedule), model.loss)
        backup = tf_dsgd.callbacks.BackupAndRestore(tmp_path / "backup")
        callbacks = [backup, *interrupts]
        model.fit(x, y, batch_size=2, epochs=5, verbose=0, callbacks=callbacks)
        return strategy, float(model.get_weights()[0][0, 0])

    with pytest.raises(Interrupted):
        phases(InterruptAt(2))
    strategy, weight = phases()
    assert weight == -0.5 * 6 - 18.0
    assert strategy.steps == 6 + 5 * 6
