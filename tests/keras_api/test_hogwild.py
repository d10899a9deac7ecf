"""`HogwildStrategy`: beside plain Keras, beside sums, beside Downpour on the simulator."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tf_dsgd import _tf

pytestmark = pytest.mark.medium

ROWS, BATCH = 60, 4
SGD, ADAGRAD = (lambda: keras.optimizers.SGD(0.1)), (lambda: keras.optimizers.Adagrad(0.1))


def decaying(make=keras.optimizers.SGD):
    return make(keras.optimizers.schedules.ExponentialDecay(0.3, 1, 0.7))


def distinct_ids(batches, seed=0):
    """Three ids an example; within a mini-batch each is named once."""
    random = np.random.default_rng(seed)
    return np.concatenate([random.permutation(ROWS)[: BATCH * 3] for _ in range(batches)]).reshape(
        -1, 3
    )


def regression(optimizer, **embedding):
    ids = keras.Input((3,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(ROWS, 2, **embedding)(ids))
    hidden = keras.layers.Dense(5, activation="tanh")(rows)
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    model.compile(optimizer(), "mse")
    return model


def trained(strategy, optimizer, first, x, y, epochs=2):
    with strategy.scope():
        model = regression(optimizer)
    model.set_weights(first)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=epochs)
    return model


def data(batches):
    y = np.random.default_rng(1).standard_normal((batches * BATCH, 1)).astype("float32")
    return distinct_ids(batches), y


def mean_output(y, p):
    return tf.reduce_mean(p)


def table_alone(strategy, rows=ROWS, optimizer=lambda: keras.optimizers.SGD(0.5)):
    """A model whose output is the sum of the rows named."""
    with strategy.scope():
        ids = keras.Input((2,), dtype="int32")
        table = keras.layers.Embedding(rows, 1, embeddings_initializer="zeros")
        model = keras.Model(ids, keras.ops.sum(table(ids), axis=1))
        model.compile(optimizer(), mean_output)
    return model


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("optimizer", "lock"),
    [
        (SGD, "none"),
        (ADAGRAD, "none"),
        (ADAGRAD, "rows"),
        (ADAGRAD, "round-robin"),
        (decaying, "none"),
        (lambda: decaying(keras.optimizers.Adagrad), "rows"),
        (decaying, "round-robin"),
    ],
    ids=[
        *("sgd", "adagrad", "locks_of_rows", "round_robin"),
        *("schedule", "schedule_and_locks_of_rows", "schedule_and_round_robin"),
    ],
)
def test_one_thread_is_plain_keras(optimizer, lock):
    x, y = data(10)
    keras.utils.set_random_seed(1)
    plain = regression(optimizer)
    first = plain.get_weights()
    plain.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=2)
    strategy = tf_dsgd.HogwildStrategy(tf_dsgd.LocalCluster(1), lock=lock)
    model = trained(strategy, optimizer, first, x, y)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


class TenthEachTime(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 10.0 ** -keras.ops.cast(step, "float32")


def test_a_message_has_the_rate_of_the_mini_batches_before_it():
    """The k-th adds 10 ** -k to each of two rows: 1.111 after four, whoever sends them."""
    for cluster in (tf_dsgd.SimulatedCluster(1), tf_dsgd.SimulatedCluster(2, seed=0)):
        model = table_alone(
            tf_dsgd.HogwildStrategy(cluster),
            optimizer=lambda: keras.optimizers.SGD(TenthEachTime()),
        )
        model.fit(np.array([[0, 1]] * 4), np.zeros([4, 1]), batch_size=1, verbose=0)
        np.testing.assert_allclose(model.get_weights()[0][:2], -1.111, rtol=1e-6)


def test_on_the_simulator_it_is_downpour_of_one_mini_batch():
    """Stale gradients are of the weights that were there when the worker began."""
    x, y = data(15)
    first = regression(ADAGRAD).get_weights()
    found = []
    for make in (
        tf_dsgd.HogwildStrategy,
        lambda cluster: tf_dsgd.DownpourStrategy(cluster, local_rule="none"),
    ):
        cluster = tf_dsgd.SimulatedCluster(
            3, compute_seconds=[1.0, 1.7, 2.3], network_seconds=0.3, seed=0
        )
        strategy = make(cluster)
        model = trained(strategy, ADAGRAD, first, x, y)
        assert strategy.staleness().max >= 2
        found.append(model.get_weights())
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_on_rows_of_their_own_lose_nothing(threads):
    strategy = tf_dsgd.HogwildStrategy(tf_dsgd.LocalCluster(threads))
    model = table_alone(strategy, 400)
    x = np.repeat(np.arange(200), BATCH)[:, None] * 2 + [[0, 1]]
    model.fit(x, np.zeros((len(x), 1)), batch_size=BATCH, verbose=0, shuffle=False)
    np.testing.assert_array_equal(model.get_weights()[0], np.full((400, 1), -0.5))


def test_threads_on_one_row_lose_at_most_additions_to_it_and_no_count():
    """Each mini-batch adds -1 to row 7, which it names eight times."""
    strategy = tf_dsgd.HogwildStrategy(tf_dsgd.LocalCluster(4))
    model = table_alone(strategy)
    number = 400
    x = np.full((number * BATCH, 2), 7)
    model.fit(x, np.zeros((len(x), 1)), batch_size=BATCH, verbose=0)
    kept = -model.get_weights()[0][7, 0]
    assert 0.9 * number <= kept <= number and kept == round(kept)
    assert np.count_nonzero(model.get_weights()[0]) == 1
    ledger = strategy.ledger()
    assert (ledger.applied, ledger.refused, ledger.in_flight) == (number, 0, 0)
    counts = strategy.steps, strategy.updates, int(model.optimizer.iterations)
    assert counts == (number, number, number)


def test_locks_of_rows_lose_no_addition_to_a_row():
    """Each mini-batch adds -1 to row 7, and to one of three others."""
    strategy = tf_dsgd.HogwildStrategy(tf_dsgd.LocalCluster(5), lock="rows")
    model = table_alone(strategy)
    number = 300
    other = np.repeat(8 + np.arange(number) % 3, BATCH)
    x = np.stack([np.full(number * BATCH, 7), other], axis=1)
    model.fit(x, np.zeros((len(x), 1)), batch_size=BATCH, verbose=0, shuffle=False)
    expected = np.zeros(ROWS)
    expected[7], expected[8:11] = -0.5 * number, -0.5 * number / 3
    np.testing.assert_array_equal(model.get_weights()[0][:, 0], expected)
    assert strategy.ledger().applied == int(model.optimizer.iterations) == number


def changes_of_the_count(within):
    """The operations that change `optimizer.iterations` in an update."""
    optimizer, weight = keras.optimizers.SGD(0.5), keras.Variable([1.0])
    optimizer.build([weight])

    @tf.function
    def update():
        with within(optimizer):
            optimizer.apply([tf.constant([1.0])])

    graph = update.get_concrete_function().graph
    update()
    assert int(optimizer.iterations) == 1 and weight.numpy() == [0.5]
    counter = graph.capture(optimizer.iterations.value.handle)
    changed = [o for o in graph.get_operations() if o.type.startswith("Assign")]
    return [o.type for o in changed if o.inputs[0] is counter]


def test_an_update_is_counted_by_one_operation():
    """Two threads that read the count, and then assign it as Keras does, would count once."""
    assert changes_of_the_count(contextlib.nullcontext) == ["AssignVariableOp"]
    assert changes_of_the_count(_tf.counted_natively) == ["AssignAddVariableOp"]


def test_dense_weights_lose_nothing_and_have_no_copies():
    strategy = tf_dsgd.HogwildStrategy(tf_dsgd.LocalCluster(4))
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((6,)), layer])
        model.compile(keras.optimizers.SGD(0.5), mean_output)
    x = np.random.default_rng(0).integers(-16, 16, (200 * BATCH, 6)).astype("float32") / 8
    model.fit(x, np.zeros((len(x), 1)), batch_size=BATCH, verbose=0)
    mean = x.reshape(-1, BATCH, 6).mean(1).sum(0)
    np.testing.assert_array_equal(model.get_weights()[0][:, 0], -0.5 * mean)
    assert layer.kernel.value.copies is None
    assert strategy.ledger().applied == int(model.optimizer.iterations) == 200


def test_a_weight_may_be_a_scalar():
    """Of which no row can be named."""
    strategy = tf_dsgd.HogwildStrategy(tf_dsgd.LocalCluster(2))
    with strategy.scope():
        layer = Shift()
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(keras.optimizers.SGD(1.0), mean_output)
    model.fit(np.ones((40, 1)), np.zeros((40, 1)), batch_size=BATCH, verbose=0)
    assert float(layer.shift) == -40 / BATCH


class Shift(keras.layers.Layer):
    """Adds one number."""

    def build(self, _):
        self.shift = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        return x + self.shift


def test_an_id_that_is_named_twice_is_merged_before_it_is_squared():
    strategy = tf_dsgd.HogwildStrategy(tf_dsgd.LocalCluster(2))
    model = table_alone(strategy, optimizer=lambda: keras.optimizers.Adagrad(0.5, epsilon=0.0))
    model.fit(np.full((BATCH, 2), 3), np.zeros((BATCH, 1)), batch_size=BATCH, verbose=0)
    accumulator = np.float32(0.1 + 2.0**2)  # not 0.1 + 8 * 0.25 ** 2
    expected = -0.5 * 2.0 / np.sqrt(accumulator)
    np.testing.assert_allclose(model.get_weights()[0][3, 0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "embedding", "said"),
    [
        (lambda: keras.optimizers.Adam(), {}, "Adam reads its slots"),
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), {}, "SGD with momentum=0.9"),
        (lambda: keras.optimizers.SGD(0.1, use_ema=True), {}, "use_ema"),
        (lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), {}, "accumulation"),
        (lambda: keras.optimizers.LossScaleOptimizer(SGD()), {}, "loss scale"),
        (SGD, {"embeddings_constraint": "non_neg"}, "constraint"),
    ],
    ids=["adam", "momentum", "ema", "accumulation", "loss_scale", "constraint"],
)
def test_what_writes_over_others_is_refused_with_the_remedy(optimizer, embedding, said):
    strategy = tf_dsgd.HogwildStrategy(tf_dsgd.LocalCluster(2))
    with strategy.scope():
        model = regression(optimizer, **embedding)
    first = model.get_weights()
    x, y = data(2)
    with pytest.raises(ValueError, match=said):
        model.fit(x, y, batch_size=BATCH, verbose=0)
    for now, before in zip(model.get_weights(), first, strict=True):
        np.testing.assert_array_equal(now, before)


def test_an_optimizer_that_the_step_does_not_apply_is_no_reason_to_refuse_it():
    """Another model's, and the one before, which lives on: the traceback refers to it."""
    strategy = tf_dsgd.HogwildStrategy(tf_dsgd.LocalCluster(2))
    x, y = data(2)
    with strategy.scope():
        other = regression(keras.optimizers.Adam)
        model = regression(keras.optimizers.Adam)
    with pytest.raises(ValueError, match="Adam reads its slots") as refused:
        model.fit(x, y, batch_size=BATCH, verbose=0)
    with strategy.scope():
        model.compile(SGD(), "mse")
    model.fit(x, y, batch_size=BATCH, verbose=0)
    assert int(model.optimizer.iterations) == strategy.updates == len(x) // BATCH
    with pytest.raises(ValueError, match="Adam reads its slots"):
        other.fit(x, y, batch_size=BATCH, verbose=0)
    assert refused.tb is not None


def test_what_is_not_there_is_refused_by_name():
    spec = tf.train.ClusterSpec({"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]})
    for lock in ("rows", "round-robin"):
        with pytest.raises(ValueError, match=f"lock='{lock}' is for threads"):
            tf_dsgd.HogwildStrategy(tf_dsgd.TFCluster(spec), lock=lock)
    with pytest.raises(ValueError, match="lock"):
        tf_dsgd.HogwildStrategy(tf_dsgd.LocalCluster(2), lock="all")
