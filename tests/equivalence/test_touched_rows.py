"""Updates of tables by the rows that a gradient names: against dense updates, and NumPy twins."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests.equivalence import twin

pytestmark = pytest.mark.medium

ROWS, WIDTH = 30, 2
RATE, STEPS = 0.1, 12


def ids(seed=1):
    """Two of the first twenty rows per example, often the same; the last ten are never named."""
    found = np.random.default_rng(seed).integers(0, 20, (STEPS * 4, 2))
    found[::3, 1] = found[::3, 0]
    return found.astype("int32")


def targets():
    return np.random.default_rng(2).standard_normal((STEPS * 4, WIDTH)).astype("float32")


def model(optimizer, rows=ROWS, initializer="uniform"):
    """The sum of an example's rows; loss: half the squared distance from its target."""
    inputs = keras.Input((2,), dtype="int32")
    table = keras.layers.Embedding(rows, WIDTH, initializer, name="table")
    built = keras.Model(inputs, keras.ops.sum(table(inputs), axis=1))
    built.compile(optimizer, lambda y, p: 0.5 * keras.ops.sum((y - p) ** 2, axis=-1))
    return built


def trained(make, initializer="uniform", **options):
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.SimulatedCluster(1), **options)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        built = model(make(), initializer=initializer)
    first = built.get_weights()[0].astype("float64")
    built.fit(ids(), targets(), batch_size=4, shuffle=False, verbose=0)
    return first, built.get_weights()[0]


def by_hand(first, update, slots=1, initial=0.0):
    """`update(row, gradient, slots, step)` on each row of a batch, on the sum of its gradients."""
    table = first.copy()
    memory = np.full((slots, ROWS, WIDTH), initial)
    for step in range(STEPS):
        batch, y = ids()[4 * step : 4 * step + 4], targets()[4 * step : 4 * step + 4]
        error = table[batch].sum(1) - y
        gradients = {}
        for example, pair in enumerate(batch):
            for row in pair:
                gradients[row] = gradients.get(row, 0.0) + error[example] / 4
        for row, gradient in gradients.items():
            table[row] += update(gradient, memory[:, row], step + 1)
    return table


def momentum(gradient, slots, _):
    slots[0] = 0.9 * slots[0] - RATE * gradient
    return slots[0]


def rmsprop(gradient, slots, _):
    slots[0] = 0.9 * slots[0] + 0.1 * gradient**2
    return -RATE * gradient / np.sqrt(slots[0] + 1e-7)


def adam(gradient, slots, step):
    slots[0] = 0.9 * slots[0] + 0.1 * gradient
    slots[1] = 0.999 * slots[1] + 0.001 * gradient**2
    alpha = RATE * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    return -alpha * slots[0] / (np.sqrt(slots[1]) + 1e-7)


def adagrad(gradient, slots, _):
    slots[0] += gradient**2
    return -RATE * gradient / np.sqrt(slots[0] + 1e-7)


