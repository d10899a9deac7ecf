"""Frozen layers: whether a worker is sent them, and that it steps with what they are now."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tf_dsgd.engine.read_state import _NEVER

WIDTHS = 200, 100  # of the frozen layers' kernels, the first larger than what is always sent
BATCH = 16


def made(trainable_later=True):
    """(a network of which all but the last layer is frozen, its frozen layers)."""
    keras.utils.set_random_seed(1)
    options = {} if trainable_later else {"trainable": False}
    frozen = [keras.layers.Dense(n, "relu", **options) for n in WIDTHS]
    model = keras.Sequential([keras.Input((200,)), *frozen, keras.layers.Dense(3)])
    for layer in frozen:
        layer.trainable = False
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model, frozen


def data(batches=4):
    random = np.random.default_rng(0)
    return [random.standard_normal((batches * BATCH, n)).astype("f") for n in (200, 3)]


def downpour(cluster, **options):
    strategy = tf_dsgd.DownpourStrategy(cluster, push_every=1, fetch_every=1, **options)
    with strategy.scope():
        return strategy, *made()


def in_function(frozen):
    @tf.function
    def shrink():
        for variable in frozen[0].variables:
            variable.assign(0.5 * variable)

    shrink()


def from_outside(frozen):
    for layer in frozen:
        layer.set_weights([0.5 * w for w in layer.get_weights()])


def one_by_one(frozen):
    frozen[0].kernel.assign_sub(0.1 * frozen[0].kernel)


def trained_in_turns(model, frozen):
    """Between the calls of `fit` somebody writes to frozen layers."""
    for write in (in_function, from_outside, one_by_one, lambda _: None):
        model.fit(*data(), batch_size=BATCH, shuffle=False, verbose=0)
        write(frozen)
        yield model.get_weights()


@pytest.mark.parametrize("trainable_later", [True, False])
def test_one_worker_is_plain_keras_whoever_writes_to_frozen_layers(trainable_later):
    plain = list(trained_in_turns(*made(trainable_later)))
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1), push_every=1, fetch_every=1)
    with strategy.scope():
        ours = made(trainable_later)
    for got, want in zip(trained_in_turns(*ours), plain, strict=True):
        helpers.assert_close(got, want, 1e-5)


def test_all_workers_have_what_was_written():
    """Each worker's copies, after a `fit` in which all took part."""
    _, model, frozen = downpour(helpers.workers(2))
    for write in (in_function, from_outside, one_by_one):
        model.fit(*data(8), batch_size=BATCH, verbose=0)
        write(frozen)
        model.fit(*data(8), batch_size=BATCH, verbose=0)
        for layer in frozen:
            there = layer.kernel.value.on_workers().read()
            assert sorted(there) == [0, 1]
            for copy in there.values():
                np.testing.assert_array_equal(copy, layer.kernel.numpy())


def test_a_worker_is_sent_them_once():
    strategy, model, frozen = downpour(
        tf_dsgd.SimulatedCluster(2, network_bytes_per_second=1e9, seed=0)
    )
    fetches = strategy.engine.store.fetched
    model.fit(*data(), batch_size=BATCH, verbose=0)
    trained = 4 * sum(int(tf.size(v)) for v in model.trainable_variables)
    rest = 4 * sum(int(tf.size(v)) for v in model.non_trainable_variables)
    small = 1000 + 4 * sum(WIDTHS)  # biases, counters, rates
    sizes = list(fetches.read().values())
    assert all(trained <= size <= trained + small for size in sizes), sizes
    (program,) = (each.program for each in strategy.batches.programs)

    def next_fetch(m=0):
        program.fetch[m]()
        return int(fetches.read()[m])

    from_outside(frozen)
    first, second = next_fetch(), next_fetch()
    assert trained + rest <= first <= trained + rest + 1000
    assert second <= trained + small
    # Worker 1 has not had them, and another fetches in its name: it is sent them for itself, too.
    program.fetch_as[0](tf.constant(1, tf.int64))
    assert next_fetch(1) >= trained + rest
    assert next_fetch(1) <= trained + small
    in_function(frozen)
    assert [next_fetch() >= trained + rest for _ in range(3)] == [True, False, False]


def test_what_training_writes_is_always_sent():
    """A teacher's weights, which the optimizer sets on a shard."""

    class Following(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient, variable, learning_rate)
            if any(variable is v for v in (student.kernel, student.kernel.value)):
                teacher.kernel.assign(0.9 * teacher.kernel + 0.1 * variable)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.both = [student, teacher]

        def call(self, x):
            return student(x) + keras.ops.stop_gradient(teacher(x))

    def trained(scope):
        nonlocal student, teacher
        keras.utils.set_random_seed(1)
        x = data()[0]
        with scope:
            student, teacher = (keras.layers.Dense(200, use_bias=False) for _ in range(2))
            teacher.trainable = False
            model = Model()
            model.compile(Following(0.05), "mse")
            model(x[:1])
        first = teacher.kernel.numpy()
        model.fit(x, np.roll(x, 1, 1), batch_size=BATCH, shuffle=False, verbose=0)
        follows.append(not np.allclose(first, teacher.kernel))
        return [student.kernel.numpy(), teacher.kernel.numpy()]

    student = teacher = None
    follows = []
    plain = trained(contextlib.nullcontext())
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1), push_every=1, fetch_every=1)
    helpers.assert_close(trained(strategy.scope()), plain, 1e-5)
    assert follows == [True, True]


def test_a_restored_state_is_sent_anew():
    strategy, model, _ = downpour(helpers.workers(1))
    model.fit(*data(), batch_size=BATCH, verbose=0)
    (program,) = (each.program for each in strategy.batches.programs)
    seen = [s._seen for s in program._read_state if s._at_rest]
    assert seen and all((s.numpy() != _NEVER).all() for s in seen)
    strategy.restore(strategy.state())
    assert all((s.numpy() == _NEVER).all() for s in seen)