TWINS = {
    "momentum": (lambda: keras.optimizers.SGD(RATE, momentum=0.9), momentum, 1, 0.0),
    "rmsprop": (lambda: keras.optimizers.RMSprop(RATE), rmsprop, 1, 0.0),
    "adam": (lambda: keras.optimizers.Adam(RATE), adam, 2, 0.0),
    "adagrad": (lambda: keras.optimizers.Adagrad(RATE), adagrad, 1, 0.1),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", TWINS)
def test_lazy_updates_against_a_twin_by_hand(name):
    make, update, slots, initial = TWINS[name]
    first, got = trained(make, sparse="lazy")
    np.testing.assert_allclose(got, by_hand(first, update, slots, initial), rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(got[20:], first[20:].astype("float32"))


def test_adagrad_by_rows_equals_adagrad_on_dense_gradients():
    """By default, too: its rows keep still at a gradient of zero."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1))

    def make():
        return model(keras.optimizers.Adagrad(RATE))

    twin.assert_same_as_plain(make, strategy, ids(), targets())


def test_adam_is_dense_by_default():
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1))

    def make():
        return model(keras.optimizers.Adam(RATE))

    twin.assert_same_as_plain(make, strategy, ids(), targets())


def test_ftrl_moves_rows_that_begin_at_zero_as_dense_ftrl_does():
    """Others it sets to zero at the first step if it is dense; lazy, it lets them be."""

    def make():
        return keras.optimizers.Ftrl(RATE, l2_regularization_strength=0.01)

    _, lazy = trained(make, "zeros", sparse="lazy")
    _, dense = trained(make, "zeros")
    assert np.abs(dense).max() > 0.1
    np.testing.assert_allclose(lazy, dense, rtol=1e-5, atol=1e-6)
    first, lazy = trained(make, sparse="lazy")
    np.testing.assert_array_equal(lazy[20:], first[20:].astype("float32"))


@pytest.mark.parametrize("sparse", ["dense", "lazy"])
def test_softsync_takes_the_rows_of_a_whole_collection(sparse):
    """Two messages of two workers in an update: as one batch of both, by hand."""
    cluster = tf_dsgd.SimulatedCluster(2, compute_seconds=1.0)
    strategy = tf_dsgd.SoftsyncStrategy(cluster, gradients_per_update=2, sparse=sparse)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        built = model(keras.optimizers.Adagrad(RATE))
    first = built.get_weights()[0].astype("float64")
    built.fit(ids(), targets(), batch_size=2, shuffle=False, verbose=0)
    want = by_hand(first, adagrad, 1, 0.1)
    np.testing.assert_allclose(built.get_weights()[0], want, rtol=2e-5, atol=2e-6)


def test_no_operation_of_the_whole_table_is_in_an_update_by_rows():
    """Nor of its slots: what is written and read of 7,919 rows are some."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1), sparse="lazy")
    with strategy.scope():
        built = model(keras.optimizers.Adam(RATE), rows=7919)
    built.fit(ids()[:8], targets()[:8], batch_size=4, verbose=0)
    (program,) = strategy.batches.programs
    (receiving,) = program.program.receiving
    operations = [
        operation
        for graph in [receiving.graph, *_graphs_of_branches(receiving.graph)]
        for operation in graph.get_operations()
    ]
    assert sum(operation.type.startswith("ResourceScatter") for operation in operations) >= 3
    outputs = [tensor for operation in operations for tensor in operation.outputs]
    assert not [t for t in outputs if t.shape.rank and t.shape[0] == 7919]


def _graphs_of_branches(graph):
    for operation in graph.get_operations():
        if operation.type in ("If", "StatelessIf"):
            for branch in (operation._true_graph, operation._false_graph):
                yield branch
                yield from _graphs_of_branches(branch)


def test_what_is_not_elementwise_is_refused_by_name():
    with pytest.raises(ValueError, match=r'sparse="lazy".*Received: Lamb'):
        trained(lambda: keras.optimizers.Lamb(RATE), sparse="lazy")
    for options in ({"global_clipnorm": 1.0}, {"gradient_accumulation_steps": 2}):
        (name,) = options
        with pytest.raises(ValueError, match=f"does not go with {name}.*Received: {name}="):
            trained(lambda options=options: keras.optimizers.Adam(**options), sparse="lazy")
    with pytest.raises(ValueError, match="run on workers"):
        tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1), local_rule="optimizer", sparse="lazy")
    with pytest.raises(ValueError, match='sparse must be "dense" or "lazy"'):
        tf_dsgd.SoftsyncStrategy(tf_dsgd.LocalCluster(1), gradients_per_update=1, sparse=True)


def test_a_large_table_that_is_updated_whole_is_hinted_at_once(capsys, monkeypatch):
    from tf_dsgd.strategies.rows import touched_rows

    monkeypatch.setattr(touched_rows, "_MANY_ROWS", ROWS)
    trained(lambda: keras.optimizers.Adam(RATE))
    trained(lambda: keras.optimizers.Adagrad(RATE))
    trained(lambda: keras.optimizers.Lamb(RATE))  # it cannot be lazy
    said = capsys.readouterr().err
    assert said.count('With sparse="lazy" it updates those that have a gradient.') == 1
    assert "Adam updates all 30 rows of" in said


def test_clipping_by_norm_sees_each_row_once():
    """On the shard (a message of one batch) and on the worker (of several)."""
    for period in (1, 3):
        strategy = tf_dsgd.DownpourStrategy(
            tf_dsgd.SimulatedCluster(1), push_every=period, fetch_every=period, local_rule="none"
        )

        def make():
            return model(keras.optimizers.SGD(RATE, clipnorm=0.05))

        keras.utils.set_random_seed(3)
        with strategy.scope():
            built = make()
        first = built.get_weights()[0].astype("float64")
        batches = 3
        x, y = ids()[: 4 * batches], targets()[: 4 * batches]
        built.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        table = first.copy()
        for start in range(0, batches, period):
            total = np.zeros_like(table)
            for batch in range(start, start + period):
                part = slice(4 * batch, 4 * batch + 4)
                error = table[x[part]].sum(1) - y[part]
                gradient = np.zeros_like(table)
                np.add.at(gradient, x[part], np.repeat(error[:, None] / 4, 2, axis=1))
                total += gradient * min(1.0, 0.05 / np.linalg.norm(gradient))
            table -= RATE * total
        np.testing.assert_allclose(built.get_weights()[0], table, rtol=2e-5, atol=2e-6)


def test_the_gradient_that_reaches_an_optimizer_is_sparse():
    """Also one that is not updated by rows: nothing made it dense on the way."""
    seen = []

    class Adagrad(keras.optimizers.Adagrad):
        def update_step(self, gradient, variable, learning_rate):
            seen.append(type(gradient))
            super().update_step(gradient, variable, learning_rate)

    trained(lambda: Adagrad(RATE))
    assert seen == [tf.IndexedSlices]
